"""``moe-core bench``: what it reports and what it refuses. Times themselves are not tested."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_core import MoEConfig, MoELayer, cli, environment
from moe_core.cli import main
from moe_core.sizes import layer_sizes
from moe_core.timing import FEWEST, alternate, spread
from moe_torch.runner import TorchRunner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from moe_core.contracts import Routing

CPU = torch.device("cpu")
TINY = ("--hidden-size", "16", "--intermediate-size", "8", "--num-experts", "4", "--samples", "3")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def bench(capsys: pytest.CaptureFixture[str], *argv: str, code: int = cli.OK) -> dict[str, Any]:
    assert main(["bench", *TINY, *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_spread():
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (found.p20, found.p50, found.p80, found.samples) == (2.0, 3.5, 5.0, 6)
    assert spread([7.0]).p80 == 7.0
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_alternate_takes_turns():
    log: list[str] = []
    calls = {name: lambda name=name: log.append(name) for name in "ab"}
    found = alternate(calls, CPU, samples=4, warmup=1, before=lambda: log.append("."))
    assert "".join(log) == "ab" + ".a.b" + ".b.a" + ".a.b" + ".b.a"
    assert {name: s.samples for name, s in found.items()} == {"a": 4, "b": 4}


def test_alternate_stops_at_its_limit():
    found = alternate({"a": lambda: None}, CPU, samples=100, limit_s=0)
    assert found["a"].samples == FEWEST


@pytest.mark.parametrize("backward", [False, True])
def test_rows(backward: bool, capsys: pytest.CaptureFixture[str]):
    flags = ["--backend", "reference", "--backend", "torch", "--tokens", "0", "--tokens", "6"]
    report = bench(capsys, *flags, *(["--backward"] if backward else []))
    cells = [(row["tokens"], row["backend"]) for row in report["rows"]]
    assert cells == [(0, "reference"), (0, "torch"), (6, "reference"), (6, "torch")]
    assert report["parts"]["torch"]["runner"].startswith("torch")
    config = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
    flops = layer_sizes(config).flops_per_token * (3 if backward else 1)
    medians = {(row["tokens"], row["backend"]): row["p50_s"] for row in report["rows"]}
    for row in report["rows"]:
        assert 0 < row["p20_s"] <= row["p50_s"] <= row["p80_s"]
        assert row["samples"] == 3
        assert row["difference"] <= report["bound"]
        first = medians[row["tokens"], "reference"]
        assert math.isclose(row["ratio"], row["p50_s"] / first)
        assert math.isclose(row["tflops"], flops * row["tokens"] / row["p50_s"] / 1e12)


def test_all_that_serve_share_one_set_of_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    places: set[int] = set()
    forward = MoELayer.forward

    def noted(layer: MoELayer, *args: Any, **kwargs: Any) -> Any:
        places.add(layer.experts.w13.data_ptr())
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(MoELayer, "forward", noted)
    report = bench(capsys, "--tokens", "2")
    timed = {row["backend"] for row in report["rows"]}
    assert {"torch", "reference"} <= timed
    assert len(places) == 1
    assert "TRITON_INTERPRET" in "".join(report["left_out"]["triton"])
    assert not timed & set(report["left_out"])


def test_outputs_that_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    forward = MoELayer.forward

    def off(layer: MoELayer, x: Any, *, routing: Routing | None = None) -> Any:
        out = forward(layer, x, routing=routing)
        return out * 1.01 if layer.resolution.name == "torch" else out

    monkeypatch.setattr(MoELayer, "forward", off)
    flags = ["--tokens", "2", "--backend", "reference", "--backend", "torch"]
    report = bench(capsys, *flags, code=cli.NO)
    assert math.isclose(report["rows"][1]["difference"], 0.01, rel_tol=1e-3)
    assert main(["bench", *TINY, *flags]) == cli.NO
    assert capsys.readouterr().out.count("more than rounding explains") == 1


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--backend", "torhc"], cli.USAGE, "did you mean 'torch'"),
        (["--backend", "torch[gemm=grouped]", "--dtype", "float64"], cli.NO, "dtype"),
        (["--tokens", "-1", "--samples", "0"], cli.USAGE, "--samples"),
        (["--device", "gpu7"], cli.USAGE, "torch knows no such device"),
        (["--hidden-size", "0"], cli.USAGE, "hidden_size"),
    ],
)
def test_refusals(flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", *TINY, *flags]) == code
    out, err = capsys.readouterr()
    assert not out
    assert said in err


class Settings:
    """A tuner of three settings: as shipped, one that can't run, one that gives wrong numbers."""

    def __init__(self, call: Any) -> None:
        self.space = {"blocks": [{"size": 1}, {"size": 2}, {"size": 3}]}
        self.state = 0
        self.written: dict[str, dict[str, int]] = {}

    @contextmanager
    def using(self, chosen: dict[str, int]) -> Iterator[None]:
        self.state = chosen["blocks"]
        if self.state == 1:
            raise RuntimeError("out of shared memory")
        yield
        self.state = 0

    def write(self, path: str, chosen: dict[str, int]) -> None:
        self.written[path] = dict(chosen)


def test_tuning_takes_only_what_runs_and_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    tuner, run = Settings(None), TorchRunner.run

    def off(runner: TorchRunner, record: Any, weights: Any) -> Any:
        made = run(runner, record, weights)
        return replace(made, rows=made.rows * 1.01) if tuner.state == 2 else made

    monkeypatch.setattr(TorchRunner, "run", off)
    monkeypatch.setattr(TorchRunner, "tuner", lambda self, call: tuner, raising=False)
    report = bench(capsys, "--backend", "torch", "--tokens", "3", "--tune", "a file")
    (choice,) = report["choices"]
    assert (choice["name"], choice["setting"], choice["changed"]) == ("blocks", {"size": 1}, False)
    assert (choice["tried"], choice["left_out"], choice["tokens"]) == (1, 2, 3)
    assert tuner.written == {"a file": {"blocks": 0}}
    assert main(["bench", *TINY, "--backend", "torch", "--tokens", "3", "--tune", "f"]) == cli.OK
    assert "MOE_TRITON_CONFIGS=f" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--backend", "torch"], "has no launch settings to choose from"),
        ([], "needs one --backend"),
        (["--backend", "torch", "--backend", "reference"], "needs one --backend"),
    ],
)
def test_tuning_is_refused(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", *TINY, *flags, "--tune", str(tmp_path / "file")]) == cli.USAGE
    assert said in capsys.readouterr().err
    assert not (tmp_path / "file").exists()

"""``moe-core bench``: what it reports and what it refuses. Times themselves are not tested."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_core import MoEConfig, MoELayer, cli, environment
from moe_core.cli import main
from moe_core.sizes import layer_sizes
from moe_core.timing import FEWEST, alternate, spread

if TYPE_CHECKING:
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

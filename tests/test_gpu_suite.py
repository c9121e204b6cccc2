"""The GPU suite without a GPU: cells, predictions, the page, what it makes of results, resuming."""

from __future__ import annotations

import argparse
import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV4Config, GptOssConfig, MixtralConfig

from moe_core import moe_forward

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
predict: Any = import_module("suite.predict")
results: Any = import_module("suite.results")
shapes: Any = import_module("suite.shapes")
problem: Any = import_module("suite.problem")
gpu_suite: Any = import_module("gpu_suite")
VERSIONS = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12"}


def cell(name: str) -> Any:
    return next(c for c in shapes.CELLS if c.name == name)


def test_cells():
    names = [c.name for c in shapes.CELLS]
    assert len(names) == len(set(names)) <= 60
    for shape in shapes.SHAPES:
        tokens = {c.tokens for c in shapes.CELLS if c.shape.name == shape and c.passes == "forward"}
        assert {1, 16, 4096, 16384} <= tokens
        assert any(c.passes == "train" for c in shapes.CELLS if c.shape.name == shape)


@pytest.mark.parametrize(
    ("name", "config", "share"),
    [
        ("mixtral-8x7b", MixtralConfig, 1),
        ("deepseek-v3-ep8", DeepseekV3Config, 8),
        ("deepseek-v4-ep8", DeepseekV4Config, 8),
        ("gpt-oss-120b", GptOssConfig, 1),
    ],
)
def test_shapes_are_what_their_sources_say(name: str, config: Any, share: int):
    theirs, ours = config(), shapes.SHAPES[name]
    inner = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == inner
    assert ours.num_experts * share == theirs.num_local_experts
    assert ours.top_k == theirs.num_experts_per_tok
    assert ours.activation.get("limit") == getattr(theirs, "swiglu_limit", None)


def test_counts_of_one_token():
    """Two of Mixtral's eight experts, each of three matrices of 4096 x 14336 in 2 bytes."""
    one = cell("mixtral-8x7b/T1/forward")
    assert predict.flops(one) == 2 * 2 * 3 * 4096 * 14336
    assert math.isclose(predict.experts_hit(one), 2)
    assert math.isclose(predict.floor_bytes(one), 2 * 3 * 4096 * 14336 * 2 + 2 * 4096 * 2)
    assert math.isclose(predict.floor(one), 704_659_456 / 4.3e12)
    # two experts, a tile of 16 rows each
    assert math.isclose(predict.tile_rows(one, 16), 32)


def test_rows_of_an_expert():
    """Two tokens, each of which chooses an expert with 4 / 128."""
    made = shapes.Cell(shapes.SHAPES["gpt-oss-120b"], 2, "forward")
    p = 4 / 128
    wanted = [(1 - p) ** 2, 2 * p * (1 - p), p * p]
    assert predict.rows_of_an_expert(made) == pytest.approx(wanted)
    for one in shapes.CELLS:
        chances = predict.rows_of_an_expert(one)
        assert math.isclose(sum(chances), 1, rel_tol=1e-9)
        assert math.isclose(predict.tile_rows(one, 1), one.rows, rel_tol=1e-9)


def test_predictions_are_above_the_floor():
    for one in shapes.CELLS:
        assert predict.predicted(one) > predict.floor(one)
        total = sum(step.flops for step in predict.steps(one))
        assert total >= predict.flops(one) * (1 - 1e-9)  # no product is forgotten


def test_training_goal_and_decode_goal():
    train = cell("mixtral-8x7b/T4096/train")
    assert math.isclose(predict.goal(train), 3 * 6 * 8192 * 4096 * 14336 / (0.6 * 790e12))
    assert predict.goal(cell("mixtral-8x7b/T256/forward")) is None
    one = cell("mixtral-8x7b/T1/forward")
    assert math.isclose(predict.goal(one), predict.floor(one) + 12e-6)


def test_tiles_are_as_high_as_the_backend_makes_them():
    pytest.importorskip("triton")
    configs: Any = import_module("moe_triton.configs")
    chips: Any = import_module("moe_triton.runtime").CHIPS
    for one in shapes.CELLS:
        chosen = configs.choose(
            "up",
            chips["sm90"],
            itemsize=2,
            rows_per_expert=one.rows / one.shape.num_experts,
            n=one.shape.intermediate_size,
            k=one.shape.hidden_size,
            halves=2,
        )
        assert predict.tile_height(one) == chosen.block_m, one.name


def test_the_page_shows_what_the_tool_prints(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = page.split("<!-- prediction -->\n", 1)[1].split("\n<!-- end -->", 1)[0]
    assert gpu_suite.main(["--predict"]) == 0
    assert shown == capsys.readouterr().out.rstrip("\n")
    assert "predicted, not measured" in page


def time_row(who: str, microseconds: float) -> dict[str, Any]:
    percentiles = dict.fromkeys(("p20", "p50", "p80"), microseconds)
    return {"contender": who, "metric": "time", "unit": "us", **percentiles, "samples": 9}


def hit(experts: float = 8.0) -> dict[str, Any]:
    return {"contender": "suite", "metric": "experts hit", "p50": experts}


def ceiling(name: str, value: float) -> dict[str, Any]:
    return {"contender": "machine", "metric": name, "p50": value}


def test_report(tmp_path: Path):
    table = results.Table(tmp_path / "results.csv")
    table.add("machine", [ceiling("matrix", 800.0), ceiling("copy", 4.0)], VERSIONS)
    large, small = "mixtral-8x7b/T4096/forward", "mixtral-8x7b/T1/forward"
    slow = {"contender": "vllm", "metric": "left out", "p50": 0.0, "note": "not usable here"}
    rows = [hit(), time_row("triton", 5000), time_row("grouped_mm", 10000), time_row("loop", 8000)]
    table.add(large, [*rows, slow], VERSIONS)
    table.add(small, [hit(2.0), time_row("triton", 200), time_row("grouped_mm", 100)], VERSIONS)
    again = results.Table(tmp_path / "results.csv")  # what was written is what is read
    assert again.finished == {large, small}
    assert results.ratios(again) == {large: 1.6, small: 0.5}
    matrix, _ = results.shares(again, cell(large), 0.005)
    assert math.isclose(matrix, 6 * 8192 * 4096 * 14336 / 0.005 / 800e12, rel_tol=1e-6)
    _, memory = results.shares(again, cell(small), 200e-6)
    assert math.isclose(memory, 704_659_456 / 200e-6 / 4e12, rel_tol=1e-6)
    text = results.report(again)
    assert f"geometric mean against the best peer: {math.sqrt(1.6 * 0.5):.3f}" in text
    assert f"worst cell: {small} at 0.500" in text
    assert "cells below 0.85: " + small in text
    assert f"left out: vllm ({large}): not usable here" in text
    assert "met: 72% of the matrix rate" in text
    assert "MISSED: 23.8 us over bytes / rate, goal 12" in text
    assert "cells: 2 of 60 done" in text
    pytest.importorskip("matplotlib")
    results.picture(again, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


class Scripted:
    """In place of a measuring process: says what it is told to, then ends."""

    scripts: Iterator[list[dict[str, Any]]]
    asked: list[dict[str, Any]]

    def __init__(self, asked: dict[str, Any]) -> None:
        type(self).asked.append(asked)
        self.events = next(type(self).scripts)

    def next(self, seconds: float) -> dict[str, Any] | None:
        return dict(self.events.pop(0)) if self.events else None

    def stop(self) -> int:
        return -11

    def tail(self) -> str:
        return "CUDA error: an illegal memory access"


def suite(out: Path, **flags: Any) -> Any:
    defaults = {"budget": 480.0, "only": "mixtral.*T(1|4)/", "cpu_check": False, "no_tests": True}
    others = {"no_cells": False, "report": False, "out": out}
    return gpu_suite.Suite(argparse.Namespace(**{**defaults, **others, **flags}))


def test_goes_on_without_what_ended_the_process_and_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    one, four = "mixtral-8x7b/T1/forward", "mixtral-8x7b/T4/forward"
    about = {"event": "versions", **VERSIONS}
    done = [hit(), time_row("triton", 10), time_row("loop", 20)]
    Scripted.asked, Scripted.scripts = (
        [],
        iter(
            [
                [
                    about,
                    {"event": "rows", "cell": one, "rows": done},
                    {"event": "begin", "cell": four, "contender": "triton"},
                ],
                [
                    about,
                    {"event": "rows", "cell": four, "rows": [hit(), time_row("loop", 30)]},
                    {"event": "done"},
                ],
            ]
        ),
    )
    monkeypatch.setattr(gpu_suite, "Worker", Scripted)
    assert suite(tmp_path).run() == 0
    first, second = Scripted.asked
    assert first["cells"] == [one, four]
    assert first["skip"] == []
    assert second["cells"] == [four]
    assert second["skip"] == [(four, "triton")]
    text = (tmp_path / "report.txt").read_text()
    assert "FAILED: triton" in text
    assert "ended (-11)" in text
    assert "illegal memory access" in text
    assert suite(tmp_path).run() == 0  # all is there: no process is started
    assert len(Scripted.asked) == 2
    capsys.readouterr()


def test_begins_nothing_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Scripted.asked, Scripted.scripts = [], iter([])
    monkeypatch.setattr(gpu_suite, "Worker", Scripted)
    assert suite(tmp_path, budget=30.0).run() == 1
    assert Scripted.asked == []


def test_a_process_that_is_silent_is_ended(monkeypatch: pytest.MonkeyPatch):
    """A real one, which hangs after its first words."""
    line = gpu_suite.SIGN + json.dumps({"event": "done"})
    code = f"import time; print({line!r}); print('noise'); time.sleep(60)"
    monkeypatch.setattr(gpu_suite.Worker, "code", code)
    worker = gpu_suite.Worker({"cells": []})
    assert worker.next(30) == {"event": "done"}
    assert worker.next(0.5) is None
    assert worker.stop() is None  # it had to be killed
    assert worker.tail() == "noise\n"
    assert worker.process.returncode == -9


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "tests/a.py::b PASSED  [ 50%]\ntests/a.py::c[1-x] SKIPPED (no) [100%]",
            "1 passed, 1 skipped",
        ),
        ("x.py::a PASSED [1%]\nx.py::b", "1 passed"),  # ended in the middle of b
        (
            "x.py::a[b c] FAILED [1%]\nx.py::d ERROR [9%]\nFAILED x.py::a[b c] - why",
            "2 failed: a[b c], d; 0 passed",
        ),
        ("no tests ran", "0 passed"),
    ],
)
def test_outcome(log: str, said: str):
    assert gpu_suite.outcome(log) == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_tests_that_all_skip_are_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As here, where there is no GPU: the suite's own command, run for real."""
    code = suite(tmp_path, no_tests=False, no_cells=True, only="none").run()
    out = capsys.readouterr().out
    assert code == 1
    assert "0 passed" in out
    assert "needs a CUDA device" in (tmp_path / "tests.log").read_text()


@pytest.mark.parametrize("shape", ["mixtral-8x7b", "gpt-oss-120b"])
def test_numbers_are_compared(shape: str):
    """With the reference backend's: right ones pass, and what is off by a few roundings doesn't."""
    made = shapes.tiny(shapes.Cell(shapes.SHAPES[shape], 5, "train"))
    weights = problem.Weights(made.shape, torch.device("cpu"))
    asked = problem.Problem(made, weights)
    own = weights.own
    leaves = [asked.x, asked.topk, own.w13, own.w2]
    leaves += [b for b in (own.w13_bias, own.w2_bias) if b is not None]
    leaves = [t.clone().requires_grad_() for t in leaves]
    x, topk, w13, w2, *biases = leaves
    b13, b2 = biases or (None, None)
    out = moe_forward(
        x,
        asked.ids,
        topk,
        w13,
        w2,
        w13_bias=b13,
        w2_bias=b2,
        w13_layout=made.shape.w13_layout,
        activation=weights.config.activation,
        backend="reference",
    )
    assert asked.forward_error(out.detach()) < 1
    names = ["x", "topk", "w13", "w2", "b13", "b2"]
    grads = dict(zip(names, torch.autograd.grad(out, leaves, asked.upstream), strict=False))
    assert all(error < 1 for error in asked.gradient_errors(grads).values())
    assert set(asked.gradient_errors(grads)) == set(grads)
    wrong = out.detach().clone()
    wrong[-1, 3] += 0.25 * wrong.abs().max()
    assert asked.forward_error(wrong) > 1
    assert asked.forward_error(out.detach() * float("nan")) == math.inf
    for name, grad in grads.items():
        assert asked.gradient_errors({**grads, name: 1.5 * grad})[name] > 1


def test_layouts_of_w13():
    made = shapes.tiny(shapes.Cell(shapes.SHAPES["gpt-oss-120b"], 2, "forward"))
    weights = problem.Weights(made.shape, torch.device("cpu"))
    own = weights.own.w13  # interleaved
    assert torch.equal(weights.w13("interleaved"), own)
    assert torch.equal(weights.w13("gate_up"), torch.cat([own[:, 0::2], own[:, 1::2]], 1))
    assert torch.equal(weights.w13("up_gate"), torch.cat([own[:, 1::2], own[:, 0::2]], 1))

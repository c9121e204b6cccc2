"""The worked examples, against numbers that were worked out on paper."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_four_ranks_two_tokens(example: Any, backend: str):
    story = example("ep_by_hand").tell(backend)
    assert story.ranks == [0, 0, 1, 1, 2, 2, 3, 3]
    assert story.rows_per_expert == [0, 2, 0, 0, 0, 2, 0, 0]
    nothing = [0, 0, 0, 0]
    assert story.sent == [[2, 0, 2, 0], nothing, nothing, nothing]
    # A = (1, 2, 4, 8), B = (1, -1, .5, 0); E1 doubles, E5 multiplies by 32. 11 and 14 are exact:
    # what rounding .7, .3, .4 and .6 leaves is less than half a unit of 11 or 14.
    y = torch.tensor([[11.0, 22, 44, 88], [14, -14, 7, 0]])
    assert torch.equal(story.output, y)
    assert torch.equal(story.local, y)
    a, b = torch.tensor([1.0, 2, 4, 8]), torch.tensor([1.0, -1, 0.5, 0])
    assert torch.equal(story.partials[0], torch.stack([0.7 * 2 * a, 0.6 * 2 * b]))
    assert torch.equal(story.partials[2], torch.stack([0.3 * 32 * a, 0.4 * 32 * b]))
    assert not story.partials[1].any()
    assert not story.partials[3].any()


def test_four_tokens_three_experts(example: Any):
    story = example("grouped_by_hand").tell()
    assert story.tokens == [0, 2, 3, 1, 2, 0, 1, 3]
    assert story.counts == [3, 2, 3]
    assert story.starts == [0, 3, 5, 8]
    weights = torch.tensor([0.7, 0.2, 0.9, 0.4, 0.8, 0.3, 0.6, 0.1])
    assert torch.equal(story.row_weights, weights)
    # E0, E1, E2 multiply by 1, 2, 4. Two weights and their sum are each rounded once, by 2^-24.
    by_hand = [0.7 + 0.3 * 4, 0.6 * 4 + 0.4 * 2, 0.8 * 2 + 0.2, 0.9 + 0.1 * 4]
    assert story.factors.tolist() == pytest.approx(by_hand, rel=2**-23)


def test_softmax_before_and_after_the_choice(example: Any):
    routes = example("grouped_by_hand").tell().routes
    after = routes["top-2, then softmax"]
    before = routes["softmax, then top-2, renormalised"]
    raw = routes["softmax, then top-2"]
    assert after[0] == before[0] == raw[0] == [3, 0]  # 2.1 and 1.2
    share = 1 / (1 + math.exp(1.2 - 2.1))
    assert share == pytest.approx(0.71, abs=0.001)
    # float32: the logits' rounding, an exponential and a quotient, each a few 2^-24
    for _, weights in (after, before):
        assert weights.tolist() == pytest.approx([share, 1 - share], rel=1e-6)
    logits = (1.2, -0.3, 0.8, 2.1, -1.0, 0.5, 0.1, -0.7)
    total = sum(math.exp(x) for x in logits)
    all_eight = [math.exp(2.1) / total, math.exp(1.2) / total]
    assert raw[1].tolist() == pytest.approx(all_eight, rel=1e-6)
    assert all_eight == pytest.approx([0.452, 0.184], abs=0.001)


@pytest.mark.parametrize("name", ["ep_by_hand", "grouped_by_hand"])
def test_examples_print_what_they_found(
    example: Any, name: str, capsys: pytest.CaptureFixture[str]
):
    example(name).main()
    shown = capsys.readouterr().out
    expected = {
        "ep_by_hand": [
            "E5 lives on rank 2: 2 rows",
            "rank 0          2       0       2       0",
            "rank 3: A [0, 0, 0, 0]  B [0, 0, 0, 0]   (idle: it was sent nothing)",
            "y_A = [11, 22, 44, 88]",
        ],
        "grouped_by_hand": [
            "E0      0..2   0 2 3        0.7 0.2 0.9",
            "E2      5..7   0 1 3        0.3 0.6 0.1",
            "token 1: 0.6 * 4 + 0.4 * 2 = 3.2",
            "E3 0.711, E0 0.289",
        ],
    }
    assert [line for line in expected[name] if line not in shown] == []


def test_story_counts_launches_and_padding():
    command = [sys.executable, "-W", "error", "grouped_gemm_story.py", "--quick", "--json"]
    done = subprocess.run(
        command, cwd=EXAMPLES, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    points = {(p["routing"], p["tokens_per_expert"]): p for p in json.loads(done.stdout)}
    assert set(points) == {("even", 1), ("even", 16), ("skewed", 4), ("skewed", 16)}
    for point in points.values():  # two products per expert, or two in all
        assert point["launches"] == {"loop": 16, "batched": 2, "grouped": 2}
        assert all(ms > 0 for ms in point["ms"].values())
    assert points["even", 16]["padded_rows"] == 0
    # 32 rows over 8 experts as 1, 1/2, ..., 1/8 (together 2.7179): shares 11.77 5.89 3.92 2.94
    # 2.35 1.96 1.68 1.47, so 12 6 4 3 2 2 2 1; the longest is 12, and 8 * 12 - 32 = 64
    skewed = points["skewed", 4]
    assert (skewed["rows"], skewed["longest"], skewed["padded_rows"]) == (32, 12, 64)


def test_story_rows_of_idle_experts_are_not_launched(example: Any):
    story = example("grouped_gemm_story")
    with torch.no_grad():
        point = story.measure(64, 4, 1, "skewed", 0, "cpu")
    # 64 rows over 64 experts: shares 13.49 / (e + 1), of which E0 to E12 floor to 37 rows. The
    # other 27 go to the largest remainders: E0 (.49), six more of the first, and the 20 from E13
    # (.96) to E32 (.41). So 33 experts have rows, and E0 has 14 of them.
    assert (point.rows, point.active_experts, point.longest) == (64, 33, 14)
    assert point.padded_rows == 64 * 14 - 64
    assert point.launches == {"loop": 2 * 33, "batched": 2, "grouped": 2}


@pytest.mark.parametrize(
    ("loop_ms", "sentence"),
    [
        ((30, 15, 11), "largest, 3.0 x at 1 tokens per expert, and has faded (below 1.25 x) at 64"),
        ((15, 30, 20), "largest, 3.0 x at 8 tokens per expert, and still 2.00 x at 64"),
        ((11, 10, 9), "No gain to speak of here: at most 1.1 x at 1 tokens"),
    ],
)
def test_story_says_where_the_gain_fades(example: Any, loop_ms: tuple[int, ...], sentence: str):
    story = example("grouped_gemm_story")
    points = [
        story.Point("even", n, n, 1, n, 0, {}, {"loop": ms, "grouped": 10})
        for n, ms in zip((1, 8, 64), loop_ms, strict=True)
    ]
    assert sentence in story.fade(points)

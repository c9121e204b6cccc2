"""Rows between attention and MoE: by hand on each rank, and a decoder against its twin."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from moe_core import (
    Backend,
    ConfigError,
    HandleError,
    InputError,
    MoEConfig,
    MoELayer,
    Offer,
    ParallelConfig,
    Part,
    Range,
    RouterConfig,
    resolve,
)
from moe_core import row_layouts_moves as moves
from moe_core.conformance.pool import ranks
from moe_core.registry import register_backend, unregister_backend
from moe_core.row_layouts import MoERows, RowExchange, RowLayout

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "dp_attention_ep_moe.py"
LIMIT = 120.0

ATTENTION = [
    RowLayout(dp_size=4),
    RowLayout(dp_size=2, tp_size=2),
    RowLayout(tp_size=4),
    RowLayout(cp_size=2, tp_size=2),
    RowLayout(dp_size=2, tp_size=2, sequence_parallel=True),
]
WIDTHS = [
    ParallelConfig(ep_size=4),
    ParallelConfig(ep_size=2, tp_size=2),
    ParallelConfig(dp_size=2, tp_size=2),
    ParallelConfig(tp_size=4),
    ParallelConfig(dp_size=2, ep_size=2, rows="replicated"),
    ParallelConfig(ep_size=4, rows="replicated"),
]

CONFIG = MoEConfig(
    hidden_size=6,
    intermediate_size=8,
    num_experts=5,
    top_k=2,
    router=RouterConfig(scoring_func="sigmoid", renormalize=True),
    bias=True,
    dtype="float64",
)


def holder(layout: RowLayout) -> int:
    """Number of the group that has the same rows as this rank."""
    return dist.get_rank() // layout.copies


def rows_of(group: int, count: int) -> torch.Tensor:
    """``[n, 2]``: 100 * group + 0, 1, 2, ... and its negative: whole numbers, all distinct."""
    named = 100.0 * group + torch.arange(count, dtype=torch.float64)
    return torch.stack([named, -named], 1)


# -- by hand


def by_hand(
    layout: RowLayout, parallel: ParallelConfig, counts: list[int], gradient_sum: str
) -> dict[str, Any]:
    """The MoE multiplies by 2, or, where it returns parts, by rank + 1. Holder g's loss is the sum
    of its results (first column) times g + 1."""
    exchange = RowExchange(layout, parallel, gradient_sum=gradient_sum)
    group, parts = holder(layout), parallel.final_sum == "caller"
    factor = torch.tensor(float(dist.get_rank() + 1 if parts else 2), dtype=torch.float64)
    factor.requires_grad_()
    seen: dict[str, Any] = {}
    for _ in range(2):  # twice in a row: nothing may be left over
        x = rows_of(group, counts[group]).requires_grad_()
        factor.grad = None
        there = exchange.to_moe(x, torch.arange(counts[group]) + 1000 * group)
        y = exchange.from_moe(there.hidden_states * factor, there.handle)
        (y[:, 0].sum() * (group + 1)).backward()
        assert x.grad is not None
        assert factor.grad is not None
        now = {
            "case": exchange.case,
            "moe": there.hidden_states[:, 0].tolist(),
            "ids": there.input_ids.tolist(),
            "y": y[:, 0].tolist(),
            "grad": x.grad[:, 0].tolist(),
            "factor": factor.grad.item(),
        }
        assert now == (seen or now)
        assert torch.equal(y[:, 1], -y[:, 0])
        seen = now
    return seen


def test_gather_by_hand() -> None:
    """Attention dp 4, MoE ep 2 x tp 2: ranks 0, 1 and ranks 2, 3 come together."""
    parallel = ParallelConfig(ep_size=2, tp_size=2)
    got = ranks(4).run(by_hand, RowLayout(dp_size=4), parallel, [3, 0, 1, 2], "layer", limit=LIMIT)
    for r in (0, 1):
        assert got[r]["case"] == "gather"
        assert got[r]["moe"] == [0, 1, 2]
        assert got[r]["ids"] == [0, 1, 2]
        # d/d factor of the mean of ranks 0 and 1's losses, 1 * (0 + 1 + 2) and nothing
        assert got[r]["factor"] == 3 / 2
    for r in (2, 3):
        assert got[r]["moe"] == [200, 300, 301]
        assert got[r]["ids"] == [2000, 3000, 3001]
        assert got[r]["factor"] == (3 * 200 + 4 * (300 + 301)) / 2
    assert [g["y"] for g in got] == [[0, 2, 4], [], [400], [600, 602]]
    assert [g["grad"] for g in got] == [[2, 2, 2], [], [6], [8, 8]]


def test_split_by_hand() -> None:
    """Attention dp 2 x tp 2, MoE ep 4: of 3 rows the first rank takes 2, of 1 row 1."""
    got = ranks(4).run(
        by_hand, RowLayout(dp_size=2, tp_size=2), ParallelConfig(ep_size=4), [3, 1], "layer",
        limit=LIMIT,
    )  # fmt: skip
    assert {g["case"] for g in got} == {"split"}
    assert [g["moe"] for g in got] == [[0, 1], [2], [100], []]
    assert [g["ids"] for g in got] == [[0, 1], [2], [1000], []]
    assert [g["y"] for g in got] == [[0, 2, 4], [0, 2, 4], [200], [200]]
    assert [g["grad"] for g in got] == [[2, 2, 2], [2, 2, 2], [4], [4]]
    # ranks 0 and 1 have one loss, 1 * (0 + 1 + 2): the mean of 2 * (0 + 1) and 2 * 2
    assert [g["factor"] for g in got] == [2, 4, 2 * 2 * 100, 0]


def test_sum_by_hand() -> None:
    """As the gather, and the ranks return parts: rank + 1 times the row, 3 and 7 times in all."""
    parallel = ParallelConfig(ep_size=2, tp_size=2, final_sum="caller")
    got = ranks(4).run(by_hand, RowLayout(dp_size=4), parallel, [3, 0, 1, 2], "caller", limit=LIMIT)
    assert [g["moe"] for g in got[1:]] == [[0, 1, 2], [200, 300, 301], [200, 300, 301]]
    assert [g["y"] for g in got] == [[0, 3, 6], [], [1400], [2100, 2107]]
    # each rank's gradient of a row is a part too, (rank + 1) times that of the sum
    assert [g["grad"] for g in got] == [[3, 3, 3], [], [21], [28, 28]]
    assert [g["factor"] for g in got] == [1.5, 1.5, 1502, 1502]  # (600 + 2404) / 2


def test_sum_of_equal_rows_by_hand() -> None:
    """Attention tp 4, MoE ep 4 replicated: no row moves on its way there, and ten fold home."""
    parallel = ParallelConfig(ep_size=4, rows="replicated", final_sum="caller")
    for got in ranks(4).run(by_hand, RowLayout(tp_size=4), parallel, [5], "caller", limit=LIMIT):
        assert got["case"] == "same"
        assert got["moe"] == [0, 1, 2, 3, 4]
        assert got["y"] == [0, 10, 20, 30, 40]
        assert got["grad"] == [10] * 5
        assert got["factor"] == 10


def test_regroup_by_hand() -> None:
    """Attention dp 3 x tp 2, MoE dp 2 x tp 3: each rank owns half of two equal ones' rows, and
    three consecutive ranks route what they own together."""
    got = ranks(6).run(
        by_hand, RowLayout(dp_size=3, tp_size=2), ParallelConfig(dp_size=2, tp_size=3), [3, 2, 0],
        "layer", limit=LIMIT,
    )  # fmt: skip
    assert {g["case"] for g in got} == {"regroup"}
    # owned: 0, 1 | 2 | 100 || 101 | - | -
    assert [g["moe"] for g in got] == [[0, 1, 2, 100]] * 3 + [[101]] * 3
    assert [g["ids"] for g in got] == [[0, 1, 2, 1000]] * 3 + [[1001]] * 3
    assert [g["y"] for g in got] == [[0, 2, 4]] * 2 + [[200, 202]] * 2 + [[]] * 2
    assert [g["grad"] for g in got] == [[2, 2, 2]] * 2 + [[4, 4]] * 2 + [[]] * 2
    # of the mean over ranks 0, 1, 2: 2/3 of 1 * (0 + 1 + 2) + 2 * 100; then 2/3 of 2 * 101
    assert [g["factor"] for g in got] == pytest.approx([2 / 3 * 203] * 3 + [2 / 3 * 202] * 3)


# -- every pair of layouts


def every_pair() -> list[str]:
    """Each row is in one group of ranks there, comes home as it went, and moves as little as can
    be. Strided inputs, lengths of 0, 1 and more that differ."""
    wrong: list[str] = []
    for layout in ATTENTION:
        for parallel in WIDTHS:
            exchange = RowExchange(layout, parallel)
            me, groups = dist.get_rank(), 4 // layout.copies
            for counts in ([5, 0, 1, 3], [0, 0, 7, 0], [0] * 4, [1, 1, 1, 1]):
                own = counts[holder(layout)]
                exchange.mover.sent_bytes.clear()
                wide = torch.full((2 * own, 4), math.nan, dtype=torch.float64)
                wide[::2, ::2] = rows_of(holder(layout), own)
                x = wide[::2, ::2]
                there = exchange.to_moe(x, torch.arange(own) + 1000 * holder(layout))
                there_rows = there.hidden_states.clone()
                y = exchange.from_moe(there.hidden_states * 3, there.handle)
                names = torch.arange(own) + 1000 * holder(layout)
                all_there: list[Any] = [None] * 4
                mine = (there.input_ids.tolist(), there_rows.tolist(), names.tolist())
                dist.all_gather_object(all_there, mine)
                where = f"{layout} {parallel} {counts}"
                if not torch.equal(y, 3 * rows_of(holder(layout), own)):
                    wrong.append(f"home: {where}")
                firsts = [all_there[r] for r in range(0, 4, parallel.copies)]
                routed = sorted(i for ids, _, _ in firsts for i in ids)
                if routed != sorted(1000 * g + i for g in range(groups) for i in range(counts[g])):
                    wrong.append(f"once each: {where}")
                if any(all_there[r][:2] != firsts[r // parallel.copies][:2] for r in range(4)):
                    wrong.append(f"alike: {where}")
                ids = torch.tensor(mine[0], dtype=torch.int64)
                if not torch.equal(
                    there_rows[:, 0], (ids // 1000 * 100 + ids % 1000).to(torch.float64)
                ):
                    wrong.append(f"ids follow: {where}")
                lacked = sum(len(set(i) ^ set(n)) for i, _, n in all_there)
                sent = torch.tensor(
                    sum(n for k, n in exchange.mover.sent_bytes.items() if k.endswith("_moe"))
                )
                dist.all_reduce(sent)
                if sent != lacked * 16:
                    wrong.append(f"bytes {sent} for {lacked} rows: {where}")
            assert exchange.case != "same" or not exchange.mover.collectives, me
    return wrong


def test_every_pair_of_layouts() -> None:
    assert ranks(4).run(every_pair, limit=LIMIT) == [[]] * 4


def other_order() -> list[Any]:
    """A mesh whose tp is outermost: the MoE's tp groups are ranks 0, 2 and 1, 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    before = len(moves._made)
    for _ in range(3):  # a hundred layers make no more groups than one
        exchange = RowExchange(
            RowLayout(dp_size=4), ParallelConfig(ep_size=2, tp_size=2), mesh=mesh
        )
    assert len(moves._made) <= before + 1
    x = rows_of(dist.get_rank(), dist.get_rank() + 1)
    there = exchange.to_moe(x)
    y = exchange.from_moe(there.hidden_states * 2, there.handle)
    return [there.hidden_states[:, 0].tolist(), torch.equal(y, 2 * x)]


def test_a_mesh_in_another_order() -> None:
    got = ranks(4).run(other_order, limit=LIMIT)
    assert [g[0] for g in got[:2]] == [[0, 200, 201, 202], [100, 101, 300, 301, 302, 303]]
    assert got[2][0] == got[0][0]
    assert got[3][0] == got[1][0]
    assert all(g[1] for g in got)


# -- padding


def poisoned(layout: RowLayout, parallel: ParallelConfig) -> dict[str, Any]:
    """``[2, 3, 2]`` of which the mask leaves (0, 0), (0, 2), (1, 1); NaN in all others, in the
    gradient of what comes back there too."""
    exchange = RowExchange(layout, parallel)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    x = torch.where(mask[..., None], rows_of(holder(layout), 6).view(2, 3, 2), math.nan)
    x.requires_grad_()
    ids = torch.tensor([[1, -7, 3], [-7, 5, -7]])
    weight = torch.eye(2, dtype=torch.float64, requires_grad=True)
    kept = [t.detach().clone() for t in (x, mask, ids)]
    there = exchange.to_moe(x, ids, mask)
    # a matrix product spreads a NaN over its gradient, if one gets there
    y = exchange.from_moe(there.hidden_states @ weight, there.handle)
    y.backward(torch.where(mask[..., None], torch.ones_like(y), math.nan))
    for now, then in zip((x, mask, ids), kept, strict=True):
        assert torch.equal(now.nan_to_num(77), then.nan_to_num(77))
    return {
        "there": there.hidden_states[:, 0].tolist(),
        "ids": there.input_ids.tolist(),
        "mask": there.token_mask,
        "y": y[..., 0].tolist(),
        "grad": x.grad.tolist(),
        "finite": bool(weight.grad.isfinite().all()),
    }


@pytest.mark.parametrize("final_sum", ["layer", "caller"])
def test_poisoned_padding_gets_nowhere(final_sum: str) -> None:
    parallel = ParallelConfig(tp_size=4, final_sum=final_sum)
    times = 4 if final_sum == "caller" else 1
    layout = RowLayout(dp_size=2, tp_size=2)
    for r, got in enumerate(ranks(4).run(poisoned, layout, parallel, limit=LIMIT)):
        assert got["there"] == [0, 2, 4, 100, 102, 104]
        assert got["ids"] == [1, 3, 5, 1, 3, 5]
        assert got["mask"] is None
        first = 100 * (r // 2)
        assert got["y"] == [[times * first, 0, times * (first + 2)], [0, times * (first + 4), 0]]
        # gradients of a layer's input are the layer's to sum: one copy of each is taken
        one, none = [1, 1], [0, 0]
        assert got["grad"] == [[one, none, one], [none, one, none]]
        assert got["finite"]


# -- idle ranks

STEPS = ([3, 0, 5, 0, 0, 1], [0, 2, 0, 0, 4, 0])
"""Tokens per step of ranks 0 and 1 (vllm-project/vllm#51984, #43547: an idle rank left a step out
and the others waited, or everything drifted apart)."""


def six_steps(final_sum: str) -> list[Any]:
    torch.manual_seed(5)
    widths = ParallelConfig(tp_size=2, final_sum=final_sum)
    layer = MoELayer(CONFIG, widths, "nccl+torch")
    torch.manual_seed(5)
    alone = MoELayer(CONFIG, backend="reference")
    exchange, counts, errors = RowExchange(RowLayout(dp_size=2), widths), list[int](), [0.0]
    for step, tokens in enumerate(STEPS[dist.get_rank()]):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(tokens, 6, dtype=torch.float64, generator=generator).requires_grad_()
        there = exchange.to_moe(x)
        y = exchange.from_moe(layer(there.hidden_states), there.handle)
        y.square().sum().backward()
        twin = x.detach().clone().requires_grad_()
        want = alone(twin)
        want.square().sum().backward()
        errors += (y - want).abs().flatten().tolist()
        assert x.grad is not None
        assert twin.grad is not None
        errors += (x.grad - twin.grad).abs().flatten().tolist()
        counts.append(exchange.mover.collectives.total())
    return [max(errors), counts]


@pytest.mark.parametrize(("final_sum", "each"), [("layer", 3), ("caller", 4)])
def test_idle_ranks_keep_step(final_sum: str, each: int) -> None:
    """Sizes, rows there and gradients back; sums home too where the exchange sums."""
    for error, counts in ranks(2).run(six_steps, final_sum, limit=LIMIT):
        assert error < 1e-12
        assert counts == [each * n for n in range(1, 7)]


# -- faults


def faulty(layout: RowLayout, parallel: ParallelConfig, bad: dict[int, Any]) -> str:
    """``bad``: rank → what it hands in, or what makes it. After the error the exchange works."""
    exchange = RowExchange(layout, parallel)
    group = holder(layout)
    good = {"hidden_states": rows_of(group, group + 1), "input_ids": torch.arange(group + 1)}
    said = ""
    try:
        given = good | bad.get(dist.get_rank(), {})
        exchange.to_moe(**{k: v() if callable(v) else v for k, v in given.items()})
    except InputError as error:
        said = str(error)
    there = exchange.to_moe(**good)
    y = exchange.from_moe(there.hidden_states, there.handle)
    assert torch.equal(y, good["hidden_states"])
    return said


SPARSE = partial(torch.sparse_coo_tensor, size=(2, 2), check_invariants=True)
GATHER = (RowLayout(dp_size=4), ParallelConfig(ep_size=2, tp_size=2))
SPLIT = (RowLayout(dp_size=2, tp_size=2), ParallelConfig(ep_size=4))


@pytest.mark.parametrize(("layout", "parallel"), [GATHER, SPLIT], ids=["gather", "split"])
def test_one_ranks_fault_is_raised_on_all(layout: RowLayout, parallel: ParallelConfig) -> None:
    """Also on those that would meet it in the MoE only: there they would wait for it."""
    bad = {
        1: {"token_mask": torch.ones(9, dtype=torch.bool)},
        2: {"hidden_states": torch.ones(3, 2, dtype=torch.int32), "input_ids": None},
    }
    said = ranks(4).run(faulty, layout, parallel, bad, limit=LIMIT)
    assert len(set(said)) == 1
    count = 2 if layout.copies == 1 else 1
    assert f"rank 1: token_mask must have shape ({count},)" in said[0]
    assert "rank 2: hidden_states must be of a float dtype, not torch.int32" in said[0]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"input_ids": [3, 4]}, "input_ids must be a dense tensor, not a list"),
        ({"token_mask": (True,)}, "token_mask must be a dense tensor, not a tuple"),
        ({"hidden_states": SPARSE}, "hidden_states must be dense, not torch.sparse_coo"),
        ({"hidden_states": torch.ones(2, 0)}, "must have a last dimension of at least 1, not 0"),
        ({"hidden_states": None}, "hidden_states must be a tensor [..., H], not a NoneType"),
    ],
)
def test_what_is_no_rows_at_all_is_told_of_on_all_ranks(bad: dict[str, Any], words: str) -> None:
    said = ranks(4).run(faulty, *GATHER, {1: bad}, limit=LIMIT)
    assert said[0] == said[1]
    assert said[0].startswith("rank 1: ")
    assert words in said[0]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            {"hidden_states": rows_of(0, 2), "input_ids": torch.arange(2)},
            "ranks [0, 1] hold the same rows (tp_size=2), but they brought [1, 2]",
        ),
        (
            {"hidden_states": rows_of(0, 1).float()},
            "the dtype of hidden_states differs: ['torch.float64', 'torch.float32', "
            "'torch.float64', 'torch.float64'] on ranks [0, 1, 2, 3]",
        ),
        (
            {"hidden_states": torch.ones(1, 3, dtype=torch.float64)},
            "the hidden_size of hidden_states differs: [2, 3, 2, 2] on ranks [0, 1, 2, 3]",
        ),
        ({"input_ids": None}, "input_ids are missing on ranks [1] and given on others"),
    ],
)
def test_ranks_that_disagree(bad: dict[str, Any], words: str) -> None:
    assert ranks(4).run(faulty, *SPLIT, {1: bad}, limit=LIMIT) == [words] * 4


def empty_rank() -> tuple[list[int], int, Any]:
    """Rank 1 has no rows, brings no ids and asks for no gradient; it takes part all the same."""
    exchange = RowExchange(*GATHER)
    if dist.get_rank() == 1:
        x, ids = torch.zeros(0, 2, dtype=torch.float64), None
    else:
        x, ids = rows_of(dist.get_rank(), 2).requires_grad_(), torch.tensor([5, 6])
    there = exchange.to_moe(x, ids)
    y = exchange.from_moe(there.hidden_states * 2, there.handle)
    y.sum().backward()
    counts = sorted(exchange.mover.collectives.items())
    return there.input_ids.tolist(), y.shape[0], [x.grad is None, counts]


def test_a_rank_without_rows_asks_for_nothing() -> None:
    got = ranks(4).run(empty_rank, limit=LIMIT)
    assert [g[0] for g in got] == [[5, 6], [5, 6], [5, 6, 5, 6], [5, 6, 5, 6]]
    assert [g[1] for g in got] == [2, 0, 2, 2]
    assert [g[2][0] for g in got] == [False, True, False, False]
    # one exchange of sizes; no rows come home, as each rank has its own results
    once = [("from_moe.backward", 1), ("input_ids", 1), ("sizes", 1), ("to_moe", 1)]
    assert [g[2][1] for g in got] == [once] * 4


def comes_back_wrong(change: str) -> str:
    """On rank 3."""
    changes: dict[str, Any] = {
        "rows": lambda rows: rows[:1],
        "width": lambda rows: rows[:, :1],
        "dtype": lambda rows: rows.float(),
        "integers": lambda rows: rows.int(),
        "nothing": lambda rows: None,
    }
    os.environ["MOE_DEBUG_COLLECTIVES"] = "1"
    try:
        exchange = RowExchange(GATHER[0], replace(GATHER[1], final_sum="caller"))
        rows, handle = (there := exchange.to_moe(rows_of(0, 2))).hidden_states, there.handle
        exchange.from_moe(changes[change](rows) if dist.get_rank() == 3 else rows, handle)
    except InputError as error:
        return str(error)
    finally:
        del os.environ["MOE_DEBUG_COLLECTIVES"]
    return ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rows", "rank 3: 4 rows of 2 went to the MoE, and (1, 2) came back"),
        ("width", "rank 3: 4 rows of 2 went to the MoE, and (4, 1) came back"),
        ("dtype", "what came back differs in dtype: ['torch.float64', 'torch.float64', "),
        ("integers", "rank 3: torch.float64 on cpu went to the MoE, and torch.int32 on cpu came"),
        ("nothing", "rank 3: a tensor must come back from the MoE, not a NoneType"),
    ],
)
def test_what_the_moe_spoils_is_told_of_on_all_ranks(change: str, words: str) -> None:
    said = ranks(4).run(comes_back_wrong, change, limit=LIMIT)
    assert said == [said[3]] * 4
    assert words in said[3]


def home_in_float32(layout: RowLayout, parallel: ParallelConfig) -> torch.dtype:
    """Rank 0 computes in another dtype, as under an autocast of its own."""
    exchange = RowExchange(layout, parallel)
    there = exchange.to_moe(torch.ones(2, 4))
    rows = there.hidden_states.bfloat16() if dist.get_rank() == 0 else there.hidden_states
    home = exchange.from_moe(rows, there.handle)
    assert torch.equal(home, torch.ones(2, 4))
    return home.dtype


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [GATHER, SPLIT, (GATHER[0], SPLIT[1])],
    ids=["gather", "split", "same"],
)
def test_rows_come_home_in_the_dtype_that_went(layout: RowLayout, parallel: ParallelConfig) -> None:
    assert ranks(4).run(home_in_float32, layout, parallel, limit=LIMIT) == [torch.float32] * 4


def from_inference_mode() -> list[float]:
    """Rank 0's rows need no gradient, and were made where none could ever be had."""
    exchange = RowExchange(*GATHER)
    if dist.get_rank() == 0:
        with torch.inference_mode():
            x = rows_of(0, 2)
    else:
        x = rows_of(dist.get_rank(), 2).requires_grad_()
    there = exchange.to_moe(x)
    exchange.from_moe(there.hidden_states * 2, there.handle).sum().backward()
    return [] if x.grad is None else x.grad[:, 0].tolist()


def test_a_rank_with_rows_of_inference_mode_takes_part() -> None:
    assert ranks(4).run(from_inference_mode, limit=LIMIT) == [[], [2, 2], [2, 2], [2, 2]]


def no_grad_here() -> str:
    exchange = RowExchange(*GATHER)
    x = rows_of(0, 2).requires_grad_()
    try:
        with torch.set_grad_enabled(dist.get_rank() != 2):
            exchange.to_moe(x)
    except InputError as error:
        return str(error)
    return ""


def test_no_grad_on_one_rank_is_refused_on_all_that_would_wait_for_it() -> None:
    said = ranks(4).run(no_grad_here, limit=LIMIT)
    assert said == [said[0]] * 4
    assert said[0].startswith("ranks [0, 1, 3] need a gradient, and ranks [2] are under no_grad")


def checkpointed(reentrant: bool) -> list[Any]:
    """Rank 0 has padding and the others none: what their graphs save differs."""
    exchange, grads = RowExchange(*GATHER), list[Any]()
    mask = torch.tensor([True, False, True]) if dist.get_rank() == 0 else None

    def block(x: torch.Tensor) -> torch.Tensor:
        there = exchange.to_moe(x, None, mask)
        return exchange.from_moe(there.hidden_states.square(), there.handle)

    for recompute in (False, True):
        x = rows_of(dist.get_rank(), 3).requires_grad_()
        y = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
        y.sum().backward()
        assert x.grad is not None
        grads.append(x.grad[:, 0].tolist())
    return grads


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_with_padding_on_one_rank(reentrant: bool) -> None:
    for r, (plain, recomputed) in enumerate(ranks(4).run(checkpointed, reentrant, limit=LIMIT)):
        # d/dx of x squared
        want = [0, 0, 4] if r == 0 else [200 * r, 200 * r + 2, 200 * r + 4]
        assert plain == recomputed == want


# -- handles, and one process


def test_nothing_moves_in_one_process() -> None:
    exchange = RowExchange(RowLayout())
    assert exchange.case == "same"
    x, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    first, second = (exchange.to_moe(x, mask.long(), mask) for _ in range(2))
    assert isinstance(first, MoERows)
    assert first.hidden_states.data_ptr() == x.data_ptr()
    assert first.hidden_states.shape == (6, 4)
    assert first.token_mask.shape == first.input_ids.shape == (6,)
    assert second.handle.num_rows == 6
    home = exchange.from_moe(second.hidden_states * 2, second.handle)
    assert torch.equal(home, 2 * x)
    with pytest.raises(HandleError, match="came home already"):
        exchange.from_moe(second.hidden_states, second.handle)
    with pytest.raises(HandleError, match="another RowExchange"):
        RowExchange(RowLayout()).from_moe(first.hidden_states, first.handle)
    with pytest.raises(InputError, match=r"6 rows of 4 went to the MoE, and \(5, 4\) came back"):
        exchange.from_moe(first.hidden_states[:5], first.handle)
    with pytest.raises(HandleError, match=r"\(.handle\), not a MoERows"):
        exchange.from_moe(first.hidden_states, first)  # pyright: ignore[reportArgumentType]
    assert not exchange.mover.collectives


def two_alive() -> list[bool]:
    exchange = RowExchange(*GATHER)
    xs = [rows_of(dist.get_rank(), n) for n in (2, 3)]
    first, second = (exchange.to_moe(x) for x in xs)
    ys = [
        exchange.from_moe(second.hidden_states * 3, second.handle),
        exchange.from_moe(first.hidden_states * 2, first.handle),
    ]
    return [torch.equal(ys[0], 3 * xs[1]), torch.equal(ys[1], 2 * xs[0])]


def test_two_handles_are_independent() -> None:
    assert ranks(4).run(two_alive, limit=LIMIT) == [[True, True]] * 4


# -- configurations that can't be


def test_all_faults_of_a_layout_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RowLayout(dp_size=0, tp_size=True, sequence_parallel=1)
    assert [f.field for f in caught.value.faults] == ["dp_size", "tp_size", "sequence_parallel"]
    with pytest.raises(ConfigError) as caught:
        RowExchange(RowLayout(tp_size=2), gradient_sum="nobody")
    assert [f.field for f in caught.value.faults] == ["gradient_sum", "layout"]
    assert "dp * cp * tp = 2 ranks attend, and the MoE has dp * ep * tp = 1" in str(caught.value)
    with pytest.raises(ConfigError, match=r"layout=.*must be a RowLayout\n.*must be a Parallel"):
        RowExchange(ParallelConfig(), RowLayout())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(final_sum="moe")
    assert [f.field for f in caught.value.faults] == ["final_sum"]


def build(layouts: list[RowLayout], parallel: ParallelConfig) -> list[str]:
    try:
        RowExchange(layouts[dist.get_rank()], parallel)
    except ConfigError as error:
        return [f"{f.field}: {f.message}" for f in error.faults]
    return []


def test_a_layout_refused_or_other_on_one_rank_is_refused_on_all() -> None:
    dp, tp = RowLayout(dp_size=4), RowLayout(tp_size=4)
    got = ranks(4).run(build, [dp, dp, tp, dp], ParallelConfig(ep_size=4), limit=LIMIT)
    assert got == [got[0]] * 4
    assert [said.partition(":")[0] for said in got[0]] == ["row_layout"]
    assert "on ranks [2]" in got[0][0]
    narrow = RowLayout(dp_size=3)
    got = ranks(4).run(build, [dp, narrow, dp, dp], ParallelConfig(ep_size=4), limit=LIMIT)
    assert got == [got[0]] * 4
    assert got[0][0].startswith("rank 1: layout=")
    assert "3 ranks attend" in got[0][0]


# -- a layer that leaves its last sum


def summed_outside(parallel: ParallelConfig, spec: str, config: MoEConfig) -> dict[str, Any]:
    """One step with the layer's sum, one with the exchange's."""
    layout = RowLayout(dp_size=4)
    me = dist.get_rank()
    seen: dict[str, Any] = {}
    for final_sum in ("layer", "caller"):
        torch.manual_seed(5)
        widths = replace(parallel, final_sum=final_sum)
        layer, exchange = MoELayer(config, widths, spec), RowExchange(layout, widths)
        generator = torch.Generator().manual_seed(me)
        x = torch.randn((3, 0, 5, 2)[me], 6, dtype=torch.float64, generator=generator)
        x = x.to(getattr(torch, config.dtype)).requires_grad_()
        there = exchange.to_moe(x)
        out = layer(there.hidden_states)
        y = exchange.from_moe(out, there.handle)
        y.square().sum().backward()
        path = layer.resolution.path
        seen[final_sum] = {
            "y": y.detach(),
            "out": out.dtype,
            "grads": [x.grad, *(p.grad for p in layer.parameters())],
            "payers": dict(path.payers) if path else {},
            "sent": exchange.mover.sent_bytes["from_moe"],
        }
    return seen


@pytest.mark.parametrize(
    ("parallel", "mode"),
    [
        (ParallelConfig(ep_size=2, tp_size=2), "all_to_all"),
        (ParallelConfig(ep_size=2, tp_size=2), "replicated"),
        (ParallelConfig(tp_size=4), "all_to_all"),
        (ParallelConfig(dp_size=2, tp_size=2), "replicated"),
        (ParallelConfig(ep_size=4, rows="replicated"), "replicated"),
        (ParallelConfig(ep_size=2, tp_size=2, rows="replicated"), "replicated"),
    ],
)
def test_a_layer_may_leave_its_last_sum(parallel: ParallelConfig, mode: str) -> None:
    got = ranks(4).run(summed_outside, parallel, f"nccl[mode={mode}]+torch", CONFIG, limit=LIMIT)
    for seen in got:
        mine, its = seen["layer"], seen["caller"]
        torch.testing.assert_close(its["y"], mine["y"], rtol=1e-12, atol=1e-12)
        for a, b in zip(its["grads"], mine["grads"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert mine["payers"]["tp_sum"] == "transport"
        assert its["payers"]["tp_sum"] == ("caller" if parallel.tp_size > 1 else "transport")
        replicated = parallel.rows == "replicated"
        assert its["payers"]["rank_sum"] == ("caller" if replicated else "transport")
        assert mine["sent"] == 0  # each rank has its results in what the layer returned
    # 10 rows of 6 float64, from each rank of a group but the one that sums
    assert sum(s["caller"]["sent"] for s in got) == 10 * 48 * (parallel.copies - 1)


def test_parts_travel_in_combine_dtype_and_are_rounded_once() -> None:
    config = replace(CONFIG, dtype="bfloat16", bias=False)
    parallel = ParallelConfig(tp_size=4)
    for seen in ranks(4).run(summed_outside, parallel, "nccl+torch", config, limit=LIMIT):
        assert seen["layer"]["out"] == seen["caller"]["y"].dtype == torch.bfloat16
        assert seen["caller"]["out"] == torch.float32
        assert torch.equal(seen["caller"]["y"], seen["layer"]["y"])


def test_what_cant_be_left_to_the_caller_is_refused() -> None:
    config = replace(CONFIG, bias=False, num_shared_experts=1, combine="per_slot")
    widths = ParallelConfig(ep_size=2, rows="replicated", final_sum="caller")
    with pytest.raises(ConfigError) as caught:
        MoELayer(config, widths, "nccl+torch")
    fields = [f.field for f in caught.value.faults]
    assert fields[:2] == ["num_shared_experts", "combine"]
    # where each row is one rank's there is no such sum, and nothing to refuse
    alone = ParallelConfig(final_sum="caller")
    y = MoELayer(config, alone, "torch")(torch.ones(2, 6, dtype=torch.float64))
    assert y.shape == (2, 6)


def test_a_transport_that_always_sums_is_refused() -> None:
    transport = Part(
        role="transport",
        target="nowhere:Nothing",
        offer=Offer(ep_size=Range(), tp_size=Range(), dtype=("float64",), autograd=True),
        gives=("rank_grouped",),
        takes=("slot_list",),
        pays=("weight", "slot_sum", "rank_sum", "tp_sum"),
    )
    register_backend(Backend(name="summing", parts=(transport,)))
    try:
        for final_sum, served in (("layer", True), ("caller", False)):
            widths = ParallelConfig(tp_size=2, final_sum=final_sum)
            got = resolve(replace(CONFIG, bias=False), widths, "summing+torch")
            refused = [r.axis for r in got.refusals if r.part.startswith("summing")]
            assert refused == ([] if served else ["final_sum"])
    finally:
        unregister_backend("summing")


# -- the decoder


def run_example(*command: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLE), "--json"],
        capture_output=True, text=True, timeout=280, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_decoder_equals_its_twin() -> None:
    lines = run_example()
    assert len(lines) == 5 * 9
    assert {line["case"] for line in lines} == {"same", "gather", "split"}
    for line in lines:
        assert line["forward"] <= 1e-10, line
        assert line["backward"] <= 1e-10, line
        assert line["bytes_sent"] == line["least_bytes"], line
        summed = line["moe"].endswith("summed")
        assert line["bytes_backward"] <= line["bytes_sent"] if summed else True, line
        assert line["bytes_backward"] == line["bytes_sent"] or summed, line
    # By hand: 20 real rows of 8 float64 in two layers. Attention dp 4 has 8, 5, 0 and 7 of them;
    # each of MoE's two tp groups brings two of these together: 8 + 5 + 0 + 7 rows are sent once.
    sent = {(line["attention"], line["moe"]): line["bytes_sent"] for line in lines}
    assert sent["dp4 tp1", "dp1 ep2 tp2"] == 2 * 20 * 64
    assert sent["dp4 tp1", "dp1 ep1 tp4"] == 2 * 20 * 64 * 3
    assert sent["dp4 tp1", "dp1 ep1 tp4 summed"] == 2 * 20 * 64 * (3 + 3)
    assert sent["dp1 tp4", "dp1 ep4 tp1"] == 2 * 20 * 64 * 3  # nothing there, all home
    assert sent["dp1 tp4", "dp1 ep1 tp4"] == 0


@pytest.mark.slow
def test_the_decoder_runs_under_torchrun() -> None:
    lines = run_example("-m", "torch.distributed.run", "--nproc-per-node", "4")
    assert len(lines) == 5 * 9

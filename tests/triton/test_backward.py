"""The derivatives against their twins in float64, which take them by autograd."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from grouped_rows import (
    IDS,
    LAYOUTS,
    NAN,
    NUM_EXPERTS,
    SMALL,
    Rows,
    job,
    near,
    normal,
    rows_of,
    use,
)

from moe_core import Activation
from moe_core.config import ACTIVATIONS, LIMIT_FORMS
from moe_triton import launches, ops, runtime, tiles, twins
from moe_triton.configs import Config

torch.set_num_threads(1)
EVERY = [
    *(
        Activation(name=n, gated=g, limit=0.5 if f else None, limit_form=f or "before")
        for n, g, f in product(ACTIVATIONS, (True, False), (None, *LIMIT_FORMS))
    ),
    Activation(alpha=1.702),
    Activation(alpha=1.702, limit=0.5),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype)


def wide(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if t is None else t.double() for t in tensors]


def check_down_backward(
    layout: str,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    activation: Activation = Activation(),  # noqa: B008  (frozen)
    w13_layout: str = "gate_up",
    *,
    bias: bool = True,
    weighted: bool = True,
    on_input: bool = False,
    strided: bool = False,
    ids: torch.Tensor = IDS,
) -> None:
    rows = rows_of(layout, ids)
    width = inner * (2 if activation.gated else 1)
    grad = rows.by_slot(hidden, dtype=dtype, seed=1)
    w2 = normal(NUM_EXPERTS, hidden, inner, dtype=dtype) / hidden**0.5
    b13 = normal(NUM_EXPERTS, width, dtype=dtype, seed=3) if bias else None
    weights = rows.by_slot(dtype=torch.float32) if weighted else None
    pre = rows.filled(width, dtype=dtype, seed=5)
    if strided:
        grad, w2 = grad.mT.contiguous().mT, w2.mT.contiguous().mT
    task = job(
        rows, rows.inputs(hidden, dtype), w2, weights, activation, w13_layout,
        on_input=on_input,
    )  # fmt: skip
    config = task.config("down_backward", inner, hidden)
    grad_pre = poisoned(rows.num_positions, width, dtype=dtype)
    act = poisoned(rows.num_positions, inner, dtype=dtype)
    parts = torch.zeros(rows.num_positions, -(-inner // config.block_n)) if weighted else None
    launches.launch_down_backward(task, grad, w2, b13, pre, grad_pre, act, parts, config)
    given = wide(grad, w2, b13, weights, pre)
    want = twins.down_backward(*given, rows.places, activation, w13_layout, on_input=on_input)
    mine, slots = rows.mine, rows.places.slots(rows.mine)
    # slopes, values and their factors stay below 16, and weights below 4
    flat = grad.double().reshape(-1, hidden)
    size = torch.zeros(rows.num_positions, dtype=torch.float64)
    for expert, position in rows.places.experts():
        u = flat[rows.places.slots(position)].abs() @ w2[expert].double().abs()
        size[position] = 1 + 64 * u.amax(1) if inner else 1.0
    near(grad_pre[mine], want[0][mine], size[mine, None].expand(-1, width), hidden)
    near(act[mine], want[1][mine], size[mine, None].expand(-1, inner), hidden)
    if parts is not None:
        total = parts.sum(1)
        near(total[slots], want[2][slots], size[mine] * inner * 4, hidden + inner)
    others = torch.ones(rows.num_positions, dtype=torch.bool)
    others[mine] = False
    assert grad_pre[others].isnan().all(), "rows of nobody were written"
    assert act[others].isnan().all(), "rows of nobody were written"


@pytest.mark.parametrize("activation", EVERY, ids=str)
def test_every_activation(activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    check_down_backward("indexed", 16, 24, activation=activation)


@each_layout
@pytest.mark.parametrize("sizes", [(33, 17), (1, 1), (40, 48)], ids=str)
@pytest.mark.parametrize("on_input", [False, True])
def test_odd_sizes(
    layout: str, sizes: tuple[int, int], on_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    check_down_backward(layout, *sizes, on_input=on_input, strided=on_input)


@pytest.mark.parametrize("w13_layout", ["up_gate", "interleaved"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_weight_layouts_in_parts(
    w13_layout: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, SMALL | {"down_backward": Config(16, 32, 16, 1, 1, 2, 1, parts)})
    oss = Activation(alpha=1.702, limit=0.5)
    check_down_backward("indexed", 16, 40, w13_layout=w13_layout)
    ungated = Activation(gated=False)
    check_down_backward("indexed", 16, 40, activation=ungated, w13_layout=w13_layout)
    check_down_backward("expert_masked", 16, 40, activation=oss, w13_layout=w13_layout)


@half
@each_layout
def test_through_descriptors(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tma=True)
    with runtime.record_launches() as made:
        check_down_backward(layout, 40, 24, dtype)
        check_down_backward(layout, 40, 24, dtype, weighted=False, bias=False)
    assert [launched.meta["W_TMA"] for launched in made.made] == [True, True]
    check_down_backward(layout, 40, 18, dtype, strided=True)


def test_every_row_has_its_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    # ByteDance-Seed/Triton-distributed#185: all rows were written to row 0
    use(monkeypatch)
    rows = rows_of("indexed", torch.tensor([[0], [1], [2], [0], [1]]), 3)
    w2, x = torch.eye(4).expand(3, 4, 4).contiguous(), torch.zeros(5, 4)
    task = job(rows, x, w2, None, Activation(name="identity", gated=False))
    grad = torch.arange(1.0, 21).view(5, 4)
    made = poisoned(5, 4)
    config = task.config("down_backward", 4, 4)
    launches.launch_down_backward(task, grad, w2, None, torch.zeros(5, 4), made, None, None, config)
    assert torch.equal(made, grad[[0, 3, 1, 4, 2]])


def check_outer(
    layout: str, a_size: int, b_size: int, dtype: torch.dtype, *, weighted: bool, ids: Any = IDS
) -> None:
    rows = rows_of(layout, ids)
    indexed = layout == "indexed"
    weights = rows.by_slot(dtype=torch.float32)
    x = rows.inputs(b_size, dtype)
    task = job(rows, x, torch.empty(5, 1, 1), weights)
    by_token, by_slot = task.by_token, task.by_slot
    # as for w13: rows by position, inputs by token; as for w2: gradients by slot, rows by position
    first, second = rows.filled(a_size, dtype=dtype), rows.by_slot(a_size, dtype=dtype, seed=2)
    out = poisoned(NUM_EXPERTS, a_size, b_size, dtype=dtype)
    given = weights if weighted else None
    for a, b, how, twin in (
        (first, x, (tiles.NONE, by_token), {"a_by_slot": False, "b_by_token": indexed}),
        (
            second,
            rows.filled(b_size, dtype=dtype),
            (by_slot, tiles.NONE),
            {"a_by_slot": indexed, "b_by_token": False},
        ),
    ):
        out.fill_(NAN)
        launches.launch_outer(task, a, b, out, a_by=how[0], b_by=how[1], weighted=weighted)
        want = twins.outer(*wide(a, b, given), rows.places, **twin)
        sizes = [None if t is None else t.abs() for t in wide(a, b, given)]
        terms = twins.outer(*sizes, rows.places, **twin)
        # a weight is multiplied in before the product, and rounded
        near(out, want, terms * (1 + torch.finfo(dtype).eps * 2**23 * weighted), len(rows.mine))
        idle = (rows.places.tokens_per_expert == 0).nonzero()
        assert not out[idle].any()


@each_layout
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(16, 16), (33, 17), (1, 1)], ids=str)
def test_outer(
    layout: str, weighted: bool, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    check_outer(layout, *sizes, torch.float32, weighted=weighted)


@half
def test_outer_in_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    check_outer("indexed", 24, 40, dtype, weighted=False)


@each_layout
def test_outer_of_nothing(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    for ids in (torch.full((3, 2), -1), torch.empty(0, 2, dtype=torch.int64)):
        check_outer(layout, 8, 8, torch.float32, weighted=False, ids=ids)
        check_biases(rows_of(layout, ids), 8, torch.float32, weighted=True)


def check_biases(rows: Rows, size: int, dtype: torch.dtype, *, weighted: bool) -> None:
    weights = rows.by_slot(dtype=torch.float32)
    grad = rows.by_slot(size, dtype=dtype, seed=1)
    x = rows.inputs(size, dtype)
    task = job(rows, x, torch.empty(NUM_EXPERTS, size, 1), weights)
    out = poisoned(NUM_EXPERTS, size, dtype=dtype)
    launches.launch_bias_backward(task, grad, out, by=task.by_slot, weighted=weighted)
    given = weights if weighted else None
    want = twins.bias_backward(*wide(grad, given), rows.places, by_slot=True)
    sizes = [None if t is None else t.abs() for t in wide(grad, given)]
    terms = twins.bias_backward(*sizes, rows.places, by_slot=True)
    near(out, want, terms, max(len(rows.mine), 1))
    bias = normal(NUM_EXPERTS, size, dtype=dtype)
    parts = torch.zeros(rows.num_positions, 3)
    launches.launch_bias_product(task, grad, bias, parts)
    assert not parts[:, :2].any()
    want = twins.bias_product(*wide(grad, bias), rows.places, rows.num_positions)
    terms = twins.bias_product(
        grad.double().abs(), bias.double().abs(), rows.places, rows.num_positions
    )
    near(parts[:, 2], want, terms, size)


@each_layout
@pytest.mark.parametrize("size", [1, 33, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases(layout: str, size: int, dtype: torch.dtype) -> None:
    for weighted in (False, True):
        check_biases(rows_of(layout), size, dtype, weighted=weighted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_is_saved(layout: str) -> None:
    """An empty first product is computed again: the same gradients, bit by bit."""
    rows = rows_of(layout)
    x, grad = rows.inputs(12, torch.float32), rows.by_slot(12, dtype=torch.float32)
    w13, w2 = normal(NUM_EXPERTS, 20, 12), normal(NUM_EXPERTS, 12, 10)
    b13, b2 = normal(NUM_EXPERTS, 20), normal(NUM_EXPERTS, 12)
    places, weights = rows.places, rows.by_slot(dtype=torch.float32)
    given = (
        x, w13, w2, b13, b2, weights, places.sorted_token_ids, rows.slot_rows,
        places.tokens_per_expert, places.expert_starts,
    )  # fmt: skip
    how = ("gate_up", "silu", True, None, False, None, False)
    _, pre = ops.run_experts(*given, *how, True, False)
    _, nothing = ops.run_experts(*given, *how, False, False)
    assert (pre.shape, nothing.shape) == ((rows.num_positions, 20), (0,))
    saved, again = (
        ops.run_experts_backward(grad, *given, p, *how, False, [True] * 6) for p in (pre, nothing)
    )
    for one, other in zip(saved, again, strict=True):
        assert torch.equal(one, other)
    if layout != "indexed":
        others = torch.ones(rows.num_positions, dtype=torch.bool)
        others[rows.mine] = False
        assert not saved[0].view(-1, 12)[others].any(), "gradients of nobody's rows are zero"
        assert not saved[5].view(-1)[others].any()


def test_only_what_is_asked_for() -> None:
    rows = rows_of("indexed")
    x, grad = rows.inputs(8, torch.float32), rows.by_slot(8, dtype=torch.float32)
    w13, w2 = normal(NUM_EXPERTS, 8, 8), normal(NUM_EXPERTS, 8, 4)
    places = rows.places
    given = (
        x, w13, w2, None, None, None, places.sorted_token_ids, rows.slot_rows,
        places.tokens_per_expert, places.expert_starts,
    )  # fmt: skip
    how = ("gate_up", "silu", True, None, False, None, False)
    _, pre = ops.run_experts(*given, *how, True, False)
    names = {
        0: ["down_backward_kernel", "down_kernel", "sum_rows_kernel"],
        1: ["down_backward_kernel", "outer_kernel"],
        2: ["down_backward_kernel", "outer_kernel"],
    }
    for which, kernels in names.items():
        needs = [i == which for i in range(6)]
        with runtime.record_launches() as made:
            out = ops.run_experts_backward(grad, *given, pre, *how, False, needs)
        assert [launched.name for launched in made.made] == kernels
        assert [g.numel() > 0 for g in out] == needs


def test_positions_past_two_to_the_31(
    monkeypatch: pytest.MonkeyPatch, overflows_found: None
) -> None:
    # linkedin/Liger-Kernel#1296: offsets of the weights' gradient. Memory is reserved, not used.
    use(monkeypatch)
    last = 2**27 + 3
    counts = torch.tensor([1, 1], dtype=torch.int32)
    starts = torch.tensor([0, last, last + 1], dtype=torch.int32)
    grad = normal(1, 16, dtype=torch.bfloat16).expand(last + 1, 16)
    w2 = normal(2, 16, 16, dtype=torch.bfloat16)
    how = ("gate_up", "identity", False, None, False, None, False, False)
    task = launches.make_job(grad, None, w2, None, None, None, counts, starts, *how)
    pre, made = (torch.empty(last + 1, 16, dtype=torch.bfloat16) for _ in range(2))
    for row in (0, last):
        pre[row] = normal(16, dtype=torch.bfloat16, seed=row % 7)
    config = task.config("down_backward", 16, 16)
    launches.launch_down_backward(task, grad, w2, None, pre, made, None, None, config)
    outer, total = torch.empty(2, 16, 16), torch.empty(2, 16)
    launches.launch_outer(task, made, pre, outer, a_by=tiles.NONE, b_by=tiles.NONE, weighted=False)
    launches.launch_bias_backward(task, made, total, by=tiles.NONE, weighted=False)
    for expert, row in ((0, 0), (1, last)):
        u = grad[0].double() @ w2[expert].double()
        near(made[row], u, u.abs() + 64, 16)
        near(outer[expert], torch.outer(made[row].double(), pre[row].double()), u.abs() + 64, 1)
        assert torch.equal(total[expert], made[row].float())

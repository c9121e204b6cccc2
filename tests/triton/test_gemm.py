"""The forward products against their twins in float64: layouts, odd sizes, strides, descriptors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouped_rows import IDS, LAYOUTS, NAN, NUM_EXPERTS, SMALL, job, near, normal, rows_of, use

from moe_core import Activation
from moe_triton import launches, runtime, tiles, twins
from moe_triton.configs import Config
from moe_triton.gemm import WEIGHT_INPUT, WEIGHT_OUTPUT

torch.set_num_threads(1)
W13_LAYOUTS = ("gate_up", "up_gate", "interleaved")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, NAN, dtype=dtype)


def check_up(
    layout: str,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.float32,
    w13_layout: str = "gate_up",
    activation: Activation = Activation(),  # noqa: B008  (frozen)
    *,
    bias: bool = True,
    on_input: bool = False,
    ids: torch.Tensor = IDS,
    strided: bool = False,
) -> None:
    rows = rows_of(layout, ids)
    width = inner * (2 if activation.gated else 1)
    x = rows.inputs(hidden, dtype)
    w13 = normal(NUM_EXPERTS, width, hidden, dtype=dtype) / hidden**0.5
    w2 = normal(NUM_EXPERTS, hidden, inner, dtype=dtype)
    b13 = normal(NUM_EXPERTS, width, dtype=dtype, seed=3) if bias else None
    weights = rows.by_slot(dtype=torch.float32)
    if strided:
        x = torch.stack([x, x], -1)[..., 0]
        w13 = w13.mT.contiguous().mT
        b13 = None if b13 is None else b13.t().contiguous().t()
    task = job(rows, x, w2, weights, activation, w13_layout, on_input=on_input)
    assert task.weight == (WEIGHT_INPUT if on_input else WEIGHT_OUTPUT)
    act = poisoned(rows.num_positions, inner, dtype=dtype)
    pre = poisoned(rows.num_positions, width, dtype=dtype)
    launches.launch_up(task, x, w13, b13, act, pre)
    wide: list[Any] = [None if t is None else t.double() for t in (x, w13, b13, weights)]
    if not on_input:
        wide[3] = None
    want = twins.up(*wide, rows.places, rows.num_positions, activation, w13_layout)
    magnitudes = [None if t is None else t.abs() for t in wide]
    linear = Activation(name="identity", gated=activation.gated)
    _, terms = twins.up(*magnitudes, rows.places, rows.num_positions, linear, w13_layout)
    mine = rows.mine
    near(pre[mine], want[1][mine], terms[mine], hidden)
    # an activation's slope is below 1.2 where it isn't squared, its factor below 8 + 1
    both = terms * (weights.abs().double().nan_to_num().max() if on_input else 1) + 4
    scale = 1.2 * 9 * both.amax(1, keepdim=True).expand(-1, inner)
    near(act[mine], want[0][mine], scale[mine], hidden)
    others = torch.ones(rows.num_positions, dtype=torch.bool)
    others[mine] = False
    assert act[others].isnan().all(), "rows of nobody were written"
    assert pre[others].isnan().all(), "rows of nobody were written"


@each_layout
@pytest.mark.parametrize("sizes", [(16, 16), (33, 17), (1, 1), (40, 48)], ids=str)
def test_up_of_odd_sizes(
    layout: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    check_up(layout, *sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_layout
def test_up_in_half_precision(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    check_up(layout, 40, 24, dtype)


@pytest.mark.parametrize("w13_layout", W13_LAYOUTS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("on_input", [False, True])
def test_up_of_each_weight_layout(
    w13_layout: str, strided: bool, on_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    oss = Activation(alpha=1.702, limit=0.5)
    check_up("indexed", 24, 20, w13_layout=w13_layout, strided=strided, on_input=on_input)
    check_up("indexed", 24, 20, w13_layout=w13_layout, activation=oss, on_input=on_input)
    check_up("indexed", 24, 20, w13_layout=w13_layout, activation=Activation(gated=False))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("w13_layout", W13_LAYOUTS)
def test_results_in_parts(parts: int, w13_layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SMALL | {"up": Config(16, 32, 16, 1, 1, 2, 1, parts)})
    check_up("indexed", 16, 40, w13_layout=w13_layout)
    check_up("indexed", 16, 40, activation=Activation(gated=False))


@pytest.mark.parametrize("w13_layout", W13_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_up_through_descriptors(
    w13_layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tma=True)
    sizes = (32, 24) if w13_layout == "interleaved" else (40, 24)
    with runtime.record_launches() as made:
        check_up("indexed", *sizes, dtype, w13_layout)
        check_up("indexed", *sizes, dtype, activation=Activation(gated=False))
    assert [launched.meta["W_TMA"] for launched in made.made] == [True, True]
    with runtime.record_launches() as made:  # rows that aren't multiples of 16 bytes
        check_up("indexed", 36, 24, dtype, w13_layout)
        check_up("indexed", 36, 24, dtype, w13_layout, strided=True)
    assert [launched.meta["W_TMA"] for launched in made.made] == [False, False]


def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    for ids in (torch.full((3, 2), -1), torch.empty(0, 2, dtype=torch.int64)):
        for layout in LAYOUTS:
            check_up(layout, 8, 8, ids=ids)
            check_down(layout, 8, 8, ids=ids)


def check_down(
    layout: str,
    inner: int,
    out_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = True,
    weighted: bool = True,
    ids: torch.Tensor = IDS,
    transposed: bool = False,
) -> None:
    rows = rows_of(layout, ids)
    x = rows.inputs(out_size, dtype)
    w = normal(NUM_EXPERTS, out_size, inner, dtype=dtype) / inner**0.5
    w = w.mT.contiguous().mT if transposed else w
    bias_values = normal(NUM_EXPERTS, out_size, dtype=dtype, seed=3) if bias else None
    weights = rows.by_slot(dtype=torch.float32)
    act = rows.filled(inner, dtype=dtype)
    task = job(rows, x, w, weights)
    out = poisoned(rows.num_positions, out_size, dtype=dtype)
    by_slot = layout == "indexed"
    by = tiles.SLOT if by_slot else tiles.NONE
    launches.launch_down(task, act, w, bias_values, out, by=by, weighted=weighted)
    wide = [t.double() if t is not None else None for t in (act, w, bias_values, weights)]
    if not weighted:
        wide[3] = None
    want = twins.down(*wide, rows.places, by_slot=by_slot)
    terms = twins.down(*(t if t is None else t.abs() for t in wide), rows.places, by_slot=by_slot)
    where = rows.places.slots(rows.mine) if by_slot else rows.mine
    near(out[where], want[where], terms[where], inner)
    others = torch.ones(rows.num_positions, dtype=torch.bool)
    others[where] = False
    assert out[others].isnan().all(), "rows of nobody were written"


@each_layout
@pytest.mark.parametrize("sizes", [(16, 16), (33, 17), (1, 1), (20, 48)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_down_of_odd_sizes(
    layout: str, sizes: tuple[int, int], transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    check_down(layout, *sizes, transposed=transposed)


@each_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_down_through_descriptors(
    layout: str, dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tma=True)
    with runtime.record_launches() as made:
        check_down(layout, 24, 40, dtype, transposed=transposed)
        check_down(layout, 24, 40, dtype, bias=False, weighted=False, transposed=transposed)
    assert [(m.meta["TMA"], m.meta["W_KN"]) for m in made.made] == [(True, transposed)] * 2
    with runtime.record_launches() as made:
        check_down(layout, 18, 40, dtype)
    assert [m.meta["TMA"] for m in made.made] == [False]


@each_layout
@pytest.mark.parametrize("group", [1, 3])
def test_each_tile_once(layout: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than programs, of experts with 0, 1 and 3 tiles of rows, side by side or not."""
    use(monkeypatch, SMALL | {"down": Config(16, 16, 16, 1, 1, group)})
    ids = torch.tensor([[0]] * 33 + [[2]] * 3 + [[4]] * 17)
    check_down(layout, 16, 50, ids=ids)


def test_offsets_past_two_to_the_31(monkeypatch: pytest.MonkeyPatch, overflows_found: None) -> None:
    """Rows, experts and columns of weights that lie further apart than int32 counts elements:
    memory is reserved and, but for a few pages, not used."""
    use(monkeypatch)
    far = 2**31 + 64
    rows = rows_of("indexed", torch.tensor([[0], [1]]), 2)
    x = torch.empty(far + 16, dtype=torch.bfloat16).as_strided((2, 16), (far, 1))
    w13 = torch.empty(far + 16 * 32, dtype=torch.bfloat16).as_strided((2, 32, 16), (far, 16, 1))
    x.copy_(normal(2, 16))
    w13.copy_(normal(2, 32, 16))
    w2 = normal(2, 16, 16, dtype=torch.bfloat16)
    task = job(rows, x, w2)
    act = poisoned(2, 16, dtype=torch.bfloat16)
    launches.launch_up(task, x, w13, None, act, None)
    want, _ = twins.up(
        x.double(), w13.double(), None, None, rows.places, 2, Activation(), "gate_up"
    )
    near(act, want, want.abs() + 40, 16)


def test_positions_past_two_to_the_31(
    monkeypatch: pytest.MonkeyPatch, overflows_found: None
) -> None:
    """The second expert's only row is so far down that its offset is more than int32 holds."""
    use(monkeypatch)
    last = 2**27 + 3
    counts = torch.tensor([1, 1], dtype=torch.int32)
    starts = torch.tensor([0, last, last + 1], dtype=torch.int32)
    x = normal(1, 16, dtype=torch.bfloat16).expand(last + 1, 16)
    w13, w2 = normal(2, 16, 16, dtype=torch.bfloat16), normal(2, 16, 16, dtype=torch.bfloat16)
    act, out = (torch.empty(last + 1, 16, dtype=torch.bfloat16) for _ in range(2))
    how = ("gate_up", "identity", False, None, False, None, False, False)
    task = launches.make_job(x, None, w2, None, None, None, counts, starts, *how)
    launches.launch_up(task, x, w13, None, act, None)
    launches.launch_down(task, act, w2, None, out, by=tiles.NONE, weighted=False)
    for expert, row in ((0, 0), (1, last)):
        h = x[0].double() @ w13[expert].double().mT
        near(act[row], h, h.abs() + 16, 16)
        y = act[row].double() @ w2[expert].double().mT
        near(out[row], y, y.abs() + 64, 16)

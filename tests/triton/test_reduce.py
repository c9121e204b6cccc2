"""The sum over slots in the interpreter: bits, order, roundings, gradients, poison."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_core import InputError
from moe_triton import twins_routing
from moe_triton.reduce import sum_rows, sum_rows_backward
from moe_triton.runtime import record_launches

torch.set_num_threads(1)
NAN = math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case(tokens: int, top_k: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows ``[N, K, H]``, validity and weights; NaN where nobody may read."""
    generator = torch.Generator().manual_seed(hidden)
    ids = torch.randint(-1, 3, (tokens, top_k), generator=generator)
    rows = torch.randn(tokens, top_k, hidden, generator=generator).to(dtype)
    weights = torch.randn(tokens, top_k, generator=generator)
    rows[ids < 0], weights[ids < 0] = NAN, NAN
    return rows, ids, weights


def spread(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as ``[R, H]`` in another order with rows of nobody, and ``slot_rows``."""
    count = ids.numel() + 3
    places = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: ids.numel()]
    flat = torch.full((count, rows.shape[2]), NAN).to(rows.dtype)
    flat[places] = rows.reshape(-1, rows.shape[2])
    return flat, torch.where(ids < 0, -1, places.view(ids.shape)).int()


def with_grads(fn: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None):
    leaves = [t.detach().clone().requires_grad_() for t in (rows, weights) if t is not None]
    out = fn(leaves[0], index, leaves[1] if weights is not None else None)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    out.backward(upstream)
    grads: list[Any] = [leaf.grad for leaf in leaves]
    return out, grads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_kernels_are_their_twins(dtype: torch.dtype, weighted: bool) -> None:
    """Bits of the sum and of the rows' gradient; weights' gradients are sums over H."""
    for sizes in ((0, 2, 8), (1, 1, 1), (5, 3, 37), (3, 2, 1100), (2, 20, 16)):
        rows, ids, weights = case(*sizes, dtype)
        flat, slot_rows = spread(rows, ids)
        for given, index in ((rows, ids), (flat, slot_rows)):
            owed = weights if weighted else None
            out, grads = with_grads(sum_rows, given, index, owed)
            want, right = with_grads(twins_routing.sum_rows, given, index, owed)
            assert torch.equal(out, want)
            assert out.dtype == dtype
            assert torch.equal(grads[0], right[0])
            if weighted:
                valid = torch.where(ids < 0, 0.0, rows.float().abs().nan_to_num(0).sum(2))
                error = (grads[1] - right[1]).abs()
                assert (error <= sizes[2] * 2**-23 * valid).all()


def test_a_sum_by_hand() -> None:
    rows = torch.tensor([[[1.0, 2.0], [4.0, 8.0]], [[NAN, NAN], [3.0, 5.0]]])
    ids, weights = torch.tensor([[7, 0], [-1, 2]]), torch.tensor([[0.5, -1.0], [NAN, 2.0]])
    assert sum_rows(rows, ids, None).tolist() == [[5, 10], [3, 5]]
    out, (by_row, by_weight) = with_grads(sum_rows, rows, ids, weights)
    assert out.tolist() == [[-3.5, -7], [6, 10]]
    # upstream is -1, -1/3, 1/3, 1
    third = 1 / 3
    want = [[[-0.5, -third / 2], [1, third]], [[0, 0], [2 * third, 2]]]
    torch.testing.assert_close(by_row, torch.tensor(want))
    want = [[-1 - 2 * third, -4 - 8 * third], [0, 3 * third + 5]]
    torch.testing.assert_close(by_weight, torch.tensor(want))


def test_slots_are_added_in_order_and_rounded_once() -> None:
    big = 2.0**25  # + 1 is lost in float32
    rows = torch.tensor([[[big], [1.0], [-big]], [[big], [-big], [1.0]]])
    assert sum_rows(rows, torch.zeros(2, 3, dtype=torch.int64), None).tolist() == [[0], [1]]
    # 1 + 2^-9 + 2^-9 + 2^-9: a sum rounded to bfloat16 (2^-7 apart) each time would stay 1
    rows = torch.tensor([[[1.0], [2**-9], [2**-9], [2**-9]]], dtype=torch.bfloat16)
    assert sum_rows(rows, torch.zeros(1, 4, dtype=torch.int64), None).tolist() == [[1 + 2**-7]]
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: a fused multiply-add would keep the last term
    factor = 1 + 2.0**-12
    rows, weights = torch.tensor([[[-1.0 - 2**-11], [factor]]]), torch.tensor([[1.0, factor]])
    assert sum_rows(rows, torch.zeros(1, 2, dtype=torch.int64), weights).tolist() == [[0]]


def test_strided_inputs_are_not_written_to() -> None:
    rows, ids, weights = case(4, 3, 10, torch.float32)
    want, right = with_grads(sum_rows, rows, ids, weights)
    given = (
        rows.permute(2, 0, 1).contiguous().permute(1, 2, 0), ids.t().contiguous().t(),
        torch.stack([weights, weights], 2)[:, :, 1],
    )  # fmt: skip
    before = [t.clone() for t in given]
    out, grads = with_grads(sum_rows, *given)
    assert torch.equal(out, want)
    assert all(torch.equal(a, b) for a, b in zip(grads, right, strict=True))
    for now, then in zip(given, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    # an upstream gradient with strides of 0
    leaf = rows.clone().requires_grad_()
    sum_rows(leaf, ids, None).sum().backward()
    assert torch.equal(leaf.grad, (ids >= 0).float()[:, :, None].expand(4, 3, 10))


def test_nothing_valid_and_nothing_wanted() -> None:
    rows, ids = torch.full((3, 2, 5), NAN, requires_grad=True), -torch.ones(3, 2, dtype=torch.int64)
    weights = torch.full((3, 2), NAN, requires_grad=True)
    out = sum_rows(rows, ids, weights)
    assert (out == 0).all()
    out.sum().backward()
    assert (rows.grad == 0).all()
    assert (weights.grad == 0).all()
    empty = torch.zeros(0, 5, requires_grad=True)
    sum_rows(empty, ids, None).sum().backward()
    assert empty.grad.shape == (0, 5)
    with record_launches() as made:  # only what is asked for
        sum_rows(rows.detach(), ids, weights).sum().backward()
    assert made.count == 2


def test_errors_say_all_that_is_wrong() -> None:
    rows, ids = torch.zeros(3, 2, 5), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(InputError, match=r"slot_rows must have shape \[3, 2\].*weights must have"):
        sum_rows(rows, ids.t(), torch.zeros(4))
    with pytest.raises(InputError, match=r"float64.*|int16"):
        sum_rows(rows.double(), ids.short(), None)


def test_opcheck() -> None:
    rows, ids, weights = case(4, 3, 10, torch.float32)
    rows, weights = rows.nan_to_num(0), weights.nan_to_num(0)
    flat, slot_rows = spread(rows, ids)
    for given, index in ((rows, ids), (flat.nan_to_num(0), slot_rows), (rows[:0], ids[:0])):
        owed = weights[: len(index)]
        leaves = (given.clone().requires_grad_(), index, owed.clone().requires_grad_())
        torch.library.opcheck(sum_rows, leaves)
        torch.library.opcheck(sum_rows, (given, index, None))
        grad = torch.ones(len(index), 10)
        for need_rows, need_weights in ((True, True), (False, True)):
            torch.library.opcheck(
                sum_rows_backward, (grad, given, index, owed, need_rows, need_weights)
            )


def test_it_compiles_into_one_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sum_rows, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (3, 6):
        rows, ids, weights = case(tokens, 2, 7, torch.bfloat16)
        for have, right in zip(
            with_grads(compiled, rows, ids, weights), with_grads(sum_rows, rows, ids, weights),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(have, right, rtol=0, atol=0)
    assert counter.frame_count == 1

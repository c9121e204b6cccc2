"""The permute converter: where rows go, what comes back, gradients, no syncs, no poison."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from moe_core.contracts import BuildContext, IdSpace
from moe_core.convert import Index, Permute
from moe_core.converters import CONVERTERS
from moe_core.errors import InputError
from moe_core.layouts import SlotMajor, TokenMajor
from moe_core.manifest import LAYOUTS, Request

NAN = float("nan")


def permute(experts: int) -> Permute:
    return Permute(BuildContext(Request(), "float32", "cpu", experts, experts, 0))


def record(ids: list[list[int]], hidden: int = 3, dtype: torch.dtype = torch.float32) -> TokenMajor:
    """Row t is t+1 everywhere, the weight of flat slot j is j+1."""
    topk_ids = torch.tensor(ids, dtype=torch.int64).reshape(len(ids), -1)
    rows = torch.arange(1, len(ids) + 1, dtype=dtype).unsqueeze(1).repeat(1, hidden)
    weights = torch.arange(1, topk_ids.numel() + 1, dtype=dtype).view(topk_ids.shape)
    return TokenMajor(rows, topk_ids, weights)


def test_the_table_names_known_layouts_and_real_classes() -> None:
    for spec in CONVERTERS:
        assert {spec.takes, spec.gives, spec.back_takes, spec.back_gives} <= set(LAYOUTS)
        module, _, name = spec.target.partition(":")
        assert callable(getattr(importlib.import_module(module), name).there)
    assert CONVERTERS[0].name == "permute"
    # 6 tokens, 2 slots: 12 rows of 5 bf16 elements = 120 bytes; read and written, there and back
    assert CONVERTERS[0].bytes_moved(6, 2, 5, 2) == 480
    assert {c.name: c.bytes_moved(6, 2, 5, 2) for c in CONVERTERS}["index"] == 0


def test_an_index_says_which_rows_each_expert_reads() -> None:
    # as below, and an id past the last expert counts as none
    source = record([[2, -1], [0, 2], [2, 0], [3, -1]])
    index = Index(BuildContext(Request(), "float32", "cpu", 3, 3, 0))
    there, state = index.there(replace(source, paid=("rank_sum",)))
    assert there.rows is source.rows
    assert there.topk_weights is source.topk_weights
    assert there.sorted_token_ids.tolist() == [2, 5, 0, 3, 4, -1, -1, -1]
    assert there.slot_rows.tolist() == [[2, -1], [0, 3], [4, 1], [-1, -1]]
    assert there.tokens_per_expert.tolist() == [2, 0, 3]
    assert there.expert_starts.tolist() == [0, 2, 2, 5]
    made = (there.sorted_token_ids, there.slot_rows, there.tokens_per_expert, there.expert_starts)
    assert {t.dtype for t in made} == {torch.int32}
    assert there.paid == ("rank_sum",)
    results = SlotMajor(torch.rand(4, 2, 3))
    assert index.back(results, state) is results
    nobody = TokenMajor(torch.zeros(0, 3), torch.zeros(0, 2).long(), torch.zeros(0, 2))
    empty, _ = index.there(nobody)
    assert empty.sorted_token_ids.shape == (0,)
    assert empty.tokens_per_expert.tolist() == [0, 0, 0]


def test_an_index_counts_in_32_bits_and_says_so() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64).expand(2**16, 2**15)
    many = TokenMajor(torch.zeros(1, 1).expand(2**16, 1), ids, ids)
    index = Index(BuildContext(Request(), "float32", "cpu", 3, 3, 0))
    with pytest.raises(InputError, match="2147483648 slots in one call"):
        index.there(many)


def test_hand_made_order() -> None:
    # slots in order: token 0 -> 2, none; token 1 -> 0, 2; token 2 -> 2, 0 (expert 1 is idle)
    source = record([[2, -1], [0, 2], [2, 0]])
    there, state = permute(3).there(replace(source, paid=("rank_sum",)))
    assert there.tokens_per_expert.tolist() == [2, 0, 3]
    assert there.expert_starts.tolist() == [0, 2, 2, 5]
    assert there.expert_starts.dtype == there.tokens_per_expert.dtype == torch.int32
    assert there.rows[:, 0].tolist() == [2, 3, 1, 2, 3, 0]
    assert there.row_weights.tolist() == [3, 6, 1, 4, 5, 0]
    assert state.slot_rows.tolist() == [[2, -1], [0, 3], [4, 1]]
    assert there.paid == ("rank_sum",)
    back = permute(3).back(replace(there, rows=there.rows * 10, paid=("weight",)), state)
    assert back.rows[..., 0].tolist() == [[10, 0], [20, 20], [30, 30]]
    assert back.paid == ("weight",)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_slot_once_and_round_trip(data: st.DataObject) -> None:
    experts = data.draw(st.integers(0, 5))
    tokens, top_k = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4))
    ids = data.draw(
        st.lists(
            st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k),
            min_size=tokens,
            max_size=tokens,
        )
    )
    source = record(ids) if ids else replace(record([[-1] * top_k]), rows=torch.empty(0, 3))
    if not ids:
        source = replace(
            source,
            topk_ids=torch.empty(0, top_k, dtype=torch.int64),
            topk_weights=torch.empty(0, top_k),
        )
    there, state = permute(experts).there(source)
    starts = there.expert_starts.tolist()
    want = sorted(
        (e, t * top_k + k) for t, row in enumerate(ids) for k, e in enumerate(row) if e >= 0
    )
    got = [
        (e, int(there.row_weights[r]) - 1)
        for e in range(experts)
        for r in range(starts[e], starts[e] + int(there.tokens_per_expert[e]))
    ]
    assert got == want
    assert there.rows.shape == (tokens * top_k, 3)
    poisoned = there.rows.clone()
    poisoned[starts[-1] :] = NAN
    back = permute(experts).back(replace(there, rows=poisoned), state).rows
    expected = torch.where(source.topk_ids.unsqueeze(-1) >= 0, source.rows.unsqueeze(1), 0)
    assert torch.equal(back, expected)


def test_gradients_skip_the_tail_and_match_finite_differences() -> None:
    source = record([[2, -1], [0, 2], [2, 2], [-1, -1]], dtype=torch.float64)
    rows = source.rows.clone().requires_grad_()
    weights = source.topk_weights.clone().requires_grad_()

    def chain(rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        there, state = permute(3).there(replace(source, rows=rows, topk_weights=weights))
        valid = torch.arange(8) < there.expert_starts[-1]
        # a kernel whose unwritten tail is garbage
        out = torch.where(valid.unsqueeze(1), there.rows * there.row_weights.unsqueeze(1), NAN)
        back = permute(3).back(replace(there, rows=out), state)
        return back.rows, there.row_weights

    assert torch.autograd.gradcheck(chain, (rows, weights))
    there, _ = permute(3).there(replace(source, rows=rows, topk_weights=weights))
    garbage = torch.full((8, 3), NAN, dtype=torch.float64)
    garbage[:5] = 1
    grads = torch.autograd.grad(
        (there.rows, there.row_weights), (rows, weights), (garbage, garbage[:, 0])
    )
    assert grads[0][:, 0].tolist() == [1, 2, 2, 0]
    assert grads[1].tolist() == [[1, 0], [1, 1], [1, 1], [0, 0]]


def test_bfloat16_gradient_of_a_row_is_rounded_once() -> None:
    # 256 + 1 is 256 in bfloat16, so adding one by one would give 256; 263 rounds to 264
    source = record([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.bfloat16)
    rows = source.rows.clone().requires_grad_()
    there, _ = permute(8).there(replace(source, rows=rows))
    upstream = torch.ones_like(there.rows)
    upstream[0] = 256
    (grad,) = torch.autograd.grad(there.rows, rows, upstream)
    assert grad.tolist() == [[264.0] * 3]


def test_poisoned_and_foreign_values() -> None:
    source = record([[0, -1], [-1, -1]])
    rows = source.rows.clone()
    rows[1] = NAN  # a token that goes nowhere may hold anything
    weights = torch.tensor([[2.0, NAN], [NAN, NAN]])
    there, state = permute(2).there(replace(source, rows=rows, topk_weights=weights))
    assert there.rows[:, 0].tolist() == [1, 0, 0, 0]
    assert there.row_weights.tolist() == [2, 0, 0, 0]
    # a sentinel (id = E) is nobody's slot, as -1 is
    there, state = permute(2).there(record([[2, 1]]))
    assert state.slot_rows.tolist() == [[-1, 0]]
    with pytest.raises(InputError, match="logical"):
        permute(2).there(replace(source, id_space=IdSpace.LOGICAL))


def test_inputs_may_be_strided_and_are_not_written() -> None:
    wide = torch.arange(24.0).view(2, 12)
    source = replace(record([[1, 0], [0, 1]]), rows=wide[:, ::4])
    before = wide.clone()
    there, state = permute(2).there(source)
    back = permute(2).back(there, state)
    assert torch.equal(back.rows[:, 1], wide[:, ::4])
    assert torch.equal(wide, before)


# Dynamo instantiates autograd functions while it traces them, and torch warns of that
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_fullgraph_compiles_twice_at_most() -> None:
    torch.set_num_threads(1)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    converter = permute(4)

    def chain(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        there, state = converter.there(TokenMajor(rows, ids, weights))
        scaled = replace(there, rows=there.rows * there.row_weights.unsqueeze(1))
        return converter.back(scaled, state).rows

    compiled = torch.compile(chain, backend=counter, fullgraph=True)
    for tokens in (1, 7, 64):
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, 3, (tokens, 2), generator=generator)  # expert 3 is idle
        rows = torch.randn(tokens, 5, generator=generator).requires_grad_()
        weights = torch.rand(tokens, 2, generator=generator)
        out = compiled(rows, ids, weights)
        want = torch.where(
            (ids >= 0).unsqueeze(-1), rows.detach().unsqueeze(1) * weights.unsqueeze(-1), 0
        )
        assert torch.equal(out, want)
        out.backward(torch.ones_like(out))
        assert rows.grad is not None
        torch.testing.assert_close(
            rows.grad, torch.where(ids >= 0, weights, 0).sum(1, keepdim=True).expand(-1, 5)
        )
    assert counter.frame_count <= 2

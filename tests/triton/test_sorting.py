"""The counting sort in the interpreter: by hand, against its torch twins, as an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from moe_core import InputError
from moe_triton import sorting, twins_routing
from moe_triton.runtime import launch, record_launches

torch.set_num_threads(1)


@pytest.fixture(params=["one launch", "three launches"])
def form(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small blocks, so that few slots fill several of them."""
    if request.param == "three launches":
        monkeypatch.setattr(sorting, "ONE_LAUNCH", -1)
        monkeypatch.setattr(sorting, "LARGE", {"BLOCK": 16, "CHUNK": 8, "num_warps": 1})
        monkeypatch.setattr(sorting, "SUMS", {"BLOCK": 4, "CHUNK": 4, "num_warps": 1})
    else:
        monkeypatch.setattr(sorting, "SMALL", {"BLOCK": 16, "CHUNK": 8, "num_warps": 1})
    return request.param


def check(topk_ids: torch.Tensor, num_experts: int) -> None:
    made = sorting.sort_slots(topk_ids, num_experts)
    want = twins_routing.sort_slots(topk_ids, num_experts)
    for have, right in zip(made, want, strict=True):
        assert have.dtype == torch.int32
        assert have.shape == right.shape
        assert have.tolist() == right.tolist()


def random_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Some of them no expert's."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-3, experts + 9, (tokens, top_k), generator=generator)


def test_a_sort_by_hand(form: str) -> None:
    # an id past the last expert, and any below 0, is none
    ids = torch.tensor([[2, -1], [0, 2], [2, 0], [3, -7]])
    token_ids, slot_rows, counts, starts = sorting.sort_slots(ids, 3)
    assert token_ids.tolist() == [2, 5, 0, 3, 4, -1, -1, -1]
    assert slot_rows.tolist() == [[2, -1], [0, 3], [4, 1], [-1, -1]]
    assert counts.tolist() == [2, 0, 3]
    assert starts.tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(0, 2, 3), (1, 1, 1), (7, 3, 5), (41, 3, 7), (33, 8, 60), (97, 2, 257)],
)
def test_odd_sizes(form: str, tokens: int, top_k: int, experts: int) -> None:
    check(random_ids(tokens, top_k, experts), experts)
    check(random_ids(tokens, top_k, experts).int(), experts)


def test_extreme_routings(form: str) -> None:
    for ids in (-torch.ones(19, 2), torch.zeros(19, 2), torch.full((19, 2), 4.0)):
        check(ids.long(), 5)
    check(torch.arange(40).flip(0).view(20, 2), 40)
    wide = random_ids(11, 6, 4)
    before = wide.clone()
    check(wide[:, ::2], 4)
    check(wide.t(), 4)
    assert torch.equal(wide, before)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 5), min_size=3, max_size=3), max_size=12))
def test_any_routing(ids: list[list[int]]) -> None:
    check(torch.tensor(ids, dtype=torch.int64).view(-1, 3), 5)


def test_each_kernel_is_its_twin() -> None:
    ids, experts, block = random_ids(50, 3, 9), 9, 16
    counts = torch.full((10, experts + 1), -5, dtype=torch.int32)
    launch(sorting.histogram_kernel, (10,), ids, counts, ids.numel(), experts, BLOCK=block, CHUNK=8)
    want = twins_routing.histogram(ids, experts, block)
    assert counts.tolist() == want.tolist()
    totals = torch.full((experts + 1,), -5, dtype=torch.int32)
    launch(sorting.running_sum_kernel, (3,), counts, totals, 10, experts, BLOCK=4, CHUNK=4)
    before, right = twins_routing.running_sum(want)
    assert counts.tolist() == before.tolist()
    assert totals.tolist() == right.tolist()
    # the last kernel from the first two's numbers
    made = sorting._outputs(ids, experts)
    launch(
        sorting.place_kernel, (11,), ids, counts, totals, *made, ids.numel(), experts, 10,
        BLOCK=block, CHUNK=8,
    )  # fmt: skip
    for have, right in zip(made, twins_routing.sort_slots(ids, experts), strict=True):
        assert have.tolist() == right.tolist()


def test_launches() -> None:
    most = sorting.ONE_LAUNCH
    for slots, launches in ((0, 1), (most, 1), (most + 1, 3)):
        with record_launches() as made:
            ids = torch.arange(slots).view(-1, 1) % 3
            *_, counts, starts = sorting.sort_slots(ids, 2)
        assert made.count == launches
        assert counts.tolist() == [-(-slots // 3), -(-(slots - 1) // 3) if slots else 0]
        assert starts.diff().tolist() == counts.tolist()
    many = torch.zeros(1, 1, dtype=torch.int64).expand(2**20, 2**11)
    with pytest.raises(InputError, match="2147483648 slots"):
        sorting.sort_slots(many, 2)


def test_opcheck_and_one_graph() -> None:
    for ids in (random_ids(5, 2, 3), torch.empty(0, 2, dtype=torch.int64)):
        torch.library.opcheck(sorting.sort_slots, (ids, 3))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda ids: sorting.sort_slots(ids, 3), backend=counter, fullgraph=True, dynamic=True
    )
    for tokens in (4, 9):
        ids = random_ids(tokens, 2, 3)
        for have, right in zip(compiled(ids), sorting.sort_slots(ids, 3), strict=True):
            assert torch.equal(have, right)
    assert counter.frame_count == 1

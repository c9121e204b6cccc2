"""Capacity: who is dropped, that every backend agrees, and what padding adds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_core import ConfigError, Experts, MoEConfig, MoELayer, ParallelConfig, Router, RouterConfig
from moe_core.capacity import drop_over_capacity, pad_to_capacity
from moe_core.conformance.pool import ranks
from moe_core.contracts import Routing
from moe_core.resolution import resolve

BACKENDS = ["reference", "torch", "torch[gemm=loop]", "torch+reference"]


def config(**changes: Any) -> MoEConfig:
    base: dict[str, Any] = {
        "hidden_size": 12,
        "intermediate_size": 8,
        "num_experts": 5,
        "top_k": 2,
        "router": RouterConfig(renormalize=True),
        "bias": True,
        "dtype": "float64",
    }
    return MoEConfig(**base | changes)


def layer(backend: str, parallel: ParallelConfig | None = None, **changes: Any) -> MoELayer:
    torch.manual_seed(0)
    built = MoELayer(config(**changes), parallel, backend)
    with torch.no_grad():
        for bias in (built.experts.w13_bias, built.experts.w2_bias):
            assert bias is not None
            bias.fill_(0.25)  # a padded row is then no row of zeros on its way out
    return built


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 12, dtype=torch.float64, generator=generator)


def kept_by_hand(ids: torch.Tensor, capacity: int, num_experts: int) -> torch.Tensor:
    """First come, first served."""
    room = [capacity] * num_experts
    kept = torch.zeros(ids.shape, dtype=torch.bool)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0 and room[expert] > 0:
                room[expert] -= 1
                kept[token, slot] = True
    return kept


def test_the_first_come_in_token_then_slot_order() -> None:
    """C = ceil(.7 * 4 * 2 / 3) = 2 for each of three experts."""
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0]])
    weights = torch.arange(1.0, 9).view(4, 2)
    for permuted in (ids, ids.t().contiguous().t()):  # not contiguous
        routing, dropped = drop_over_capacity(
            Routing(permuted, weights), config(num_experts=3, capacity_factor=0.7)
        )
        assert routing.topk_ids.tolist() == [[0, 1], [0, 2], [-1, 1], [-1, -1]]  # pyright: ignore
        assert routing.topk_weights.tolist() == [[1, 2], [3, 4], [0, 6], [0, 0]]  # pyright: ignore
        assert routing.chosen_ids is permuted
        assert dropped.item() == 3
    twice, dropped = drop_over_capacity(routing, config(num_experts=3, capacity_factor=0.7))
    assert torch.equal(twice.topk_ids, routing.topk_ids)  # pyright: ignore
    assert dropped.item() == 0
    # both slots of a token count: one of two equal ones is dropped
    same = Routing(torch.tensor([[1, 1]]), torch.ones(1, 2))
    routing, _ = drop_over_capacity(same, config(num_experts=3, capacity_factor=1.5))
    assert routing.topk_ids.tolist() == [[1, -1]]  # pyright: ignore


def test_capacity_is_exact() -> None:
    ten = config(num_experts=10, top_k=1)
    for factor, num_tokens, want in (
        (1.1, 100, 11),  # 1.1 * 100 / 10 is a little over 11 in floats
        (1.25, 100, 13),
        (0, 100, 0),
        (1.0, 0, 0),
        (0.001, 1, 1),
        (1e300, 7, 7),
    ):
        made = replace(ten, capacity_factor=factor)
        assert made.expert_capacity(num_tokens) == want
        assert made.expert_capacity(torch.tensor(num_tokens)).item() == want  # pyright: ignore
        assert made.padding_tokens(num_tokens) == 0
        assert replace(made, capacity_policy="pad").padding_tokens(num_tokens) == 10 * want
    three = config(num_experts=5, top_k=3, capacity_factor=1.0, capacity_policy="pad")
    assert three.padding_tokens(4) == 5  # C = 3: 15 slots


@pytest.mark.parametrize("factor", [0, 0.5, 1.0, 9])
@pytest.mark.parametrize("policy", ["drop", "pad"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_drops_the_same(backend: str, policy: str, factor: float) -> None:
    """Against a layer without capacity that is told by hand what is kept."""
    model = layer(backend, capacity_factor=factor, capacity_policy=policy)
    oracle = layer("reference")
    x = tokens(9).requires_grad_()
    mask = torch.arange(9) % 4 != 1
    capacity = math.ceil(factor * 7 * 2 / 5)  # of the seven real tokens
    results: list[list[Any]] = []
    for each in (model, oracle):
        x.grad = None
        if each is model:
            dirty = torch.where(mask[:, None], x, math.nan)
            y, routing = model(dirty, token_mask=mask, return_routing=True)
        else:
            routing = oracle.router(x, None, mask)
            kept = kept_by_hand(routing.topk_ids, capacity, 5)
            ids, weights = routing.topk_ids, routing.topk_weights
            dropped = int((ids >= 0).sum() - kept.sum())
            routing = Routing(torch.where(kept, ids, -1), torch.where(kept, weights, 0))
            y = oracle(x, token_mask=mask, routing=routing)
        y.square().sum().backward()
        grads = [p.grad for p in each.parameters()]
        results.append([y.detach(), routing.topk_ids, routing.topk_weights, x.grad, *grads])
    for mine, want in zip(*results, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-13)
    assert model.stats()["dropped_slots"].item() == dropped
    if factor == 0:
        assert dropped == 14
        assert not any(tensor.any() for tensor in (results[0][0], *results[0][3:]))
    if factor == 9:
        assert dropped == 0


@pytest.mark.parametrize("policy", ["drop", "pad"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_is_normal(backend: str, policy: str) -> None:
    model = layer(backend, capacity_factor=1.0, capacity_policy=policy)
    x = torch.empty(0, 12, dtype=torch.float64, requires_grad=True)
    model(x).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    nobody = model(tokens(3), token_mask=torch.zeros(3, dtype=torch.bool))
    assert not nobody.any()
    ids = torch.full((3, 2), -1)
    assert not model.experts(tokens(3), ids, torch.full((3, 2), math.nan)).any()
    assert model.stats()["dropped_slots"].item() == 0


def test_padded_experts_have_exactly_their_capacity() -> None:
    made = config(capacity_factor=1.0, capacity_policy="pad", top_k=3)
    experts = Experts(made, backend="torch")
    ids = torch.tensor([[0, 0, 0], [0, 1, 4], [0, 1, -1], [0, 1, 1]])
    weights = torch.full((4, 3), 0.5)
    record, handle = experts.dispatch(tokens(4), ids, weights)
    assert record.tokens_per_expert.tolist() == [3] * 5  # pyright: ignore
    y = experts.combine(experts.run(record), handle)
    assert torch.equal(y, experts(tokens(4), ids, weights))
    # Half of the tokens are padding: C = ceil(2 * 3 / 5) = 2, and the four dropped ids stay so.
    mask = torch.tensor([True, False, True, False])
    routing, _ = drop_over_capacity(
        Routing(torch.where(mask[:, None], ids, -1), weights, token_mask=mask), made
    )
    rows, padded = pad_to_capacity(tokens(4), routing, made)
    assert padded.topk_ids is not None
    assert torch.bincount(padded.topk_ids[padded.topk_ids >= 0]).tolist() == [2] * 5
    assert rows.shape == (4 + 5, 12)  # as many as four real tokens could need
    assert not rows[4:].any()
    assert torch.equal(padded.topk_ids[:4], routing.topk_ids)  # pyright: ignore


def test_what_a_buffer_must_hold_includes_the_padding() -> None:
    made = config(capacity_factor=1.0, capacity_policy="pad")  # 10 tokens: C = 4, 10 more
    assert resolve(made, max_tokens_per_rank=10).request.max_tokens_per_rank == 20
    dropping = replace(made, capacity_policy="drop")
    assert resolve(dropping, max_tokens_per_rank=10).request.max_tokens_per_rank == 10


@pytest.mark.parametrize("policy", ["drop", "pad"])
def test_compiles_whole_with_few_graphs(policy: str) -> None:
    from torch._dynamo.testing import CompileCounter  # slow: not in every rank of the pool

    model = layer("torch", capacity_factor=0.6, capacity_policy=policy)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for count in (2, 7, 64):
        before = model.stats()["dropped_slots"].clone()
        y = compiled(tokens(count))
        dropped = model.stats()["dropped_slots"] - before
        torch.testing.assert_close(y, model(tokens(count)), rtol=1e-12, atol=1e-13)
        assert model.stats()["dropped_slots"] - before == 2 * dropped
    assert counter.frame_count <= 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_drops_are_counted_once_per_forward(reentrant: bool) -> None:
    model = layer("torch", capacity_factor=0)
    x = tokens(6).requires_grad_()
    for calls in (1, 2):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()  # pyright: ignore
        assert model.stats()["dropped_slots"].item() == calls * 12
    model.eval()(x)  # a forward that drops is counted in evaluation too
    assert model.stats()["dropped_slots"].item() == 36


def test_a_saved_routing_is_not_dropped_twice() -> None:
    model = layer("torch", capacity_factor=0.5)
    x = tokens(9)
    y, routing = model(x, return_routing=True)
    dropped = model.stats()["dropped_slots"].item()
    assert dropped == (routing.chosen_ids >= 0).sum() - (routing.topk_ids >= 0).sum() > 0
    assert torch.equal(model(x, routing=routing.detach()), y)
    assert model.stats()["dropped_slots"].item() == dropped
    # The choice alone is weighed before anything is dropped, as the first time.
    again, weighed = model(x, routing=routing.choice(), return_routing=True)
    assert torch.equal(again, y)
    assert torch.equal(weighed.topk_weights, routing.topk_weights)
    assert model.stats()["dropped_slots"].item() == 2 * dropped


class LogitsOnly(Router):
    routing_ids = False

    def forward(self, hidden_states, input_ids=None, token_mask=None) -> Routing:
        return Routing(None, None, router_logits=hidden_states[:, :5])


def test_a_kernel_that_routes_would_have_to_drop_as_well() -> None:
    with pytest.raises(ConfigError, match="leave capacity_factor unset"):
        MoELayer(config(capacity_factor=1.0), router=LogitsOnly())


def run_rank(parallel: ParallelConfig, spec: str, sizes: list[int], changes: dict[str, Any]) -> Any:
    model = layer(spec, parallel, **changes)
    ep_rank = model.experts.groups.ep_rank
    x = tokens(sizes[ep_rank], seed=ep_rank if parallel.rows == "distinct" else 0).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad, model.stats()["dropped_slots"].item()


@pytest.mark.parametrize("policy", ["drop", "pad"])
@pytest.mark.parametrize(
    ("mode", "rows"),
    [("all_to_all", "distinct"), ("replicated", "distinct"), ("replicated", "replicated")],
)
def test_each_rank_decides_for_its_own_tokens(mode: str, rows: str, policy: str) -> None:
    changes = {"capacity_factor": 0.6, "capacity_policy": policy}
    parallel = ParallelConfig(ep_size=2, rows=rows)
    for sizes in ([7, 7], [5, 0]) if rows == "distinct" else ([7, 7],):
        spec = f"nccl[mode={mode}]+torch"
        got = ranks(2).run(run_rank, parallel, spec, sizes, changes)
        for rank, mine in enumerate(got):
            model = layer("reference", **changes)
            x = tokens(sizes[rank], seed=rank if rows == "distinct" else 0).requires_grad_()
            y = model(x)
            y.square().sum().backward()
            torch.testing.assert_close(mine[0], y.detach(), rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(mine[1], x.grad, rtol=1e-11, atol=1e-12)
            assert mine[2] == model.stats()["dropped_slots"].item()

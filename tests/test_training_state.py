"""Counts, replayed routing and jitter: what a training step must do once, or twice alike."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_core import (
    ConfigError,
    Experts,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RouterConfig,
    route,
)
from moe_core.conformance.pool import ranks
from moe_core.contracts import Routing
from moe_core.routing import TopKRouter, replay_routing, tokens_per_expert

E, H = 6, 8
BIASED = RouterConfig(scoring_func="sigmoid", correction_bias=True, renormalize=True)
VARIANTS = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])


def config(**changes: Any) -> MoEConfig:
    base: dict[str, Any] = {
        "hidden_size": H,
        "intermediate_size": 8,
        "num_experts": E,
        "top_k": 2,
        "router": BIASED,
        "dtype": "float64",
    }
    return MoEConfig(**base | changes)


def layer(
    parallel: ParallelConfig | None = None, backend: str = "torch", **changes: Any
) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(config(**changes), parallel, backend)


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, H, dtype=torch.float64, generator=generator)


def counted(model: MoELayer) -> list[int]:
    return model.stats()["tokens_per_expert"].tolist()


def chosen(model: MoELayer, *batches: torch.Tensor) -> list[int]:
    ids = [model.router(x).topk_ids.flatten() for x in batches]
    return torch.bincount(torch.cat(ids), minlength=E).tolist()


@VARIANTS
@pytest.mark.parametrize("compiled", [False, True])
def test_choices_count_once_over_micro_batches_and_recomputes(
    reentrant: bool, compiled: bool
) -> None:
    model = layer()
    torch._dynamo.reset()
    sizes = (5, 5) if compiled else (5, 0, 7)  # a recompute may not meet another graph
    batches = [tokens(n, seed=i).requires_grad_() for i, n in enumerate(sizes)]
    run: Any = torch.compile(model, backend="aot_eager") if compiled else model
    for x in batches:
        y: Any = checkpoint(run, x, use_reentrant=reentrant)
        y.sum().backward(retain_graph=not reentrant)
        if not reentrant:
            y.sum().backward()  # recomputes again
    assert counted(model) == chosen(model, *batches)
    model.experts.counts.reset()
    assert counted(model) == [0] * E


def test_what_counts_is_the_choice_of_real_tokens_in_training() -> None:
    model = layer(capacity_factor=0)
    x, mask = tokens(6), torch.tensor([True, False, True, True, False, True])
    model(x, token_mask=mask)
    assert counted(model) == chosen(model, x[mask])  # though all of it was dropped
    model(x, token_mask=mask, routing=layer().router(x))
    assert counted(model) == [2 * n for n in chosen(model, x[mask])]
    model.eval()(x)
    assert counted(model) == [2 * n for n in chosen(model, x[mask])]
    served = MoELayer(config(), inference=True)
    served(x)
    assert counted(served) == [0] * E


def test_counts_are_neither_saved_nor_synchronised_nor_cast() -> None:
    model = layer()
    model(tokens(5))
    before = counted(model)
    # DDP sends rank 0's buffers to all ranks before each forward
    assert not any("counts" in name for name, _ in model.named_buffers())
    assert not any("counts" in name for name in model.state_dict())
    assert copy.deepcopy(model.experts.counts).tokens_per_expert.tolist() == before
    model.half()
    assert model.stats()["tokens_per_expert"].dtype == torch.int64
    assert counted(model) == before
    moved = MoELayer(config(), device="meta").to_empty(device="cpu")
    assert counted(moved) == [0] * E
    assert moved.stats()["dropped_slots"].item() == 0


def test_bias_update_by_hand() -> None:
    model = layer()
    everyone = Routing(torch.tensor([[0, 1], [0, 2], [0, 1]]), torch.ones(3, 2))
    model(tokens(3), routing=everyone)  # 3, 2, 1, 0, 0, 0 around a mean of 1
    model.update_correction_bias(rate=0.5)
    bias: Any = model.router.e_score_correction_bias
    assert bias.tolist() == [-0.5, -0.5, 0, 0.5, 0.5, 0.5]
    assert counted(model) == [0] * E
    model.update_correction_bias(rate=0.5)  # nothing was counted: nothing moves
    assert bias.tolist() == [-0.5, -0.5, 0, 0.5, 0.5, 0.5]
    with pytest.raises(InputError, match="no correction bias"):
        layer(router=RouterConfig()).update_correction_bias()


def bias_of_a_rank(parallel: ParallelConfig, sizes: list[int]) -> tuple[list[float], list[int]]:
    model = layer(parallel, "nccl+torch")
    groups = model.experts.groups
    place = groups.dp_rank * parallel.ep_size + groups.ep_rank
    if parallel.rows == "replicated":
        place = groups.dp_rank
    for seed in (1, 2):
        model(tokens(sizes[place], seed=10 * seed + place))
    mine = counted(model)
    model.update_correction_bias(rate=1.0)
    return model.router.e_score_correction_bias.tolist(), mine  # pyright: ignore


@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        (ParallelConfig(ep_size=2), [5, 0]),
        (ParallelConfig(tp_size=2), [5]),
        (ParallelConfig(dp_size=2), [5, 3]),
        (ParallelConfig(ep_size=2, rows="replicated"), [4]),
        (ParallelConfig(ep_size=2, dp_size=2), [5, 3, 0, 4]),
        (ParallelConfig(ep_size=2, tp_size=2), [5, 3]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_counts_are_summed_where_tokens_differ(parallel: ParallelConfig, sizes: list[int]) -> None:
    got = ranks(parallel.world_size).run(bias_of_a_rank, parallel, sizes)
    one = layer()
    batches = [[tokens(n, seed=10 * s + place) for s in (1, 2)] for place, n in enumerate(sizes)]
    total = chosen(one, *(x for both in batches for x in both))
    assert len(set(total)) > 1
    want = [float((sum(total) > n * E) - (sum(total) < n * E)) for n in total]
    for rank, (bias, mine) in enumerate(got):
        assert bias == want
        place = rank // parallel.tp_size
        if parallel.rows == "replicated":
            place //= parallel.ep_size
        assert mine == chosen(one, *batches[place])


class Shaky(TopKRouter):
    """Whose logits differ by about 1e-7 from the second call on, as a recompute's may."""

    def __init__(self, made: MoEConfig) -> None:
        super().__init__(made)
        self.calls = 0

    def forward(self, hidden_states, input_ids=None, token_mask=None) -> Routing:
        self.calls += 1
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        noise = torch.linspace(-1e-7, 1e-7, logits.numel(), dtype=logits.dtype).view_as(logits)
        bias = self.e_score_correction_bias
        logits = logits + noise * (self.calls > 1)  # the same operations in both
        return route(logits, 2, self.config.router, correction_bias=bias)


def ties(make_router: Any, **changes: Any) -> MoELayer:
    """Experts 1 to 4 tie, so that every cut at two is one through a tie."""
    made = config(**changes)
    torch.manual_seed(0)
    model = MoELayer(made, backend="torch", router=make_router(made))
    with torch.no_grad():
        weight: Any = model.router.weight
        weight[1:5] = weight[1]
        weight[0], weight[5] = -weight[1], -weight[1]
    return model


def gradients(block: Any, x: torch.Tensor, models: list[MoELayer], run: Any) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    run(block, x).square().sum().backward()
    found = [x.grad, *(p.grad for model in models for p in model.parameters())]
    assert all(grad is not None for grad in found)
    return found  # pyright: ignore[reportReturnType]


@VARIANTS
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": RouterConfig()},
        {"router": RouterConfig(softmax_before_topk=False), "capacity_factor": 0.7},
    ],
    ids=["sigmoid-bias", "softmax", "capacity"],
)
def test_a_recompute_that_flips_ties_replays_the_forward(
    reentrant: bool, changes: dict[str, Any]
) -> None:
    """Two layers in one checkpointed block (Automodel#3140, torchtitan#3336)."""
    x, results = tokens(9), []
    for router, run in (
        (TopKRouter, lambda block, x: block(x)),
        (Shaky, lambda block, x: checkpoint(replay_routing(block), x, use_reentrant=reentrant)),
        (Shaky, lambda block, x: checkpoint(block, x, use_reentrant=reentrant)),
    ):
        models = [ties(router, **changes) for _ in range(2)]

        def block(x: torch.Tensor, models: list[MoELayer] = models) -> torch.Tensor:
            return models[1](x + models[0](x))

        results.append(gradients(block, x, models, run))
        if router is Shaky:
            assert [model.router.calls for model in models] == [2, 2]
        assert [sum(counted(model)) for model in models] == [18, 18]
    plain, replayed, flipped = results
    assert any(grad.any() for grad in plain[2::3])  # the routers learn
    for got, want in zip(replayed, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    far = [not torch.allclose(a, b, rtol=1e-2) for a, b in zip(flipped, plain, strict=True)]
    assert any(far)  # what would happen without


def test_replay_has_the_bits_of_a_run_without_checkpoint() -> None:
    for changes in ({}, {"router": RouterConfig(jitter=0.3)}):
        results = []
        for run in (
            lambda block, x: block(x),
            lambda block, x: checkpoint(replay_routing(block), x, use_reentrant=True),
            lambda block, x: checkpoint(replay_routing(block), x, use_reentrant=False),
        ):
            model = layer(**changes)
            torch.manual_seed(5)
            results.append(gradients(model, tokens(9), [model], run))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_nested_checkpoints_replay_too() -> None:
    results = []
    for nested in (False, True):
        inner, outer = ties(Shaky), ties(Shaky)

        def block(x: torch.Tensor, inner=inner, outer=outer, nested: bool = nested) -> Any:
            if nested:
                x = checkpoint(replay_routing(inner), x, use_reentrant=False)  # pyright: ignore
            else:
                x = inner(x)
            return outer(x)

        def run(block: Any, x: torch.Tensor, nested: bool = nested) -> Any:
            if nested:
                return checkpoint(replay_routing(block), x, use_reentrant=False)
            return block(x)

        results.append(gradients(block, tokens(9), [inner, outer], run))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_replay_says_what_it_cannot_do() -> None:
    model, x = layer(), tokens(4).requires_grad_()
    twice: Any = replay_routing(model)
    twice(x)
    with pytest.raises(InputError, match="anew for each call of checkpoint"):
        twice(x)
    with pytest.raises(InputError, match="saw no MoELayer"):
        replay_routing(torch.sin)(x)
    torch._dynamo.reset()
    with pytest.raises(InputError, match=r"torch\.compile can't be seen"):
        replay_routing(torch.compile(model, backend="eager"))(x)

    calls = []

    def grows(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return sum((model(x) for _ in calls), torch.zeros_like(x))

    y: Any = checkpoint(replay_routing(grows), x, use_reentrant=True)
    with pytest.raises(InputError, match="calls other layers"):
        y.sum().backward()

    own = MoELayer(config(), router=lambda x, _: (torch.zeros(4, 2).long(), torch.ones(4, 2)))
    with pytest.raises(InputError, match=r"CallableRouter has no reweight"):
        checkpoint(replay_routing(own), x, use_reentrant=True)
    with pytest.raises(InputError, match="topk_weights is missing"):
        Experts(config())(x, torch.zeros(4, 2).long())


@pytest.mark.parametrize(
    "router",
    [
        RouterConfig(),
        RouterConfig(softmax_before_topk=False, routed_scaling_factor=2.5),
        RouterConfig(scoring_func="sqrtsoftplus", renormalize=True),
        BIASED,
        RouterConfig(kind="hash", vocab_size=9, renormalize=True),
    ],
    ids=["softmax", "topk-softmax", "sqrtsoftplus", "bias", "hash"],
)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_replayed_choice_is_weighed_as_the_first_time_and_the_router_learns(
    backend: str, router: RouterConfig
) -> None:
    x, input_ids = tokens(7), torch.arange(7)
    model = layer(backend=backend, router=router)
    with torch.no_grad():
        _, saved = model(x, input_ids, return_routing=True)
    want = gradients(lambda x: model(x, input_ids), x, [model], lambda block, x: block(x))
    model.zero_grad()
    if model.router.e_score_correction_bias is not None:
        model.router.e_score_correction_bias.normal_(0, 10)  # pyright: ignore # chooses otherwise
    got = gradients(
        lambda x: model(x, input_ids, routing=saved.choice()), x, [model], lambda block, x: block(x)
    )
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    assert model.router.weight.grad.any()  # pyright: ignore
    # Weights given as numbers: the router rests.
    model.zero_grad()
    model(x, input_ids, routing=replace(saved, scores=None).detach()).square().sum().backward()
    assert model.router.weight.grad is None


def test_detached_routing_holds_no_graph_and_the_same_numbers() -> None:
    routing = layer().router(tokens(3))
    kept = routing.detach()
    for name in ("topk_weights", "router_logits", "scores"):
        assert getattr(routing, name).requires_grad
        assert not getattr(kept, name).requires_grad
        assert torch.equal(getattr(routing, name), getattr(kept, name))
    assert torch.equal(tokens_per_expert(kept, E), tokens_per_expert(routing, E))


def test_weights_of_another_choice() -> None:
    model = layer(router=RouterConfig(softmax_before_topk=False))
    logits = torch.tensor([[0.0, 1, 2, 3, -torch.inf, torch.nan]], dtype=torch.float64)
    routing = route(logits, 2, model.config.router)
    assert routing.topk_ids.tolist() == [[3, 2]]  # pyright: ignore
    for ids, other, weights in (
        ([[1, 3]], [[1, 3]], torch.softmax(torch.tensor([1.0, 3]).double(), 0)),
        ([[4, 0]], [[-1, 0]], torch.tensor([0.0, 1])),  # -inf and NaN can't be chosen
        ([[2, 5]], [[2, -1]], torch.tensor([1.0, 0])),
        ([[7, -3]], [[-1, -1]], torch.zeros(2)),
    ):
        made = model.router.reweight(routing, torch.tensor(ids, dtype=torch.int32))
        assert made.topk_ids.tolist() == other  # pyright: ignore
        torch.testing.assert_close(made.topk_weights[0], weights.double(), rtol=1e-15, atol=0)  # pyright: ignore
    with pytest.raises(InputError, match=r"topk_ids must have shape \[1, K\], got \[2, 2\]"):
        model.router.reweight(routing, torch.zeros(2, 2).long())
    with pytest.raises(InputError, match="returns logits and scores"):
        model.router.reweight(Routing(None, None), torch.zeros(2, 2).long())


def test_jitter_is_the_routers_alone_and_drawn_in_training_only() -> None:
    model = layer(router=RouterConfig(jitter=0.4))
    x, weight = tokens(50), model.router.weight
    torch.manual_seed(7)
    routing = model.router(x)
    torch.manual_seed(7)
    noise = torch.empty(50, H, dtype=torch.float64).uniform_(0.6, 1.4)
    assert torch.equal(routing.router_logits, torch.nn.functional.linear(x * noise, weight))  # pyright: ignore
    torch.manual_seed(7)
    y, used = model(x, return_routing=True)
    assert torch.equal(used.topk_ids, routing.topk_ids)
    assert torch.equal(y, model.experts(x, routing.topk_ids, routing.topk_weights))
    clear = layer(router=RouterConfig())(x)
    assert not torch.equal(y, clear)
    assert torch.equal(model.eval()(x), clear)
    model.train().router.requires_grad_(False)
    assert torch.equal(model(x), clear)
    served = MoELayer(model.config, backend="torch", inference=True)
    served.load_state_dict(model.state_dict())
    assert torch.equal(served(x), clear)


@VARIANTS
def test_a_recompute_draws_the_same_jitter(reentrant: bool) -> None:
    results = []
    for run in (
        lambda block, x: block(x),
        lambda block, x: checkpoint(block, x, use_reentrant=reentrant),
    ):
        model = layer(router=RouterConfig(jitter=0.3))
        torch.manual_seed(3)
        results.append(gradients(model, tokens(6), [model], run))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_jitter_needs_ranks_that_hold_different_tokens() -> None:
    jitter = config(router=RouterConfig(jitter=0.1))
    for parallel in (ParallelConfig(tp_size=2), ParallelConfig(ep_size=2, rows="replicated")):
        with pytest.raises(ConfigError, match="2 ranks hold the same tokens"):
            MoELayer(jitter, parallel)
    for wrong in (-0.1, 1, float("nan"), "0.1"):
        with pytest.raises(ConfigError, match=r"jitter.* of at least 0 and below 1"):
            RouterConfig(jitter=wrong)  # pyright: ignore[reportArgumentType]


def test_expert_choice_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"depend on the whole batch.* take kind=topk"):
        RouterConfig(kind="expert_choice")
    with pytest.raises(ConfigError, match="must be one of topk, hash"):
        RouterConfig(kind="expertchoice")

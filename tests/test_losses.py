"""Losses of the router and the bias update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_core.config import RouterConfig
from moe_core.conformance.pool import ranks
from moe_core.contracts import Routing
from moe_core.errors import InputError
from moe_core.routing import (
    load_balance_loss,
    route,
    router_z_loss,
    sequence_balance_loss,
    tokens_per_expert,
    updated_correction_bias,
)
from moe_core.routing.losses import sum_over


def routing_of(ids: list[list[int]], scores: list[list[float]] | None = None, **extra) -> Routing:
    chosen = torch.tensor(ids)
    made = None if scores is None else torch.tensor(scores, dtype=torch.float64)
    return Routing(chosen, torch.ones(chosen.shape), scores=made, **extra)


def test_counts() -> None:
    """Duplicates count twice; invalid slots, ids out of range and masked tokens do not count."""
    mask = torch.tensor([True, True, False])
    routing = routing_of([[0, 2], [2, 2], [1, 1]], token_mask=mask)
    counts = tokens_per_expert(routing, 4)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [1, 0, 3, 0]
    assert tokens_per_expert(routing_of([[-1, 3], [4, -5]]), 4).tolist() == [0, 0, 0, 1]
    with pytest.raises(InputError, match="no ids"):
        tokens_per_expert(Routing(None, None), 4)


@pytest.mark.parametrize("masked", [False, True])
def test_equals_transformers(masked: bool) -> None:
    """Theirs sums the fractions to K, ours to 1."""
    from transformers.models.mixtral import modeling_mixtral  # slow: not in every rank of the pool

    torch.manual_seed(0)
    logits = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(40) % 3 != 0 if masked else None
    theirs = modeling_mixtral.load_balancing_loss_func(
        (logits,), 6, 2, mask[None].long() if mask is not None else None
    )
    assert isinstance(theirs, torch.Tensor)
    (want,) = torch.autograd.grad(theirs, logits)
    poisoned = logits if mask is None else torch.where(mask[:, None], logits, torch.nan)
    ours = load_balance_loss(route(poisoned, 2, RouterConfig(), token_mask=mask), 6)
    (got,) = torch.autograd.grad(ours, logits)
    single = torch.finfo(torch.float32).eps  # theirs accumulates 40 rows in float32
    torch.testing.assert_close(2 * ours, theirs.double(), rtol=40 * single, atol=0)
    bound = 40 * single * want.abs().max().item()
    torch.testing.assert_close(2 * got, want, rtol=0, atol=bound)


def test_loss_by_hand() -> None:
    even = routing_of([[0], [1]], [[0.5, 0.5], [3, 3]])
    assert load_balance_loss(even, 2).item() == 1.0
    # f = [3/4, 1/4] of four choices, P = mean([1, 0], [1/4, 3/4]) = [5/8, 3/8].
    mask = torch.tensor([True, True, True, False])
    ids = [[0, 0], [0, 1], [-1, -1], [1, 1]]
    uneven = routing_of(ids, [[2, 0], [0.1, 0.3], [0, 0], [0, 1]], token_mask=mask)
    want = 2 * (3 / 4 * 5 / 8 + 1 / 4 * 3 / 8)
    assert load_balance_loss(uneven, 2).item() == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_balance_is_zero_with_a_graph(rows: int) -> None:
    logits = torch.full((rows, 4), torch.nan, requires_grad=True)
    loss = load_balance_loss(route(logits, 2, RouterConfig(scoring_func="sigmoid")), 4)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def test_loss_names_what_is_missing() -> None:
    with pytest.raises(InputError, match=r"needs routing\.scores"):
        load_balance_loss(routing_of([[0]]), 2)
    with pytest.raises(InputError, match=r"shape \[T, 3\], got \[1, 2\]"):
        load_balance_loss(routing_of([[0]], [[1, 2]]), 3)


def test_bias_update() -> None:
    """Toward the mean of 5: up for the idle, down for the busy, still at the mean."""
    bias = torch.tensor([0.0, 1, 2, 3], dtype=torch.float64)
    counts = torch.tensor([0, 5, 14, 1], dtype=torch.int32)
    got = updated_correction_bias(bias, counts, rate=0.5)
    assert got.tolist() == [0.5, 1, 1.5, 3.5]
    assert bias.tolist() == [0, 1, 2, 3]
    # 2**24 + 1 is not a float32: the comparison with the mean is done in integers.
    counts = torch.tensor([2**24, 2**24 + 2, 2**24 + 1])
    assert updated_correction_bias(torch.zeros(3), counts, 1.0).tolist() == [1, -1, 0]
    with pytest.raises(InputError, match=r"counts must have shape \[3\], got \[4\].*integer"):
        updated_correction_bias(torch.zeros(3), torch.zeros(4))


def test_sequence_loss_by_hand() -> None:
    """DeepSeek-V3, equations 17 to 20, E = 3 and K = 1, two sequences of two tokens."""
    scores = [[2, 1, 1], [1, 2, 1], [4, 0, 0], [0.75, 0.25, 0]]
    routing = routing_of([[2], [2], [2], [2]], scores)  # what a bias chose doesn't matter
    # first: f = 3/2 * [1, 1, 0], P = [3/8, 3/8, 1/4]
    # second: f = 3/2 * [2, 0, 0], P = [7/8, 1/8, 0]
    first, second = 3 / 2 * (3 / 8 + 3 / 8), 3 / 2 * 2 * 7 / 8
    want = pytest.approx((first + second) / 2, rel=1e-15)
    assert sequence_balance_loss(routing, 3, 2).item() == want
    order = torch.tensor([2, 0, 3, 1])
    mixed = replace(routing, topk_ids=torch.full((4, 1), 2), scores=routing.scores[order])  # pyright: ignore
    ids = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    assert sequence_balance_loss(mixed, 3, 2, ids).item() == want
    assert sequence_balance_loss(mixed, 3, 4, ids + 2).item() == want  # two without tokens
    # the tokens of the second belong to no sequence
    assert sequence_balance_loss(mixed, 3, 2, -ids).item() == pytest.approx(first, rel=1e-15)
    balanced = routing_of([[0, 1], [1, 2], [2, 0]], [[1, 1, 0], [0, 1, 1], [1, 0, 1]])
    assert sequence_balance_loss(balanced, 3, 1).item() == pytest.approx(1, rel=1e-15)
    with pytest.raises(InputError, match="4 tokens are not 3 sequences"):
        sequence_balance_loss(routing, 3, 3)
    with pytest.raises(InputError, match=r"sequence_ids must have shape \[4\], got \[2\]"):
        sequence_balance_loss(routing, 3, 2, ids[:2])
    with pytest.raises(InputError, match=r"sequence_balance_loss needs routing\.scores"):
        sequence_balance_loss(routing_of([[0]]), 3, 1)


def test_z_loss_by_hand() -> None:
    third = math.log(1 / 3)
    logits = torch.tensor([[0.0, 0, 0], [third] * 3, [0, 0, 0]], dtype=torch.float64)
    logits[2, 0], logits[2, 1] = math.nan, -math.inf  # one expert left, of logit 0
    want = (math.log(3) ** 2 + 0 + 0) / 3
    assert router_z_loss(Routing(None, None, logits)).item() == pytest.approx(want, rel=1e-15)
    with pytest.raises(InputError, match=r"needs routing\.router_logits"):
        router_z_loss(routing_of([[0]]))


Loss = Callable[..., torch.Tensor]
# One sequence of all tokens, and two of which one is twice as long.
LOSSES: dict[str, Loss] = {
    "load": lambda routing, ids, groups=(): load_balance_loss(routing, 6, groups),
    "sequence": lambda routing, ids, groups=(): sequence_balance_loss(routing, 6, 3, ids, groups),
    "z": lambda routing, ids, groups=(): router_z_loss(routing, groups),
}
ROUTERS = [
    RouterConfig(),
    RouterConfig(softmax_before_topk=False),
    RouterConfig(scoring_func="sigmoid", renormalize=True, correction_bias=True),
]


def loss_and_gradient(
    name: str, config: RouterConfig, logits: torch.Tensor, *extra: Any, **routing: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.clone().requires_grad_()
    bias = torch.linspace(-1, 1, 6, dtype=torch.float64) if config.correction_bias else None
    made = route(logits, 2, config, correction_bias=bias, **routing)
    loss = LOSSES[name](made, *extra)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient


def random_logits(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, 6, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("config", ROUTERS, ids=["softmax", "topk-softmax", "sigmoid"])
@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_no_loss_and_gets_no_gradient(name: str, config: RouterConfig) -> None:
    clean, ids = random_logits(0, 8), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    want, gradient = loss_and_gradient(name, config, clean, ids)
    mask = torch.tensor([True, False, True, True, False] + [True] * 5 + [False, False])
    padded = torch.full((12, 6), math.nan, dtype=torch.float64)
    padded[mask] = clean
    padded[1], padded[4] = 100.0, torch.tensor([math.inf, -math.inf, 0, 1, 2, 3])
    for fill in (-1, 0):
        padded_ids = torch.full((12,), fill).masked_scatter(mask, ids)
        with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
            loss, got = loss_and_gradient(name, config, padded, padded_ids, token_mask=mask)
        torch.testing.assert_close(loss, want, rtol=1e-14, atol=0)
        torch.testing.assert_close(got[mask], gradient, rtol=1e-12, atol=1e-15)
        assert not got[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("masked", [0, 4])
def test_no_tokens_cost_nothing_and_keep_their_graph(name: str, masked: int) -> None:
    logits, mask = torch.full((masked, 6), math.nan), torch.zeros(masked, dtype=torch.bool)
    extra = torch.zeros(masked, dtype=torch.int64)
    loss, gradient = loss_and_gradient(name, RouterConfig(), logits, extra, token_mask=mask)
    assert loss.dtype == torch.float32
    assert loss.item() == 0
    assert gradient.shape == logits.shape
    assert not gradient.any()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_the_gradient_of_their_value(name: str) -> None:
    logits, ids = random_logits(4, 5), torch.tensor([0, 0, 1, 1, 1])

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return LOSSES[name](route(logits, 2, RouterConfig(scoring_func="sigmoid")), ids)

    assert torch.autograd.gradcheck(loss, (logits.requires_grad_(),))


def losses_of_a_rank(sizes: list[int]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    rank = dist.get_rank()
    group = dist.group.WORLD
    logits = random_logits(1, sum(sizes)).split(sizes)[rank]
    ids = torch.zeros(len(logits), dtype=torch.int64)  # one sequence each
    counts = tokens_per_expert(route(logits, 2, RouterConfig()), 6)
    kept = counts.clone()
    assert sum_over(counts, (group,)).sum() == 2 * sum(sizes)
    results = {
        name: loss_and_gradient(name, RouterConfig(), logits, ids, (group,)) for name in LOSSES
    }
    assert torch.equal(counts, kept)  # nor does anything write into a rank's own counts
    return results


@pytest.mark.parametrize("sizes", [[5, 3], [4, 0], [0, 0]])
def test_two_ranks_have_the_mean_gradient_of_one(sizes: list[int]) -> None:
    """Uneven ones too. A local count overwritten by the global one doubled it (Megatron#7452)."""
    got = ranks(2).run(losses_of_a_rank, sizes)
    ids = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
    for name in LOSSES:
        loss, gradient = loss_and_gradient(name, RouterConfig(), random_logits(1, sum(sizes)), ids)
        mean = (got[0][name][0] + got[1][name][0]) / 2
        torch.testing.assert_close(mean, loss, rtol=1e-13, atol=0)
        whole = torch.cat([got[0][name][1], got[1][name][1]])
        # DDP's mean over two ranks of what each token's logits got from its own rank's loss
        torch.testing.assert_close(whole / 2, gradient, rtol=1e-12, atol=1e-15)

"""Balance losses and the bias update."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moe_core.config import RouterConfig
from moe_core.contracts import Routing
from moe_core.errors import InputError
from moe_core.routing import (
    load_balance_loss,
    route,
    tokens_per_expert,
    updated_correction_bias,
)


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
    torch.manual_seed(0)
    logits = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(40) % 3 != 0 if masked else None
    theirs = load_balancing_loss_func(
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

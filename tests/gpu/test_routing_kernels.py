"""Router, sort and sum on a device: equal to moe-core's torch code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_core import RouterConfig, route
from moe_core.conformance import bounds
from moe_core.local import sum_slots
from moe_triton.reduce import sum_rows
from moe_triton.router import route as triton_route
from moe_triton.sorting import ONE_LAUNCH, sort_slots

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("experts", "top_k", "how"),
    [
        (8, 2, {"renormalize": True}),
        (128, 8, {"softmax_before_topk": False}),
        (60, 4, {"scoring_func": "sqrtsoftplus", "correction_bias": True, "renormalize": True}),
        (
            256,
            8,
            {
                "scoring_func": "sigmoid",
                "num_expert_group": 8,
                "topk_group": 4,
                "correction_bias": True,
                "renormalize": True,
                "routed_scaling_factor": 2.5,
            },
        ),
    ],
)
@pytest.mark.parametrize("tokens", [0, 1, 33, 4096])
def test_router(tokens: int, experts: int, top_k: int, how: Any, device: torch.device):
    config = RouterConfig(**how)
    logits = torch.randn(tokens, experts, device=device)
    logits[: tokens // 8] = logits[: tokens // 8].round()  # ties
    bias = torch.randn(experts, device=device) / 10 if config.correction_bias else None
    given = logits.clone().requires_grad_()
    found = triton_route(given, top_k, config, correction_bias=bias)
    exact_logits = logits.double().requires_grad_()
    exact = route(
        exact_logits,
        top_k,
        config,
        correction_bias=None if bias is None else bias.double(),
        input_ids=None,
    )
    same = (found.topk_ids == exact.topk_ids).all(1)
    # float32 and float64 may order scores differently that differ by less than float32 tells
    assert same.float().mean() > 0.98 or not tokens
    ids, weights = found.ids_and_weights()
    wanted = exact.ids_and_weights()[1]
    limit = bounds.router_weights(wanted.float(), logits)
    assert ((weights - wanted).abs() <= limit)[same].all()
    upstream = torch.randn_like(weights)
    grad = torch.autograd.grad(weights, given, upstream)[0]
    exact_grad = torch.autograd.grad(wanted, exact_logits, upstream.double())[0]
    largest = exact_grad.abs().max().item() if tokens else 0.0
    assert ((grad - exact_grad).abs()[same] <= 1e-4 * largest).all()
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("experts", [1, 3, 64, 384])
@pytest.mark.parametrize("slots", [0, 1, 100, ONE_LAUNCH, ONE_LAUNCH + 8, 400_000])
def test_sort(slots: int, experts: int, device: torch.device):
    top_k = 4 if slots % 4 == 0 else 1
    ids = torch.randint(-1, experts, (slots // top_k, top_k), device=device)
    sorted_ids, slot_rows, counts, starts = sort_slots(ids, experts)
    flat = ids.flatten()
    key = torch.where(flat < 0, experts, flat)
    order = key.argsort(stable=True)
    valid = int((flat >= 0).sum())
    assert torch.equal(sorted_ids[:valid].long(), order[:valid])
    assert (sorted_ids[valid:] == -1).all()
    wanted = key.bincount(minlength=experts + 1)[:experts]
    assert torch.equal(counts.long(), wanted)
    assert starts[0] == 0
    assert torch.equal(starts[1:].long(), wanted.cumsum(0))
    places = torch.empty_like(flat)
    places[order] = torch.arange(slots, device=device)
    assert torch.equal(slot_rows.flatten().long(), torch.where(flat < 0, -1, places))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(0, 2, 64), (3, 1, 100), (500, 8, 2880)])
def test_sum(tokens: int, top_k: int, hidden: int, dtype: Any, device: torch.device):
    rows = torch.randn(tokens, top_k, hidden, device=device, dtype=dtype)
    ids = torch.randint(-1, 5, (tokens, top_k), device=device)
    rows[ids < 0] = float("nan")
    for weights in (None, torch.rand(tokens, top_k, device=device)):
        wanted = sum_slots(rows, ids, weights).to(dtype)
        assert torch.equal(sum_rows(rows, ids, weights), wanted)

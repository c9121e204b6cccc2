"""Torch twins of the kernels that route, sort and sum: the same answers, to read and to test with.

Arguments and results are those of the custom operators, or of the kernel that is named.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.config import RouterConfig
from moe_core.contracts import Routing
from moe_core.local import sum_indexed, sum_slots
from moe_core.routing import route as core_route
from moe_core.routing.topk import reweight


def route(
    logits: Tensor,
    correction_bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    token_mask: Tensor | None,
    top_k: int,
    scoring_func: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    topk_group: int,
    top2_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``topk.route_kernel``; float64 logits are computed in float64."""
    grouped = num_groups > 1 or (top2_sum and correction_bias is None)
    config = RouterConfig(
        kind="topk" if tid2eid is None else "hash",
        scoring_func=scoring_func,
        renormalize=normalize,
        routed_scaling_factor=scale,
        num_expert_group=num_groups if grouped else None,
        topk_group=topk_group if grouped else None,
        group_score=("top2_sum" if top2_sum else "max") if grouped else None,
        correction_bias=correction_bias is not None,
        vocab_size=None if tid2eid is None else tid2eid.shape[0],
    )
    routing = core_route(
        logits,
        top_k,
        config,
        correction_bias=correction_bias,
        input_ids=input_ids,
        tid2eid=tid2eid,
        token_mask=token_mask,
    )
    ids, weights = routing.ids_and_weights()
    assert routing.scores is not None
    return weights, routing.scores, ids


def route_backward(
    grad_weights: Tensor | None,
    grad_scores: Tensor | None,
    logits: Tensor,
    topk_ids: Tensor,
    token_mask: Tensor | None,
    scoring_func: str,
    normalize: bool,
    scale: float,
) -> Tensor:
    """Of ``topk.route_backward_kernel``."""
    config = RouterConfig(
        scoring_func=scoring_func, renormalize=normalize, routed_scaling_factor=scale
    )
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        made = core_route(leaf, 1, config, token_mask=token_mask)
        made = reweight(Routing(None, None, leaf, made.scores, token_mask), topk_ids, config)
        total = leaf.new_zeros(())
        for value, grad in ((made.topk_weights, grad_weights), (made.scores, grad_scores)):
            if value is not None and grad is not None:
                total = total + (value * grad).sum()
        return torch.autograd.grad(total, leaf)[0]


def sort_slots(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of ``sorting.count_pairs_kernel``, and of the other three together."""
    ids = topk_ids.reshape(-1)
    expert = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = torch.argsort(expert, stable=True)
    counts = torch.bincount(expert, minlength=num_experts + 1)[:num_experts]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    valid = expert < num_experts
    places = torch.where(valid, torch.argsort(order), -1)
    sorted_ids = torch.where(valid[order], order, -1)
    return sorted_ids.int(), places.view(topk_ids.shape).int(), counts.int(), starts.int()


def histogram(topk_ids: Tensor, num_experts: int, block: int) -> Tensor:
    """``counts [blocks, E + 1]`` of ``sorting.histogram_kernel``."""
    parts = topk_ids.reshape(-1).split(block)
    expert = [torch.where((p >= 0) & (p < num_experts), p, num_experts) for p in parts]
    return torch.stack([torch.bincount(e, minlength=num_experts + 1) for e in expert]).int()


def running_sum(counts: Tensor) -> tuple[Tensor, Tensor]:
    """What ``sorting.running_sum_kernel`` leaves in ``counts``, and ``totals``."""
    return (counts.cumsum(0) - counts).int(), counts.sum(0).int()


def sum_rows(rows: Tensor, slot_rows: Tensor, weights: Tensor | None) -> Tensor:
    """Of ``reduce.sum_rows_kernel``, and by its derivative of ``sum_rows_backward_kernel``."""
    sums = sum_slots if rows.dim() == 3 else sum_indexed
    return sums(rows, slot_rows, weights).to(rows.dtype)

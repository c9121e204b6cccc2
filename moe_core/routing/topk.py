"""``route``: from router logits to expert ids and weights. Pure, vectorised, without host syncs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe_core.contracts import INVALID, Routing
from moe_core.errors import InputError
from moe_core.routing.checks import check_route, expect, settle
from moe_core.routing.scores import (
    accumulate_dtype,
    log_scores,
    masked_softmax,
    scores,
    without_autocast,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.config import RouterConfig


def route(
    router_logits: Tensor,
    top_k: int,
    router_config: RouterConfig,
    *,
    correction_bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Routing:
    """Chooses ``top_k`` experts per token and weights them.

    ``router_logits`` ``[T, E]``, any float dtype; ``correction_bias`` float ``[E]`` (if the config
    has one); ``input_ids`` integer ``[T]`` and ``tid2eid`` integer ``[vocab_size, K]`` (hash
    routing); ``token_mask`` bool ``[T]``, True = a real token.

    Returns ids int64 ``[T, K]`` and weights, logits and scores in float64 if the logits are
    float64, else float32. Ids descend by choice score, ties by the lower id; hash routing keeps
    the order of its table. The choice score is the logit, or with a bias (or ``top2_sum`` groups)
    score + bias; NaN and -inf are never chosen. +inf counts as the largest finite logit in scores.
    A slot that can't be filled, and every slot of a masked token, has id -1 and weight 0.
    Weights come from unbiased scores and include ``routed_scaling_factor``; renormalised ones sum
    to it even where the scores underflow. ``scores`` are 0 for experts that can't be chosen.

    Raises ``InputError`` with every fault of shape, dtype or (on a CPU, or with ``MOE_VALIDATE=1``)
    value; elsewhere an ``input_ids`` or table entry that is out of range gives id -1.

    Choice with a bias and the sum of a group's two best: DeepSeek-V3, arXiv 2412.19437, 2.1.2;
    hash routing and sqrtsoftplus: DeepSeek-V4 as in transformers' ``modeling_deepseek_v4.py``.
    """
    check_route(
        router_logits, top_k, router_config, correction_bias, input_ids, tid2eid, token_mask
    )
    config = router_config
    with without_autocast(router_logits.device):
        logits = router_logits.to(accumulate_dtype(router_logits))
        valid, clean = cleaned(logits, token_mask)
        score = scores(clean, valid, config.scoring_func)
        if input_ids is not None and tid2eid is not None and config.kind == "hash":
            ids = _look_up(input_ids, tid2eid, valid)
        else:
            choice = logits
            if correction_bias is not None:
                choice = score + correction_bias.to(logits.dtype)
            elif config.effective_group_score == "top2_sum":
                choice = score
            ids = _choose(choice.detach(), valid, top_k, config)
        weights = _weights(clean, score, ids, config)
    return Routing(ids, weights, logits, score, token_mask)


def reweight(routing: Routing, topk_ids: Tensor, router_config: RouterConfig) -> Routing:
    """``routing`` with another choice, weighed from its logits as ``route`` would weigh it.

    ``topk_ids`` integer ``[T, K]``; an id that ``route`` could not have chosen becomes -1. Raises
    ``InputError`` for another shape or dtype, or where the routing has no logits and scores.
    """
    logits, score = routing.router_logits, routing.scores
    if logits is None or score is None:
        raise InputError("a choice can only be weighed by a router that returns logits and scores")
    faults: list[str] = []
    expect(faults, "topk_ids", topk_ids, (logits.shape[0], "K"), "integer")
    settle(faults)
    with without_autocast(logits.device):
        valid, clean = cleaned(logits, routing.token_mask)
        ids = topk_ids.long()
        good = (ids >= 0) & (ids < logits.shape[1])
        good = good & valid.gather(1, torch.where(good, ids, 0))
        ids = torch.where(good, ids, INVALID)
        weights = _weights(clean, score, ids, router_config)
    return replace(routing, topk_ids=ids, topk_weights=weights, chosen_ids=None)


def cleaned(logits: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """bool ``[T, E]``: which experts can be chosen; and finite logits, 0 for the others."""
    valid = ~torch.isnan(logits) & (logits != -torch.inf)
    if token_mask is not None:
        valid = valid & token_mask[:, None]
    return valid, torch.where(valid, logits, 0.0).clamp(max=torch.finfo(logits.dtype).max)


def _weights(clean: Tensor, score: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
    """Of the experts ``ids [T, K]``; 0 where -1."""
    filled = ids != INVALID
    safe = torch.where(filled, ids, 0)
    if config.renormalize or not config.softmax_before_topk:
        log = log_scores(clean.gather(1, safe), config.scoring_func)
        weights = masked_softmax(log, filled)
    else:
        weights = score.gather(1, safe)
    return torch.where(filled, weights * config.routed_scaling_factor, 0.0)


def _choose(choice: Tensor, valid: Tensor, top_k: int, config: RouterConfig) -> Tensor:
    """Ids of the ``top_k`` largest choice scores, -1 where there are fewer."""
    choice = torch.where(valid & ~torch.isnan(choice), choice, -torch.inf)
    if config.num_expert_group is not None and config.topk_group is not None:
        choice = _keep_groups(
            choice, config.num_expert_group, config.topk_group, config.effective_group_score
        )
    # A stable sort, since torch.topk promises no order between equals.
    best, ids = torch.sort(choice, dim=-1, descending=True, stable=True)
    return torch.where(best == -torch.inf, INVALID, ids)[:, :top_k]


def _keep_groups(choice: Tensor, num_groups: int, topk_group: int, group_score: str) -> Tensor:
    """-inf outside the best groups. -inf and not 0: biased scores may be negative."""
    num_tokens, num_experts = choice.shape
    size = num_experts // num_groups
    groups = choice.view(num_tokens, num_groups, size)
    if group_score == "max":
        group = groups.amax(dim=-1)
    else:
        # The sum of the two best that can be chosen, or of the only one.
        two = groups.topk(min(2, size), dim=-1).values
        total = torch.where(two == -torch.inf, 0.0, two).sum(dim=-1)
        group = torch.where(two[..., 0] == -torch.inf, -torch.inf, total)
    order = torch.sort(group, dim=-1, descending=True, stable=True).indices[:, :topk_group]
    keep = torch.zeros_like(group, dtype=torch.bool).scatter(1, order, True)
    return torch.where(keep[..., None], groups, -torch.inf).view(num_tokens, num_experts)


def _look_up(input_ids: Tensor, tid2eid: Tensor, valid: Tensor) -> Tensor:
    """The table's ids; -1 where the token, the table's entry or the expert's logit is no good."""
    input_ids = input_ids.long()
    known = (input_ids >= 0) & (input_ids < tid2eid.shape[0])
    ids = tid2eid[torch.where(known, input_ids, 0)].long()
    good = known[:, None] & (ids >= 0) & (ids < valid.shape[1])
    good = good & valid.gather(1, torch.where(good, ids, 0))
    return torch.where(good, ids, INVALID)

"""The oracle of routing: one token at a time, straight from the definitions, for reading.

Shares no arithmetic with ``moe_core.routing.route``: choices are made in Python floats, weights by
plain torch operations in float64 on the chosen logits, so that gradients flow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moe_core.contracts import Routing
from moe_core.routing.checks import check_route
from moe_core.routing.router import GateRouter

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.config import RouterConfig


def reference_route(
    router_logits: Tensor,
    top_k: int,
    router_config: RouterConfig,
    *,
    correction_bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Routing:
    """The same contract as ``moe_core.route``, argument by argument. Slow; syncs with the host."""
    check_route(
        router_logits, top_k, router_config, correction_bias, input_ids, tid2eid, token_mask
    )
    config = router_config
    dtype = torch.float64 if router_logits.dtype == torch.float64 else torch.float32
    logits = router_logits.to(dtype)
    largest = torch.finfo(dtype).max
    bias = None if correction_bias is None else correction_bias.tolist()
    num_tokens, num_experts = logits.shape
    ids = torch.full((num_tokens, top_k), -1, dtype=torch.int64, device=logits.device)
    weights: list[Tensor] = []
    scores: list[Tensor] = []
    for t, row in enumerate(logits.tolist()):
        real = token_mask is None or bool(token_mask[t])
        able = [e for e, x in enumerate(row) if real and not math.isnan(x) and x != -math.inf]
        if input_ids is not None and tid2eid is not None and config.kind == "hash":
            token = int(input_ids[t])
            entries = tid2eid[token].tolist() if 0 <= token < len(tid2eid) else [-1] * top_k
            chosen = [e if e in able else -1 for e in entries]
        else:
            chosen = _choose({e: row[e] for e in able}, num_experts, top_k, config, bias, largest)
        chosen += [-1] * (top_k - len(chosen))
        ids[t] = torch.tensor(chosen)

        # Gradients go through these; clamp gives +inf a finite value and no gradient.
        finite = logits[t].double().clamp(max=largest)
        slots = [k for k in range(top_k) if chosen[k] >= 0]
        picked = [chosen[k] for k in slots]
        score = torch.zeros_like(finite).index_put(_at(able, finite), _score(finite[able], config))
        if config.renormalize or not config.softmax_before_topk:
            logs = _log_score(finite[picked], config)
            share = (logs - logs.max()).exp() if picked else logs
            weight = share / share.sum()
        else:
            weight = score[picked]
        empty = finite.new_zeros(top_k)
        weights.append(empty.index_put(_at(slots, finite), weight * config.routed_scaling_factor))
        scores.append(score)
    if not weights:  # no tokens: empty, but still part of the graph
        return Routing(ids, logits[:, :top_k], logits, logits.clone(), token_mask)
    stacked = torch.stack(weights).to(dtype)
    return Routing(ids, stacked, logits, torch.stack(scores).to(dtype), token_mask)


class ReferenceRouter(GateRouter):
    """The learned gate with ``reference_route``: kinds ``topk`` and ``hash``, same parameters."""

    route_fn = staticmethod(reference_route)


def _choose(
    able: dict[int, float],
    num_experts: int,
    top_k: int,
    config: RouterConfig,
    bias: list[float] | None,
    largest: float,
) -> list[int]:
    """Best experts first, among those that are able (id → logit)."""
    choice = able
    if bias is not None or config.effective_group_score == "top2_sum":
        score = _plain_scores({e: min(x, largest) for e, x in able.items()}, config.scoring_func)
        choice = {e: s + (bias[e] if bias is not None else 0.0) for e, s in score.items()}
        choice = {e: c for e, c in choice.items() if not math.isnan(c) and c != -math.inf}
    if config.num_expert_group is not None and config.topk_group is not None:
        size = num_experts // config.num_expert_group
        totals: dict[int, float] = {}
        for g in range(config.num_expert_group):
            best = sorted((choice[e] for e in choice if e // size == g), reverse=True)
            if best:
                totals[g] = best[0] if config.effective_group_score == "max" else sum(best[:2])
        groups = sorted(totals, key=lambda g: (-totals[g], g))[: config.topk_group]
        choice = {e: c for e, c in choice.items() if e // size in groups}
    return sorted(choice, key=lambda e: (-choice[e], e))[:top_k]


def _plain_scores(able: dict[int, float], scoring_func: str) -> dict[int, float]:
    if scoring_func == "softmax":
        top = max(able.values(), default=0.0)
        powers = {e: math.exp(x - top) for e, x in able.items()}
        return {e: p / sum(powers.values()) for e, p in powers.items()}
    if scoring_func == "sigmoid":
        return {
            e: 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))
            for e, x in able.items()
        }
    return {
        e: math.sqrt(x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)))
        for e, x in able.items()
    }


def _score(x: Tensor, config: RouterConfig) -> Tensor:
    if config.scoring_func == "softmax":
        powers = (x - x.max()).exp() if len(x) else x
        return powers / powers.sum()
    if config.scoring_func == "sigmoid":
        return torch.sigmoid(x)
    return _log_score(x, config).exp()


def _log_score(x: Tensor, config: RouterConfig) -> Tensor:
    """Without a constant that normalising removes."""
    if config.scoring_func == "softmax":
        return x
    if config.scoring_func == "sigmoid":
        return -torch.logaddexp(-x, torch.zeros_like(x))
    # log(softplus(x)) is x - e^x/2 for very negative x, where softplus itself underflows.
    far = x < -30
    near = torch.logaddexp(torch.where(far, 0.0, x), torch.zeros_like(x)).log()
    return torch.where(far, x - x.clamp(max=-30).exp() / 2, near) / 2


def _at(positions: list[int], like: Tensor) -> tuple[Tensor]:
    return (torch.tensor(positions, dtype=torch.int64, device=like.device),)

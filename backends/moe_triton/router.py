"""The router part: moe-core's gate and parameters; choice and weights in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_core.contracts import Routing
from moe_core.errors import ConfigError, Fault, InputError
from moe_core.routing import GateRouter
from moe_core.routing.checks import check_route
from moe_triton import topk

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.config import MoEConfig, RouterConfig


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
    """As ``moe_core.route``, argument by argument, in float32: a launch, and one in the backward.

    Raises ``InputError`` as it does, and for float64 logits.
    """
    check_route(
        router_logits, top_k, router_config, correction_bias, input_ids, tid2eid, token_mask
    )
    if router_logits.dtype == torch.float64:
        raise InputError(
            "the triton router computes in float32 and was given float64 logits: cast them, or use "
            "the torch router"
        )
    config, logits = router_config, router_logits.float()
    by_table = config.kind == "hash"
    weights, scores, ids = topk.route(
        logits,
        correction_bias,
        input_ids if by_table else None,
        tid2eid,
        token_mask,
        top_k,
        config.scoring_func,
        config.renormalize or not config.softmax_before_topk,
        config.routed_scaling_factor,
        config.num_expert_group or 1,
        config.topk_group or 1,
        config.effective_group_score == "top2_sum",
    )
    return Routing(ids, weights, logits, scores, token_mask)


class TritonRouter(GateRouter):
    """Kinds ``topk`` and ``hash``; parameters, buffers and jitter are ``GateRouter``'s.

    A replayed choice (``reweight``) is weighed by moe-core's torch code. Raises ``ConfigError`` for
    more experts than a program can hold (``topk.MAX_EXPERTS``).
    """

    route_fn = staticmethod(route)

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None) -> None:
        groups = config.router.num_expert_group or 1
        try:
            topk.block_sizes(config.num_experts, groups, config.top_k)
        except ValueError as error:
            message = f"{error}; use router=torch"
            raise ConfigError([Fault("num_experts", config.num_experts, message)]) from error
        super().__init__(config, device)

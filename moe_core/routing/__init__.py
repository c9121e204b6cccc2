"""Routing: which experts a token goes to, and with what weight."""

from moe_core.routing.counts import RoutingCounts
from moe_core.routing.losses import (
    load_balance_loss,
    router_z_loss,
    sequence_balance_loss,
    tokens_per_expert,
    updated_correction_bias,
)
from moe_core.routing.recompute import replay_routing
from moe_core.routing.router import (
    CallableRouter,
    GateRouter,
    HashRouter,
    TopKRouter,
    build_router,
)
from moe_core.routing.topk import route

__all__ = [
    "CallableRouter",
    "GateRouter",
    "HashRouter",
    "RoutingCounts",
    "TopKRouter",
    "build_router",
    "load_balance_loss",
    "replay_routing",
    "route",
    "router_z_loss",
    "sequence_balance_loss",
    "tokens_per_expert",
    "updated_correction_bias",
]

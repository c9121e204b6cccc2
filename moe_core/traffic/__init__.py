"""A simulator of what layers send between ranks: ``simulate(config, parallel, backend, ...)``."""

from __future__ import annotations

from moe_core.traffic.draws import Draw
from moe_core.traffic.flow import Flow, Sent
from moe_core.traffic.recorded import Recorded, load_routing, save_routing
from moe_core.traffic.result import Traffic
from moe_core.traffic.simulate import simulate

__all__ = [
    "Draw",
    "Flow",
    "Recorded",
    "Sent",
    "Traffic",
    "load_routing",
    "save_routing",
    "simulate",
]

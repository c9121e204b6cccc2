"""The contract of a router."""

from moe_core.conformance.plugin import settings
from moe_core.conformance.router import RouterConformance


class TestRouter(RouterConformance):
    backend, device = settings.backend, settings.device

"""The contract of a fused path, alone and over several ranks."""

from moe_core.conformance.fused import FusedConformance
from moe_core.conformance.plugin import settings


class TestFused(FusedConformance):
    backend, device, ranks = settings.backend, settings.device, settings.ranks

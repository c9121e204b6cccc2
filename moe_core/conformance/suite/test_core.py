"""What every backend owes, and that its manifest says the truth."""

from moe_core.conformance.claims import ClaimsConformance
from moe_core.conformance.core import CoreConformance
from moe_core.conformance.plugin import settings


class TestCore(CoreConformance):
    backend, device = settings.backend, settings.device


class TestClaims(ClaimsConformance):
    backend, device = settings.backend, settings.device

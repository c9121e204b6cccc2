"""The contract of a transport, alone and over several ranks."""

from moe_core.conformance.plugin import settings
from moe_core.conformance.transport import TransportConformance


class TestTransport(TransportConformance):
    backend, device, ranks = settings.backend, settings.device, settings.ranks

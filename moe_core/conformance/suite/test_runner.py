"""The contract of a runner."""

from moe_core.conformance.plugin import settings
from moe_core.conformance.runner import RunnerConformance


class TestRunner(RunnerConformance):
    backend, device = settings.backend, settings.device

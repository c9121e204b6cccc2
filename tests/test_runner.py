"""The torch runner: the conformance suite on both engines, and what is its own."""

from __future__ import annotations

from moe_core.conformance.runner import RunnerConformance


class TestTorch(RunnerConformance):
    backend = "torch"
    refuses = frozenset()


class TestTorchLoop(RunnerConformance):
    backend = "torch[gemm=loop]"
    refuses = frozenset()


class TestReference(RunnerConformance):
    backend = "reference"
    refuses = frozenset({"compile"})

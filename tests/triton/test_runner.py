"""The triton runner in the interpreter: the conformance suite, and what is its own."""

from __future__ import annotations

from typing import ClassVar

import torch

from moe_core.conformance.runner import RunnerConformance

torch.set_num_threads(1)


class TestTriton(RunnerConformance):
    backend = "torch+triton"
    refuses: ClassVar[frozenset[str]] = frozenset({"dtype"})


class TestTritonInvariant(RunnerConformance):
    backend = "torch+triton[batch_invariant=true]"
    refuses: ClassVar[frozenset[str]] = frozenset({"dtype"})

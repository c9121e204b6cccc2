"""What a manifest can't say about these parts, without importing torch or triton."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_core.manifest import Request

Reason = tuple[str, str, str, str]
"""Axis, what was wanted, what is offered, what to do."""


def check_interpreter(request: Request, options: Mapping[str, str]) -> list[Reason]:
    """Refuses CPUs unless ``TRITON_INTERPRET=1``: kernels then run one operation at a time in
    Triton's interpreter, thousands of times slower than on a GPU."""
    if request.device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return []
    fix = (
        "build the layer on a CUDA device, or set TRITON_INTERPRET=1 before Python starts to test "
        "the kernels in Triton's interpreter"
    )
    return [("device", request.device, "cuda (cpu: in Triton's interpreter only)", fix)]

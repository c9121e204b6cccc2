"""What ``F.grouped_mm`` can do, without importing torch: asked when a backend is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_core.manifest import Request

GROUPED_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""dtype → bytes of one element."""

Reason = tuple[str, str, str, str]
"""Axis, what was wanted, what is offered, what to do."""


def grouped_reasons(dtype: str, hidden_size: int, intermediate_size: int) -> list[Reason]:
    """Why ``F.grouped_mm`` can't run these sizes; empty if it can.

    ``intermediate_size`` is this rank's share. Both products and their gradients read rows of H
    and of I (and 2I) elements, and torch wants each row to be a multiple of 16 bytes
    (torch/_meta_registrations.py, "strides should be multiple of 16 bytes").
    """
    other = "use gemm=loop or gemm=auto"
    if dtype not in GROUPED_DTYPES:
        return [("dtype", dtype, ", ".join(GROUPED_DTYPES), other)]
    step = 16 // GROUPED_DTYPES[dtype]
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return [
        (axis, str(size), f"multiples of {step} with {dtype}", other)
        for axis, size in sizes.items()
        if size % step
    ]


def check_runner(request: Request, options: Mapping[str, str]) -> list[Reason]:
    """Refuses ``torch[gemm=grouped]`` where ``F.grouped_mm`` is not able."""
    if options.get("gemm") != "grouped":
        return []
    share = request.intermediate_size // request.tp_size
    return grouped_reasons(request.dtype, request.hidden_size, share)

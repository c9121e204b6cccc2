"""Triton kernels for one GPU: experts that gather their rows while loading, forward and backward.

Importing this package imports neither torch nor triton.
"""

from __future__ import annotations

from typing import Any

_OFFER: dict[str, Any] = {
    "dtype": ["float32", "bfloat16", "float16"],
    "autograd": True,
    "compile": True,
}

_RUNNER: dict[str, Any] = {
    "role": "runner",
    "target": "moe_triton.runner:TritonRunner",
    "offer": _OFFER
    | {
        "activation": ["silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"],
        "gated": [True, False],
        "limit": ["none", "before", "after"],
        "alpha": True,
        "w13_layout": ["gate_up", "up_gate", "interleaved"],
        "bias": True,
        "weight_on_input": True,
    },
    "takes": ["indexed", "expert_contiguous", "expert_masked"],
    "gives": ["slot_major", "expert_contiguous", "expert_masked"],
    "may_pay": ["weight"],
    "options": {"batch_invariant": ["false", "true"], "recompute": ["false", "true"]},
}


def _on_both(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The part on GPUs, and in Triton's interpreter for tests, which ``auto`` never prefers."""
    offer = part["offer"]
    gpu = {"mode": "cuda", "offer": offer | {"device": ["cuda"], "cuda_graph": True}}
    tests = {"mode": "interpreted", "offer": offer | {"device": ["cpu"]}}
    return [
        part | gpu | {"needs": ["triton>=3.6"], "preference": 20},
        part
        | tests
        | {
            "needs": ["triton>=3.6"],
            "check": "moe_triton.checks:check_interpreter",
            "preference": 1,
        },
    ]


BACKEND: dict[str, Any] = {
    "name": "triton",
    "api": "1.0",
    "summary": "Triton kernels for one GPU: grouped products that gather their rows while loading",
    "parts": [*_on_both(_RUNNER)],
}

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

_ROUTER: dict[str, Any] = {
    "role": "router",
    "target": "moe_triton.router:TritonRouter",
    "offer": _OFFER
    | {
        "router": ["topk", "hash"],
        "scoring_func": ["softmax", "sigmoid", "sqrtsoftplus"],
        "expert_groups": True,
        "correction_bias": True,
        "jitter": True,
    },
}

_TRANSPORT: dict[str, Any] = {
    "role": "transport",
    "target": "moe_triton.transport:TritonTransport",
    "offer": _OFFER,
    "takes": ["slot_major", "token_major"],
    "gives": ["indexed", "token_major"],
    "pays": ["rank_sum", "tp_sum"],
    "may_pay": ["weight", "slot_sum"],
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
    "parts": [part for role in (_ROUTER, _TRANSPORT, _RUNNER) for part in _on_both(role)],
}

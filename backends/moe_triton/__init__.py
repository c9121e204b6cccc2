"""Triton kernels for one GPU: experts that gather their rows while loading, forward and backward.

Importing this package imports neither torch nor triton.
"""

from __future__ import annotations

from typing import Any

_OFFER: dict[str, Any] = {
    "device": ["cuda", "cpu"],
    "dtype": ["float32", "bfloat16", "float16"],
    "autograd": True,
    "compile": True,
    "cuda_graph": True,
}
_EVERY: dict[str, Any] = {
    "needs": ["triton>=3.6"],
    "check": "moe_triton.checks:check_interpreter",
    "preference": {"cuda": 20, "cpu": 1},  # interpreted on a CPU, which is for tests
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


BACKEND: dict[str, Any] = {
    "name": "triton",
    "api": "1.0",
    "summary": "Triton kernels for one GPU: grouped products that gather their rows while loading",
    "parts": [part | _EVERY for part in (_ROUTER, _TRANSPORT, _RUNNER)],
}

"""The portable backend: plain torch, any device it has, forward, backward and compiled.

Importing this package imports no torch.
"""

from __future__ import annotations

from typing import Any

_ANYWHERE: dict[str, Any] = {
    "device": ["cpu", "cuda"],
    "dtype": ["float32", "float64", "bfloat16", "float16"],
    "autograd": True,
    "compile": True,
}

BACKEND: dict[str, Any] = {
    "name": "torch",
    "api": "1.0",
    "summary": "portable: sorts rows by expert and runs torch's grouped matrix product",
    "parts": [
        {
            "role": "router",
            "target": "moe_core.routing:build_router",
            "offer": _ANYWHERE
            | {
                "router": ["topk", "hash"],
                "scoring_func": ["softmax", "sigmoid", "sqrtsoftplus"],
                "expert_groups": True,
                "correction_bias": True,
                "jitter": True,
            },
            "preference": 10,
        },
        {
            "role": "transport",
            "target": "moe_core.local:LocalTransport",
            "offer": _ANYWHERE,
            "takes": ["slot_major", "token_major"],
            "gives": ["token_major"],
            "pays": ["rank_sum", "tp_sum"],
            "may_pay": ["weight", "slot_sum"],
            "preference": 10,
        },
        {
            "role": "runner",
            "target": "moe_torch.runner:TorchRunner",
            "offer": _ANYWHERE
            | {
                "activation": ["silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"],
                "gated": [True, False],
                "limit": ["none", "before", "after"],
                "alpha": True,
                "w13_layout": ["gate_up", "up_gate", "interleaved"],
                "bias": True,
                "weight_on_input": True,
            },
            "takes": ["expert_contiguous"],
            "gives": ["expert_contiguous"],
            "may_pay": ["weight"],
            "check": "moe_torch.checks:check_runner",
            "options": {"gemm": ["auto", "grouped", "loop"]},
            "preference": 10,
        },
    ],
}

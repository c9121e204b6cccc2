"""What the ``reference`` backend offers: everything, slowly."""

from __future__ import annotations

from typing import Any

_DTYPES = ["float32", "float64", "bfloat16", "float16"]
_ANYWHERE = {"device": ["cpu", "cuda"], "dtype": _DTYPES, "autograd": True}

BACKEND: dict[str, Any] = {
    "name": "reference",
    "api": "1.0",
    "summary": "plain loops, obviously right, up to float64: the oracle of everything",
    "parts": [
        {
            "role": "router",
            "target": "moe_core.reference_routing:ReferenceRouter",
            "offer": _ANYWHERE
            | {
                "router": ["topk", "hash"],
                "scoring_func": ["softmax", "sigmoid", "sqrtsoftplus"],
                "expert_groups": True,
                "correction_bias": True,
                "jitter": True,
            },
            "preference": -10,
        },
        {
            "role": "transport",
            "target": "moe_core.reference:ReferenceTransport",
            "offer": _ANYWHERE,
            "takes": ["slot_major"],
            "gives": ["token_major"],
            "pays": ["slot_sum", "rank_sum", "tp_sum"],
            "may_pay": ["weight"],
            "preference": -10,
        },
        {
            "role": "runner",
            "target": "moe_core.reference:ReferenceRunner",
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
            "takes": ["token_major", "expert_contiguous"],
            "gives": ["slot_major", "expert_contiguous"],
            "may_pay": ["weight"],
            "preference": -10,
        },
    ],
}

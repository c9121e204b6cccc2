"""What this backend can do, as plain data: moe-core reads it without importing torch."""

from __future__ import annotations

from typing import Any

_DTYPES = ["float32", "float64", "bfloat16", "float16"]
_OFFER: dict[str, Any] = {"device": ["cpu"], "dtype": _DTYPES, "autograd": True, "compile": True}
_EXPERTS: dict[str, Any] = {
    "activation": ["silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"],
    "gated": [True, False],
    "limit": ["none", "before", "after"],
    "alpha": True,
    "w13_layout": ["gate_up", "up_gate", "interleaved"],
    "bias": False,
}
_TRANSPORT: dict[str, Any] = {
    "role": "transport",
    "target": "moe_example.backend:LocalTransport",
    "offer": _OFFER,
    "gives": ["token_major"],
    "takes": ["slot_major"],
    "pays": ["slot_sum", "rank_sum", "tp_sum"],
    "may_pay": ["weight"],
}
_RUNNER: dict[str, Any] = {
    "role": "runner",
    "target": "moe_example.backend:GatherRunner",
    "offer": _OFFER | _EXPERTS,
    "takes": ["token_major"],
    "gives": ["slot_major"],
}
BACKEND: dict[str, Any] = {
    "name": "example",
    "api": "1.0",
    "summary": "for few tokens: gathers the weights of each (token, slot)",
    "parts": [_TRANSPORT, _RUNNER],
}

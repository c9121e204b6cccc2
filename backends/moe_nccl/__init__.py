"""Expert parallelism over ``torch.distributed``: NCCL between GPUs, gloo between CPUs.

Importing this package imports no torch.
"""

from __future__ import annotations

from typing import Any

_DTYPES = ["float32", "float64", "bfloat16", "float16"]
_OFFER: dict[str, Any] = {
    "device": ["cpu", "cuda"],
    "dtype": _DTYPES,
    "dispatch_dtype": _DTYPES,
    "combine_dtype": _DTYPES,
    "final_sum": ["layer", "caller"],
    "uneven_experts": True,
    "ep_size": {"min": 1},
    "tp_size": {"min": 1},
    "dp_size": {"min": 1},
    "autograd": True,
}
_PART: dict[str, Any] = {
    "role": "transport",
    "gives": ["rank_grouped"],
    "takes": ["slot_list"],
    "pays": ["slot_sum", "rank_sum", "tp_sum"],
    "may_pay": ["weight"],
}

BACKEND: dict[str, Any] = {
    "name": "nccl",
    "api": "1.0",
    "summary": "expert parallelism over torch.distributed (NCCL on GPUs, gloo on CPUs)",
    "parts": [
        _PART
        | {
            "target": "moe_nccl.all_to_all:AllToAllTransport",
            "mode": "all_to_all",
            "offer": _OFFER | {"rows": ["distinct"]},
            "preference": 5,
        },
        _PART
        | {
            "target": "moe_nccl.replicated:ReplicatedTransport",
            "mode": "replicated",
            "offer": _OFFER | {"rows": ["distinct", "replicated"]},
            "preference": 4,
        },
        _PART
        | {
            "target": "moe_nccl.hierarchical:HierarchicalTransport",
            "mode": "hierarchical",
            "offer": _OFFER | {"rows": ["distinct"], "ranks_per_node": {"min": 1}},
            "preference": 3,  # a rule prefers it where there are nodes to cross
        },
    ],
}

"""Compiles the kernels that route, sort and sum, for ``sys.argv[1]``, and prints what came out.

A script: Triton has to be imported without TRITON_INTERPRET. As JSON, per kernel and case:
spills, loads of 16 bytes, fused multiply-adds, and whether it is the same kernel for every T.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch

from moe_triton import reduce, sorting, topk
from moe_triton.aot import TARGETS, compile_only
from moe_triton.aot_binary import read_binary

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = (1, 16, 17, 600)  # one, a multiple of 16, neither; the last sorts in three launches


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def routing(experts: int, top_k: int, score: str, groups: int = 1) -> Callable[[int], None]:
    def launch(tokens: int) -> None:
        logits, biased = empty(tokens, experts), groups > 1
        how = (score, True, 1.0)
        route: Any = topk.route._init_fn  # the kernels themselves, without looking for a device
        *_, ids = route(
            logits, empty(experts) if biased else None, None, None, None, top_k, *how,
            groups, max(1, groups // 2), biased,
        )  # fmt: skip
        backward: Any = topk.route_backward._init_fn
        backward(empty(tokens, top_k), empty(tokens, experts), logits, ids, None, *how)

    return launch


def by_table(tokens: int) -> None:
    ids, table = empty(tokens, dtype=torch.int64), empty(1000, 6, dtype=torch.int64)
    mask = empty(tokens, dtype=torch.bool)
    route: Any = topk.route._init_fn
    how = ("sqrtsoftplus", True, 1.0, 1, 1, False)
    route(empty(tokens, 256), None, ids, table, mask, 6, *how)


def sort(tokens: int) -> None:
    run: Any = sorting.sort_slots._init_fn
    run(empty(tokens, 8, dtype=torch.int64), 256)


def sums(hidden: int, top_k: int, dtype: torch.dtype) -> Callable[[int], None]:
    def launch(tokens: int) -> None:
        slot_rows, weights = empty(tokens, top_k, dtype=torch.int32), empty(tokens, top_k)
        for rows in (
            empty(tokens, top_k, hidden, dtype=dtype), empty(tokens * top_k, hidden, dtype=dtype)
        ):  # fmt: skip
            forward: Any = reduce.sum_rows._init_fn
            out = forward(rows, slot_rows, weights)
            backward: Any = reduce.sum_rows_backward._init_fn
            backward(out, rows, slot_rows, weights, True, True)

    return launch


CASES: dict[str, Callable[[int], None]] = {
    "deepseek-v3": routing(256, 8, "sigmoid", groups=8),
    "mixtral": routing(8, 2, "softmax"),
    "sort": sort,
    "sum 7168": sums(7168, 8, torch.bfloat16),
    "qwen3": routing(128, 8, "softmax"),
    "512 experts": routing(512, 10, "sqrtsoftplus"),
    "60 experts": routing(60, 6, "softmax", groups=12),
    "most experts": routing(topk.MAX_EXPERTS, 8, "sigmoid"),
    "table": by_table,
    "sum 2880 float32": sums(2880, 4, torch.float32),
    "sum 37": sums(37, 20, torch.float16),
}


def main(target: str, names: list[str]) -> None:
    found: list[dict[str, Any]] = []
    for name in names or CASES:
        kernels: dict[str, set[str]] = {}
        seen: set[str] = set()
        for tokens in TOKENS:
            with compile_only(TARGETS[target]) as made:
                CASES[name](tokens)
            for compiled, _, _ in made:
                kernel = compiled.metadata.name
                kernels.setdefault(kernel, set()).add(compiled.hash)
                if compiled.hash in seen:
                    continue
                seen.add(compiled.hash)
                binary, text = read_binary(compiled), compiled.asm
                fused = text["ptx"].count("fma.rn.f32") if "ptx" in text else 0
                found.append(
                    {
                        "case": name, "kernel": kernel, "spills": binary.spills,
                        "registers": binary.registers, "wide": binary.loads.get("16", 0),
                        "fused": fused,
                    }
                )  # fmt: skip
        for kernel, hashes in kernels.items():
            found.append({"case": name, "kernel": kernel, "variants": len(hashes)})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""``python -m moe_triton.aot``: compile every shipped configuration without a device, and read what
came out.

Layers are run forward and backward on empty tensors, with a chip that isn't there: every launch
compiles its kernel for that chip and goes no further. So what is compiled is what a layer launches,
specialised as Triton would. Needs a process without ``TRITON_INTERPRET``.
"""
# ruff: noqa: T201  (a command prints)

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moe_triton import configs, ops, runtime
from moe_triton.aot_binary import Binary, read_binary
from moe_triton.runtime import CHIPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moe_triton.runtime import Chip


@dataclass(frozen=True)
class Target:
    """``shared_limit``: bytes that one program may have. ``wide_matrix``: what multiplies tiles of
    at least 64 rows there."""

    gpu: GPUTarget
    chip: Chip
    shared_limit: int
    wide_matrix: str


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), CHIPS["sm80"], 163 * 1024, "mma"),
    "sm_86": Target(GPUTarget("cuda", 86, 32), CHIPS["sm86"], 99 * 1024, "mma"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), CHIPS["sm90"], 227 * 1024, "wgmma"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), CHIPS["sm100"], 227 * 1024, "tcgen05"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), CHIPS["gfx942"], 64 * 1024, "mfma"),
}


NUM_EXPERTS, TOP_K, SIZE = 32, 4, 1024


@dataclass(frozen=True)
class Case:
    """A layer whose kernels are compiled: ``height`` rows per expert on average, so that its tiles
    are as high. ``odd``: sizes that no 16-byte load divides."""

    name: str
    height: int
    dtype: str = "bfloat16"
    w13_layout: str = "gate_up"
    bias: bool = False
    limit: float | None = None
    alpha: float | None = None
    odd: bool = False
    backward: bool = True
    inner: int = SIZE

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize


GPT_OSS = {"w13_layout": "interleaved", "bias": True, "limit": 7.0, "alpha": 1.702}
CASES = (
    *(Case(f"silu/{height}", height) for height in configs.BUCKETS),
    *(Case(f"gpt-oss/{height}", height, **GPT_OSS) for height in configs.BUCKETS),
    Case("silu/float32", 64, dtype="float32"),
    Case("silu/odd", 128, odd=True),
    Case("silu/narrow", 128, inner=configs.SHORT * 3 // 4),
)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target. ``config``: the constants that say how large its tiles are, and
    warps and stages. ``needs_tiles``: it multiplies matrices."""

    target: str
    case: str
    kernel: str
    itemsize: int
    config: dict[str, int]
    binary: Binary

    @property
    def needs_tiles(self) -> bool:
        return self.kernel.removesuffix("_kernel") in configs.KERNELS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Driver:
    """What Triton asks of a device before it compiles."""

    def __init__(self, gpu: GPUTarget) -> None:
        self.gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return self.gpu

    def get_current_device(self) -> Any:
        return self.gpu  # kernels are cached by it

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextmanager
def compile_only(target: Target) -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """While open, launches compile for ``target`` and don't run; yields ``(compiled, arguments,
    keywords)`` of each, a kernel that was launched twice twice."""
    made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    run, chip = JITFunction.run, runtime.chip

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **meta: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **meta)
        made.append((compiled, args, meta))
        return compiled

    before = driver._active
    driver.set_active(_Driver(target.gpu))  # pyright: ignore[reportArgumentType]
    JITFunction.run = note  # pyright: ignore[reportAttributeAccessIssue]
    runtime.chip = lambda device: target.chip  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield made
    finally:
        JITFunction.run, runtime.chip, driver._active = run, chip, before


def launch_case(case: Case) -> None:
    """Every kernel of a layer, on tensors that hold nothing. Only inside ``compile_only``."""
    dtype = getattr(torch, case.dtype)
    size, inner = (SIZE + 3, case.inner + 3) if case.odd else (SIZE, case.inner)
    tokens = case.height * NUM_EXPERTS // TOP_K

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    x, grad = empty(tokens, size), empty(tokens, TOP_K, size)
    w13, w2 = empty(NUM_EXPERTS, 2 * inner, size), empty(NUM_EXPERTS, size, inner)
    b13, b2 = (
        (empty(NUM_EXPERTS, 2 * inner), empty(NUM_EXPERTS, size)) if case.bias else (None, None)
    )
    weights = empty(tokens, TOP_K, dtype=torch.float32)
    counted = (tokens * TOP_K,), (tokens, TOP_K), (NUM_EXPERTS,), (NUM_EXPERTS + 1,)
    rows = (weights, *(empty(*shape, dtype=torch.int32) for shape in counted))
    how = (case.w13_layout, "silu", True, case.limit, False, case.alpha, False)
    run: Any = ops.run_experts
    run_backward: Any = ops.run_experts_backward
    _, pre = run(x, w13, w2, b13, b2, *rows, *how, case.backward, False)
    if case.backward:
        needs = [True, True, True, case.bias, case.bias, True]
        run_backward(grad, x, w13, w2, b13, b2, *rows, pre, *how, False, needs)


def compile_cases(target_name: str, cases: Sequence[Case] = CASES) -> list[Compiled]:
    """Each kernel once per way it is compiled. Raises what the compiler raises."""
    target = TARGETS[target_name]
    found: list[Compiled] = []
    seen: set[str] = set()
    for case in cases:
        with compile_only(target) as made:
            launch_case(case)
        for compiled, _, meta in made:
            if compiled.hash in seen:
                continue
            seen.add(compiled.hash)
            names = {
                "BLOCK_M": "m", "BLOCK_N": "n", "BLOCK_K": "k", "num_warps": "warps",
                "num_stages": "stages",
            }  # fmt: skip
            config = {short: meta[name] for name, short in names.items() if name in meta}
            found.append(
                Compiled(
                    target_name,
                    case.name,
                    compiled.metadata.name,
                    case.itemsize,
                    config,
                    read_binary(compiled),
                )
            )
    return found


def faults(compiled: Compiled) -> list[str]:
    """What is wrong with a kernel; empty where all is well."""
    target, binary = TARGETS[compiled.target], compiled.binary
    where = f"{compiled.target} {compiled.case} {compiled.kernel} {compiled.config}"
    found: list[str] = []
    if binary.spills:
        found.append(f"{where}: {binary.spills} bytes of spilled registers")
    if binary.shared > target.shared_limit:
        found.append(
            f"{where}: {binary.shared} bytes of shared memory, {target.shared_limit} exist"
        )
    if not compiled.needs_tiles or compiled.itemsize != 2:
        return found
    tall = compiled.config["m"] >= 64
    wanted = target.wide_matrix if tall else "mfma" if target.gpu.backend == "hip" else "mma"
    if not binary.matrix.get(wanted):
        found.append(f"{where}: no {wanted} but {binary.matrix or 'no matrix instruction'}")
    if "odd" not in compiled.case and not binary.loads.keys() & {"16", "tma"}:
        found.append(f"{where}: no load of 16 bytes, only {binary.loads}")
    return found


def table(found: Sequence[Compiled]) -> str:
    """As Markdown."""
    lines = [
        "| target | layer | kernel | tile m x n x k | warps | stages | registers | spilled | "
        "shared KiB | matrix | loads: TMA | 16 bytes | narrow |",
        "|---|---|---|---|--:|--:|--:|--:|--:|---|--:|--:|--:|",
    ]
    for one in found:
        c, b = one.config, one.binary
        tile = " x ".join(str(c[name]) for name in "mnk" if name in c)
        matrix = ", ".join(f"{n} {kind}" for kind, n in b.matrix.items())
        loads = " | ".join(str(b.loads.get(kind, 0)) for kind in ("tma", "16", "narrow"))
        lines.append(
            f"| {one.target} | {one.case} | `{one.kernel}` | {tile} | {c.get('warps', 4)} | "
            f"{c.get('stages', '')} | {b.registers} | {b.spills} | {b.shared / 1024:.1f} | "
            f"{matrix} | {loads} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """0: all kernels are as they should be, 1: some aren't, 2: a wrong call."""
    parser = argparse.ArgumentParser(prog="python -m moe_triton.aot", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--case", action="append", choices=[c.name for c in CASES])
    parser.add_argument("--forward", action="store_true", help="kernels of the forward only")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 is set, and nothing is compiled then: unset it", file=sys.stderr)
        return 2
    cases = [
        replace(case, backward=case.backward and not args.forward)
        for case in CASES
        if args.case is None or case.name in args.case
    ]
    found: list[Compiled] = []
    for name in args.target or TARGETS:
        found += compile_cases(name, cases)
        print(f"{name}: {len(found)} kernels so far", file=sys.stderr)
    wrong = [fault for one in found for fault in faults(one)]
    if args.json:
        print(json.dumps({"kernels": [c.to_dict() for c in found], "faults": wrong}, indent=2))
    else:
        print(table(found))
        for fault in wrong:
            print(f"fault: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Launching kernels: what the device is, empty grids, and who compiled what."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1`` at import."""

_GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class Chip:
    """What a schedule has to know. ``family``: ``sm80``, ``sm90`` (Hopper and later), ``gfx942``
    or ``interpreter``; ``shared_memory``: bytes that one program may use."""

    family: str
    num_sms: int
    shared_memory: int

    @property
    def has_tma(self) -> bool:
        """Whether tiles can be loaded through tensor descriptors."""
        return self.family == "sm90"


CHIPS = {
    "sm80": Chip("sm80", 108, 160 * 1024),
    "sm90": Chip("sm90", 132, 227 * 1024),
    "sm100": Chip("sm90", 148, 227 * 1024),
    "gfx942": Chip("gfx942", 304, 64 * 1024),
    "interpreter": Chip("interpreter", 3, 64 * 1024),
}
"""Known ones, for compiling without a device. Few multiprocessors make programs take turns."""


@cache
def chip(device: torch.device) -> Chip:
    """Of a CUDA device; of the interpreter's, a small one, for a CPU."""
    if device.type != "cuda":
        return CHIPS["interpreter"]
    found: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Chip("gfx942", found.multi_processor_count, 64 * 1024)
    family = "sm90" if found.major >= 9 else "sm80"
    shared = getattr(found, "shared_memory_per_block_optin", 0) or 99 * 1024
    return Chip(family, found.multi_processor_count, shared)


@dataclass
class Launches:
    """What was launched while it was recorded: variants are what Triton compiles apart."""

    count: int = 0
    variants: set[tuple[Any, ...]] = field(default_factory=set[tuple[Any, ...]])


_recorders: list[Launches] = []


@contextmanager
def record_launches() -> Iterator[Launches]:
    """Counts launches and the variants of kernels that they need, compiled before or not."""
    launches = Launches()
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders.remove(launches)


@dataclass
class Compilations:
    """Names of the kernels that Triton compiled (or read from its cache on disk)."""

    names: list[str] = field(default_factory=list[str])


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Every kernel that is made ready while this is open, by Triton's own hook."""
    found, knobs = Compilations(), triton.knobs.runtime
    before = knobs.jit_post_compile_hook

    def note(*args: Any, **what: Any) -> Any:
        found.names.append(what["fn"].name)
        return before(*args, **what) if before is not None else None

    knobs.jit_post_compile_hook = note
    try:
        yield found
    finally:
        knobs.jit_post_compile_hook = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """``kernel[grid](*args, **meta)`` on the device of the first tensor; nothing for an empty grid.

    Raises ``ValueError`` for a grid that CUDA can't launch.
    """
    if not all(grid):
        return
    if any(size > limit for size, limit in zip(grid, _GRID_LIMITS, strict=False)):
        raise ValueError(f"a grid of {grid} programs: at most {_GRID_LIMITS} can be launched")
    for recorder in _recorders:
        recorder.count += 1
        recorder.variants.add(variant(kernel, args, meta))
    with _current(args):
        kernel[grid](*args, **meta)


def _current(args: tuple[Any, ...]) -> Any:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return torch.cuda.device(arg.device) if arg.is_cuda else nullcontext()
    return nullcontext()


def variant(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles one kernel per value of: types, constants, and of an integer or address
    whether it is 1 or a multiple of 16, unless the kernel says ``do_not_specialize``."""
    names = list(kernel.arg_names)
    fixed = getattr(kernel, "fn", kernel).__name__
    loose = getattr(kernel, "do_not_specialize", None) or ()
    key: list[Any] = [fixed, tuple(sorted((k, str(v)) for k, v in meta.items()))]
    for i, arg in enumerate(args):
        special = names[i] not in loose and i not in loose
        if isinstance(arg, torch.Tensor):
            key.append((arg.dtype, special and arg.data_ptr() % 16 == 0))
        elif isinstance(arg, bool) or not isinstance(arg, int):
            key.append(arg if arg is None or isinstance(arg, bool | str) else type(arg))
        else:
            wide = not -(2**31) <= arg < 2**31
            key.append((wide, special and (arg == 1, arg % 16 == 0)))
    return tuple(key)

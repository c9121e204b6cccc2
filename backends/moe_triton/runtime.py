"""Launching kernels: on what chip, or only planned; empty grids; and who compiled what."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors: ``TRITON_INTERPRET=1`` at import."""

_GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class Chip:
    """What a schedule has to know. ``family``: ``sm80``, ``sm90`` (Hopper and later), ``gfx942``
    or ``interpreter``; ``shared_memory``: bytes that one program may use; ``has_tma``: whether
    tiles can be loaded through tensor descriptors."""

    family: str
    num_sms: int
    shared_memory: int
    has_tma: bool = False


CHIPS = {
    "sm80": Chip("sm80", 108, 160 * 1024),
    "sm86": Chip("sm80", 84, 99 * 1024),
    "sm90": Chip("sm90", 132, 227 * 1024, has_tma=True),
    "sm100": Chip("sm90", 148, 227 * 1024, has_tma=True),
    "gfx942": Chip("gfx942", 304, 64 * 1024),
    "interpreter": Chip("interpreter", 3, 64 * 1024),
}
"""Known ones, for compiling without a device. In the interpreter few multiprocessors, so that
programs take turns."""


@cache
def _chip_of(device: torch.device) -> Chip:
    if device.type != "cuda":
        return CHIPS["interpreter"]
    found: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Chip("gfx942", found.multi_processor_count, 64 * 1024)
    family, has_tma = ("sm90", True) if found.major >= 9 else ("sm80", False)
    shared = getattr(found, "shared_memory_per_block_optin", 0) or 99 * 1024
    return Chip(family, found.multi_processor_count, shared, has_tma)


def chip(device: torch.device) -> Chip:
    """Of a CUDA device; a plan's for its meta tensors; the interpreter's for a CPU."""
    if _plans and device.type == "meta":
        return _plans[-1].chip
    return _chip_of(device)


@dataclass(frozen=True)
class Launch:
    """A launch that is planned: the kernel, its grid, arguments (tensors on the meta device,
    descriptors of them, numbers, None) and constants; among these Triton's own options
    (``num_warps``, ``num_stages``, ``enable_fp_fusion``)."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def variant(self) -> tuple[Any, ...]:
        """What Triton compiles one kernel per value of: constants, types, and of an integer or
        address whether it is 1 or a multiple of 16."""
        loose = getattr(self.kernel, "do_not_specialize", None) or ()
        key: list[Any] = [self.name, *sorted((k, str(v)) for k, v in self.meta.items())]
        for name, arg in zip(self.kernel.arg_names, self.args, strict=False):
            special = name not in loose
            if isinstance(arg, torch.Tensor):
                key.append((arg.dtype, special and arg.data_ptr() % 16 == 0))
            elif isinstance(arg, TensorDescriptor):
                key.append((arg.base.dtype, tuple(arg.block_shape)))
            elif isinstance(arg, int) and not isinstance(arg, bool):
                wide = not -(2**31) <= arg < 2**31
                key.append((wide, special and (arg == 1, arg % 16 == 0)))
            else:
                key.append(arg if arg is None or isinstance(arg, bool) else type(arg))
        return tuple(key)


@dataclass
class Plan:
    """Launches for meta tensors, in order, as ``chip`` would get them. Compiled if ``compiles``."""

    chip: Chip
    compiles: bool = False
    launches: list[Launch] = field(default_factory=list[Launch])


@dataclass
class Launches:
    """What was launched while it was recorded, in order."""

    made: list[Launch] = field(default_factory=list[Launch])

    @property
    def count(self) -> int:
        return len(self.made)

    @property
    def variants(self) -> set[tuple[Any, ...]]:
        """How many kernels Triton compiles for them, at most."""
        return {launched.variant() for launched in self.made}


_plans: list[Plan] = []
_recorders: list[Launches] = []


@contextmanager
def planning(target: Chip, *, compiles: bool = False) -> Iterator[Plan]:
    """While this is open, launches on meta tensors are collected: all that a call at any size would
    launch, without memory or a device. With ``compiles`` kernels are also made ready for the
    current CUDA device, as far as the disk cache or the compiler can."""
    plan = Plan(target, compiles)
    _plans.append(plan)
    try:
        yield plan
    finally:
        _plans.remove(plan)


@contextmanager
def record_launches() -> Iterator[Launches]:
    """The launches that happen while this is open."""
    launches = Launches()
    _recorders.append(launches)
    try:
        yield launches
    finally:
        # by identity: those of another recorder may be equal
        _recorders[:] = [r for r in _recorders if r is not launches]


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """The names of kernels that are made ready (compiled, or read from the disk cache) while this
    is open, by Triton's own hook."""
    found: list[str] = []
    before: Any = knobs.runtime.jit_post_compile_hook

    def note(*args: Any, **what: Any) -> Any:
        found.append(what["fn"].name)
        return before(*args, **what) if before is not None else None

    knobs.runtime.jit_post_compile_hook = note
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """``kernel[grid](*args, **meta)`` on the device of the first tensor; nothing for an empty grid.

    Raises ``ValueError`` for a grid that CUDA can't launch.
    """
    if not all(grid):
        return
    if any(size > limit for size, limit in zip(grid, _GRID_LIMITS, strict=False)):
        raise ValueError(f"a grid of {grid} programs: at most {_GRID_LIMITS} can be launched")
    device = _device_of(args)
    if _recorders or device.type == "meta":
        planned = Launch(kernel, grid, args, meta)
        for recorder in _recorders:
            recorder.made.append(planned)
        if device.type == "meta":
            _plan(planned)
            return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **meta)


def _plan(planned: Launch) -> None:
    if not _plans:
        raise ValueError("a kernel was launched on meta tensors with nobody planning")
    _plans[-1].launches.append(planned)
    if _plans[-1].compiles:
        planned.kernel.run(*planned.args, grid=planned.grid, warmup=True, **planned.meta)


def _device_of(args: tuple[Any, ...]) -> torch.device:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
        if isinstance(arg, TensorDescriptor):
            return arg.base.device
    return torch.device("cpu")

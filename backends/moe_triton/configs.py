"""Block sizes: a small table, and the rule for everything that isn't in it.

Keyed by kernel, family of chips, bytes per element and bucket. A bucket is a tile height, from how
many rows an expert has on average (a number the host knows): so few variants of a kernel serve all
numbers of tokens. Whatever the table says is fitted to the sizes and to the chip's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_triton.runtime import Chip

KERNELS = ("up", "down", "down_backward", "outer")
BUCKETS = (16, 32, 64, 128)
"""Tile heights. An expert's last tile is half full on average, so a tile is at most about as high
as an expert has rows; lower than 16 gains nothing, for matrix units take 16 rows."""
INVARIANT_BUCKET = 64
"""The one bucket where a row's result may not depend on what other rows there are."""


@dataclass(frozen=True)
class Config:
    """Launch parameters of a grouped product. ``group_m``: tiles of an expert side by side;
    ``per_sm``: programs of the persistent grid on each multiprocessor. ``parts``: in how many parts
    (1, 2 or 4) a tile's results are finished, where an activation takes registers."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    per_sm: int = 1
    parts: int = 1

    def blocks(self) -> dict[str, int]:
        """As kernels are told."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
        }

    def options(self) -> dict[str, Any]:
        """As Triton is told. Multiply and add may fuse: sums of products are rounded less often."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


Key = tuple[str, str, int, int]
"""Kernel, family, bytes per element, bucket (0: any)."""

TABLE: dict[Key, Config] = {
    # Hopper and later. Low tiles: weights stream by, so several programs a multiprocessor, each
    # with a few stages on the way; high ones: as many products per byte as registers allow.
    ("up", "sm90", 2, 16): Config(16, 32, 128, 4, 3, 8, 3),
    ("up", "sm90", 2, 32): Config(32, 32, 128, 4, 3, 8, 2),
    ("up", "sm90", 2, 64): Config(64, 64, 64, 4, 4, 8, 2),
    ("up", "sm90", 2, 128): Config(128, 128, 64, 8, 4, 8, 1, parts=4),
    ("down", "sm90", 2, 16): Config(16, 64, 128, 4, 3, 8, 3),
    ("down", "sm90", 2, 32): Config(32, 64, 128, 4, 3, 8, 2),
    ("down", "sm90", 2, 64): Config(64, 128, 64, 4, 4, 8, 2),
    ("down", "sm90", 2, 128): Config(128, 256, 64, 8, 4, 8, 1),
    ("down_backward", "sm90", 2, 16): Config(16, 64, 64, 4, 3, 8, 3),
    ("down_backward", "sm90", 2, 32): Config(32, 64, 64, 4, 3, 8, 3, parts=2),
    ("down_backward", "sm90", 2, 64): Config(64, 64, 64, 4, 4, 8, 2, parts=2),
    ("down_backward", "sm90", 2, 128): Config(128, 128, 64, 8, 3, 8, 1, parts=4),
    ("outer", "sm90", 2, 0): Config(128, 256, 64, 8, 3, 8, 1),
    # Ampere and Ada: no descriptors
    ("up", "sm80", 2, 16): Config(16, 32, 128, 4, 3, 8, 2),
    ("up", "sm80", 2, 32): Config(32, 32, 128, 4, 3, 8, 2),
    ("up", "sm80", 2, 64): Config(64, 64, 64, 4, 3, 8, 1, parts=2),
    ("up", "sm80", 2, 128): Config(128, 64, 64, 8, 3, 8, 1, parts=4),
    ("down", "sm80", 2, 16): Config(16, 64, 128, 4, 3, 8, 2),
    ("down", "sm80", 2, 32): Config(32, 64, 64, 4, 3, 8, 2),
    ("down", "sm80", 2, 64): Config(64, 128, 64, 8, 3, 8, 1),
    ("down", "sm80", 2, 128): Config(128, 128, 64, 8, 3, 8, 1),
    ("down_backward", "sm80", 2, 16): Config(16, 64, 64, 4, 3, 8, 2),
    ("down_backward", "sm80", 2, 32): Config(32, 64, 64, 4, 3, 8, 2),
    ("down_backward", "sm80", 2, 64): Config(64, 64, 64, 4, 3, 8, 1, parts=4),
    ("down_backward", "sm80", 2, 128): Config(128, 64, 64, 8, 3, 8, 1, parts=4),
    ("outer", "sm80", 2, 0): Config(128, 128, 32, 8, 3, 8, 1),
    # MI300: 64 KiB of shared memory, and loads go through registers: two stages
    ("up", "gfx942", 2, 16): Config(16, 32, 128, 4, 2, 8, 2),
    ("up", "gfx942", 2, 32): Config(32, 32, 128, 4, 2, 8, 2),
    ("up", "gfx942", 2, 64): Config(64, 64, 64, 4, 2, 8, 1),
    ("up", "gfx942", 2, 128): Config(128, 64, 64, 8, 2, 8, 1),
    ("down", "gfx942", 2, 16): Config(16, 64, 128, 4, 2, 8, 2),
    ("down", "gfx942", 2, 32): Config(32, 64, 128, 4, 2, 8, 2),
    ("down", "gfx942", 2, 64): Config(64, 128, 64, 4, 2, 8, 1),
    ("down", "gfx942", 2, 128): Config(128, 128, 64, 8, 2, 8, 1),
    ("down_backward", "gfx942", 2, 16): Config(16, 64, 64, 4, 2, 8, 2),
    ("down_backward", "gfx942", 2, 32): Config(32, 64, 64, 4, 2, 8, 2, parts=2),
    ("down_backward", "gfx942", 2, 64): Config(64, 64, 64, 4, 2, 8, 1, parts=4),
    ("down_backward", "gfx942", 2, 128): Config(128, 64, 64, 8, 2, 8, 1, parts=4),
    ("outer", "gfx942", 2, 0): Config(128, 128, 32, 8, 2, 8, 1),
}

SHORT = 1024
SHORT_SUMS: dict[Key, Config] = {
    ("down", "sm90", 2, 128): Config(128, 128, 64, 8, 3, 8, 2),
}
"""Ahead of ``TABLE`` where fewer than ``SHORT`` terms are summed: a tile is done soon, so two
programs share a multiprocessor, one storing its results while the other multiplies."""
INTERPRETED = {kernel: Config(32, 64, 64, 1, 1, 2) for kernel in KERNELS}
"""In the interpreter every operation takes its time, whatever its size."""


def bucket(rows_per_expert: float) -> int:
    """The tile height for experts of so many rows on average."""
    return next((b for b in BUCKETS if rows_per_expert <= b), BUCKETS[-1])


def rule(kernel: str, chip: Chip, itemsize: int, height: int) -> Config:
    """For what ``TABLE`` lacks. float32 is computed without matrix units (TF32 would round it), so
    there a tile has to be small enough for registers."""
    if chip.family == "interpreter":
        return INTERPRETED[kernel]
    if itemsize == 4:
        return Config(min(height, 32), 32, 32, 4, 2, 8, 2)
    # loads of single elements keep their addresses in registers: more threads to a tile
    if height < 64:
        return Config(height, 32, 32, 4, 2, 8, 1)
    in_parts = kernel == "down_backward" and chip.family == "gfx942"
    return Config(64, 64, 32, 8, 2, 8, 1, parts=4 if in_parts else 1)


def shared_bytes(kernel: str, config: Config, itemsize: int, halves: int) -> int:
    """Shared memory that a program needs, estimated: the tiles of all stages in flight, or what the
    results take on their way to memory, and a little for sums over threads. ``halves``: 2 where
    ``up`` multiplies with a gate as well."""
    c = config
    weights = c.block_n * (halves if kernel == "up" else 1)
    stages = max(c.num_stages, 1)
    loads = stages * (c.block_m + weights) * c.block_k * itemsize
    stores = c.block_m * c.block_n * (4 if kernel == "down_backward" else itemsize)
    return max(loads, stores) + 2048


def fit(
    kernel: str, config: Config, chip: Chip, itemsize: int, halves: int, n: int, k: int
) -> Config:
    """No blocks beyond the sizes ``n`` and ``k``, and what fits into the chip's shared memory:
    fewer stages first, then a shorter and at last a narrower block."""
    c = config
    block_n = min(c.block_n, max(16, _power(n)))
    block_k = min(c.block_k, max(16, _power(k)))
    c = replace(c, block_n=block_n, block_k=block_k)
    while shared_bytes(kernel, c, itemsize, halves) > chip.shared_memory:
        if c.num_stages > 2:
            c = replace(c, num_stages=c.num_stages - 1)
        elif c.block_k > 32:
            c = replace(c, block_k=c.block_k // 2)
        elif c.block_n > 16:
            c = replace(c, block_n=c.block_n // 2)
        elif c.block_m > 16:
            c = replace(c, block_m=c.block_m // 2)
        else:
            break
    return c


def choose(
    kernel: str,
    chip: Chip,
    *,
    itemsize: int,
    rows_per_expert: float,
    n: int,
    k: int,
    halves: int = 1,
    aligned: bool = True,
    plain: bool = True,
    batch_invariant: bool = False,
) -> Config:
    """What ``kernel`` is launched with for results of ``n`` columns summed over ``k``.

    ``aligned``: rows are multiples of 16 bytes; others are loaded element by element, through
    registers, which a large tile would use up. ``plain``: no bias, limit, alpha or interleaved
    ``w13``, each of which takes registers when a derivative is finished.
    """
    height = INVARIANT_BUCKET if batch_invariant else bucket(rows_per_expert)
    keys = [(kernel, chip.family, itemsize, b) for b in (height, 0)] if aligned else []
    tables = (SHORT_SUMS, TABLE) if k < SHORT else (TABLE,)
    found = next((table[key] for table in tables for key in keys if key in table), None)
    config = found or rule(kernel, chip, itemsize, height)
    if kernel == "down_backward" and not plain and config.block_m * config.block_n > 64 * 64:
        config = replace(config, block_n=64)
    return fit(kernel, config, chip, itemsize, halves, n, k)


def _power(size: int) -> int:
    """The least power of two from ``size``."""
    return 1 << max(size - 1, 0).bit_length()

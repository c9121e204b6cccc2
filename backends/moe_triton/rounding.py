"""Rounding float32 to the rows' dtype, to nearest even, on chips and in the interpreter.

Triton's interpreter (3.6 to 3.9) cuts the lower bits off where it converts float32 to bfloat16, and
NumPy, on which it stands, warns of numbers that are too large for float16.
"""

import triton
import triton.language as tl

from moe_triton import runtime

INTERPRETED = tl.constexpr(runtime.INTERPRETED)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 ``x`` as ``DTYPE``. NaN stays NaN."""
    if INTERPRETED and DTYPE is tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, nearest, bits).to(tl.float32, bitcast=True)
    if INTERPRETED and DTYPE is tl.float16:
        # what rounds past 65504, the largest
        x = tl.where(x >= 65520.0, float("inf"), tl.where(x <= -65520.0, float("-inf"), x))
    return x.to(DTYPE)

"""An expert's activation and its derivative on tiles, in float32: ``moe_core.activation``'s.

``moe_core.activation.activate`` says what the names, limits and alpha mean.
"""
# Pyright doesn't know what triton.jit makes of a function.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

GATE_UP, UP_GATE, INTERLEAVED = 0, 1, 2
LAYOUTS = {"gate_up": GATE_UP, "up_gate": UP_GATE, "interleaved": INTERLEAVED}
"""``w13_layout`` as kernels are told it."""

_UP_GATE = tl.constexpr(UP_GATE)
_INTERLEAVED = tl.constexpr(INTERLEAVED)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TANH = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBE = tl.constexpr(0.044715)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _at_most(x, limit):
    return tl.where(x > limit, limit, x)  # a NaN stays one


@triton.jit
def _value(x, NAME: tl.constexpr, ALPHA: tl.constexpr):
    if ALPHA is not None:
        return x * sigmoid(ALPHA * x)
    elif NAME == "silu":
        return x * sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif NAME == "gelu_tanh":
        # (1 + tanh z) / 2 = sigmoid(2 z)
        return x * sigmoid((x + x * x * x * _CUBE) * _TANH)
    elif NAME == "relu":
        return tl.where(x <= 0, 0.0, x)
    elif NAME == "relu2":
        return tl.where(x <= 0, 0.0, x) * tl.where(x <= 0, 0.0, x)
    else:
        tl.static_assert(NAME == "identity")
        return x


@triton.jit
def _slope(x, NAME: tl.constexpr, ALPHA: tl.constexpr):
    if ALPHA is not None:
        s = sigmoid(ALPHA * x)
        return s + ALPHA * x * s * (1.0 - s)
    elif NAME == "silu":
        s = sigmoid(x)
        return s + x * s * (1.0 - s)
    elif NAME == "gelu":
        density = tl.exp(-0.5 * x * x) * _DENSITY
        return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * density
    elif NAME == "gelu_tanh":
        s = sigmoid((x + x * x * x * _CUBE) * _TANH)
        inner = (1.0 + x * x * _CUBE * 3.0) * _TANH
        return s + x * s * (1.0 - s) * inner
    elif NAME == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif NAME == "relu2":
        return tl.where(x > 0, 2.0 * x, 0.0)
    else:
        tl.static_assert(NAME == "identity")
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def activate(gate, up, NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
             LIMIT_AFTER: tl.constexpr, ALPHA: tl.constexpr):  # fmt: skip
    """float32 tiles; ``up`` is not looked at without a gate."""
    if LIMIT is not None and not LIMIT_AFTER:
        gate = _at_most(gate, LIMIT)
    value = _value(gate, NAME, ALPHA)
    if LIMIT is not None and LIMIT_AFTER:
        value = _at_most(value, LIMIT)
    if GATED:
        if LIMIT is not None:
            up = -_at_most(-_at_most(up, LIMIT), LIMIT)
        if ALPHA is not None:
            up += 1.0
        value = value * up
    return value


@triton.jit
def activate_backward(gate, up, grad, NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
                      LIMIT_AFTER: tl.constexpr, ALPHA: tl.constexpr):  # fmt: skip
    """The gradients of gate and up for that of the activation (without a gate: the same twice)."""
    inner = gate
    if LIMIT is not None and not LIMIT_AFTER:
        inner = _at_most(gate, LIMIT)
    slope = _slope(inner, NAME, ALPHA)
    if LIMIT is not None and not LIMIT_AFTER:
        slope = tl.where(gate > LIMIT, 0.0, slope)
    if LIMIT is not None and LIMIT_AFTER:
        slope = tl.where(_value(gate, NAME, ALPHA) > LIMIT, 0.0, slope)
    if not GATED:
        return grad * slope, grad * slope
    else:
        value = _value(inner, NAME, ALPHA)
        clamped = up
        if LIMIT is not None:
            clamped = -_at_most(-_at_most(up, LIMIT), LIMIT)
        if LIMIT is not None and LIMIT_AFTER:
            value = _at_most(value, LIMIT)
        by_up = grad * value
        if LIMIT is not None:
            by_up = tl.where(tl.abs(up) > LIMIT, 0.0, by_up)
        if ALPHA is not None:
            clamped += 1.0
        return grad * slope * clamped, by_up


@triton.jit
def gate_column(column, inner_size, LAYOUT: tl.constexpr):
    """Which row of ``w13`` (column of ``x @ w13.T``) is the gate of activation ``column``."""
    if LAYOUT == _INTERLEAVED:
        return 2 * column
    elif LAYOUT == _UP_GATE:
        return inner_size + column
    else:
        return column


@triton.jit
def up_column(column, inner_size, LAYOUT: tl.constexpr):
    if LAYOUT == _INTERLEAVED:
        return 2 * column + 1
    elif LAYOUT == _UP_GATE:
        return column
    else:
        return inner_size + column


@triton.jit
def store_gate_up(rows, gate, up, first, inside, inner_size, GATED: tl.constexpr,
                  LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Columns of gate and up from ``first`` on, ``[m, BLOCK_N]`` each, into the dense rows ``rows
    [m]``, laid out as ``w13``'s."""
    if GATED and LAYOUT == _INTERLEAVED:
        both = tl.join(gate, up).reshape(gate.shape[0], 2 * BLOCK_N)
        wide = 2 * first + tl.arange(0, 2 * BLOCK_N)
        mask = inside[:, None] & (wide < 2 * inner_size)[None, :]
        tl.store(rows[:, None] + wide[None, :], both.to(rows.dtype.element_ty), mask=mask)
    else:
        column = first + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (column < inner_size)[None, :]
        at = rows[:, None] + gate_column(column, inner_size, LAYOUT)[None, :]
        tl.store(at, gate.to(rows.dtype.element_ty), mask=mask)
        if GATED:
            at = rows[:, None] + up_column(column, inner_size, LAYOUT)[None, :]
            tl.store(at, up.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def load_gate_up(rows, first, inside, inner_size, GATED: tl.constexpr, LAYOUT: tl.constexpr,
                 BLOCK_N: tl.constexpr):  # fmt: skip
    """What ``store_gate_up`` stored, in float32, zeros past the end (without a gate: twice it)."""
    if GATED and LAYOUT == _INTERLEAVED:
        wide = 2 * first + tl.arange(0, 2 * BLOCK_N)
        mask = inside[:, None] & (wide < 2 * inner_size)[None, :]
        both = tl.load(rows[:, None] + wide[None, :], mask=mask, other=0.0)
        gate, up = tl.split(both.to(tl.float32).reshape(rows.shape[0], BLOCK_N, 2))
        return gate, up
    else:
        column = first + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (column < inner_size)[None, :]
        at = rows[:, None] + gate_column(column, inner_size, LAYOUT)[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if not GATED:
            return gate, gate
        else:
            at = rows[:, None] + up_column(column, inner_size, LAYOUT)[None, :]
            return gate, tl.load(at, mask=mask, other=0.0).to(tl.float32)

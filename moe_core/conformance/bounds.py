"""How far a result may be off: from dtypes, the roundings that are declared, and its own scale.

Standard forward error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 3.1):
n operations in a row with unit roundoff u are off by at most ``gamma(n, u) = n u / (1 - n u)``
times the sum of the magnitudes of the terms. No constant here is a tolerance: each is a count of
operations, and the magnitudes come from the oracle of the case at hand (``cases.oracle``).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = 8
"""Roundings to the rows' dtype that a runner may make per output: the weighted input, gate, up,
activation, second product, bias, weight, sum over slots. What a part declares may be less."""
ROUTER_STEPS = 16
"""Elementary operations from a logit to its weight: exponential, logarithms, sums, quotients."""


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def fine(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gamma(count: int, unit_roundoff: float) -> float:
    share = count * unit_roundoff
    assert share < 0.5, f"{count} roundings of {unit_roundoff:g} leave no digit to compare"
    return share / (1 - share)


def forward(
    masses: Tensor,
    dtype: torch.dtype,
    length: int,
    *,
    roundings: int = ROUNDINGS,
    dispatch: torch.dtype | None = None,
    combine: torch.dtype | None = None,
    partial_sums: int = 1,
) -> Tensor:
    """``[T, H]``: the bound of each element of a layer's output.

    ``masses [2, T, H]``: what relative errors of 1 in the results of the steps, and in the terms of
    their sums, add up to. ``length``: how many terms the sums have, one after the other.
    ``dispatch``: what rows travel in (one rounding of every input); ``combine``: what
    ``partial_sums`` sums per token come home in.
    """
    results, terms = masses
    bound = gamma(roundings, unit(dtype)) * results + gamma(length, unit(fine(dtype))) * terms
    if dispatch is not None:
        bound = bound + unit(dispatch) * terms
    if combine is not None:
        bound = bound + gamma(partial_sums + 1, unit(combine)) * results
    return bound + torch.finfo(dtype).smallest_normal


def gradient(
    exact: Tensor, dtype: torch.dtype, size: int, *, roundings: int = 2 * ROUNDINGS
) -> float:
    """The bound of every element of a gradient, from its largest one: sums over ``size`` terms,
    and twice a forward's roundings."""
    most = exact.abs().max().item() if exact.numel() else 0.0
    return most * (size * 2 * unit(fine(dtype)) + roundings * 2 * unit(dtype))


def router_weights(want: Tensor, logits: Tensor) -> Tensor:
    """``[T, n]``: the bound of weights or scores, relative: errors in a logarithm become relative
    ones, and a logarithm is about as large as the token's largest logit ``logits [T, E]``."""
    limits = torch.finfo(want.dtype)
    return ROUTER_STEPS * limits.eps * (1 + logits.abs().amax(1, keepdim=True)) * want + limits.tiny

"""The scoring functions, their logarithms, and weights that survive underflow.

All of them take logits that are finite (``route`` cleans them first) and have finite gradients
everywhere. They use only operations whose result for an element doesn't depend on where in the
tensor it lies: ``torch.sigmoid``, ``softplus`` and ``logaddexp`` on a CPU round differently in the
last, not vectorised elements, which would break exact ties between experts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

# Below this, softplus(x) = e^x - e^2x/2 + ... to the last bit of a float64 after two terms.
_LOW = -20.0


def accumulate_dtype(*tensors: Tensor) -> torch.dtype:
    """What routing is computed in: float64 where any of these is, else float32."""
    wide = any(t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast must not lower what happens inside."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def masked_softmax(x: Tensor, valid: Tensor) -> Tensor:
    """Softmax of ``x [T, N]`` over the valid ones of each row, 0 elsewhere (also in rows of none).

    A row of none goes through the softmax as it is, so that no NaN enters the backward.
    """
    some = valid.any(dim=-1, keepdim=True)
    inside = torch.where(valid | ~some, x, -torch.inf)
    return torch.where(valid, inside.softmax(dim=-1), 0.0)


def scores(logits: Tensor, valid: Tensor, scoring_func: str) -> Tensor:
    """Unbiased scores ``[T, E]`` (softmax: over the valid experts), 0 where not valid."""
    if scoring_func == "softmax":
        return masked_softmax(logits, valid)
    score = _sigmoid(logits) if scoring_func == "sigmoid" else _sqrtsoftplus(logits)
    return torch.where(valid, score, 0.0)


def log_scores(logits: Tensor, scoring_func: str) -> Tensor:
    """Logarithm of the score; for softmax up to a constant per token, which normalising drops."""
    if scoring_func == "softmax":
        return logits
    if scoring_func == "sigmoid":
        return F.logsigmoid(logits)
    low, below, above = _split(logits)
    return 0.5 * torch.where(low, below - below.exp() / 2, _softplus(above).log())


def _sigmoid(x: Tensor) -> Tensor:
    positive = x >= 0
    e = torch.exp(torch.where(positive, -x, x))  # not abs(): its gradient at 0 is 0
    return torch.where(positive, 1.0, e) / (1 + e)


def _softplus(x: Tensor) -> Tensor:
    positive = x >= 0
    e = torch.exp(torch.where(positive, -x, x))
    return torch.where(positive, x, 0.0) + torch.log1p(e)


def _sqrtsoftplus(x: Tensor) -> Tensor:
    low, below, above = _split(x)
    return torch.where(low, (below / 2).exp() * (1 - below.exp() / 4), _softplus(above).sqrt())


def _split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where ``x`` is low, and ``x`` for each branch with a harmless value in the other's place."""
    low = x < _LOW
    return low, torch.where(low, x, _LOW), torch.where(low, 0.0, x)

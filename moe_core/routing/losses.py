"""Balancing the experts: pure functions of a ``Routing``. Under data parallelism they see one
rank's tokens: sum ``tokens_per_expert`` over the ranks before a bias update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_core.errors import InputError
from moe_core.routing.checks import expect, settle

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import Routing


def tokens_per_expert(routing: Routing, num_experts: int) -> Tensor:
    """How often each expert was chosen: int64 ``[E]``, on the device, without a host sync.

    Ids outside ``[0, E)`` and tokens that ``token_mask`` excludes count nowhere; duplicate ids
    count twice. Raises ``InputError`` if the routing has no ids.
    """
    ids = routing.topk_ids
    if ids is None:
        raise InputError("this routing holds no ids to count: it is for kernels that route")
    counted = (ids >= 0) & (ids < num_experts)
    if routing.token_mask is not None:
        counted = counted & routing.token_mask[:, None]
    bins = torch.where(counted, ids, num_experts).flatten()  # the last bin is thrown away
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, bins, torch.ones_like(bins))[:num_experts]


def load_balance_loss(routing: Routing, num_experts: int) -> Tensor:
    """``E * sum_e f_e * P_e``: 1 where the choices are spread evenly, up to E. A scalar.

    ``f_e`` is expert e's fraction of the choices, ``P_e`` the mean over real tokens of its score,
    scores normalised to sum to 1 per token (tokens whose scores are all 0 are left out). 0, with a
    graph, for no tokens. Switch Transformer, arXiv 2101.03961, equations 4 to 6; transformers'
    ``load_balancing_loss_func`` sums f to K instead of 1 and is K times this.
    Raises ``InputError`` for a routing without ids or without scores ``[T, num_experts]``.
    """
    counts = tokens_per_expert(routing, num_experts)
    scores = routing.scores
    if scores is None:
        raise InputError("load_balance_loss needs routing.scores [T, E]; route() fills them in")
    faults: list[str] = []
    expect(faults, "routing.scores", scores, ("T", num_experts), "float")
    settle(faults)
    total = scores.sum(dim=-1, keepdim=True)
    real = total > torch.finfo(scores.dtype).tiny  # 1/total is finite
    if routing.token_mask is not None:
        real = real & routing.token_mask[:, None]
    shares = torch.where(real, scores, 0.0) / torch.where(real, total, 1.0)
    mean_share = shares.sum(dim=0) / real.sum().clamp(min=1)
    fraction = counts.to(scores.dtype) / counts.sum().clamp(min=1)
    return num_experts * (fraction * mean_share).sum()


def updated_correction_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3) -> Tensor:
    """``bias + rate * sign(mean(counts) - counts)``: balancing without a loss, arXiv 2408.15664.

    ``bias`` float ``[E]``, ``counts`` integer ``[E]`` from ``tokens_per_expert``. Returns a new
    tensor in ``bias``'s dtype. Raises ``InputError`` for other shapes or dtypes.
    """
    faults: list[str] = []
    expect(faults, "bias", bias, ("E",), "float")
    expect(faults, "counts", counts, tuple(bias.shape), "integer")
    settle(faults)
    counts = counts.long()
    below = torch.sign(counts.sum() - counts * counts.numel())  # in integers: exact
    return bias.detach() + rate * below.to(bias.dtype)

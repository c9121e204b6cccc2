"""Balancing the experts: pure functions of a ``Routing``, scalars with a gradient.

Tokens that ``token_mask`` excludes change nothing, whatever they hold. Nothing waits for the host.

``groups``: process groups over which tokens differ (``Experts.token_groups``). The loss is then
that of all their tokens: counts are summed over them (collective; never the scores, so no gradient
is counted twice), and each rank returns its tokens' share times the number of ranks. Averaged over
the ranks, as DDP and FSDP do, losses and gradients are those of one process with all tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moe_core.collectives import sum_over
from moe_core.errors import InputError
from moe_core.routing.checks import expect, settle
from moe_core.routing.topk import cleaned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moe_core.contracts import Routing


def tokens_per_expert(routing: Routing, num_experts: int) -> Tensor:
    """How often each expert was chosen: int64 ``[E]``, on the device, without a host sync.

    Ids outside ``[0, E)`` and tokens that ``token_mask`` excludes count nowhere; duplicate ids
    count twice, and slots that a capacity dropped count. Raises ``InputError`` if the routing has
    no ids.
    """
    ids = routing.topk_ids if routing.chosen_ids is None else routing.chosen_ids
    if ids is None:
        raise InputError("this routing holds no ids to count: it is for kernels that route")
    ids = ids.to(torch.int64)
    counted = (ids >= 0) & (ids < num_experts)
    if routing.token_mask is not None:
        counted = counted & routing.token_mask[:, None]
    bins = torch.where(counted, ids, num_experts).flatten()  # the last bin is thrown away
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, bins, torch.ones_like(bins))[:num_experts]


def load_balance_loss(
    routing: Routing, num_experts: int, groups: Sequence[ProcessGroup] = ()
) -> Tensor:
    """``E * sum_e f_e * P_e``: 1 where the choices are spread evenly, up to E. A scalar.

    ``f_e`` is expert e's fraction of the choices, ``P_e`` the mean over real tokens of its score,
    scores normalised to sum to 1 per token (tokens whose scores are all 0 are left out). 0, with a
    graph, for no tokens. Switch Transformer, arXiv 2101.03961, equations 4 to 6; transformers'
    ``load_balancing_loss_func`` sums f to K instead of 1 and is K times this.
    Raises ``InputError`` for a routing without ids or without scores ``[T, num_experts]``.
    """
    counts = sum_over(tokens_per_expert(routing, num_experts), groups)
    shares, real = _shares(routing, num_experts, "load_balance_loss")
    mean_share = _mean(shares.sum(dim=0), real.sum(), groups)
    fraction = counts.to(shares.dtype) / counts.sum().clamp(min=1)
    return num_experts * (fraction * mean_share).sum()


def sequence_balance_loss(
    routing: Routing,
    num_experts: int,
    num_sequences: int,
    sequence_ids: Tensor | None = None,
    groups: Sequence[ProcessGroup] = (),
) -> Tensor:
    """The mean over sequences of ``sum_e f_e * P_e``, each over one sequence's tokens. A scalar.

    ``f_e = E / (K * length)`` times how often e is among a token's K best by unbiased score (so it
    sees what a correction bias hides), ``P_e`` the mean of its score, normalised per token: 1 where
    the sequence is balanced. Multiply by alpha. DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.

    ``sequence_ids`` int ``[T]``: which of the ``num_sequences`` a token belongs to (outside of
    them: none); None: T / num_sequences consecutive tokens each, as ``[B, S]`` flattened. Masked
    tokens don't lengthen a sequence, and one without real tokens is left out. 0, with a graph, for
    no tokens. A sequence must lie on one rank. Raises ``InputError`` for a routing without ids
    (K is their number), without scores ``[T, E]``, or for ids that don't fit.
    """
    shares, real = _shares(routing, num_experts, "sequence_balance_loss")
    if routing.topk_ids is None:
        raise InputError("sequence_balance_loss needs routing.topk_ids [T, K]")
    num_tokens, top_k = shares.shape[0], routing.topk_ids.shape[1]
    if sequence_ids is None:
        if num_sequences < 1 or num_tokens % num_sequences:
            raise InputError(
                f"{num_tokens} tokens are not {num_sequences} sequences of one length: "
                "pass sequence_ids"
            )
        sequence_ids = torch.arange(num_tokens, device=shares.device)
        sequence_ids = sequence_ids // max(num_tokens // num_sequences, 1)
    faults: list[str] = []
    expect(faults, "sequence_ids", sequence_ids, (num_tokens,), "integer")
    settle(faults)
    real = real.squeeze(1) & (sequence_ids >= 0) & (sequence_ids < num_sequences)
    home = torch.where(real, sequence_ids.long(), num_sequences)  # one more, for nobody's tokens

    best, order = torch.sort(shares.detach(), dim=-1, descending=True, stable=True)
    top = (best[:, :top_k] > 0).to(shares.dtype)
    chosen = torch.zeros_like(shares).scatter(1, order[:, :top_k], top)
    zeros = shares.new_zeros(num_sequences + 1, num_experts)
    counts = zeros.index_add(0, home, chosen)[:num_sequences]
    totals = zeros.index_add(0, home, shares)[:num_sequences]
    length = zeros[:, 0].index_add(0, home, torch.ones_like(shares[:, 0]))[:num_sequences]
    scale = num_experts / (top_k * length.clamp(min=1).square())
    losses = (counts * totals).sum(dim=-1) * scale  # 0 for an empty one
    return _mean(losses.sum(), (length > 0).sum(), groups)


def router_z_loss(routing: Routing, groups: Sequence[ProcessGroup] = ()) -> Tensor:
    """The mean over real tokens of ``logsumexp(router_logits)**2``: keeps logits small. A scalar.

    Experts with a NaN or -inf logit are left out, and so are tokens with no other. 0, with a graph,
    for no tokens. ST-MoE, arXiv 2202.08906, equation 5. Raises ``InputError`` for a routing
    without logits.
    """
    if routing.router_logits is None:
        raise InputError("router_z_loss needs routing.router_logits [T, E]; route() fills them in")
    valid, clean = cleaned(routing.router_logits, routing.token_mask)
    real = valid.any(dim=-1, keepdim=True)
    total = torch.where(valid | ~real, clean, -math.inf).logsumexp(dim=-1, keepdim=True)
    return _mean(torch.where(real, total, 0.0).square().sum(), real.sum(), groups)


def _shares(routing: Routing, num_experts: int, asked_by: str) -> tuple[Tensor, Tensor]:
    """Scores normalised per token ``[T, E]``, 0 in rows that aren't real; real bool ``[T, 1]``."""
    scores = routing.scores
    if scores is None:
        raise InputError(f"{asked_by} needs routing.scores [T, E]; route() fills them in")
    faults: list[str] = []
    expect(faults, "routing.scores", scores, ("T", num_experts), "float")
    settle(faults)
    total = scores.sum(dim=-1, keepdim=True)
    real = total > torch.finfo(scores.dtype).tiny  # 1/total is finite
    if routing.token_mask is not None:
        real = real & routing.token_mask[:, None]
    return torch.where(real, scores, 0.0) / torch.where(real, total, 1.0), real


def _mean(total: Tensor, count: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """Of the things that all ranks count, this rank's part times the number of ranks."""
    num_ranks = math.prod(group.size() for group in groups)
    return total * num_ranks / sum_over(count, groups).clamp(min=1).to(total.dtype)


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

"""The records between the stages. One frozen dataclass per layout; ``docs/design.md`` draws them.

N rows, one per token (``token_major``; later also one per token and rank); R rows, one per
(token, slot). ``paid`` says which debts of the layer are settled in these rows already
(``moe_core.manifest.DEBTS``): it travels with the data so that a sum or a weight that happens
twice is an error and not a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from moe_core.contracts import IdSpace

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Record:
    """Base of all layouts. ``layout`` is the name that manifests use."""

    layout: ClassVar[str]


@dataclass(frozen=True)
class TokenMajor(Record):
    """One row per token, with its choices alongside.

    ``rows`` ``[N, H]``; ``topk_ids`` int64 ``[N, K]`` in ``id_space``, -1 = not here;
    ``topk_weights`` ``[N, K]``. After the experts: rows whose slots are summed.
    """

    layout: ClassVar[str] = "token_major"
    rows: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    id_space: IdSpace = IdSpace.LOCAL
    paid: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankGrouped(Record):
    """Received rows, one per (token, rank), in ascending source rank, then token.

    ``rows`` ``[N, H]``; ``topk_ids`` int64 ``[N, K]``, local, -1 = lives elsewhere;
    ``topk_weights`` ``[N, K]``, 0 where the id is -1. ``num_slots``: how many ids are valid, where
    the host knows it (None: nobody has asked the device). DeepEP's normal layout.
    After the experts: rows whose local slots are summed.
    """

    layout: ClassVar[str] = "rank_grouped"
    rows: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    num_slots: int | None = None
    id_space: IdSpace = IdSpace.LOCAL
    paid: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlotList(Record):
    """Results, one row per valid (row, slot), ascending in (row, slot): ``rows`` ``[S, H]``.

    ``slot_index`` int64 ``[N, K]``: a slot's place in the list, -1 for an invalid one. Places that
    no slot names (the tail, where S is a bound) may hold anything and nobody may read them.
    """

    layout: ClassVar[str] = "slot_list"
    rows: Tensor
    slot_index: Tensor
    paid: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertContiguous(Record):
    """Rows sorted by local expert, stable in (token, slot).

    ``rows`` ``[R, H]``; expert e's rows are ``rows[expert_starts[e] : expert_starts[e] +
    tokens_per_expert[e]]``. ``expert_starts`` int32 ``[E_local + 1]``, exclusive with the end last
    (a gap for alignment may follow an expert's rows); ``tokens_per_expert`` int32 ``[E_local]``,
    both on the device. Rows that belong to no expert (gaps, the tail past ``expert_starts[-1]``)
    may hold anything and nobody may read them. ``row_weights`` ``[R]``: routing weight per row.
    """

    layout: ClassVar[str] = "expert_contiguous"
    rows: Tensor
    tokens_per_expert: Tensor
    expert_starts: Tensor
    row_weights: Tensor
    expert_alignment: int = 1
    paid: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertMasked(Record):
    """A block of rows per expert, of which the first few are taken: static shapes for graphs.

    ``rows`` ``[E_local, capacity, H]``; ``tokens_per_expert`` int32 ``[E_local]``: expert e's rows
    are ``rows[e, : tokens_per_expert[e]]``, the others may hold anything and nobody may read them.
    ``row_weights`` ``[E_local, capacity]``: routing weight per row. DeepEP's low-latency layout,
    DeepGEMM's masked one.
    """

    layout: ClassVar[str] = "expert_masked"
    rows: Tensor
    tokens_per_expert: Tensor
    row_weights: Tensor
    paid: tuple[str, ...] = ()


@dataclass(frozen=True)
class Indexed(Record):
    """Rows where they are, and which of them each expert reads: what a gathering GEMM takes.

    ``rows`` ``[N, H]``. ``sorted_token_ids`` int32 ``[N * K]``: the valid slots as ``token * K +
    slot``, sorted by local expert, stable in (token, slot), then a tail of -1; expert e's are those
    from ``expert_starts[e]`` up to ``expert_starts[e + 1]`` (int32 ``[E_local + 1]``), and
    ``tokens_per_expert`` int32 ``[E_local]`` says how many. ``slot_rows`` int32 ``[N, K]``: the
    inverse, a slot's place in the sorted list, -1 for an invalid one. ``topk_weights`` ``[N, K]``.
    After the experts: ``SlotMajor``.
    """

    layout: ClassVar[str] = "indexed"
    rows: Tensor
    sorted_token_ids: Tensor
    slot_rows: Tensor
    tokens_per_expert: Tensor
    expert_starts: Tensor
    topk_weights: Tensor
    paid: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlotMajor(Record):
    """Results, one row per (token, slot): ``rows`` ``[N, K, H]``.

    Rows of invalid slots may hold anything and nobody may read them.
    """

    layout: ClassVar[str] = "slot_major"
    rows: Tensor
    paid: tuple[str, ...] = ()

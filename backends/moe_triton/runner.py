"""The experts as one part: the runner of the ``triton`` backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.errors import InputError
from moe_core.interfaces import ExpertRunner
from moe_core.layouts import ExpertContiguous, ExpertMasked, Indexed, SlotMajor
from moe_triton.ops import experts

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import BuildContext, ExpertWeights
    from moe_core.layouts import Record


class TritonRunner(ExpertRunner):
    """``indexed`` → ``slot_major``; ``expert_contiguous`` and ``expert_masked`` as they come.

    Rows of invalid slots and of nobody are not read, and come back as the memory was. Roundings to
    the rows' dtype, per output: the activation and the result (bias and weight included); in
    between all is float32. Options: ``batch_invariant``: one block size for every batch, so that a
    row's result has the same bits whatever other rows there are; ``recompute``: the backward
    computes the first product ``[R, 2I]`` again, in place of keeping it from the forward.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        request = context.request
        self.batch_invariant = context.options.get("batch_invariant") == "true"
        self.recompute = context.options.get("recompute") == "true"
        self._weighs = "weight" in context.pays
        self._on_input = self._weighs and request.weight_on_input
        share = request.intermediate_size // request.tp_size
        self._widths = (request.hidden_size, share, share * (2 if request.gated else 1))

    def describe(self) -> dict[str, Any]:
        """As JSON: the options in use."""
        return {"batch_invariant": self.batch_invariant, "recompute": self.recompute}

    def run(self, record: Record, weights: ExpertWeights) -> Record:
        """Raises ``InputError`` for another layout, for a routing weight that is paid already, and
        for rows and weights of different dtypes."""
        if not isinstance(record, Indexed | ExpertContiguous | ExpertMasked):
            raise InputError(
                "the triton runner takes indexed, expert_contiguous or expert_masked rows, not "
                f"{record.layout}"
            )
        if record.rows.dtype != weights.w13.dtype:
            raise InputError(
                f"rows are {record.rows.dtype} and expert weights {weights.w13.dtype}: cast the "
                "rows first"
            )
        if self._weighs and "weight" in record.paid:
            raise InputError(f"the routing weight is paid already: paid={record.paid}")
        paid = record.paid + (("weight",) if self._weighs else ())
        if isinstance(record, Indexed):
            ids, slot_rows, starts = (
                record.sorted_token_ids, record.slot_rows, record.expert_starts
            )  # fmt: skip
            rows = self._experts(record, weights, record.topk_weights, ids, slot_rows, starts)
            return SlotMajor(rows=rows, paid=paid)
        starts = record.expert_starts if isinstance(record, ExpertContiguous) else None
        rows = self._experts(record, weights, record.row_weights, None, None, starts)
        return replace(record, rows=rows, paid=paid)

    def _experts(
        self,
        record: Indexed | ExpertContiguous | ExpertMasked,
        weights: ExpertWeights,
        row_weights: Tensor,
        ids: Tensor | None,
        slot_rows: Tensor | None,
        starts: Tensor | None,
    ) -> Tensor:
        own = (weights.w13, weights.w2, weights.w13_bias, weights.w2_bias)
        weighed = row_weights if self._weighs else None
        learns = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (record.rows, weighed, *own)
        )
        act = weights.activation
        out, _ = experts(
            record.rows, *own, weighed, ids, slot_rows, record.tokens_per_expert, starts,
            weights.w13_layout, act.name, act.gated, act.limit, act.limit_form == "after",
            act.alpha, self._on_input, learns and not self.recompute, self.batch_invariant,
        )  # fmt: skip
        return out

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Dense copies where weights aren't dense; the kernels read every ``w13_layout``."""
        return replace(weights, w13=weights.w13.contiguous(), w2=weights.w2.contiguous())

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        """What a forward allocates besides its result at most, in bytes: ``R * I`` elements for the
        activation and, for a backward without ``recompute``, ``R * W`` for the first product,
        with ``R = num_tokens * top_k`` rows and W rows of ``w13`` per expert."""
        _, share, width = self._widths
        size = getattr(torch, self.context.dtype).itemsize
        kept = width if self.context.request.autograd and not self.recompute else 0
        return num_tokens * top_k * (share + kept) * size

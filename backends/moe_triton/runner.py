"""The experts as one part: the runner of the ``triton`` backend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.errors import InputError
from moe_core.interfaces import ExpertRunner
from moe_core.layouts import ExpertContiguous, ExpertMasked, Indexed, SlotMajor
from moe_triton import configs, runtime, tuned
from moe_triton.ops import experts, run_experts, run_experts_backward
from moe_triton.tuning import Tuner

if TYPE_CHECKING:
    from collections.abc import Callable

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
        tuned.check_file()
        request = context.request
        self.batch_invariant = context.options.get("batch_invariant") == "true"
        self.recompute = context.options.get("recompute") == "true"
        self._weighs = "weight" in context.pays
        self._on_input = self._weighs and request.weight_on_input
        share = request.intermediate_size // request.tp_size
        self._widths = (request.hidden_size, share)

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
        out, _ = experts(
            record.rows, *own, weighed, ids, slot_rows, record.tokens_per_expert, starts,
            *self._how(weights), learns and not self.recompute, self.batch_invariant,
        )  # fmt: skip
        return out

    def _how(self, weights: ExpertWeights) -> tuple[Any, ...]:
        act, after = weights.activation, weights.activation.limit_form == "after"
        layout = weights.w13_layout
        return layout, act.name, act.gated, act.limit, after, act.alpha, self._on_input

    def warmup(self, weights: ExpertWeights, top_k: int, max_tokens: int) -> int:
        """Makes ready every kernel that calls with up to ``max_tokens`` tokens launch, backward
        included where the layer learns; afterwards none is compiled. For ``expert_masked``,
        ``max_tokens`` is the capacity. Returns how many kernels there are.

        No memory is taken and nothing runs: launches for meta tensors are planned, one call per
        tile height, and compiled for the current device (in the interpreter there is nothing to
        compile). Rows, and gradients of results, are taken to be dense.
        """
        chip = runtime.chip(weights.w13.device)
        with runtime.planning(chip, compiles=not runtime.INTERPRETED) as plan:
            for tokens in self._sizes(weights.num_local_experts, top_k, max_tokens):
                self._plan(_on_meta(weights), top_k, tokens)
        return len({launch.variant() for launch in plan.launches})

    def _sizes(self, num_experts: int, top_k: int, max_tokens: int) -> list[int]:
        """For each tile height the most tokens for which it is used."""
        if self.context.takes == "expert_masked":
            return [max_tokens]
        most = [height * num_experts // max(top_k, 1) for height in configs.BUCKETS]
        return [1, *(t for t in most if 1 < t < max_tokens), max_tokens]

    def _plan(self, weights: ExpertWeights, top_k: int, tokens: int) -> None:
        """A call, and its backward, on meta tensors, as ``run`` would make them."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        own = (weights.w13, weights.w2, weights.w13_bias, weights.w2_bias)
        experts, hidden, dtype = weights.num_local_experts, weights.w13.shape[2], weights.w13.dtype
        counts, starts = empty(experts), empty(experts + 1)
        ids = slot_rows = None
        shape = results = (tokens * top_k,)
        if self.context.takes == "indexed":
            shape, results = (tokens,), (tokens, top_k)
            ids, slot_rows = empty(tokens * top_k), empty(tokens, top_k)
        elif self.context.takes == "expert_masked":
            shape = results = (experts, tokens)
            starts = None
        weighed = empty(*results, dtype=torch.float32) if self._weighs else None
        given = (
            empty(*shape, hidden, dtype=dtype), *own, weighed, ids, slot_rows, counts, starts,
        )  # fmt: skip
        how = self._how(weights)
        forward: Any = run_experts
        backward: Any = run_experts_backward
        for learns in {False, self.context.request.autograd}:
            keep = learns and not self.recompute
            out, pre = forward(*given, *how, keep, self.batch_invariant)
            if learns:
                needs = [t is not None for t in given[:6]]
                backward(out, *given, pre, *how, self.batch_invariant, needs)

    def tuner(self, call: Callable[[], object]) -> Tuner:
        """What can be tried for the kernels that ``call`` launches (``moe-core bench --tune``)."""
        return Tuner(call)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Dense copies where weights aren't dense; the kernels read every ``w13_layout``."""
        return replace(weights, w13=weights.w13.contiguous(), w2=weights.w2.contiguous())

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        """What a forward without gradients allocates, its result included, in bytes: for each of
        ``num_tokens * top_k`` rows the activation, I elements, and the result, H elements, and 1024
        for the allocator's rounding. One that a backward follows keeps 2I elements per row more (I
        without a gate), unless ``recompute`` is on."""
        hidden, share = self._widths
        size = getattr(torch, self.context.dtype).itemsize
        return num_tokens * top_k * (share + hidden) * size + 1024


def _on_meta(weights: ExpertWeights) -> ExpertWeights:
    """The same shapes and strides, no memory."""

    def empty(t: Tensor | None) -> Any:
        if t is None:
            return None
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    names = ("w13", "w2", "w13_bias", "w2_bias")
    return replace(weights, **{name: empty(getattr(weights, name)) for name in names})

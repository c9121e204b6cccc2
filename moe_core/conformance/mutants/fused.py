"""Faulty fused paths: a transport and a runner behind one call, of which one step is wrong."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from moe_core.capabilities import Path, filled_options, find_path
from moe_core.conformance.mutants import LOCAL, active, mutant
from moe_core.conformance.mutants.runners import grad
from moe_core.groups import LOCAL as NO_GROUPS
from moe_core.interfaces import FusedPath
from moe_core.pipeline import load_target

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import BuildContext, ExpertWeights, Routing


class Staged(FusedPath):
    """What its carriers do one after the other."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.kept: Any = None
        both = active["transport"], active["runner"]
        path = find_path(*both, context.request)
        assert isinstance(path, Path), path

        def part(at: int, takes: str, gives: str) -> Any:
            role = both[at].part.role
            own = replace(
                context, takes=takes, gives=gives, options=filled_options(both[at]),
                pays=tuple(d for d, payer in path.payers.items() if payer == role),
            )  # fmt: skip
            return load_target(both[at])(own)

        self.transport = part(0, path.combined, path.dispatched)
        self.runner = part(1, path.runner_in, path.runner_out)
        self.converter: Any = None
        if path.converter is not None:
            module, _, name = path.converter.target.partition(":")
            self.converter = getattr(import_module(module), name)(context)

    @property
    def rank(self) -> int:
        return (self.context.groups or NO_GROUPS).rank

    def forward(self, hidden_states: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
        record, handle = self.transport.dispatch(hidden_states, routing)
        state = None
        if self.converter is not None:
            record, state = self.converter.there(record)
        record = self.runner.run(record, weights)
        if self.converter is not None:
            record = self.converter.back(record, state)
        return self.transport.combine(record, handle)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        return self.runner.prepare(weights)

    def report_fault(self, message: str) -> None:
        self.transport.report_fault(message)


fused = functools.partial(mutant, "fused", Staged, "forward")
LOCALLY: dict[str, Any] = {"carrier": f"{LOCAL}+{LOCAL}"}
NUMBERS, OPTIONS = "test_exact_numbers", "test_every_option"


def staged(self: Any, rows: Any, routing: Any, weights: Any, **change: Any) -> Any:
    """The right result, for other weights."""
    return Staged.forward(self, rows, routing, replace(weights, **change))


@fused(control=True)
def unchanged(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Nothing is wrong."""
    return staged(self, rows, routing, weights)


@fused(killer=OPTIONS, needs={"limit": "before"}, **LOCALLY)
def limit_ignored(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Nothing is clamped (sgl-project/sglang#39920)."""
    act = replace(weights.activation, limit=None)
    return staged(self, rows, routing, weights, activation=act)


@fused(killer=OPTIONS, needs={"alpha": True}, **LOCALLY)
def alpha_ignored(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """GPT-OSS's form is plain silu."""
    act = replace(weights.activation, alpha=None)
    return staged(self, rows, routing, weights, activation=act)


@fused(killer=OPTIONS, needs={"bias": True}, **LOCALLY)
def bias_ignored(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Biases are left out."""
    return staged(self, rows, routing, weights, w13_bias=None, w2_bias=None)


@fused(killer=OPTIONS, needs={"w13_layout": "interleaved"}, **LOCALLY)
def layout_ignored(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Gate and up are taken for halves."""
    return staged(self, rows, routing, weights, w13_layout="gate_up")


@fused(killer=OPTIONS, needs={"weight_on_input": True}, **LOCALLY)
class WeightOnOutput(Staged):
    """weight_on_input is ignored."""

    def __init__(self, context: BuildContext) -> None:
        request = replace(context.request, weight_on_input=False)
        super().__init__(replace(context, request=request))


@fused(killer=NUMBERS, **LOCALLY)
def last_slot_dropped(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """A token's last slot is left out."""
    ids = routing.topk_ids
    slot = torch.arange(ids.shape[1], device=ids.device)
    ids = torch.where(slot < len(slot) - 1, ids, -1)
    return staged(self, rows, replace(routing, topk_ids=ids), weights)


@fused(killer=NUMBERS, **LOCALLY)
def minus_one_wraps(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Id -1 is the last expert."""
    ids = routing.topk_ids % self.context.num_experts
    return staged(self, rows, replace(routing, topk_ids=ids), weights)


@fused(killer=NUMBERS, **LOCALLY)
def weight_twice(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """The routing weight is paid twice."""
    squared = replace(routing, topk_weights=routing.topk_weights.square())
    return staged(self, rows, squared, weights)


@fused(killer=NUMBERS, **LOCALLY)
def neighbours(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Rows meet the next expert's second matrix."""
    return staged(self, rows, routing, weights, w2=weights.w2.roll(-1, 0))


@fused(killer="test_numbers_and_gradients", needs={"autograd": True}, **LOCALLY)
def no_gradient_for_the_input(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """The gradient of the rows is zero."""
    return staged(self, grad(rows, torch.zeros_like), routing, weights)


@fused(killer="test_numbers_and_gradients", needs={"autograd": True}, **LOCALLY)
def no_gradient_for_the_weights(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """The gradient of the routing weights is zero."""
    cut = grad(routing.topk_weights, torch.zeros_like)
    return staged(self, rows, replace(routing, topk_weights=cut), weights)


@fused(killer=NUMBERS, **LOCALLY)
def output_is_a_buffer(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Without gradients the result lies in a buffer that the next call uses again."""
    out = staged(self, rows, routing, weights)
    if torch.is_grad_enabled() or not len(out):
        return out
    if self.kept is None or self.kept.shape != out.shape or self.kept.dtype != out.dtype:
        self.kept = out.clone()
    return self.kept.copy_(out)


@fused(killer=NUMBERS, needs={"dtype": "bfloat16"}, **LOCALLY)
def wide_result(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Half precision comes back as float32."""
    out = staged(self, rows, routing, weights)
    return out.float() if out.dtype.itemsize == 2 else out


@fused(killer="test_placements", **LOCALLY)
class PlacementIgnored(Staged):
    """Slots past the number of experts are taken for those of other experts."""

    def forward(self, hidden_states: Tensor, routing: Any, weights: ExpertWeights) -> Tensor:
        ids, experts = routing.topk_ids, self.context.num_experts
        other = torch.where(ids >= experts, ids - experts, ids)
        return super().forward(hidden_states, replace(routing, topk_ids=other), weights)


@fused(killer=NUMBERS, ranks=(2,))
def only_rank_0_is_right(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """On other ranks the last expert is its neighbour."""
    if self.rank and len(weights.w2) > 1:
        w2 = torch.cat([weights.w2[:-1], weights.w2[:1]])
        return staged(self, rows, routing, weights, w2=w2)
    return staged(self, rows, routing, weights)


@fused(killer=f"{NUMBERS}[tp2]", ranks=(2,))
def tp_sum_twice(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """The sum over tensor parallel ranks is made twice."""
    return staged(self, rows, routing, weights) * self.context.request.tp_size


@fused(killer="test_idle_ranks", ranks=(2,))
def idle_rank_stays_away(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """A rank without tokens returns at once, where the others wait for it (vllm#51984)."""
    return staged(self, rows, routing, weights) if len(rows) else rows * 1


@fused(killer="test_bad_input", ranks=(2,))
class FaultsKept(Staged):
    """A rank with a fault tells nobody."""

    def report_fault(self, message: str) -> None:
        return

"""Faulty transports, local ones and over ranks. T tokens of this rank, K slots each."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_core.capabilities import filled_options
from moe_core.conformance.mutants import LOCAL, REPLICATED, active, mutant
from moe_core.conformance.mutants.runners import grad
from moe_core.contracts import Handle, Pending, Routing
from moe_core.groups import LOCAL as NO_GROUPS
from moe_core.interfaces import Transport
from moe_core.layouts import SlotMajor
from moe_core.pipeline import load_target

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import BuildContext


class MutantTransport(Transport[Any]):
    """Its carrier, with four places where something can go wrong."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        carrier = active["transport"]
        self.inner = load_target(carrier)(replace(context, options=filled_options(carrier)))
        self.max_in_flight, self.payload = self.inner.max_in_flight, self.inner.payload
        self.kept: Any = None

    @property
    def rank(self) -> int:
        return (self.context.groups or NO_GROUPS).rank

    def given(self, rows: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """What is dispatched."""
        return rows, routing

    def received(self, record: Any) -> Any:
        """What reaches the runner."""
        return record

    def returned(self, record: Any, plan: Any) -> Any:
        """What came from the runner."""
        return record

    def result(self, out: Tensor, plan: Any) -> Tensor:
        """What the layer gets: ``[T, H]``."""
        return out

    def dispatch_begin(self, hidden_states: Tensor, routing: Routing) -> Pending[Any]:
        rows, changed = self.given(hidden_states, routing)
        pending = self.inner.dispatch_begin(rows, changed)

        def finish() -> tuple[Any, Any]:
            record, handle = pending.finish()
            return self.received(record), handle

        return Pending(finish)

    def combine_begin(self, record: Any, handle: Handle[Any]) -> Pending[Tensor]:
        plan = handle.plan
        pending = self.inner.combine_begin(self.returned(record, plan), handle)
        return Pending(lambda: self.result(pending.finish(), plan))

    def report_fault(self, message: str) -> None:
        self.inner.report_fault(message)


transport = functools.partial(mutant, "transport", MutantTransport, "given", ranks=(2,))
on_return = functools.partial(mutant, "transport", MutantTransport, "result", ranks=(2,))
LOCALLY: dict[str, Any] = {"carrier": LOCAL, "ranks": (1,)}
NUMBERS = "test_exact_numbers"
GRADIENTS = "test_numbers_and_gradients"


def with_ids(routing: Routing, ids: Tensor) -> Routing:
    return replace(routing, topk_ids=ids)


def weighted(routing: Routing, weights: Tensor) -> Routing:
    return replace(routing, topk_weights=weights)


def tokens_of_all(count: int) -> list[int]:
    """Every rank's T."""
    if not dist.is_initialized():
        return [count]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, count)
    return said


@transport(control=True)
def unchanged(self: Any, rows: Any, routing: Any) -> Any:
    """Nothing is wrong."""
    return rows, routing


# -- which slot, which row


@transport(killer=NUMBERS)
def last_slot_dropped(self: Any, rows: Any, routing: Any) -> Any:
    """A token's last slot is left out."""
    ids = routing.topk_ids
    slot = torch.arange(ids.shape[1], device=ids.device)
    return rows, with_ids(routing, torch.where(slot < len(slot) - 1, ids, -1))


@transport(killer=NUMBERS)
def neighbours(self: Any, rows: Any, routing: Any) -> Any:
    """Rows go to the next expert."""
    ids, experts = routing.topk_ids, self.context.num_experts
    return rows, with_ids(routing, torch.where(ids < 0, ids, (ids + 1) % experts))


@transport(killer=NUMBERS)
def minus_one_wraps(self: Any, rows: Any, routing: Any) -> Any:
    """Id -1 is the last expert, and its weight counts."""
    return rows, with_ids(routing, routing.topk_ids % self.context.num_experts)


@transport(killer=NUMBERS)
def duplicates_once(self: Any, rows: Any, routing: Any) -> Any:
    """An expert that a token chose twice counts once."""
    ids = routing.topk_ids
    earlier = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(2)
    return rows, with_ids(routing, ids.masked_fill(earlier, -1))


@transport(killer=NUMBERS)
def uneven_experts_forgotten(self: Any, rows: Any, routing: Any) -> Any:
    """Where the ranks don't hold equally many experts the last one is lost."""
    ids, experts = routing.topk_ids, self.context.num_experts
    uneven = experts % self.context.request.ep_size > 0
    return rows, with_ids(routing, ids.masked_fill(ids == experts - 1, -1) if uneven else ids)


@on_return(killer=NUMBERS)
def other_tokens_where_uneven(self: Any, out: Any, plan: Any) -> Any:
    """Where ranks have different numbers of tokens results go to the next token."""
    return out.roll(1, 0) if len(set(tokens_of_all(len(out)))) > 1 else out


@on_return(killer=NUMBERS)
def only_rank_0_is_right(self: Any, out: Any, plan: Any) -> Any:
    """On other ranks the first token is zero."""
    first = (torch.arange(len(out), device=out.device) == 0)[:, None]
    return torch.where(first, 0, out) if self.rank else out


@on_return(killer=NUMBERS, ranks=(4,))
def only_two_ranks(self: Any, out: Any, plan: Any) -> Any:
    """From the third rank on the result is that of the first token."""
    return out[:1].expand_as(out) if self.rank > 1 and len(out) else out


@on_return(killer=f"{NUMBERS}[ep2-dp2]", ranks=(4,))
def replicas_of_the_layer(self: Any, out: Any, plan: Any) -> Any:
    """With dp the second replica's last token is zero."""
    groups = self.context.groups or NO_GROUPS
    last = (torch.arange(len(out), device=out.device) == len(out) - 1)[:, None]
    return torch.where(last, 0, out) if groups.dp_rank else out


@on_return(killer="test_large_batches")
def buffer_of_64(self: Any, out: Any, plan: Any) -> Any:
    """Tokens past the 64th of a rank get the first ones' results."""
    return out[torch.arange(len(out), device=out.device) % 64]


@on_return(killer=NUMBERS, **LOCALLY)
def strided_results(self: Any, out: Any, plan: Any) -> Any:
    """With an odd number of tokens the result is filled column by column."""
    return out.T.reshape(out.shape) if len(out) % 2 else out


@transport(killer="test_placements", carrier=REPLICATED)
class PlacementIgnored(MutantTransport):
    """Ids are taken for those of experts, one after the other."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(replace(context, placement=None))


@transport(killer="test_received_rows")
class DescendingRanks(MutantTransport):
    """Received rows begin with the last rank's."""

    def received(self, record: Any) -> Any:
        turned = {n: getattr(record, n).flip(0) for n in ("rows", "topk_ids", "topk_weights")}
        return replace(record, **turned)

    def returned(self, record: Any, plan: Any) -> Any:
        return replace(record, slot_index=record.slot_index.flip(0))


@transport(killer="test_received_rows")
class IdsOfElsewhere(MutantTransport):
    """What lives elsewhere has an id past the last local one, and not -1."""

    def received(self, record: Any) -> Any:
        return replace(record, topk_ids=torch.where(record.topk_ids < 0, 999, record.topk_ids))


@transport(killer="test_received_rows")
class WeightsOfElsewhere(MutantTransport):
    """What lives elsewhere keeps a weight."""

    def received(self, record: Any) -> Any:
        weights = torch.where(record.topk_ids < 0, 1, record.topk_weights)
        return replace(record, topk_weights=weights)


@transport(killer=NUMBERS)
class OneSlotTooFew(MutantTransport):
    """Counts one received slot too few."""

    def received(self, record: Any) -> Any:
        return replace(record, num_slots=max((record.num_slots or 0) - 1, 0))


# -- debts


@transport(killer=NUMBERS)
def weight_twice(self: Any, rows: Any, routing: Any) -> Any:
    """The routing weight is paid twice."""
    return rows, weighted(routing, routing.topk_weights.square())


@transport(killer=NUMBERS)
def weight_unpaid(self: Any, rows: Any, routing: Any) -> Any:
    """Slots are summed and not weighted."""
    return rows, weighted(routing, torch.ones_like(routing.topk_weights))


@transport(killer=NUMBERS)
def one_weight_per_token(self: Any, rows: Any, routing: Any) -> Any:
    """All slots of a token get the first one's weight."""
    weights = routing.topk_weights
    return rows, weighted(routing, weights[:, :1].expand_as(weights).contiguous())


@transport(killer=NUMBERS)
def rank_sum_unpaid(self: Any, rows: Any, routing: Any) -> Any:
    """Of the ranks that hold a token's experts only the first one's sum arrives."""
    ids = routing.topk_ids
    half = -(-self.context.num_experts // 2)
    near = ((ids >= 0) & (ids < half)).any(1, keepdim=True)
    return rows, with_ids(routing, torch.where(near & (ids >= half), -1, ids))


@on_return(killer=f"{NUMBERS}[tp2]")
def tp_sum_twice(self: Any, out: Any, plan: Any) -> Any:
    """The sum over tensor parallel ranks is made twice."""
    return out * self.context.request.tp_size


@transport(killer=f"{NUMBERS}[tp2]")
class TpSumUnpaid(MutantTransport):
    """Of the slices of an expert only the first one's part arrives."""

    def returned(self, record: Any, plan: Any) -> Any:
        groups = self.context.groups or NO_GROUPS
        return replace(record, rows=record.rows * 0) if groups.tp_rank else record


@on_return(killer=NUMBERS, carrier=REPLICATED)
def replicated_rows_summed_again(self: Any, out: Any, plan: Any) -> Any:
    """Rows that all ranks have come out as often as there are ranks (vllm-ascend#6710)."""
    request = self.context.request
    return out * request.ep_size if request.rows == "replicated" else out


@on_return(killer=NUMBERS, **LOCALLY)
def mean_of_slots(self: Any, out: Any, plan: Any) -> Any:
    """Slots are averaged."""
    return out / plan.topk_ids.shape[1]


@on_return(killer=NUMBERS, **LOCALLY)
def unwritten_tokens(self: Any, out: Any, plan: Any) -> Any:
    """Tokens without an expert are not written."""
    none = (plan.topk_ids < 0).all(1, keepdim=True)
    return torch.where(none, torch.empty_like(out), out)


# -- numbers


@transport(killer="test_slots_are_summed_in_order")
def slots_from_the_last(self: Any, rows: Any, routing: Any) -> Any:
    """A token's slots are summed from the last to the first."""
    ids, weights = (t.flip(1) for t in routing.ids_and_weights())
    return rows, replace(routing, topk_ids=ids, topk_weights=weights)


@transport(killer="test_slots_are_summed_in_order", **LOCALLY)
class RoundedSums(MutantTransport):
    """A sum over slots is rounded to the rows' dtype after each one (bfloat16 accumulation)."""

    def combine_begin(self, record: Any, handle: Handle[Any]) -> Any:
        ids, weights = handle.plan.topk_ids, handle.plan.topk_weights
        pays = "weight" in self.context.pays
        if not isinstance(record, SlotMajor):
            return self.inner.combine_begin(record, handle)
        self.inner.combine_begin(record, handle)
        total = torch.zeros_like(record.rows[:, 0])
        for slot in range(ids.shape[1]):
            row = torch.where(ids[:, slot, None] >= 0, record.rows[:, slot], 0)
            row = row * torch.where(ids >= 0, weights, 0)[:, slot, None] if pays else row
            total = (total + row).to(total.dtype)
        return Pending.ready(total)


@transport(killer="test_slots_are_summed_in_order", **LOCALLY)
def narrow_weights(self: Any, rows: Any, routing: Any) -> Any:
    """Weights are rounded to the rows' dtype (sglang#39351)."""
    weights = routing.topk_weights
    return rows, weighted(routing, weights.to(rows.dtype).to(weights.dtype))


@transport(killer="test_parts")
class SumsForTheCaller(MutantTransport):
    """Sums over all ranks what final_sum=caller leaves to the caller."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(replace(context, request=replace(context.request, final_sum="layer")))


@transport(killer="test_slots_are_summed_in_order")
class AlwaysPerRank(MutantTransport):
    """combine=per_slot is served as per_rank."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(replace(context, request=replace(context.request, combine="per_rank")))


@transport(killer="test_bytes")
class AlwaysPerSlot(MutantTransport):
    """combine=per_rank is served as per_slot: right numbers, more bytes."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(replace(context, request=replace(context.request, combine="per_slot")))


@transport(killer=GRADIENTS)
def rounded_on_the_wire(self: Any, rows: Any, routing: Any) -> Any:
    """Rows travel in bfloat16 though nobody asked for that."""
    return rows.to(torch.bfloat16).to(rows.dtype), routing


@transport(killer="test_wire_dtypes")
class WideWire(MutantTransport):
    """dispatch_dtype is ignored."""

    def __init__(self, context: BuildContext) -> None:
        request = replace(context.request, dispatch_dtype=context.dtype)
        super().__init__(replace(context, request=request))


@transport(killer="test_wire_dtypes")
class WideWayBack(MutantTransport):
    """combine_dtype is ignored."""

    def __init__(self, context: BuildContext) -> None:
        wide = "float64" if context.dtype == "float64" else "float32"
        super().__init__(replace(context, request=replace(context.request, combine_dtype=wide)))


@transport(killer="test_bytes")
def payload_doubled(self: Any, rows: Any, routing: Any) -> Any:
    """Everything is sent twice."""
    with torch.no_grad():
        self.inner.dispatch(rows.detach(), routing)
    return rows, routing


@transport(killer="test_bytes")
class RowPerSlot(MutantTransport):
    """A row goes out once per slot, though it says once per rank."""

    def given(self, rows: Tensor, routing: Any) -> Any:
        ids, weights = routing.ids_and_weights()
        flat = replace(routing, topk_ids=ids.reshape(-1, 1), topk_weights=weights.reshape(-1, 1))
        return rows.repeat_interleave(ids.shape[1], 0), flat

    def result(self, out: Tensor, plan: Any) -> Tensor:
        top_k = self.context.request.top_k
        return out.view(len(out) // top_k, top_k, out.shape[1]).sum(1)


# -- gradients


@transport(killer=GRADIENTS)
def no_gradient_for_the_weights(self: Any, rows: Any, routing: Any) -> Any:
    """The routing weights are cut off from the graph, and the router learns nothing."""
    weights = grad(routing.topk_weights, torch.zeros_like)
    return rows, weighted(routing, weights)


@transport(killer=GRADIENTS)
class NoGradientFromElsewhere(MutantTransport):
    """Rows that other ranks computed have no gradient for their tokens (transformers#48687)."""

    def received(self, record: Any) -> Any:
        keep = (lambda g: g * 0) if self.rank else (lambda g: g)
        return replace(record, rows=grad(record.rows, keep))


@transport(killer=GRADIENTS)
class GradientTimesRanks(MutantTransport):
    """The experts' gradients are those of as many batches as there are ranks (pytorch#160285)."""

    def received(self, record: Any) -> Any:
        size = self.context.request.ep_size
        return replace(record, rows=grad(record.rows, lambda g: g / size))

    def returned(self, record: Any, plan: Any) -> Any:
        size = self.context.request.ep_size
        return replace(record, rows=grad(record.rows, lambda g: g * size))


@on_return(killer="test_idle_ranks", carrier=LOCAL, ranks=(1,))
def nothing_has_no_graph(self: Any, out: Any, plan: Any) -> Any:
    """Without tokens the result is no part of the graph."""
    return out if len(out) else out.detach()


@on_return(killer="test_idle_ranks")
def idle_rank_has_no_graph(self: Any, out: Any, plan: Any) -> Any:
    """A rank without tokens enters no backward, where the others wait for it (Megatron-LM#3626)."""
    return out if len(out) else torch.zeros_like(out).requires_grad_(out.requires_grad)


# -- ranks that wait for each other


@transport(killer="test_idle_ranks")
class IdleRankStaysAway(MutantTransport):
    """A rank without tokens makes no exchange."""

    def dispatch_begin(self, hidden_states: Tensor, routing: Routing) -> Pending[Any]:
        if not len(hidden_states):
            raise ValueError("nothing to send")
        return super().dispatch_begin(hidden_states, routing)


@transport(killer="test_bad_input")
class FaultsKept(MutantTransport):
    """A rank with a fault tells nobody."""

    def report_fault(self, message: str) -> None:
        return


@transport(killer="test_bad_input")
class FaultsWithoutName(MutantTransport):
    """The ranks hear of a fault, and not whose it is."""

    def report_fault(self, message: str) -> None:
        from moe_core.errors import InputError

        try:
            self.inner.report_fault(message)
        except InputError:
            raise InputError("some rank has a fault") from None


@transport(killer="test_layers_share")
class GroupPerLayer(MutantTransport):
    """Every layer makes a group of its own (Primus-Turbo#345)."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        if dist.is_initialized():
            dist.new_group()


@transport(killer="test_meta")
class MeetsOnMeta(MutantTransport):
    """Building communicates, on the meta device too."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        tokens_of_all(0)


# -- handles and memory


@transport(killer="test_handles", **LOCALLY)
class HandleUsedAgain(MutantTransport):
    """A handle can be combined as often as one likes."""

    def combine_begin(self, record: Any, handle: Handle[Any]) -> Pending[Tensor]:
        return super().combine_begin(record, Handle(handle.plan, handle._owner))


@transport(killer="test_handles", **LOCALLY)
class HandleOfAnother(MutantTransport):
    """Another transport's handle is taken for its own."""

    def combine_begin(self, record: Any, handle: Handle[Any]) -> Pending[Tensor]:
        if handle._owner is not self.inner:
            handle = Handle(handle.consume(handle._owner), self.inner)
        return super().combine_begin(record, handle)


class Endless(Pending[Any]):
    def finish(self) -> Any:
        assert self._finish is not None
        return self._finish()


@transport(killer="test_handles", **LOCALLY)
class FinishedTwice(MutantTransport):
    """finish() yields its result again and again."""

    def dispatch_begin(self, hidden_states: Tensor, routing: Routing) -> Pending[Any]:
        done = super().dispatch_begin(hidden_states, routing).finish()
        return Endless(lambda: done)


@transport(killer="test_handles", **LOCALLY)
class StalePlan(MutantTransport):
    """The plan of the last dispatch is kept on the transport, and every combine uses that."""

    def dispatch_begin(self, hidden_states: Tensor, routing: Routing) -> Pending[Any]:
        record, handle = super().dispatch_begin(hidden_states, routing).finish()
        self.kept = handle.plan
        return Pending.ready((record, handle))

    def combine_begin(self, record: Any, handle: Handle[Any]) -> Pending[Tensor]:
        handle.consume(self.inner)
        return super().combine_begin(record, Handle(self.kept, self.inner))


@on_return(killer=NUMBERS, **LOCALLY)
def output_is_a_buffer(self: Any, out: Any, plan: Any) -> Any:
    """Without gradients the result lies in a buffer that the next call uses again."""
    if torch.is_grad_enabled() or not len(out):
        return out
    if self.kept is None or self.kept.shape != out.shape or self.kept.dtype != out.dtype:
        self.kept = out.clone()
    return self.kept.copy_(out)


@transport(killer=NUMBERS, **LOCALLY)
def writes_its_rows(self: Any, rows: Any, routing: Any) -> Any:
    """Tokens without an expert are set to zero where they lie."""
    with torch.no_grad():
        rows.detach()[(routing.topk_ids < 0).all(1)] = 0
    return rows, routing


@transport(killer=NUMBERS, **LOCALLY)
def writes_the_weights(self: Any, rows: Any, routing: Any) -> Any:
    """Weights of empty slots are set to zero where they lie."""
    with torch.no_grad():
        routing.topk_weights.detach()[routing.topk_ids < 0] = 0
    return rows, routing


@on_return(killer=NUMBERS, **LOCALLY)
def second_call(self: Any, out: Any, plan: Any) -> Any:
    """From the second call on the first token is zero."""
    self.kept = (self.kept or 0) + bool(len(out))
    first = (torch.arange(len(out), device=out.device) == 0)[:, None]
    return torch.where(first, 0, out) if self.kept > 1 else out

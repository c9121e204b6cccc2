"""Parts that are right, and manifests or attributes that say more than they do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.conformance.mutants import LOCAL
from moe_core.conformance.mutants.fused import fused, staged
from moe_core.conformance.mutants.runners import MutantRunner, by_token, runner
from moe_core.conformance.mutants.transports import MutantTransport, transport
from moe_core.contracts import IdSpace
from moe_core.manifest import Range

if TYPE_CHECKING:
    from moe_core.contracts import BuildContext

WIRE: dict[str, Any] = {"dispatch_dtype": ("float32",), "combine_dtype": ("float32",)}


@transport(killer="test_exact_numbers", carrier=LOCAL, offer={**WIRE, "ep_size": Range()})
class ExpertParallelIsClaimed(MutantTransport):
    """A transport within one rank says that it spreads experts."""


@transport(killer="test_exact_numbers[tp2]", carrier=LOCAL, offer={**WIRE, "tp_size": Range()})
class TensorParallelIsClaimed(MutantTransport):
    """A transport within one rank says that it sums over slices."""


@transport(
    killer="test_numbers_and_gradients[ep2-replicated]", offer={"rows": ("distinct", "replicated")}
)
class ReplicatedRowsAreClaimed(MutantTransport):
    """An all-to-all says that all ranks may bring the same rows."""


@transport(killer="test_offer", carrier=LOCAL, ranks=(1,))
class FewSlots(MutantTransport):
    """Any top_k is claimed, and two slots per token are the most."""

    def given(self, rows: Any, routing: Any) -> Any:
        ids = routing.topk_ids.clone()
        ids[:, 2:] = -1
        return rows, replace(routing, topk_ids=ids)


@transport(killer="test_handles", carrier=LOCAL, ranks=(1,))
class OneInFlight(MutantTransport):
    """Says that one dispatch may be open at once, and doesn't hinder a second."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.max_in_flight = 1


@transport(killer="test_bytes", ranks=(2,))
class PayloadIsLess(MutantTransport):
    """Says that a row goes out per slot, and sends one per rank."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.payload = "slots"


@runner(killer="test_a_row_alone")
class BatchInvarianceIsClaimed(MutantRunner):
    """Bits depend on how many rows there are, and batch_invariant says that they don't."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.batch_invariant = True

    def run(self, record: Any, weights: Any) -> Any:
        out = self.inner.run(record, weights)
        bit = torch.finfo(out.rows.dtype).eps * (len(out.rows) > 40)
        return replace(out, rows=out.rows * (1 + bit))


@runner(killer="test_compiles", needs={"compile": True})
def compiling_is_claimed(self: Any, record: Any, weights: Any) -> Any:
    """Asks the host how many rows the first expert has, which no whole graph can."""
    if record.tokens_per_expert[0].item() > 10**6:
        raise ValueError("too many rows")
    return self.inner.run(record, weights)


@runner(killer="test_compiles", needs={"compile": True})
def compiled_for_every_size(self: Any, record: Any, weights: Any) -> Any:
    """Every number of rows is another graph."""
    tuned = {2: 1.0, 14: 1.0}
    out = self.inner.run(record, weights)
    return replace(out, rows=out.rows * tuned.get(record.rows.shape[0], 1.0))


@runner(killer="test_offer", needs={"dtype": "float16"})
def half_precision_is_claimed(self: Any, record: Any, weights: Any) -> Any:
    """float16 is claimed, and raises."""
    if record.rows.dtype == torch.float16:
        raise NotImplementedError("no kernel for float16")
    return self.inner.run(record, weights)


@runner(killer="test_no_tokens", needs={"autograd": True})
def training_is_claimed(self: Any, record: Any, weights: Any) -> Any:
    """Gradients are claimed, and there is no graph."""
    with torch.no_grad():
        return self.inner.run(record, weights)


@fused(killer="test_offer", carrier=f"{LOCAL}+{LOCAL}", offer={"routing_ids": (True, False)})
def routing_is_claimed(self: Any, rows: Any, routing: Any, weights: Any) -> Any:
    """Says that it routes by itself, and takes the first experts."""
    if not routing.has_ids:
        ids = torch.arange(self.context.request.top_k, device=rows.device).expand(len(rows), -1)
        routing = replace(routing, topk_ids=ids, topk_weights=torch.full(ids.shape, 0.5))
        routing = replace(routing, id_space=IdSpace.PHYSICAL)
    return staged(self, rows, routing, weights)


@by_token(killer="test_offer")
def many_experts_are_claimed(self: Any, record: Any, weights: Any) -> Any:
    """Any number of experts is claimed, and four are the most."""
    ids = record.topk_ids
    return self.inner.run(replace(record, topk_ids=ids.masked_fill(ids > 3, -1)), weights)

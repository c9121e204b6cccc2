"""The parts that a resolution chose, built and fitted together.

``dispatch`` includes the converter's way there and ``combine`` its way back, so that a runner
always sees the layout it takes and a transport the one it combines.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_core import tracing
from moe_core.capabilities import Candidate, filled_options
from moe_core.contracts import BuildContext, ExchangePlan, ExpertWeights, Handle, Routing
from moe_core.errors import BackendLoadError, HandleError
from moe_core.groups import LOCAL, Groups
from moe_core.layouts import Record, SlotMajor
from moe_core.slot_map import SlotMap

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moe_core.interfaces import ExpertRunner, FusedPath, Transport
    from moe_core.placement import Placement
    from moe_core.resolution import Resolution


def load_target(candidate: Candidate) -> Any:
    """Imports ``"module:name"``. Raises ``BackendLoadError`` with whatever the import raised."""
    target = candidate.part.target
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise BackendLoadError(
            candidate.backend.name, candidate.distribution, target, reason
        ) from error


@dataclass(frozen=True)
class StagedPlan(ExchangePlan):
    """The transport's own handle and the converter's state, for the one handle a caller sees.

    ``num_tokens`` is the caller's T; the ids and weights are those that travelled, padding added.
    """

    inner: Handle[ExchangePlan]
    converter_state: Any

    @property
    def slot_rows(self) -> Tensor | None:
        """int64 ``[T, K]``: row of each (token, slot) in the buffer that this rank filled, -1 for
        none: the send buffer where rows travel, else the experts' own."""
        sent = getattr(self.inner.plan, "slot_rows", None)
        return sent if sent is not None else getattr(self.converter_state, "slot_rows", None)


class Pipeline:
    """Built from a resolution that is ``ok``. ``dtype`` and ``device`` are torch names.

    ``pad`` adds tokens before anything travels; their results are cut off at the end.
    """

    def __init__(
        self,
        resolution: Resolution,
        placement: Placement,
        dtype: str,
        device: str,
        groups: Groups = LOCAL,
        pad: Callable[[Tensor, Routing], tuple[Tensor, Routing]] | None = None,
    ) -> None:
        self.resolution, self.pad = resolution, pad
        self.slot_map = SlotMap(
            placement, device, groups.ep_rank, replicated=resolution.request.rows == "replicated"
        )
        path = resolution.path

        def context(role: str, takes: str = "", gives: str = "") -> BuildContext:
            payers = path.payers if path else {}
            return BuildContext(
                request=resolution.request,
                dtype=dtype,
                device=device,
                num_experts=placement.num_experts,
                groups=groups,
                num_local_experts=placement.num_local_slots(groups.ep_rank),
                first_local_expert=placement.first_slot(groups.ep_rank),
                placement=placement,
                takes=takes,
                gives=gives,
                pays=tuple(debt for debt, payer in payers.items() if payer == role),
                options=filled_options(resolution.parts[role]) if role in resolution.parts else {},
            )

        self.fused: FusedPath | None = None
        self.transport: Transport[ExchangePlan] | None = None
        self.runner: ExpertRunner | None = None
        self.converter: Any = None
        if "fused" in resolution.parts:
            self.fused = load_target(resolution.parts["fused"])(context("fused"))
            return
        assert path is not None
        transport, runner = resolution.parts["transport"], resolution.parts["runner"]
        self.transport = load_target(transport)(
            context("transport", takes=path.combined, gives=path.dispatched)
        )
        self.runner = load_target(runner)(
            context("runner", takes=path.runner_in, gives=path.runner_out)
        )
        if path.converter is not None:
            module, _, name = path.converter.target.partition(":")
            self.converter = getattr(import_module(module), name)(context("converter"))

    @property
    def _staged(self) -> tuple[Transport[ExchangePlan], ExpertRunner]:
        if self.transport is None or self.runner is None:
            raise HandleError(
                f"backend {self.resolution.name!r} is fused: it has no separate dispatch, run and "
                "combine; call forward"
            )
        return self.transport, self.runner

    def dispatch(
        self, hidden_states: Tensor, routing: Routing, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Record, Handle[StagedPlan]]:
        """``meanwhile`` runs while the rows travel."""
        transport, _ = self._staged
        num_tokens = hidden_states.shape[0]
        if self.pad is not None:
            hidden_states, routing = self.pad(hidden_states, routing)
        with tracing.stage("dispatch", hidden_states.device):
            routing = self.slot_map.physical(routing)
            pending = transport.dispatch_begin(hidden_states, routing)
        if meanwhile is not None:
            meanwhile()
        with tracing.stage("dispatch", hidden_states.device):
            record, inner = pending.finish()
            state = None
            if self.converter is not None:
                record, state = self.converter.there(record)
        plan = inner.plan
        staged = StagedPlan(num_tokens, plan.topk_ids, plan.topk_weights, inner, state)
        return record, Handle(staged, self)

    def run(self, record: Record, weights: ExpertWeights) -> Record:
        _, runner = self._staged
        with tracing.stage("experts", weights.w13.device):
            return runner.run(record, weights)

    def combine(self, record: Record, handle: Handle[StagedPlan]) -> Tensor:
        transport, _ = self._staged
        plan = handle.consume(self)
        with tracing.stage("combine", plan.topk_ids.device):
            if self.converter is not None:
                record = self.converter.back(record, plan.converter_state)
            call = tracing.current()
            if call is not None:
                call.slot_rows = plan.slot_rows
                call.expert_rows = record.rows if isinstance(record, SlotMajor) else None
            out = transport.combine(record, plan.inner)
            return out if self.pad is None else out[: plan.num_tokens]

    def report_fault(self, error: Exception) -> None:
        """Tell the ranks that wait in this step's exchange; on one rank there are none."""
        part = self.fused if self.fused is not None else self.transport
        if part is not None:
            part.report_fault(str(error))

    def forward(
        self,
        hidden_states: Tensor,
        routing: Routing,
        weights: ExpertWeights,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """``[T, H]`` → ``[T, H]``, all stages."""
        if self.fused is not None:
            if meanwhile is not None:
                meanwhile()
            num_tokens = hidden_states.shape[0]
            if self.pad is not None:
                hidden_states, routing = self.pad(hidden_states, routing)
            with tracing.stage("fused", hidden_states.device):
                routing = self.slot_map.physical(routing)
                out = self.fused.forward(hidden_states, routing, weights)
            return out if self.pad is None else out[:num_tokens]
        record, handle = self.dispatch(hidden_states, routing, meanwhile)
        return self.combine(self.run(record, weights), handle)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        part = self.fused if self.fused is not None else self._staged[1]
        return part.prepare(weights)

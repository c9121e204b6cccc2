"""The routed experts: parameters, and the pipeline that runs them. The router is elsewhere.

Shapes: T tokens, K choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import functools
import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_core import tracing
from moe_core.building import Plan, plan_layer
from moe_core.capacity import drop_over_capacity, pad_to_capacity
from moe_core.checks import check_hidden, check_routing, values_are_checked
from moe_core.config import MoEConfig, ParallelConfig, dtype_name
from moe_core.contracts import INVALID, ExpertWeights, Handle, IdSpace, Routing
from moe_core.errors import InputError
from moe_core.pipeline import Pipeline, StagedPlan
from moe_core.placement import Placement, w13_blocks
from moe_core.routing.counts import RoutingCounts
from moe_core.shared_experts import SumSharedSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from moe_core.layouts import Record


class Experts(nn.Module):
    """The routed experts of one layer, run by a backend that is named in a string.

    Parameters, in the config's ``w13_layout``, are canonical and are the state_dict: ``w13
    [E_local, 2I/tp, H]`` (``[E_local, I/tp, H]`` without a gate), ``w2 [E_local, H, I/tp]``,
    ``w13_bias``, ``w2_bias``. E_local is the number of slots that ``placement`` gives this rank,
    one per expert and replica; the default is contiguous. A ``MoELayer`` whose shared experts are
    slots has theirs after those, and they are part of what ``forward`` returns. ``.to(...)`` to
    another dtype or device chooses the parts anew (collectively, where the layer spans ranks), and
    is refused (``ConfigError``) where none serve.

    Raises ``ConfigError`` with every fault and every candidate's every refusal.
    """

    w13_bias: Tensor | None
    w2_bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        parallel: ParallelConfig | None = None,
        backend: str | None = None,
        *,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
        max_tokens_per_rank: int | None = None,
        inference: bool = False,
        policy: str = "strict",
        compile: bool = False,
        cuda_graph: bool = False,
        placement: Placement | None = None,
        plan: Plan | None = None,
    ) -> None:
        super().__init__()
        target = torch.device(device) if device is not None else torch.get_default_device()
        self.config, self.parallel = config, parallel or ParallelConfig()
        self.inference, self.max_tokens_per_rank = inference, max_tokens_per_rank
        make_plan = functools.partial(
            plan_layer,
            parallel=self.parallel,
            backend=backend,
            mesh=mesh,
            max_tokens_per_rank=max_tokens_per_rank,
            policy=policy,
            autograd=not inference,
            compile=compile,
            cuda_graph=cuda_graph,
            router="none" if plan is None else plan.resolution.request.router,
            routing_ids=plan is None or plan.resolution.request.routing_ids,
        )
        plan = plan or make_plan(config, device=target, placement=placement)
        self._plan: Callable[..., Plan] = functools.partial(
            make_plan, placement=placement, shared_slots=plan.placement.shared_slots
        )
        self._build(plan, target)
        local = self.placement.num_local_slots(self.groups.ep_rank)
        share = config.intermediate_size // self.parallel.tp_size
        rows, hidden = share * (2 if config.activation.gated else 1), config.hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            data = torch.empty(local, *shape, dtype=self.dtype, device=target)
            return nn.Parameter(data, requires_grad=not inference)

        self.w13 = parameter(rows, hidden)
        self.w2 = parameter(hidden, share)
        self.w13_bias = parameter(rows) if config.bias else None
        self.w2_bias = parameter(hidden) if config.bias else None
        self.counts = RoutingCounts(config.num_experts, target)
        # load_state_dict(assign=True) puts other tensors in place without a word to _apply
        self.register_load_state_dict_post_hook(_after_load)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 1/sqrt(fan in); biases zero.

        Each logical expert has a seed of its own, drawn from torch's generator once for all: with
        the same seed on all ranks the experts are the same at any width and in each replica, and no
        two are alike. Shared slots are the layer's to fill.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        config = self.config
        if self.w13.is_meta:
            return
        with torch.no_grad():
            for i, expert in enumerate(self.placement.experts_of(self.groups.ep_rank)):
                own = torch.Generator(self.w13.device).manual_seed(seed + expert)
                draw = functools.partial(
                    torch.randn, dtype=self.dtype, device=self.w13.device, generator=own
                )
                w13 = draw(config.w13_rows, config.hidden_size)
                w2 = draw(config.hidden_size, config.intermediate_size)
                self.w13[i] = self._cut_w13(w13, 0) / math.sqrt(config.hidden_size)
                self.w2[i] = self._cut_w2(w2) / math.sqrt(config.intermediate_size)
            for bias in (self.w13_bias, self.w2_bias):
                if bias is not None:
                    bias.zero_()

    def _cut_w13(self, full: Tensor, dim: int) -> Tensor:
        c, tp_rank, tp_size = self.config, self.groups.tp_rank, self.parallel.tp_size
        if tp_size == 1:
            return full
        blocks = w13_blocks(c.intermediate_size, c.activation.gated, c.w13_layout, tp_rank, tp_size)
        return torch.cat([full.narrow(dim, a, b - a) for a, b in blocks], dim)

    def _cut_w2(self, full: Tensor) -> Tensor:
        return full.chunk(self.parallel.tp_size, -1)[self.groups.tp_rank]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    @property
    def is_distributed(self) -> bool:
        return self.parallel.world_size > 1

    @property
    def token_groups(self) -> tuple[ProcessGroup, ...]:
        """The process groups over which tokens differ: dp, and ep unless rows are replicated."""
        ep = self.groups.ep if self.parallel.rows == "distinct" else None
        return tuple(group for group in (self.groups.dp, ep) if group is not None)

    @property
    def weights(self) -> ExpertWeights:
        bias = self.w2_bias
        if bias is not None and self.parallel.tp_size > 1:
            bias = _OnceOverTp.apply(bias, self.groups.tp_rank)
        w13, w2 = self.w13, self.w2
        if self.placement.shared_slots and self.parallel.ep_size > 1:
            first = self.placement.num_local_experts(self.groups.ep_rank)
            w13, w2 = (SumSharedSlots.apply(w, first, self.groups.ep) for w in (w13, w2))
        return ExpertWeights(
            w13=w13,
            w2=w2,
            w13_bias=self.w13_bias,
            w2_bias=bias,
            w13_layout=self.config.w13_layout,
            activation=self.config.activation,
        )

    def _build(self, plan: Plan, device: torch.device) -> None:
        self.resolution, self.groups, self.placement = plan.resolution, plan.groups, plan.placement
        self.parallel, self._built_for = plan.resolution.parallel, device
        pad = None
        if self.config.capacity_factor is not None and self.config.capacity_policy == "pad":
            pad = functools.partial(pad_to_capacity, config=self.config)
        self.pipeline = Pipeline(
            plan.resolution, self.placement, self.config.dtype, str(device), plan.groups, pad
        )
        self._prepared: tuple[tuple[Any, ...], ExpertWeights] | None = None

    def set_placement(self, placement: Placement) -> None:
        """Say which expert each slot holds from now on; the weights are the caller's to move
        (``moe_core.balance.move_experts`` does both).

        Maps and prepared weights change in place, so that captured graphs go by them. Raises
        ``ConfigError`` where that can't be (``SlotMap.update``). Every rank must do the same.
        """
        self.pipeline.slot_map.update(placement)
        self.placement = placement
        self._plan = functools.partial(self._plan, placement=placement)
        if self._prepared is not None and self._prepared[0]:
            before = self._prepared[1]
            self.prepare_weights()
            key, after = self._prepared
            self._prepared = (key, _filled(before, after))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)
        self._follow_parameters()
        return self

    def _follow_parameters(self) -> None:
        """Another dtype or device of the parameters is another request: choose again."""
        device = self.w13.device
        if device.type == "meta" or (self.w13.dtype, device) == (self.dtype, self._built_for):
            return
        self.config = replace(self.config, dtype=dtype_name(self.w13.dtype))
        if self.counts.dropped_slots.device != device:
            records = self.counts.expert_load is not None
            self.counts = RoutingCounts(self.config.num_experts, device)
            self.counts.record_load(records)
        self._build(self._plan(self.config, device=device), device)

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        accepted: Routing | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """``hidden_states [..., H]``, ``topk_ids`` and ``topk_weights`` ``[T, K]`` → ``[..., H]``.

        T is the product of the leading sizes, 0 included. Ids are logical, -1 = no expert.
        Raises ``InputError`` for shapes, dtypes and (on CPUs or with ``MOE_VALIDATE=1``) values;
        elsewhere an id out of range becomes -1 and ``stats()`` shows that it happened. Where the
        layer spans ranks, one rank's fault raises on all of them.

        ``accepted``: what ``accept`` returned, with its rows, in place of ids and weights.
        ``meanwhile`` is called while the rows travel.
        """
        if accepted is not None:
            return self._run_all(hidden_states, accepted, meanwhile)
        rows, routing = self._accept(hidden_states, Routing(topk_ids, topk_weights))
        call = tracing.layer_call("experts", self)
        with call:
            return self._run_all(rows, routing, meanwhile).view(hidden_states.shape)

    def _run_all(
        self, rows: Tensor, routing: Routing, meanwhile: Callable[[], None] | None
    ) -> Tensor:
        with self._no_autocast():
            out = self.pipeline.forward(rows, routing, self._current_weights(), meanwhile)
        traced = tracing.current()
        if traced is not None:
            traced.hidden_states, traced.routing, traced.output = rows, routing, out
        return out

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Record, Handle[StagedPlan]]:
        """First of the three stages of ``forward``; ``[T, H]`` → the runner's layout."""
        # copies: the handle outlives this call, and the caller may fill the buffers anew
        routing = Routing(topk_ids.clone(), topk_weights.clone())
        rows, routing = self._accept(hidden_states, routing)
        with self._no_autocast():
            return self.pipeline.dispatch(rows, routing)

    def run(self, record: Record) -> Record:
        """The experts themselves."""
        with self._no_autocast():
            return self.pipeline.run(record, self._current_weights())

    def combine(self, record: Record, handle: Handle[StagedPlan]) -> Tensor:
        """→ ``[T, H]``; uses the handle up (``HandleError`` for a used or foreign one)."""
        with self._no_autocast():
            return self.pipeline.combine(record, handle)

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(self.w13.device.type, enabled=False)

    def _accept(self, hidden_states: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        if not self.is_distributed:
            return self.accept(hidden_states, routing)
        try:
            return self.accept(hidden_states, routing)
        except Exception as error:
            self.pipeline.report_fault(error)
            raise

    def accept(self, hidden_states: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """Checks, casts, flattens, counts, drops what is over capacity; says nothing to others."""
        config = self.config
        rows = check_hidden(hidden_states, config.hidden_size, self.w13)
        rows = rows.reshape(-1, config.hidden_size)
        if routing.id_space is not IdSpace.LOGICAL:
            raise InputError(f"topk_ids must be logical ids, these are {routing.id_space} ones")
        limit = self.max_tokens_per_rank
        if limit is not None and rows.shape[0] > limit:
            raise InputError(
                f"{rows.shape[0]} tokens, but the layer was built with max_tokens_per_rank={limit}"
            )
        if self.inference and torch.is_grad_enabled() and rows.requires_grad:
            raise InputError(
                "this layer was built with inference=True and its input needs a gradient: build it "
                "with inference=False, or call it under torch.no_grad()"
            )
        if routing.has_ids != self.resolution.request.routing_ids:
            have, need = ("no ids", "ids") if not routing.has_ids else ("ids", "no ids")
            raise InputError(
                f"the routing holds {have}, and backend {self.resolution.name!r} was chosen for "
                f"{need}: a router that leaves the choice to the kernel says routing_ids = False"
            )
        if routing.topk_ids is None:
            return rows, routing
        if routing.topk_weights is None:
            raise InputError("topk_weights is missing; only a MoELayer's router can weigh a choice")
        ids, weights = check_routing(
            rows, routing.topk_ids, routing.topk_weights, config.num_experts, config.top_k
        )
        if not values_are_checked(ids):
            bad = (ids < INVALID) | (ids >= config.num_experts)
            ids = ids.masked_fill(bad, INVALID)
            self.counts.add_invalid(bad.sum())
        routing = replace(routing, topk_ids=ids, topk_weights=weights)
        if self.training and not self.inference:
            self.counts.add_tokens(routing)
        if config.capacity_factor is not None:
            routing, dropped = drop_over_capacity(routing, config)
            self.counts.add_dropped(dropped)
        if self.counts.expert_load is not None:
            self.counts.add_load(routing)
        return rows, routing

    def prepare_weights(self) -> None:
        """Make an inference copy in the kernel's own format, used whenever gradients are off.

        The parameters stay; a change to them (seen by tensor, storage and version) prepares again
        at the next call. A change through ``.data`` in place can't be seen: prepare again.
        """
        with torch.no_grad():
            self._prepared = (self._weights_key(), self.pipeline.prepare(self.weights))

    def _weights_key(self) -> tuple[Any, ...]:
        # The storages are kept alive, so that no later one can lie where a known one lay.
        tensors = [t for t in (self.w13, self.w2, self.w13_bias, self.w2_bias) if t is not None]
        return tuple(
            (t, t.data_ptr(), t.untyped_storage(), 0 if t.is_inference() else t._version)
            for t in tensors
        )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave prepared weights behind, and prepare their own when called."""
        state = self.__dict__.copy()
        if self._prepared is not None:
            state["_prepared"] = ((), self.weights)
        return state

    def _current_weights(self) -> ExpertWeights:
        if self._prepared is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.weights
        known, now = self._prepared[0], self._weights_key()
        pairs = zip(known, now, strict=False)
        same = all(a[0] is b[0] and a[1] == b[1] and a[3] == b[3] for a, b in pairs)
        if not same or len(known) != len(now):
            self.prepare_weights()
        return self._prepared[1]

    def _own(self, w13: Any, w2: Any, w13_bias: Any, w2_bias: Any) -> Iterator[tuple[Any, ...]]:
        """(name, own parameter, the whole one, how to cut it for this tp rank)."""
        yield "w13", self.w13, w13, lambda t: self._cut_w13(t, 1)
        yield "w2", self.w2, w2, self._cut_w2
        yield "w13_bias", self.w13_bias, w13_bias, lambda t: self._cut_w13(t, 1)
        yield "w2_bias", self.w2_bias, w2_bias, lambda t: t

    def load_full_weights(
        self,
        w13: Tensor,
        w2: Tensor,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        """Copies this rank's part of the whole weights: ``w13 [E, 2I, H]``, ``w2 [E, H, I]``.

        Every replica gets its expert's. Raises ``InputError`` for shapes that don't fit; nothing is
        copied then.
        """
        config = self.config
        expected = {
            "w13": (config.num_experts, config.w13_rows, config.hidden_size),
            "w2": (config.num_experts, config.hidden_size, config.intermediate_size),
            "w13_bias": (config.num_experts, config.w13_rows),
            "w2_bias": (config.num_experts, config.hidden_size),
        }
        pairs = list(self._own(w13, w2, w13_bias, w2_bias))
        faults: list[str] = []
        for name, mine, full, _ in pairs:
            if (mine is None) != (full is None):
                state = "has no" if mine is None else "needs"
                faults.append(f"the layer {state} {name} (config.bias={config.bias})")
            elif full is not None and tuple(full.shape) != expected[name]:
                faults.append(f"{name} must have shape {expected[name]}, not {tuple(full.shape)}")
        if faults:
            raise InputError("; ".join(faults))
        own = self.placement.experts_of(self.groups.ep_rank)
        run = slice(own[0], own[-1] + 1) if own else slice(0)
        # a list of ids copies what it picks, a slice doesn't
        which = run if own == tuple(range(config.num_experts)[run]) else list(own)
        with torch.no_grad():
            for _, mine, full, cut in pairs:
                if mine is not None:
                    mine[: len(own)].copy_(cut(full[which]))

    def describe(self) -> dict[str, Any]:
        """What was built, as JSON data; no host sync."""
        runner, groups = self.pipeline.runner, self.groups
        return {
            "backend": self.resolution.name,
            "source": self.resolution.source,
            "parts": {role: c.label for role, c in self.resolution.parts.items()},
            "converters": [c.name for c in self.resolution.converters],
            "fingerprint": self.resolution.fingerprint,
            "widths": self.parallel.to_dict(),
            "place": {n: getattr(groups, n) for n in ("dp_rank", "ep_rank", "tp_rank")},
            "num_experts": self.config.num_experts,
            "num_physical_slots": self.placement.num_physical_slots,
            "num_local_slots": self.placement.num_local_slots(groups.ep_rank),
            "routing_width": self.config.top_k + self.placement.shared_slots,
            "dtype": self.config.dtype,
            "runner": getattr(runner, "describe", dict)(),
        }

    def stats(self) -> dict[str, Tensor]:
        """Counters on the device; reading one is what synchronises.

        ``invalid_ids``, ``dropped_slots``, ``tokens_per_expert`` and, where it is recorded,
        ``expert_load``: see ``RoutingCounts``.
        """
        names = ("invalid_ids", "dropped_slots", "tokens_per_expert", "expert_load")
        found = {name: getattr(self.counts, name) for name in names}
        return {name: count.clone() for name, count in found.items() if count is not None}

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"num_experts={c.num_experts}, top_k={c.top_k}, hidden_size={c.hidden_size}, "
            f"intermediate_size={c.intermediate_size}, backend={self.resolution.name!r}"
        )


def _filled(old: ExpertWeights, new: ExpertWeights) -> ExpertWeights:
    """``new``, its numbers in the memory of ``old`` wherever that has the same form."""

    def form(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.device, tensor.shape, tensor.stride()

    kept: dict[str, Tensor] = {}
    for f in fields(new):
        was, now = getattr(old, f.name), getattr(new, f.name)
        tensors = isinstance(was, Tensor) and isinstance(now, Tensor)
        if tensors and was is not now and form(was) == form(now):
            with torch.no_grad():
                kept[f.name] = was.copy_(now)
    return replace(new, **kept)


def _after_load(experts: Experts, _: Any) -> None:
    experts._follow_parameters()


class _OnceOverTp(torch.autograd.Function):
    """A bias that all tp ranks hold and one adds. Each rank's gradient is already the whole one:
    the ranks' results are summed, so all see the same upstream gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, tp_rank: int) -> Tensor:
        return bias.clone() if tp_rank == 0 else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None

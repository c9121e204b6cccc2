"""The whole layer: router, routed experts, shared experts.

Shapes: T tokens, K choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from moe_core import tracing
from moe_core.building import plan_layer
from moe_core.checks import check_hidden
from moe_core.config import MoEConfig, ParallelConfig
from moe_core.contracts import INVALID, Routing
from moe_core.errors import InputError
from moe_core.experts import Experts
from moe_core.interfaces import Router
from moe_core.pipeline import load_target
from moe_core.routing import CallableRouter, GateRouter, updated_correction_bias
from moe_core.routing.losses import sum_over
from moe_core.routing.recompute import through_tapes
from moe_core.shared_experts import SharedExperts, draw_weights, keep_slots_canonical, load_slots
from moe_core.sizes import layer_sizes, rank_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from moe_core.placement import Placement
    from moe_core.resolution import Resolution

PHASES = (None, "prefill", "decode")


class MoELayer(nn.Module):
    """``hidden_states [..., H]`` → ``[..., H]``: route, run the chosen experts, add the shared.

    ``backend``: a spec such as ``"auto"``, ``"torch"``, ``"A+B"``; precedence argument > config >
    ``MOE_BACKEND`` > auto. ``router``: your own ``Router`` or callable ``(hidden_states [T, H],
    input_ids [T]) → Routing`` or ``(topk_ids, topk_weights)`` in place of the configured one.
    ``inference=True`` asks for no gradients (more backends may serve). ``max_tokens_per_rank``
    bounds T. ``placement``: which rank has which expert, and how often; the default is contiguous.
    ``shared_experts`` is None where there are none and where they are slots of ``experts``
    (``config.shared_placement``). Raises ``ConfigError`` with every fault and every candidate's
    every refusal.
    """

    def __init__(
        self,
        config: MoEConfig,
        parallel: ParallelConfig | None = None,
        backend: str | None = None,
        *,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
        router: Router | Callable[..., Any] | None = None,
        max_tokens_per_rank: int | None = None,
        inference: bool = False,
        policy: str = "strict",
        compile: bool = False,
        cuda_graph: bool = False,
        placement: Placement | None = None,
    ) -> None:
        super().__init__()
        target = torch.device(device) if device is not None else torch.get_default_device()
        self.name = ""
        parallel = parallel or ParallelConfig()
        plan = plan_layer(
            config,
            parallel,
            backend,
            target,
            mesh=mesh,
            max_tokens_per_rank=max_tokens_per_rank,
            policy=policy,
            router=None if router is None else "custom",
            routing_ids=getattr(router, "routing_ids", True),
            autograd=not inference,
            compile=compile,
            cuda_graph=cuda_graph,
            placement=placement,
            shared_slots=config.shared_slots,
        )
        self.experts = Experts(
            config,
            parallel,
            backend,
            device=target,
            mesh=mesh,
            max_tokens_per_rank=max_tokens_per_rank,
            inference=inference,
            policy=policy,
            compile=compile,
            cuda_graph=cuda_graph,
            placement=placement,
            plan=plan,
        )
        own_router = router is None
        if router is None:
            router = load_target(plan.resolution.parts["router"])(config, device=target)
        elif not isinstance(router, Router):
            router = CallableRouter(router, config)
        assert isinstance(router, Router)
        self.router = router
        if inference and own_router:
            self.router.requires_grad_(False)
        self.shared_experts: SharedExperts | None = None
        if config.shared_slots:
            keep_slots_canonical(self)
            load_slots(self.experts, *draw_weights(config, self.experts.w13))
        elif config.num_shared_experts:
            self.shared_experts = SharedExperts(
                config, target, not inference, plan.groups, self.experts.parallel.tp_size
            )
        if own_router and not inference:
            self._warn_about_dead_router()

    def load_shared_weights(self, w13: Tensor, w2: Tensor, gate: Tensor | None = None) -> None:
        """Copies this rank's part of the whole ``w13 [2SW, H]``, ``w2 [H, SW]``, ``gate [1, H]``
        (``moe_core.shared_experts``), wherever they lie. Raises ``InputError`` for shapes."""
        if self.shared_experts is not None:
            self.shared_experts.load_full_weights(w13, w2, gate)
        elif self.config.shared_slots:
            load_slots(self.experts, w13, w2, gate)
        else:
            raise InputError("this layer has no shared experts (num_shared_experts=0)")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        super()._apply(fn, recurse)
        if self.shared_experts is not None:  # built on meta it had no group
            self.shared_experts.groups = self.experts.groups
        return self

    @property
    def config(self) -> MoEConfig:
        """As the layer is now: ``.to(dtype)`` changes it."""
        return self.experts.config

    def _warn_about_dead_router(self) -> None:
        routing = self.config.router
        constant = routing.renormalize or not routing.softmax_before_topk
        if self.config.top_k == 1 and constant:
            warnings.warn(
                "top_k=1 with normalised weights: every weight is the constant "
                f"{routing.routed_scaling_factor:g}, so the router gets no gradient from the "
                "output; add a load-balance loss, or set renormalize=false with "
                "softmax_before_topk=true",
                stacklevel=3,
            )

    @property
    def resolution(self) -> Resolution:
        return self.experts.resolution

    @property
    def backend_name(self) -> str:
        return self.experts.resolution.name

    @overload
    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
        *,
        routing: Routing | None = None,
        return_routing: Literal[False] = False,
        phase: str | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
        *,
        routing: Routing | None = None,
        return_routing: Literal[True],
        phase: str | None = None,
    ) -> tuple[Tensor, Routing]: ...

    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
        *,
        routing: Routing | None = None,
        return_routing: bool = False,
        phase: str | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        """``input_ids`` and ``token_mask`` have the leading shape of ``hidden_states``.

        ``token_mask`` True = a real token; rows of the others are not read, choose no expert and
        come back as zeros. ``routing``: use this one (saved, replayed) and don't route; one without
        weights (``saved.choice()``) is weighed by the router, which learns from it.
        ``return_routing``: also return what was used. ``phase`` picks one of several agreed plans
        (``"prefill"``, ``"decode"``); a local layer has one plan for all.
        """
        with tracing.layer_call(self.name, self.experts):
            if not self.experts.is_distributed:
                rows, mask, routing = self._route(
                    hidden_states, input_ids, token_mask, routing, phase
                )
                out = self.experts(rows, accepted=routing)
                shared = self._shared(rows)
            else:
                try:
                    rows, mask, routing = self._route(
                        hidden_states, input_ids, token_mask, routing, phase
                    )
                except Exception as error:  # the other ranks wait for this one
                    self.experts.pipeline.report_fault(error)
                    raise
                results: list[Tensor | None] = []
                out = self.experts(
                    rows, accepted=routing, meanwhile=lambda: results.append(self._shared(rows))
                )
                (shared,) = results
            out = out if shared is None else out + shared
            if mask is not None:
                out = torch.where(mask[:, None], out, 0)
            traced = tracing.current()
            if traced is not None:
                traced.output = out
        out = out.view(hidden_states.shape)
        return (out, routing) if return_routing else out

    def _route(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None,
        token_mask: Tensor | None,
        routing: Routing | None,
        phase: str | None,
    ) -> tuple[Tensor, Tensor | None, Routing]:
        """Everything before the first exchange: ``[T, H]`` rows, ``[T]`` mask, checked routing."""
        if phase not in PHASES:
            raise InputError(f"phase must be one of prefill, decode or None, not {phase!r}")
        hidden_size = self.config.hidden_size
        rows = check_hidden(hidden_states, hidden_size, self.experts.w13)
        rows, shape = rows.reshape(-1, hidden_size), hidden_states.shape
        ids = _per_token("input_ids", input_ids, shape)
        mask = _per_token("token_mask", token_mask, shape)
        if mask is not None:
            if mask.dtype != torch.bool:
                raise InputError(f"token_mask must be bool, not {mask.dtype}")
            rows = torch.where(mask[:, None], rows, 0)
        choice = routing.topk_ids if routing is not None and routing.topk_weights is None else None
        if routing is None or choice is not None:
            with tracing.stage("router", rows.device):
                made: Routing = self.router(rows, ids, mask)
                choice = through_tapes(choice, made.topk_ids)
                routing = made if choice is None else self.router.reweight(made, choice)
        if mask is not None and routing.topk_ids is not None:
            if routing.topk_ids.shape[:1] != mask.shape:
                raise InputError(
                    f"routing.topk_ids must have {len(mask)} rows like hidden_states, not shape "
                    f"{tuple(routing.topk_ids.shape)}"
                )
            own = routing.token_mask
            routing = replace(
                routing,
                topk_ids=routing.topk_ids.masked_fill(~mask[:, None], INVALID),
                token_mask=mask if own is None else mask & own,
            )
        rows, routing = self.experts.accept(rows, routing)
        return rows, mask, routing

    def update_correction_bias(self, rate: float = 1e-3) -> None:
        """Moves the router's ``e_score_correction_bias`` by the choices counted since the last
        time, summed over all ranks' tokens, and counts anew. Collective; after the optimizer step.

        Raises ``InputError`` for a router without that bias. See ``updated_correction_bias``.
        """
        bias = getattr(self.router, "e_score_correction_bias", None)
        if bias is None:
            raise InputError("the router has no correction bias: set router.correction_bias=true")
        counted = self.experts.counts.tokens_per_expert
        total = sum_over(counted, self.experts.token_groups)
        bias.copy_(updated_correction_bias(bias, total, rate))
        counted.zero_()

    def _shared(self, rows: Tensor) -> Tensor | None:
        if self.shared_experts is None:
            return None
        device = rows.device
        with tracing.stage("shared_experts", device), torch.autocast(device.type, enabled=False):
            return self.shared_experts(rows)

    def describe(self) -> dict[str, Any]:
        """What was built, as JSON data; no host sync. ``parameters``: of the whole layer, of it for
        one token, and on this rank; ``weight_bytes``: this rank's, buffers too, by dtype. A router
        of the caller's is not counted."""
        own, place = isinstance(self.router, GateRouter), self.experts.groups
        sizes = layer_sizes(self.config, router=own)
        here = rank_sizes(
            self.config, self.experts.parallel, self.experts.placement, place.ep_rank, router=own
        )
        return self.experts.describe() | {
            "router": type(self.router).__name__,
            "num_shared_experts": self.config.num_shared_experts,
            "shared_placement": self.config.shared_placement,
            "parameters": {"total": sizes.total, "active": sizes.active, "local": here.parameters},
            "flops_per_token": sizes.flops_per_token,
            "weight_bytes": here.bytes_by_dtype,
        }

    def stats(self) -> dict[str, Tensor]:
        """Counters on the device; reading one is what synchronises."""
        return self.experts.stats()


def _per_token(name: str, tensor: Tensor | None, shape: torch.Size) -> Tensor | None:
    """``[...]`` → ``[T]``."""
    if tensor is None:
        return None
    if tensor.shape != shape[:-1]:
        raise InputError(
            f"{name} must have shape {tuple(shape[:-1])} like hidden_states without its last "
            f"dimension, not {tuple(tensor.shape)}"
        )
    return tensor.reshape(-1)

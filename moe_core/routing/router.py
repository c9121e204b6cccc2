"""Routers as modules: a learned gate in front of ``route``, and a wrapper for a callable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from moe_core.config import ROUTER_KINDS
from moe_core.contracts import INVALID, IdSpace, Routing
from moe_core.errors import ConfigError, Fault, InputError
from moe_core.interfaces import Router
from moe_core.routing.checks import expect, settle
from moe_core.routing.scores import accumulate_dtype, without_autocast
from moe_core.routing.topk import reweight, route

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.config import MoEConfig


class GateRouter(Router):
    """``logits = hidden_states @ weight.T``, then ``route_fn``. Base of the learned routers.

    Parameter ``weight`` ``[E, H]`` and buffers ``e_score_correction_bias`` ``[E]`` (with
    ``correction_bias``) are float32, or float64 if the layer is, and stay so under ``.to()`` and
    ``.half()``; so does the table ``tid2eid``, int64 ``[vocab_size, K]`` (hash routing), which
    starts as ``(token_id + j) % E``. Raises ``ConfigError`` for a kind that the class can't do.
    """

    kinds: ClassVar[tuple[str, ...]] = ROUTER_KINDS
    route_fn: ClassVar[Callable[..., Routing]] = staticmethod(route)

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        kind = config.router.kind
        if kind not in self.kinds:
            message = f"{type(self).__name__} does {', '.join(self.kinds)}; build_router() picks"
            raise ConfigError([Fault("router.kind", kind, message)])
        self.config = config
        experts, top_k = config.num_experts, config.top_k
        dtype = torch.float64 if config.dtype == "float64" else torch.float32
        self.weight = nn.Parameter(
            torch.empty(experts, config.hidden_size, device=device, dtype=dtype)
        )
        bias = table = None
        if config.router.correction_bias:
            bias = torch.empty(experts, device=device, dtype=dtype)
        if config.router.vocab_size is not None and kind == "hash":
            table = torch.empty(config.router.vocab_size, top_k, device=device, dtype=torch.int64)
        self.e_score_correction_bias: Tensor | None
        self.tid2eid: Tensor | None
        self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("tid2eid", table)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weight normal, deviation 1/sqrt(H), from the global generator; bias 0; table as new."""
        self.weight.normal_(std=1 / math.sqrt(self.config.hidden_size))
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()
        if self.tid2eid is not None:
            table = self.tid2eid
            tokens = torch.arange(table.shape[0], device=table.device)[:, None]
            slots = torch.arange(table.shape[1], device=table.device)
            table.copy_((tokens + slots) % self.config.num_experts)

    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Routing:
        """``hidden_states`` float ``[T, H]`` → ``Routing``. Raises ``InputError`` as ``route``.

        Jitter is drawn where the router trains: in training mode, with a ``weight`` that learns.
        """
        faults: list[str] = []
        expect(faults, "hidden_states", hidden_states, ("T", self.config.hidden_size), "float")
        settle(faults)
        dtype = accumulate_dtype(hidden_states, self.weight)
        rows, jitter = hidden_states.to(dtype), self.config.router.jitter
        # Not by grad mode: a reentrant checkpoint's forward has none, its recompute has.
        if jitter and self.training and self.weight.requires_grad:
            rows = rows * torch.empty_like(rows).uniform_(1 - jitter, 1 + jitter)
        with without_autocast(hidden_states.device):
            logits = F.linear(rows, self.weight.to(dtype))
        return self.route_fn(
            logits,
            self.config.top_k,
            self.config.router,
            correction_bias=self.e_score_correction_bias,
            input_ids=input_ids,
            tid2eid=self.tid2eid,
            token_mask=token_mask,
        )

    def reweight(self, routing: Routing, topk_ids: Tensor) -> Routing:
        return reweight(routing, topk_ids, self.config.router)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves go through; casts that would lose bits of a score, or change an id, do not."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype:
                return moved
            if not tensor.dtype.is_floating_point:
                return tensor.to(moved.device)
            return tensor.to(moved.device, accumulate_dtype(moved))

        return super()._apply(keep, recurse)


class TopKRouter(GateRouter):
    """The experts with the best scores (``RouterConfig(kind="topk")``)."""

    kinds = ("topk",)


class HashRouter(GateRouter):
    """Experts from a table of token ids; the gate only gives the weights (``kind="hash"``)."""

    kinds = ("hash",)


def build_router(config: MoEConfig, device: torch.device | str | None = None) -> GateRouter:
    """The router that ``config.router.kind`` names; also a router part's target."""
    return (HashRouter if config.router.kind == "hash" else TopKRouter)(config, device)


RouterCallable = Callable[["Tensor", "Tensor | None"], "Routing | tuple[Tensor, Tensor]"]


class CallableRouter(Router):
    """A caller's own routing: ``fn(hidden_states [T, H], input_ids [T] | None)``.

    ``fn`` returns ``(topk_ids [T, K], topk_weights [T, K])`` or a ``Routing`` with logical ids; an
    ``nn.Module`` becomes a submodule. Ids of any integer dtype become int64, weights of any float
    dtype float32 (float64 if ``hidden_states`` is); weights are final, no scaling is added. Masked
    tokens get -1. A ``Routing`` without ids passes untouched. ``InputError`` for anything else.
    """

    def __init__(self, fn: RouterCallable, config: MoEConfig) -> None:
        super().__init__()
        self.fn = fn
        self.config = config

    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Routing:
        made = self.fn(hidden_states, input_ids)
        if isinstance(made, tuple) and len(made) == 2:
            made = Routing(*made)
        if not isinstance(made, Routing):
            raise InputError(
                f"a router must return a Routing or (topk_ids, topk_weights), got {type(made)}"
            )
        ids, weights, mask = made.topk_ids, made.topk_weights, made.token_mask
        if ids is None and weights is None:
            return made
        if not isinstance(ids, torch.Tensor) or not isinstance(weights, torch.Tensor):
            raise InputError(
                f"a router's ids and weights must be tensors, got {type(ids)} and {type(weights)}"
            )
        if token_mask is not None:
            mask = token_mask if mask is None else mask & token_mask
        num_tokens, faults = hidden_states.shape[0], list[str]()
        shape = (num_tokens, self.config.top_k)
        expect(faults, "the router's topk_ids", ids, shape, "integer")
        expect(faults, "the router's topk_weights", weights, shape, "float")
        if mask is not None:
            expect(faults, "token_mask", mask, (num_tokens,), "bool")
        if made.id_space != IdSpace.LOGICAL:
            faults.append(f"a router gives logical ids, got {made.id_space} ones")
        settle(faults)
        ids = ids.long()
        if mask is not None:
            ids = torch.where(mask[:, None], ids, INVALID)
        weights = torch.where(ids == INVALID, 0.0, weights.to(accumulate_dtype(hidden_states)))
        return replace(made, topk_ids=ids, topk_weights=weights, token_mask=mask)

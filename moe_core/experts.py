"""The routed experts: parameters, and the pipeline that runs them. The router is elsewhere.

Shapes: T tokens, K choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_core import environment, tracing
from moe_core.activation import sum_dtype
from moe_core.config import Activation, MoEConfig, ParallelConfig, dtype_name
from moe_core.contracts import INVALID, ExpertWeights, Handle, Routing
from moe_core.errors import ConfigError, Fault, InputError
from moe_core.pipeline import Pipeline, StagedPlan
from moe_core.placement import Placement
from moe_core.resolution import Resolution, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from moe_core.layouts import Record

POLICIES = ("strict", "adjust")


def resolve_or_raise(
    config: MoEConfig,
    parallel: ParallelConfig,
    backend: str | None,
    device: torch.device,
    **wants: Any,
) -> Resolution:
    """A resolution that is ok. Raises ``ConfigError`` with every fault and every refusal."""
    faults = list(environment.check_environment())
    if device.type == "cuda" and not torch.cuda.is_available():
        faults.append(Fault("device", str(device), "this machine or torch build has no CUDA"))
    resolution = resolve(config, parallel, backend, device=_real_type(device), **wants)
    if faults or not resolution.ok:
        raise ConfigError(faults, None if resolution.ok else resolution)
    return resolution


def _real_type(device: torch.device) -> str:
    """A layer built on the meta device is one for the CPU until it is moved."""
    return "cpu" if device.type == "meta" else device.type


def check_routing(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """int64 ids and float32/64 weights, both ``[T, K]``. Raises ``InputError`` with all faults."""
    shape = (hidden_states.shape[0], top_k)
    faults: list[str] = []
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tuple(tensor.shape) != shape:
            faults.append(f"{name} must have shape {shape} ([T, top_k]), not {tuple(tensor.shape)}")
        if tensor.device != hidden_states.device:
            faults.append(f"{name} is on {tensor.device}, hidden_states on {hidden_states.device}")
    if topk_ids.dtype.is_floating_point or topk_ids.dtype in (torch.bool, torch.complex64):
        faults.append(f"topk_ids must be int32 or int64, not {topk_ids.dtype}")
    if not topk_weights.dtype.is_floating_point:
        faults.append(f"topk_weights must be a float dtype, not {topk_weights.dtype}")
    if faults:
        raise InputError("; ".join(faults))
    ids = topk_ids.to(torch.int64)
    if _values_are_checked(ids) and ids.numel():
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < INVALID or high >= num_experts:
            bad = ((ids < INVALID) | (ids >= num_experts)).nonzero()
            token, slot = bad[0].tolist()
            raise InputError(
                f"{len(bad)} of {ids.numel()} topk_ids are not in [0, {num_experts}) or -1; the "
                f"first is {int(ids[token, slot])} at token {token}, slot {slot}"
            )
    return ids, topk_weights.to(sum_dtype(hidden_states.dtype))


def _values_are_checked(ids: Tensor) -> bool:
    """On CPUs and with ``MOE_VALIDATE=1``; never inside a compiled graph (it would break it)."""
    if torch.compiler.is_compiling():
        return False
    return ids.device.type == "cpu" or environment.validate()


def check_hidden(hidden_states: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """``[..., H]`` in the layer's dtype (under autocast any float dtype is cast to it)."""
    if hidden_states.ndim < 1 or hidden_states.shape[-1] != hidden_size:
        raise InputError(
            f"hidden_states must have shape [..., {hidden_size}], not {tuple(hidden_states.shape)}"
        )
    if hidden_states.dtype == dtype:
        return hidden_states
    if torch.is_autocast_enabled(hidden_states.device.type) and hidden_states.is_floating_point():
        return hidden_states.to(dtype)
    raise InputError(
        f"hidden_states must be {dtype} (the layer's dtype), not {hidden_states.dtype}"
    )


class Experts(nn.Module):
    """The routed experts of one layer, run by a backend that is named in a string.

    Parameters, in the config's ``w13_layout``, are canonical and are the state_dict: ``w13
    [E_local, 2I, H]`` (``[E_local, I, H]`` without a gate), ``w2 [E_local, H, I]``, ``w13_bias``,
    ``w2_bias``. ``.to(...)`` to another dtype or device chooses the parts anew, and is refused
    (``ConfigError``) where none serve.

    Raises ``ConfigError`` with every fault and every candidate's every refusal.
    """

    w13_bias: Tensor | None
    w2_bias: Tensor | None
    invalid_ids_seen: Tensor

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
        resolution: Resolution | None = None,
    ) -> None:
        super().__init__()
        self.parallel = parallel or ParallelConfig()
        target = torch.device(device) if device is not None else torch.get_default_device()
        _check_arguments(self.parallel, mesh, max_tokens_per_rank, policy)
        self.inference, self.max_tokens_per_rank = inference, max_tokens_per_rank
        self._wants: dict[str, Any] = {
            "autograd": not inference,
            "compile": compile,
            "cuda_graph": cuda_graph,
            "router": "none" if resolution is None else resolution.request.router,
            "routing_ids": resolution is None or resolution.request.routing_ids,
        }
        self._backend = backend
        self.config = config
        self.placement = Placement(config.num_experts, self.parallel.ep_size)
        if resolution is None:
            resolution = resolve_or_raise(config, self.parallel, backend, target, **self._wants)
        self._build(resolution, target)
        local = self.placement.num_local_experts(0)
        make = functools.partial(torch.empty, dtype=self.dtype, device=target)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(make(local, *shape), requires_grad=not inference)

        hidden, inner = config.hidden_size, config.intermediate_size
        self.w13 = parameter(config.w13_rows, hidden)
        self.w2 = parameter(hidden, inner)
        self.w13_bias = parameter(config.w13_rows) if config.bias else None
        self.w2_bias = parameter(hidden) if config.bias else None
        self.register_buffer(
            "invalid_ids_seen", torch.zeros((), dtype=torch.bool, device=target), persistent=False
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 1/sqrt(fan in); biases zero."""
        with torch.no_grad():
            for weight in (self.w13, self.w2):
                weight.normal_(0, 1 / math.sqrt(weight.shape[-1]))
            for bias in (self.w13_bias, self.w2_bias):
                if bias is not None:
                    bias.zero_()

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    @property
    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            w13=self.w13,
            w2=self.w2,
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
            w13_layout=self.config.w13_layout,
            activation=self.config.activation,
        )

    def _build(self, resolution: Resolution, device: torch.device) -> None:
        self.resolution = resolution
        self.pipeline = Pipeline(resolution, self.placement, self.config.dtype, str(device))
        self._prepared: tuple[tuple[Any, ...], ExpertWeights] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        """Moving or casting the parameters changes the request: choose again."""
        before = (self.w13.dtype, self.w13.device.type)
        super()._apply(fn, recurse)
        after = (self.w13.dtype, self.w13.device.type)
        if after != before and after[1] != "meta":
            self.config = replace(self.config, dtype=dtype_name(self.w13.dtype))
            device = self.w13.device
            self._build(
                resolve_or_raise(self.config, self.parallel, self._backend, device, **self._wants),
                device,
            )
        return self

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """``hidden_states [..., H]``, ``topk_ids`` and ``topk_weights`` ``[T, K]`` → ``[..., H]``.

        T is the product of the leading sizes, 0 included. Ids are logical, -1 = no expert.
        Raises ``InputError`` for shapes, dtypes and (on CPUs or with ``MOE_VALIDATE=1``) values;
        elsewhere an id out of range becomes -1 and ``stats()`` shows that it happened.
        """
        return self.forward_routing(hidden_states, Routing(topk_ids, topk_weights))

    def forward_routing(self, hidden_states: Tensor, routing: Routing) -> Tensor:
        """As ``forward``; also takes a routing without ids where the backend routes by itself."""
        shape = hidden_states.shape
        rows, routing = self._accept(hidden_states, routing)
        call = tracing.layer_call("experts", self.config.num_experts, self.parallel.world_size)
        with call, torch.autocast(rows.device.type, enabled=False):
            out = self.pipeline.forward(rows, routing, self._current_weights())
            traced = tracing.current()
            if traced is not None:
                traced.hidden_states, traced.routing, traced.output = rows, routing, out
        return out.view(shape)

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Record, Handle[StagedPlan]]:
        """First of the three stages of ``forward``; ``[T, H]`` → the runner's layout."""
        rows, routing = self._accept(hidden_states, Routing(topk_ids, topk_weights))
        return self.pipeline.dispatch(rows, routing)

    def run(self, record: Record) -> Record:
        """The experts themselves."""
        return self.pipeline.run(record, self._current_weights())

    def combine(self, record: Record, handle: Handle[StagedPlan]) -> Tensor:
        """→ ``[T, H]``; uses the handle up (``HandleError`` for a used or foreign one)."""
        return self.pipeline.combine(record, handle)

    def _accept(self, hidden_states: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        config = self.config
        rows = check_hidden(hidden_states, config.hidden_size, self.dtype)
        rows = rows.reshape(-1, config.hidden_size)
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
        if routing.topk_ids is None or routing.topk_weights is None:
            return rows, routing
        ids, weights = check_routing(
            rows, routing.topk_ids, routing.topk_weights, config.num_experts, config.top_k
        )
        if not _values_are_checked(ids):
            bad = (ids < INVALID) | (ids >= config.num_experts)
            ids = ids.masked_fill(bad, INVALID)
            self.invalid_ids_seen.logical_or_(bad.any())
        return rows, replace(routing, topk_ids=ids, topk_weights=weights)

    def prepare_weights(self) -> None:
        """Make an inference copy in the kernel's own format, used whenever gradients are off.

        The parameters stay; a change to them (seen by storage and version) prepares again at the
        next call.
        """
        with torch.no_grad():
            self._prepared = (self._weights_key(), self.pipeline.prepare(self.weights))

    def _weights_key(self) -> tuple[Any, ...]:
        tensors = (self.w13, self.w2, self.w13_bias, self.w2_bias)
        return tuple((t.data_ptr(), t._version) for t in tensors if t is not None)

    def _current_weights(self) -> ExpertWeights:
        if self._prepared is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.weights
        if self._prepared[0] != self._weights_key():
            self.prepare_weights()
        return self._prepared[1]

    def load_full_weights(
        self,
        w13: Tensor,
        w2: Tensor,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> None:
        """Copies this rank's part of the whole weights: ``w13 [E, 2I, H]``, ``w2 [E, H, I]``.

        Raises ``InputError`` for shapes that don't fit; nothing is copied then.
        """
        first, count = self.placement.first_expert(0), self.placement.num_local_experts(0)
        pairs = [("w13", self.w13, w13), ("w2", self.w2, w2)]
        pairs += [("w13_bias", self.w13_bias, w13_bias), ("w2_bias", self.w2_bias, w2_bias)]
        faults: list[str] = []
        for name, mine, full in pairs:
            if (mine is None) != (full is None):
                state = "has no" if mine is None else "needs"
                faults.append(f"the layer {state} {name} (config.bias={self.config.bias})")
            elif mine is not None and full is not None:
                expected = (self.config.num_experts, *mine.shape[1:])
                if tuple(full.shape) != expected:
                    faults.append(f"{name} must have shape {expected}, not {tuple(full.shape)}")
        if faults:
            raise InputError("; ".join(faults))
        with torch.no_grad():
            for _, mine, full in pairs:
                if mine is not None and full is not None:
                    mine.copy_(full[first : first + count])

    def describe(self) -> dict[str, Any]:
        """What was built, as JSON data; no host sync."""
        runner = self.pipeline.runner
        return {
            "backend": self.resolution.name,
            "source": self.resolution.source,
            "parts": {role: c.label for role, c in self.resolution.parts.items()},
            "converters": [c.name for c in self.resolution.converters],
            "fingerprint": self.resolution.fingerprint,
            "widths": self.parallel.to_dict(),
            "num_experts": self.config.num_experts,
            "num_local_experts": self.placement.num_local_experts(0),
            "dtype": self.config.dtype,
            "runner": getattr(runner, "describe", dict)(),
        }

    def stats(self) -> dict[str, Tensor]:
        """Counters on the device; reading one is what synchronises."""
        return {"invalid_ids_seen": self.invalid_ids_seen}

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"num_experts={c.num_experts}, top_k={c.top_k}, hidden_size={c.hidden_size}, "
            f"intermediate_size={c.intermediate_size}, backend={self.resolution.name!r}"
        )


def _check_arguments(
    parallel: ParallelConfig, mesh: DeviceMesh | None, limit: int | None, policy: str
) -> None:
    faults: list[Fault] = []
    if mesh is not None and mesh.size() != parallel.world_size:
        message = f"must hold dp * ep * tp = {parallel.world_size} ranks"
        faults.append(Fault("mesh", f"{mesh.size()} ranks", message))
    if limit is not None and limit < 1:
        faults.append(Fault("max_tokens_per_rank", limit, "must be at least 1"))
    if policy not in POLICIES:
        faults.append(Fault("policy", policy, f"must be one of {', '.join(POLICIES)}"))
    if faults:
        raise ConfigError(faults)


def moe_forward(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_layout: str = "gate_up",
    activation: Activation | None = None,
    backend: str | None = None,
) -> Tensor:
    """Routed experts as a function, local only: ``hidden_states [..., H]`` → ``[..., H]``.

    ``topk_ids`` and ``topk_weights`` ``[T, K]``; ``w13 [E, 2I, H]`` (``[E, I, H]`` without a
    gate); ``w2 [E, H, I]``; biases ``[E, 2I]`` and ``[E, H]``, both or neither. The backend is
    chosen once per configuration. Raises ``InputError`` and ``ConfigError`` as ``Experts`` does.
    """
    activation = activation or Activation()
    faults = _weight_faults(w13, w2, w13_bias, w2_bias, activation)
    if topk_ids.ndim != 2:
        faults.append(f"topk_ids must have shape [T, K], not {tuple(topk_ids.shape)}")
    if faults:
        raise InputError("; ".join(faults))
    num_experts, hidden_size, intermediate_size = w2.shape
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad
        for t in (hidden_states, topk_weights, w13, w2, w13_bias, w2_bias)
    )
    pipeline = _cached_pipeline(
        MoEConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=topk_ids.shape[1],
            activation=activation,
            w13_layout=w13_layout,
            bias=w13_bias is not None,
            dtype=dtype_name(w13.dtype),
        ),
        backend,
        environment.backend(),
        w13.device,
        needs_grad,
    )
    rows = check_hidden(hidden_states, hidden_size, w13.dtype).reshape(-1, hidden_size)
    ids, weights = check_routing(rows, topk_ids, topk_weights, num_experts, topk_ids.shape[1])
    if not _values_are_checked(ids):
        ids = ids.masked_fill((ids < INVALID) | (ids >= num_experts), INVALID)
    experts = ExpertWeights(w13, w2, w13_bias, w2_bias, w13_layout, activation)
    with torch.autocast(rows.device.type, enabled=False):
        out = pipeline.forward(rows, Routing(topk_ids=ids, topk_weights=weights), experts)
    return out.view(hidden_states.shape)


def _weight_faults(
    w13: Tensor, w2: Tensor, w13_bias: Tensor | None, w2_bias: Tensor | None, act: Activation
) -> list[str]:
    if w13.ndim != 3 or w2.ndim != 3:
        return [f"w13 and w2 must have 3 dimensions, not {w13.ndim} and {w2.ndim}"]
    faults: list[str] = []
    experts, hidden, inner = w2.shape
    rows = inner * (2 if act.gated else 1)
    if tuple(w13.shape) != (experts, rows, hidden):
        faults.append(
            f"w13 must have shape {(experts, rows, hidden)} to go with w2 {tuple(w2.shape)} and "
            f"gated={act.gated}, not {tuple(w13.shape)}"
        )
    if (w13_bias is None) != (w2_bias is None):
        faults.append("w13_bias and w2_bias go together")
    for name, bias, width in (("w13_bias", w13_bias, rows), ("w2_bias", w2_bias, hidden)):
        if bias is not None and tuple(bias.shape) != (experts, width):
            faults.append(f"{name} must have shape {(experts, width)}, not {tuple(bias.shape)}")
    tensors = [t for t in (w13, w2, w13_bias, w2_bias) if t is not None]
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        faults.append("w13, w2 and the biases must share one dtype and one device")
    return faults


@functools.lru_cache(maxsize=128)
def _cached_pipeline(
    config: MoEConfig,
    backend: str | None,
    _from_env: str | None,
    device: torch.device,
    autograd: bool,
) -> Pipeline:
    """``_from_env`` is part of the key: ``resolve`` reads it where ``backend`` is None."""
    resolution = resolve_or_raise(
        config, ParallelConfig(), backend, device, autograd=autograd, router="none"
    )
    return Pipeline(resolution, Placement(config.num_experts), config.dtype, str(device))

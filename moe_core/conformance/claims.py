"""What the manifest offers is served, and what it doesn't offer is refused by name.

    class TestMine(ClaimsConformance):
        backend = "mine"

One test per part and axis of ``Offer``, made from the fields of that class: an axis that is new is
tested at once, first on requests alone; with an entry in ``_ask`` also with real layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from moe_core import ConfigError, MoEConfig, MoELayer, ParallelConfig
from moe_core.capabilities import Candidate, Refusal, part_refusals
from moe_core.config import (
    ACTIVATIONS,
    COMBINES,
    DTYPES,
    FINAL_SUMS,
    LIMIT_FORMS,
    ROUTER_KINDS,
    ROWS,
    SCORING_FUNCS,
    W13_LAYOUTS,
    Activation,
)
from moe_core.conformance import bounds
from moe_core.conformance.cases import Case, oracle, sum_length
from moe_core.conformance.target import Conformance, Target
from moe_core.contracts import Routing
from moe_core.interfaces import Router
from moe_core.manifest import ROLE_AXES, Offer, Range, Request, meets, show
from moe_core.reference_routing import reference_route
from moe_core.resolution import make_request
from moe_core.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS: dict[str, tuple[Any, ...]] = {
    "device": ("cpu", "cuda"),
    "dtype": DTYPES,
    "dispatch_dtype": DTYPES,
    "combine_dtype": DTYPES,
    "router": ROUTER_KINDS,
    "scoring_func": SCORING_FUNCS,
    "quant": ("none",),
    "activation": ACTIVATIONS,
    "gated": (True, False),
    "routing_ids": (True, False),
    "limit": ("none", *LIMIT_FORMS),
    "w13_layout": W13_LAYOUTS,
    "combine": COMBINES,
    "rows": ROWS,
    "final_sum": FINAL_SUMS,
}
"""The values that a config can ask for on the axes of words."""
MOVING = (
    *("dispatch_dtype", "combine_dtype", "rows", "final_sum", "uneven_experts"),
    "max_tokens_per_rank",
)
"""Axes of what spans ranks: only looked at where a layer does."""
LARGEST = 512
"""Sizes above are resolved and not built."""


@dataclass(frozen=True)
class Ask:
    """How a user asks for one value of one axis."""

    config: dict[str, Any] = field(default_factory=dict[str, Any])
    parallel: dict[str, Any] = field(default_factory=dict[str, Any])
    wants: dict[str, Any] = field(default_factory=dict[str, Any])


def _ask(axis: str, value: Any, base: MoEConfig) -> Ask | None:
    """None for an axis that no field of a config, and no argument, speaks of."""
    router: Callable[..., Any] = lambda **c: Ask({"router": replace(base.router, **c)})  # noqa: E731
    spread: Callable[..., Any] = lambda **p: Ask(parallel={"ep_size": 2, **p})  # noqa: E731
    made: dict[str, Callable[[], Ask]] = {
        "router": lambda: router(kind=value, vocab_size=8 if value == "hash" else None),
        "scoring_func": lambda: router(scoring_func=value),
        "correction_bias": lambda: router(correction_bias=value),
        "expert_groups": lambda: router(
            num_expert_group=2 if value else None, topk_group=2 if value else None
        ),
        "quant": lambda: Ask({"quant": None if value == "none" else value}),
        "activation": lambda: Ask({"activation": Activation(name=value)}),
        "gated": lambda: Ask({"activation": Activation(gated=value)}),
        "limit": lambda: Ask(
            {
                "activation": Activation(limit=0.5, limit_form=value)
                if value != "none"
                else Activation()
            }
        ),
        "alpha": lambda: Ask({"activation": Activation(alpha=1.702 if value else None)}),
        "weight_on_input": lambda: Ask({"apply_router_weight_on_input": value}),
        # a layer drops by itself, unless the kernel routes
        "capacity": lambda: Ask(
            {"capacity_factor": 0.5 if value else None},
            wants={"routing_ids": False} if value else {},
        ),
        "jitter": lambda: router(jitter=0.25 if value else 0.0),
        "num_experts": lambda: Ask({"num_experts": value, "top_k": min(base.top_k, value)}),
        "top_k": lambda: Ask({"top_k": value, "num_experts": max(base.num_experts, value)}),
        "rows": lambda: spread(rows=value),
        "final_sum": lambda: Ask(
            {"intermediate_size": 2 * base.intermediate_size}, {"tp_size": 2, axis: value}
        ),
        "uneven_experts": lambda: Ask(
            {"num_experts": base.num_experts + (base.num_experts % 2 != value)}, {"ep_size": 2}
        ),
        "dispatch_dtype": lambda: Ask({"dispatch_dtype": value}, {"ep_size": 2}),
        "combine_dtype": lambda: Ask({"combine_dtype": value}, {"ep_size": 2}),
        "max_tokens_per_rank": lambda: Ask({}, {"ep_size": 2}, {axis: value}),
    }
    if axis in made:
        return made[axis]()
    if axis in ("ep_size", "tp_size", "dp_size"):
        experts = {"num_experts": base.num_experts * value} if axis == "ep_size" else {}
        inner = {"intermediate_size": base.intermediate_size * value} if axis == "tp_size" else {}
        return Ask(experts | inner, {axis: value})
    if axis in ("device", "routing_ids", "autograd", "compile", "cuda_graph"):
        return Ask(wants={axis: value})
    return Ask({axis: value}) if axis in {f.name for f in fields(MoEConfig)} else None


def values(axis: str, offered: Any) -> list[Any]:
    """Offered ones and others."""
    if isinstance(offered, bool):
        return [False, True]
    if axis in WORDS:
        return list(dict.fromkeys([*WORDS[axis], *(offered or ())]))
    if offered is None:
        return []
    if isinstance(offered, Range):
        first = -(-offered.min // offered.multiple_of) * offered.multiple_of
        found = {first, first + offered.multiple_of, first + 3 * offered.multiple_of}
        found |= {offered.min - 1, offered.min + 1, offered.max or first}
        found |= {offered.max + 1} if offered.max is not None else set()
        return sorted(v for v in found if v >= 1)
    plain = [v for v in offered if not isinstance(v, int) or isinstance(v, bool)]
    numbers = [v for v in offered if v not in plain]
    return [*offered, *([max(numbers) + 1] if numbers else ["something else"])]


def names(refusal: Refusal, axis: str) -> bool:
    """Whether it speaks of that axis: by name, or a rule that does."""
    if refusal.code != "rule":
        return refusal.axis == axis
    rule = next((r for r in RULES if r.id == refusal.axis), None)
    spoken = f"{refusal.axis} {refusal.wanted} {refusal.fix}".replace("-", "_")
    return (rule is not None and axis in rule.axes) or axis in spoken


class LogitsOnly(Router):
    """Leaves the choice to the kernel."""

    routing_ids = False

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.experts = config.num_experts

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> Routing:
        columns = torch.arange(self.experts, device=hidden_states.device) % hidden_states.shape[1]
        logits = hidden_states[:, columns].to(bounds.fine(hidden_states.dtype))
        return Routing(None, None, logits * (1 + columns))


class ClaimsConformance(Conformance):
    """Subclass it and set ``backend`` to a spec; tests collect the subclass."""

    profile: ClassVar[str] = "core"

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if not {"part", "axis"} <= set(metafunc.fixturenames):
            return
        if not self.backend:
            raise pytest.UsageError(f"{type(self).__name__} has no backend: set it to a spec")
        asked = {f.name for f in fields(Request)}
        cases = [
            (part, f.name)
            for part in self.target.parts
            for f in fields(Offer)
            if f.name in asked and self._concerns(part, f.name)
        ]
        ids = [f"{part.label}-{axis}" for part, axis in cases]
        metafunc.parametrize(("part", "axis"), cases, ids=ids)

    def _concerns(self, part: Candidate, axis: str) -> bool:
        if axis in MOVING:
            movers = part.part.role in ("transport", "fused")
            return movers and meets(2, part.part.offer.ep_size)
        return axis in ROLE_AXES[part.part.role]

    def test_offer(self, part: Candidate, axis: str, record_property: Any) -> None:
        """Every value: claimed ones are served (and computed, where that is quick), the others are
        refused by this part, naming the axis."""
        owner, offered = self.target, getattr(part.part.offer, axis)
        tried = values(axis, offered)
        for value in tried:
            claimed = meets(value, offered)
            self._request(part, axis, value, claimed)
            self._layer(part, axis, value, claimed)
            if not claimed:
                record_property("not_claimed", f"{axis}={show(value)}")
            elif axis == "device" and value != torch.device(owner.device).type:
                record_property("not_here", value)

    def _request(self, part: Candidate, axis: str, value: Any, claimed: bool) -> None:
        """The part alone, with nothing but this axis changed."""
        owner = self.target
        # a final sum is one over ranks with the same rows
        rows = "replicated" if axis == "final_sum" else "distinct"
        spans = ParallelConfig(ep_size=2 if axis in MOVING else 1, rows=rows)
        base = make_request(
            owner.config(num_experts=4), spans, device=owner.device, autograd=owner.autograd
        )
        refusals = part_refusals(part, replace(base, **{axis: value}))
        mine = [r for r in refusals if names(r, axis) and r.code != "check"]
        if claimed:
            assert not mine, f"offers {axis}={value} and refuses it: {mine[0]}"
        else:
            assert mine, f"doesn't offer {axis}={value} and no refusal says so: {refusals}"

    def _layer(self, part: Candidate, axis: str, value: Any, claimed: bool) -> None:
        owner = self.target
        try:
            asked = _ask(axis, value, owner.config())
            config = None if asked is None else replace(owner.config(), **asked.config)
        except ConfigError:
            return  # no config can say that
        if asked is None or config is None:
            return
        if asked.parallel and axis in MOVING and config.dtype != owner.config().dtype:
            return
        parallel, spec = ParallelConfig(**asked.parallel), owner.pinned(part)
        role = {"router": None} if part.part.role == "router" else {}
        found = owner.resolve(config, parallel, spec=spec, **role, **asked.wants)
        mine = [r for r in found.refusals if r.part == part.label and names(r, axis)]
        if not claimed:
            assert not found.ok, f"{spec} took {axis}={value}, which it doesn't offer"
            assert mine, f"no refusal of {part.label} names {axis}: {found.why_not()}"
            return
        assert not [r for r in mine if r.code != "check"], str(mine[0])
        size = value if isinstance(value, int) else 0
        if not found.ok or parallel.world_size > 1 or size > LARGEST:
            return  # a partner's refusal; ranks are for the suite of transports
        if axis == "capacity" and value:
            return  # which slots a kernel drops is its own affair
        if asked.wants.get("device", owner.device) != owner.device:
            return
        self._compute(owner, spec, config, asked.wants)

    def _compute(self, owner: Target, spec: str, config: MoEConfig, wants: dict[str, Any]) -> None:
        torch.manual_seed(0)
        wants = {"device": owner.device} | wants
        wants["inference"] = not wants.pop("autograd", owner.autograd)
        if not wants.pop("routing_ids", True):
            wants["router"] = LogitsOnly(config)
        layer = MoELayer(config, backend=spec, **wants)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(6, config.hidden_size, generator=generator, dtype=torch.float64)
        x = x.to(owner.device, layer.experts.dtype)
        ids = torch.arange(6, device=owner.device)
        y, routing = layer(x, ids if config.router.kind == "hash" else None, return_routing=True)
        if not routing.has_ids:  # the kernel chose, by the config's rules
            routing = reference_route(routing.router_logits, config.top_k, config.router)
        chosen, weights = routing.ids_and_weights()
        own = layer.experts
        case = Case(
            *(x, chosen, weights.detach(), own.w13.detach(), own.w2.detach()),
            b13=None if own.w13_bias is None else own.w13_bias.detach(),
            b2=None if own.w2_bias is None else own.w2_bias.detach(),
            layout=config.w13_layout,
            activation=config.activation,
            on_input=config.apply_router_weight_on_input,
        ).to("cpu")
        want, mass = oracle(case)
        limit = bounds.forward(mass, case.w13.dtype, sum_length(case))
        error = (y.detach().double().cpu() - want).abs()
        assert (error <= limit).all(), f"{config}: off by {error.max():.2e}"

"""What ``run`` finds out about a layer: loads, times, and how far it is from the reference.

The oracle is the ``reference`` backend in float64 on the CPU with the same weights and inputs. It
is given the routing that the layer chose, so that a near tie which went the other way does not
drown the numbers; the routing is compared for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.contracts import Routing
from moe_core.layer import MoELayer
from moe_core.placement import Placement
from moe_core.reference import expert_forward

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.config import MoEConfig
    from moe_core.tracing import LayerCall


def error_bound(config: MoEConfig) -> float:
    """Largest relative error that rounding explains, in units of the largest output.

    A row is rounded to the layer's dtype a handful of times; sums of H, I and K products are kept
    in float32 (float64 if the layer is) and their roundings, being independent, grow like the
    square root of the length. Eight units of each are allowed.
    """
    wide = torch.float64 if config.dtype == "float64" else torch.float32
    terms = sum(map(math.sqrt, (config.hidden_size, config.intermediate_size, config.top_k)))
    row = torch.finfo(getattr(torch, config.dtype)).eps
    return 8 * (row + torch.finfo(wide).eps * terms)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``max|a - b| / max|b|``; infinite where ``a`` isn't finite, 0 for nothing to compare."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if not expected.numel() or torch.equal(actual, expected):
        return 0.0
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    return error if math.isfinite(error) else math.inf


@dataclass
class LayerReport:
    """Sums over the calls of one layer. ``error``/``weight_error``: worst relative errors of output
    and routing weights; ``flips``: tokens that the reference would have routed otherwise, of which
    ``wrong_routes`` lie beyond rounding. All None where nothing was routed here or compared."""

    layer: MoELayer
    check: bool = True
    name: str = ""
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    rows_per_expert: list[int] = field(default_factory=list[int])
    error: float | None = None
    weight_error: float | None = None
    flips: int | None = None
    wrong_routes: int = 0

    def __post_init__(self) -> None:
        self.rows_per_expert = [0] * self.layer.config.num_experts
        self.bound = error_bound(self.layer.config)
        if self.check:
            config = replace(self.layer.config, dtype="float64", backend=None)
            self.oracle = MoELayer(config, backend="reference", device="cpu", inference=True)
            self.oracle.load_state_dict(self.layer.state_dict())

    def add(self, call: LayerCall, input_ids: Tensor | None = None, routed_here: bool = True):
        """Takes in one traced call; ``input_ids`` ``[T]``, ``routed_here`` False = route given."""
        assert call.hidden_states is not None
        assert call.routing is not None
        assert call.output is not None
        self.tokens += call.hidden_states.shape[0]
        for stage, seconds in call.stages.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        pairs = zip(self.rows_per_expert, call.rows_per_expert, strict=True)
        self.rows_per_expert = [a + b for a, b in pairs]
        if not self.check:
            return
        hidden = call.hidden_states.detach().double().cpu()
        input_ids = None if input_ids is None else input_ids.cpu()
        ids, weights = (t.detach().cpu() for t in call.routing.ids_and_weights())
        with torch.no_grad():
            expected = self.oracle(hidden, input_ids, routing=Routing(ids, weights.double()))
            self.error = max(self.error or 0.0, relative_error(call.output, expected))
            if routed_here:
                self._compare_routing(ids, weights, self.oracle.router(hidden, input_ids))

    def _compare_routing(self, ids: Tensor, weights: Tensor, expected: Routing) -> None:
        own_ids, own_weights = expected.ids_and_weights()
        flipped = (ids.sort(-1).values != own_ids.sort(-1).values).any(-1)
        self.flips = (self.flips or 0) + int(flipped.sum())
        error = relative_error(
            dense(ids, weights, self.layer.config)[~flipped],
            dense(own_ids, own_weights, self.layer.config)[~flipped],
        )
        self.weight_error = max(self.weight_error or 0.0, error)
        if not flipped.any():
            return
        scores, bias = expected.scores, getattr(self.oracle.router, "e_score_correction_bias", None)
        if self.layer.config.router.kind != "topk" or scores is None:
            self.wrong_routes += int(flipped.sum())  # nothing was a matter of rounding
            return
        choice = scores if bias is None else scores + bias
        worst = [choice.gather(1, i.clamp(min=0)).amin(-1) for i in (ids, own_ids)]
        gap = (worst[1] - worst[0]).abs() / choice.abs().amax(-1)
        self.wrong_routes += int((flipped & ~(gap <= self.bound)).sum())

    @property
    def agrees(self) -> bool | None:
        """None where nothing was compared."""
        if self.error is None:
            return None
        worst = max(self.error, self.weight_error or 0.0)
        return worst <= self.bound and not self.wrong_routes

    def to_dict(self) -> dict[str, Any]:
        """JSON data; an error that isn't finite is None, and ``agrees`` false."""
        config = self.layer.config
        busiest, rows = max(self.rows_per_expert), sum(self.rows_per_expert)
        return {
            "name": self.name or self.layer.name,
            "router": config.router.kind,
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "tokens": self.tokens,
            "rows_per_expert": self.rows_per_expert,
            "max_over_mean_load": busiest * config.num_experts / rows if rows else None,
            "seconds": self.seconds,
            "relative_error": _finite(self.error),
            "weight_relative_error": _finite(self.weight_error),
            "bound": self.bound,
            "routing_flips": self.flips,
            "wrong_routes": self.wrong_routes,
            "agrees": self.agrees,
        }


def dense(ids: Tensor, weights: Tensor, config: MoEConfig) -> Tensor:
    """Weight of each expert, float64 ``[T, E]``; slots without an expert give nothing."""
    result = torch.zeros(len(ids), config.num_experts, dtype=torch.float64)
    weights = torch.where(ids < 0, 0, weights).double()
    return result.scatter_add(1, ids.clamp(min=0), weights)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def follow(layer: MoELayer, call: LayerCall, row: int) -> dict[str, Any]:
    """One token's way through one traced call: row ``row`` to its experts and back.

    ``layer`` holds all experts, wherever the call ran.

    ``contribution`` is the length of what a slot adds to the token's output row, computed again
    with the reference where the backend doesn't show its experts' rows (``recomputed``);
    ``buffer_row`` is None where it doesn't show that.
    """
    assert call.hidden_states is not None
    assert call.routing is not None
    assert call.output is not None
    ids, weights = (t.detach() for t in call.routing.ids_and_weights())
    hidden = call.hidden_states[row : row + 1].detach()
    path, given = layer.resolution.path, call.expert_rows
    on_input = layer.config.apply_router_weight_on_input
    weighted = on_input
    if given is not None and path is not None:
        weighted = path.payers.get("weight") != "transport"
    slots: list[dict[str, Any]] = []
    for slot, expert in enumerate(ids[row].tolist()):
        entry: dict[str, Any] = {
            "slot": slot,
            "expert": expert,
            "weight": float(weights[row, slot]),
        }
        if expert >= 0:
            rank, local = Placement(layer.config.num_experts, call.ep_size).home(expert)
            place = None if call.slot_rows is None else int(call.slot_rows[row, slot])
            if given is None:
                scale = entry["weight"] if on_input else 1.0
                added = expert_forward(hidden * scale, expert, layer.experts.weights)
            else:
                added = given[row, slot]
            length = added.detach().double().norm().item()
            length *= 1.0 if weighted else abs(entry["weight"])
            entry |= {"rank": rank, "local_expert": local, "buffer_row": place}
            entry["contribution"] = _finite(length)
        slots.append(entry)
    shared = None
    if layer.shared_experts is not None:
        with torch.no_grad():
            shared = _finite(layer.shared_experts(hidden).double().norm().item())
    return {
        "name": layer.name,
        "row": row,
        "slots": slots,
        "recomputed": given is None,
        "shared_contribution": shared,
        "output": _finite(call.output[row].detach().double().norm().item()),
    }

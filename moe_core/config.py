"""What a MoE layer is, as plain data: no torch here, dtypes are strings, everything is JSON.

Every config is frozen, keyword-only and validated when made; a ``ConfigError`` lists all faults
at once, those of nested configs included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Self, cast

from moe_core.errors import ConfigError, Fault, check_keys, nearest

DTYPES = ("float32", "float64", "bfloat16", "float16")
ROUTER_KINDS = ("topk", "hash")
SCORING_FUNCS = ("softmax", "sigmoid", "sqrtsoftplus")
GROUP_SCORES = ("max", "top2_sum")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")
LIMIT_FORMS = ("before", "after")
W13_LAYOUTS = ("gate_up", "up_gate", "interleaved")
CAPACITY_POLICIES = ("drop", "pad")
COMBINES = ("per_rank", "per_slot")
ROWS = ("distinct", "replicated")
FINAL_SUMS = ("layer", "caller")
SHARED_PLACEMENTS = ("apart", "slots")


def dtype_name(dtype: object) -> str:
    """``"bfloat16"`` from ``"bfloat16"`` or from ``torch.bfloat16`` (without importing torch)."""
    return str(dtype).removeprefix("torch.")


class Faults(list[Fault]):
    """Collects faults while a config checks itself."""

    def add(self, name: str, value: Any, message: str) -> None:
        self.append(Fault(name, value, message))

    def choice(self, name: str, value: Any, options: tuple[str, ...]) -> None:
        if value not in options:
            hint = nearest(value, options) if isinstance(value, str) else ""
            self.add(name, value, f"must be one of {', '.join(options)}{hint}")

    def integer(self, name: str, value: Any, minimum: int = 1) -> bool:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        if not good:
            self.add(name, value, f"must be an integer of at least {minimum}")
        return good

    def number(
        self,
        name: str,
        value: Any,
        *,
        above: float | None = None,
        least: float = 0,
        below: float = float("inf"),
    ) -> None:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        bound = f"above {above:g}" if above is not None else f"of at least {least:g}"
        bound += f" and below {below:g}" if below < float("inf") else ""
        if not good or not least <= value < below or (above is not None and value <= above):
            self.add(name, value, f"must be a finite number {bound}")

    def flag(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            self.add(name, value, "must be true or false")

    def settle(self) -> None:
        if self:
            raise ConfigError(tuple(self))


class _Config:
    """JSON there and back, shared by the configs."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From JSON data; unknown keys are faults that name the nearest known key."""
        return _build(cls, data, "")


_NO_EXPERT_CHOICE = (
    "is not offered: where experts choose tokens, a token's experts depend on the whole batch, on "
    "the tokens that follow it too, so a model trained so can't be decoded token by token; "
    "take kind=topk and balance it with correction_bias, a loss or capacity_factor"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(_Config):
    """How a token chooses its experts and what weight each choice gets.

    ``kind``: ``"topk"`` (learned) or ``"hash"`` (a table from token id to experts; the learned
    gate still gives the weights; DeepSeek-V4's first layers).
    ``softmax_before_topk``: softmax over all experts, then top-k (True), or top-k on logits, then
    softmax over the chosen ones (False; normalised by construction).
    ``renormalize``: the chosen weights of a token sum to ``routed_scaling_factor``.
    ``num_expert_group``/``topk_group``: choose groups first. ``group_score``: ``"max"`` or
    ``"top2_sum"``; ``None`` means max without and the sum of the top two with a correction bias.
    ``correction_bias``: a bias per expert that moves the choice and never the weight (DeepSeek-V3).
    ``vocab_size``: rows of the hash table.
    ``jitter``: in training the router (not the experts) sees each element of its input times
    uniform(1 - jitter, 1 + jitter), drawn from torch's generator (Switch Transformer, arXiv
    2101.03961, 2.3; Mixtral's ``router_jitter_noise``).
    """

    kind: str = "topk"
    scoring_func: str = "softmax"
    softmax_before_topk: bool = True
    renormalize: bool = False
    routed_scaling_factor: float = 1.0
    num_expert_group: int | None = None
    topk_group: int | None = None
    group_score: str | None = None
    correction_bias: bool = False
    vocab_size: int | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        faults = Faults()
        if self.kind == "expert_choice":
            faults.add("kind", self.kind, _NO_EXPERT_CHOICE)
        else:
            faults.choice("kind", self.kind, ROUTER_KINDS)
        faults.number("jitter", self.jitter, least=0, below=1)
        faults.choice("scoring_func", self.scoring_func, SCORING_FUNCS)
        faults.flag("softmax_before_topk", self.softmax_before_topk)
        faults.flag("renormalize", self.renormalize)
        faults.flag("correction_bias", self.correction_bias)
        faults.number("routed_scaling_factor", self.routed_scaling_factor, above=0)
        if self.scoring_func != "softmax" and self.softmax_before_topk is False:
            faults.add("softmax_before_topk", False, "only has a meaning with scoring_func=softmax")
        if (self.num_expert_group is None) != (self.topk_group is None):
            faults.add("topk_group", self.topk_group, "num_expert_group and topk_group go together")
        elif self.num_expert_group is not None and self.topk_group is not None:
            good = faults.integer("num_expert_group", self.num_expert_group)
            good &= faults.integer("topk_group", self.topk_group)
            if good and self.topk_group > self.num_expert_group:
                faults.add(
                    "topk_group",
                    self.topk_group,
                    f"at most num_expert_group={self.num_expert_group}",
                )
        if self.group_score is not None:
            faults.choice("group_score", self.group_score, GROUP_SCORES)
            if self.num_expert_group is None:
                faults.add("group_score", self.group_score, "needs num_expert_group and topk_group")
        if self.kind == "hash":
            if self.vocab_size is None:
                faults.add("vocab_size", None, "kind=hash needs the number of token ids")
            if self.correction_bias:
                faults.add("correction_bias", True, "hash routing makes no choice to correct")
            if self.num_expert_group is not None:
                faults.add("num_expert_group", self.num_expert_group, "hash routing has no groups")
            if self.softmax_before_topk is False:
                faults.add("softmax_before_topk", False, "hash routing has no top-k")
        if self.vocab_size is not None:
            faults.integer("vocab_size", self.vocab_size)
        faults.settle()

    @property
    def effective_group_score(self) -> str:
        return self.group_score or ("top2_sum" if self.correction_bias else "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(_Config):
    """``act(gate) * up`` (gated) or ``act(x)``, with an optional clamp.

    ``limit`` with ``limit_form="before"`` clamps gate from above and up on both sides, then
    activates (DeepSeek-V4, GPT-OSS); ``"after"`` clamps ``act(gate)`` from above and up on both
    sides. ``alpha`` selects GPT-OSS's form: ``gate * sigmoid(alpha * gate) * (up + 1)``.
    ``gelu`` is the exact one, ``gelu_tanh`` the approximation, ``relu2`` is ``relu(x)**2``.
    """

    name: str = "silu"
    gated: bool = True
    limit: float | None = None
    limit_form: str = "before"
    alpha: float | None = None

    def __post_init__(self) -> None:
        faults = Faults()
        faults.choice("name", self.name, ACTIVATIONS)
        faults.flag("gated", self.gated)
        faults.choice("limit_form", self.limit_form, LIMIT_FORMS)
        if self.limit is not None:
            faults.number("limit", self.limit, above=0)
        if self.alpha is not None:
            faults.number("alpha", self.alpha, above=0)
            if self.name != "silu" or not self.gated:
                faults.add("alpha", self.alpha, "is GPT-OSS's form: needs name=silu and gated=true")
            if self.limit is not None and self.limit_form != "before":
                faults.add("limit_form", self.limit_form, "with alpha the clamp comes before")
        faults.settle()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(_Config):
    """Widths. ``world = dp * ep * tp`` and ``rank = (dp_rank * ep + ep_rank) * tp + tp_rank``.

    ``ep_size`` spreads experts, ``tp_size`` cuts each expert's ``intermediate_size``, ``dp_size``
    replicates the expert set. Tokens differ over dp and ep and are equal within tp.
    ``rows="replicated"``: tokens are equal over ep as well, on entry and in the layer's output.
    ``final_sum="caller"``: the ranks that hold the same rows (``copies``) get a part each of the
    layer's output, in ``combine_dtype``, and whoever calls it sums them (``RowExchange`` does).
    """

    ep_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    rows: str = "distinct"
    final_sum: str = "layer"

    def __post_init__(self) -> None:
        faults = Faults()
        for name in ("ep_size", "tp_size", "dp_size"):
            faults.integer(name, getattr(self, name))
        faults.choice("rows", self.rows, ROWS)
        faults.choice("final_sum", self.final_sum, FINAL_SUMS)
        faults.settle()

    @property
    def copies(self) -> int:
        """How many ranks hold the same rows."""
        return self.tp_size * (self.ep_size if self.rows == "replicated" else 1)

    @property
    def world_size(self) -> int:
        return self.dp_size * self.ep_size * self.tp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(_Config):
    """One mixture-of-experts layer.

    ``w13_layout``: how gate and up rows lie in ``w13 [E, 2I, H]``: ``"gate_up"`` (gate half, then
    up half), ``"up_gate"``, ``"interleaved"`` (gate, up, gate, up, ...). Without a gate ``w13`` is
    ``[E, I, H]`` and the layout says nothing.
    ``apply_router_weight_on_input``: scale the expert's input instead of its output.
    ``capacity_factor``: from the tokens of one rank each expert takes at most ``expert_capacity``
    choices, the first ones in token, then slot order; None = all. What is over it is dropped: that
    slot adds nothing, the other weights stay as they are. ``capacity_policy``: ``"drop"``, or
    ``"pad"``: the same numbers, and every expert gets exactly that many rows, zeros if need be.
    ``combine``: ``"per_slot"`` or ``"per_rank"``, see docs/design.md, Numerics.
    ``shared_intermediate_size``: of one shared expert (None: ``intermediate_size``).
    ``shared_gate``: ``sigmoid(x @ gate.T)`` scales what the shared experts return (Qwen2-MoE).
    ``shared_placement``: ``"apart"`` (a dense MLP beside the routed experts, while rows travel) or
    ``"slots"`` (each ep rank has one more slot per shared expert, and a token goes to its own
    rank's: same state_dict, no product of their own). ``shared_tp``: apart, cut each shared
    expert's width over tp; False = every tp rank computes them whole. Slots are always cut.
    ``dispatch_dtype``/``combine_dtype``: what rows travel in between ranks; None = the layer's
    dtype, and float32 (float64 if the layer is) for sums on their way home.
    ``quant``: a name from a later version; ``None`` today.
    ``backend``: a spec, see ``moe-core explain --help``; the argument of a layer wins over it.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    router: RouterConfig = field(default_factory=RouterConfig)
    activation: Activation = field(default_factory=Activation)
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    shared_placement: str = "apart"
    shared_tp: bool = False
    w13_layout: str = "gate_up"
    bias: bool = False
    apply_router_weight_on_input: bool = False
    capacity_factor: float | None = None
    capacity_policy: str = "drop"
    quant: str | None = None
    combine: str = "per_rank"
    dispatch_dtype: str | None = None
    combine_dtype: str | None = None
    dtype: str = "float32"
    backend: str | None = None

    def __post_init__(self) -> None:
        faults = Faults()
        for name in ("dtype", "dispatch_dtype", "combine_dtype"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, dtype_name(value))
                faults.choice(name, dtype_name(value), DTYPES)
        sizes = [
            faults.integer(name, getattr(self, name))
            for name in ("hidden_size", "intermediate_size", "num_experts", "top_k")
        ]
        if all(sizes[2:]) and self.top_k > self.num_experts:
            faults.add("top_k", self.top_k, f"at most num_experts={self.num_experts}")
        faults.integer("num_shared_experts", self.num_shared_experts, 0)
        if self.shared_intermediate_size is not None:
            faults.integer("shared_intermediate_size", self.shared_intermediate_size)
        self._check_shared(faults)
        faults.choice("w13_layout", self.w13_layout, W13_LAYOUTS)
        faults.choice("capacity_policy", self.capacity_policy, CAPACITY_POLICIES)
        faults.choice("combine", self.combine, COMBINES)
        faults.flag("bias", self.bias)
        faults.flag("apply_router_weight_on_input", self.apply_router_weight_on_input)
        if self.capacity_factor is not None:
            faults.number("capacity_factor", self.capacity_factor, least=0)
        for name in ("quant", "backend"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                faults.add(name, value, "must be a string or null")
        nested = True
        for name, kind in _NESTED.items():
            if not isinstance(getattr(self, name), kind):
                example = "router.kind=topk" if name == "router" else "activation.name=silu"
                message = f"is set field by field, such as {example} ({kind.__name__} in Python)"
                faults.add(name, getattr(self, name), message)
                nested = False
        if nested and all(sizes[2:]):
            self._check_groups(faults)
        faults.settle()

    def _check_shared(self, faults: Faults) -> None:
        faults.flag("shared_gate", self.shared_gate)
        faults.flag("shared_tp", self.shared_tp)
        faults.choice("shared_placement", self.shared_placement, SHARED_PLACEMENTS)
        if self.num_shared_experts == 0:
            for name, unset in _SHARED_DEFAULTS.items():
                if getattr(self, name) != unset:
                    faults.add(name, getattr(self, name), "needs num_shared_experts of at least 1")
        elif self.shared_placement == "slots":
            # A slot is a routed expert's in all but the routing.
            unlike = {
                "shared_intermediate_size": self.shared_intermediate_size
                not in (None, self.intermediate_size),
                "shared_gate": self.shared_gate,
                "bias": self.bias,
                "dispatch_dtype": self.dispatch_dtype not in (None, self.dtype),
            }
            for name in (name for name, is_unlike in unlike.items() if is_unlike):
                message = f"shared_placement=slots can't: {_SLOTS_NEED[name]}, or use apart"
                faults.add(name, getattr(self, name), message)

    def _check_groups(self, faults: Faults) -> None:
        groups, chosen = self.router.num_expert_group, self.router.topk_group
        if groups is None or chosen is None:
            return
        if self.num_experts % groups:
            faults.add(
                "router.num_expert_group", groups, f"must divide num_experts={self.num_experts}"
            )
        elif self.top_k > chosen * (self.num_experts // groups):
            faults.add(
                "router.topk_group",
                chosen,
                f"{chosen} groups of {self.num_experts // groups} experts can't give "
                f"top_k={self.top_k} choices",
            )

    def expert_capacity(self, num_tokens: int) -> int:
        """``ceil(capacity_factor * num_tokens * top_k / num_experts)``, real tokens of one rank.

        Exact: the factor is the nearest fraction with a denominator of at most 10**6, so 1.1 is
        11/10 (and ``num_experts`` if it is more, which drops nothing). An integer tensor gives a
        tensor. Only with a ``capacity_factor``.
        """
        assert self.capacity_factor is not None
        factor = Fraction(min(self.capacity_factor, self.num_experts)).limit_denominator(10**6)
        share = factor.denominator * self.num_experts
        return -((-factor.numerator * self.top_k * num_tokens) // share)

    def padding_tokens(self, num_tokens: int) -> int:
        """Tokens of zeros that ``capacity_policy="pad"`` adds to ``num_tokens``: enough slots to
        fill every expert."""
        if self.capacity_factor is None or self.capacity_policy != "pad":
            return 0
        return -((-self.num_experts * self.expert_capacity(num_tokens)) // self.top_k)

    @property
    def w13_rows(self) -> int:
        """Rows of one expert's ``w13``: 2I with a gate, I without."""
        return self.intermediate_size * (2 if self.activation.gated else 1)

    @property
    def shared_size(self) -> int:
        """Inner width of the shared experts taken together (0 if there are none)."""
        return self.num_shared_experts * self.shared_width

    @property
    def shared_width(self) -> int:
        """Inner width of one shared expert."""
        return self.shared_intermediate_size or self.intermediate_size

    @property
    def shared_slots(self) -> int:
        """Slots per rank for shared experts: 0 where they are apart."""
        return self.num_shared_experts if self.shared_placement == "slots" else 0

    @property
    def routing_width(self) -> int:
        """Slots that one token goes to: its ``top_k`` choices, and the shared slots."""
        return self.top_k + self.shared_slots

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """From a JSON file. Raises ``ConfigError`` for anything that isn't a layer config."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            message = f"can't be read: {error.strerror or error}"
            raise ConfigError([Fault("config", str(path), message)]) from error
        except ValueError as error:
            raise ConfigError([Fault("config", str(path), f"is not JSON: {error}")]) from error
        if not isinstance(data, Mapping):
            raise ConfigError([Fault("config", str(path), "must hold a JSON object")])
        return cls.from_dict(cast("Mapping[str, Any]", data))


_SHARED_DEFAULTS: dict[str, Any] = {
    "shared_intermediate_size": None,
    "shared_gate": False,
    "shared_placement": "apart",
    "shared_tp": False,
}
_SLOTS_NEED = {
    "shared_intermediate_size": "a slot is intermediate_size wide",
    "shared_gate": "a slot's result has weight 1",
    "bias": "routed experts have biases and shared ones none",
    "dispatch_dtype": "shared experts read rows that nothing has rounded; leave it at None",
}

_NESTED: dict[str, type[RouterConfig] | type[Activation]] = {
    "router": RouterConfig,
    "activation": Activation,
}


def _build(cls: Any, data: Mapping[str, Any], where: str) -> Any:
    known = {f.name: f for f in fields(cls)}
    prefix = f"{where}." if where else ""
    faults = check_keys(where, data, known)
    values: dict[str, Any] = {}
    for key in known:
        if key not in data:
            continue
        value = data[key]
        if key in _NESTED and isinstance(value, Mapping):
            try:
                value = _build(_NESTED[key], value, f"{prefix}{key}")  # type: ignore[arg-type]
            except ConfigError as error:
                faults.extend(error.faults)
                continue
        values[key] = value
    missing = [
        name
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k")
        if name in known and name not in data
    ]
    faults += [Fault(f"{prefix}{name}", None, "is required") for name in missing]
    if not missing:
        try:
            built = cls(**values)
            if not faults:
                return built
        except ConfigError as error:
            faults += [
                Fault(f"{prefix}{f.field}", f.value, f.message)
                for f in error.faults
                if f.field.split(".")[0] in values or f.field.split(".")[0] not in _NESTED
            ]
    raise ConfigError(faults)

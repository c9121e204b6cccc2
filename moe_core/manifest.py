"""What a backend says of itself: plain data that is read without importing the backend's code.

An entry point of group ``moe_core.backends`` names a mapping (JSON data) of this shape, in a
module that imports nothing heavy::

    BACKEND = {"name": "mine", "api": "1.0", "summary": "...", "parts": [
        {"role": "runner", "target": "mine.runner:MyRunner", "offer": {"dtype": ["float32"]},
         "takes": ["expert_contiguous"], "gives": ["expert_contiguous"]}]}

``api`` is read before anything else, so that a plugin for a newer moe-core gets a sentence and
not a TypeError. (A ``Backend`` made in code, for ``register_backend``, is the same data.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

from moe_core.errors import BackendVersionError, ConfigError, Fault, check_keys

API = "1.0"
GROUP = "moe_core.backends"

ROLES = ("router", "transport", "runner", "fused")
# Layouts with one row per (token, slot); the others hold one row per token.
PER_SLOT_LAYOUTS = ("slot_major", "slot_list", "expert_contiguous", "expert_masked", "indexed")
ROW_LAYOUTS = ("token_major", "rank_grouped")
LAYOUTS = ROW_LAYOUTS + PER_SLOT_LAYOUTS
DEBTS = ("weight", "slot_sum", "rank_sum", "tp_sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Integers from ``min`` to ``max`` (both included, ``None`` = no end), ``multiple_of`` only."""

    min: int = 1
    max: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        faults = [
            Fault(name, value, f"must be an integer of at least {least}")
            for name, value, least in (
                ("min", self.min, 0),
                ("max", self.min if self.max is None else self.max, 0),
                ("multiple_of", self.multiple_of, 1),
            )
            if not _whole(value) or value < least
        ]
        if not faults and self.max is not None and self.max < self.min:
            faults.append(Fault("max", self.max, f"is below min={self.min}"))
        if faults:
            raise ConfigError(faults)

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        return (
            self.min <= value
            and (self.max is None or value <= self.max)
            and value % self.multiple_of == 0
        )

    def __str__(self) -> str:
        if self.min == self.max:
            return str(self.min)
        end = f"{self.min} or more" if self.max is None else f"{self.min} to {self.max}"
        return end if self.multiple_of == 1 else f"{end}, a multiple of {self.multiple_of}"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


ANY = Range(min=1)
ONE = Range(min=1, max=1)
Values = tuple[str | bool | int, ...]


def meets(wanted: Any, offered: Any) -> bool:
    """Whether a value on an axis is covered by what is offered there (a set, range, bool, None)."""
    if offered is None:
        return True
    if isinstance(offered, bool):
        return offered or not wanted
    if isinstance(offered, Range):
        return wanted in offered
    # `True in (1,)` holds in Python: compare types too.
    return any(wanted == o and type(wanted) is type(o) for o in offered)


def show(value: Any) -> str:
    """A wanted or an offered value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(show(v) for v in cast("tuple[Any, ...]", value))
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a layer needs, one field per axis; what parts offer is compared with it field by field.

    ``router`` is ``"topk"``, ``"hash"``, ``"custom"`` (the caller's own) or ``"none"`` (the caller
    routes; ``Experts`` alone). ``routing_ids`` is False where the kernel itself is to route, and
    ``capacity`` True where it has to drop as well: the layer does it before any other part.
    ``num_experts``: ids that parts see, one per routed slot or hole (``moe_core.placement``; shared
    slots come on top); ``top_k``: how many slots a token goes to, the routing width.
    ``limit`` is ``"none"`` or the clamp's form. ``quant`` is ``"none"`` or a name.
    ``dispatch_dtype``/``combine_dtype``: what rows travel in. ``final_sum``: who sums over the
    ranks that hold the same rows, the ``"layer"`` or its ``"caller"``. ``uneven_experts``: the
    ranks of the ep group don't all hold equally many. ``max_tokens_per_rank``: the largest T,
    None = not known. ``ranks_per_node``: how many neighbouring ranks share a node, None = all do,
    or nobody said.
    """

    device: str = "cpu"
    dtype: str = "float32"
    router: str = "topk"
    scoring_func: str = "softmax"
    expert_groups: bool = False
    correction_bias: bool = False
    jitter: bool = False
    routing_ids: bool = True
    quant: str = "none"
    activation: str = "silu"
    gated: bool = True
    limit: str = "none"
    alpha: bool = False
    w13_layout: str = "gate_up"
    bias: bool = False
    weight_on_input: bool = False
    capacity: bool = False
    combine: str = "per_rank"
    dispatch_dtype: str = "float32"
    combine_dtype: str = "float32"
    rows: str = "distinct"
    final_sum: str = "layer"
    uneven_experts: bool = False
    hidden_size: int = 1
    intermediate_size: int = 1
    num_experts: int = 1
    top_k: int = 1
    ep_size: int = 1
    tp_size: int = 1
    dp_size: int = 1
    max_tokens_per_rank: int | None = None
    ranks_per_node: int | None = None
    autograd: bool = True
    compile: bool = False
    cuda_graph: bool = False

    @property
    def copies(self) -> int:
        """How many ranks hold the same rows."""
        return self.tp_size * (self.ep_size if self.rows == "replicated" else 1)

    @property
    def ep_ranks_per_node(self) -> int | None:
        """How many ranks of an ep group share a node; None where groups don't fill nodes evenly.

        Ranks of a group are ``tp_size`` apart, and those of a node are neighbours in it.
        """
        block, tp, group = self.ranks_per_node, self.tp_size, self.ep_size * self.tp_size
        if block is None or self.dp_size * group <= block or block % group == 0:
            return self.ep_size
        if group % block == 0 and block % tp == 0:
            return block // tp
        return 1 if tp % block == 0 else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a part can do: per axis of ``Request`` a set of values, a ``Range`` or a bool.

    A bool says whether the thing can be asked for (not asking is always fine). The defaults are
    the least that any part must do; an axis that doesn't concern a part's role is not looked at
    (``ROLE_AXES``; the widths and what goes with them have rules, ``moe_core.rules``).
    ``dispatch_dtype``/``combine_dtype`` None: rows never leave the rank. ``max_tokens_per_rank``
    None: buffers grow; a range: they don't, so the layer has to say a number that lies in it.
    ``ranks_per_node`` None: all links are alike to the part; a range: it sends a row to a node once
    and fans out inside, for ep groups with so many ranks on each node.
    """

    device: Values = ("cpu",)
    dtype: Values = ("float32",)
    router: Values = ("topk",)
    scoring_func: Values = ("softmax",)
    expert_groups: bool = False
    correction_bias: bool = False
    jitter: bool = False
    routing_ids: Values = (True,)
    quant: Values = ("none",)
    activation: Values = ("silu",)
    gated: Values = (True,)
    limit: Values = ("none",)
    alpha: bool = False
    w13_layout: Values = ("gate_up",)
    bias: bool = False
    weight_on_input: bool = False
    capacity: bool = False
    combine: Values = ("per_rank", "per_slot")
    dispatch_dtype: Values | None = None
    combine_dtype: Values | None = None
    rows: Values = ("distinct", "replicated")
    final_sum: Values = ("layer",)
    uneven_experts: bool = False
    hidden_size: Range | Values = ANY
    intermediate_size: Range | Values = ANY
    num_experts: Range | Values = ANY
    top_k: Range | Values = ANY
    ep_size: Range | Values = ONE
    tp_size: Range | Values = ONE
    dp_size: Range | Values = ONE
    max_tokens_per_rank: Range | Values | None = None
    ranks_per_node: Range | Values | None = None
    autograd: bool = False
    compile: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        asked = {f.name: type(f.default).__name__ for f in fields(Request)}
        faults: list[Fault] = []
        for f in fields(self):
            value: object = getattr(self, f.name)
            kind = "int" if asked[f.name] == "NoneType" else asked[f.name]
            if isinstance(f.default, bool):
                good, said = isinstance(value, bool), "true or false"
            else:
                said = f"a list of {kind}" + (" or a range" if kind == "int" else "")
                good = (value is None and f.default is None) or (
                    all(type(v).__name__ == kind for v in cast("tuple[object, ...]", value))
                    if isinstance(value, tuple)
                    else kind == "int" and isinstance(value, Range)
                )
            if not good:
                shown = repr(cast("object", value))
                faults.append(Fault(f"offer.{f.name}", shown, f"must be {said}"))
        if faults:
            raise ConfigError(faults)


_EVERYWHERE = ("device", "dtype", "autograd", "compile", "cuda_graph")
_TRANSPORT = (
    *("routing_ids", "capacity", "combine", "dispatch_dtype", "combine_dtype", "final_sum"),
    *("hidden_size", "num_experts", "top_k"),
)
_WIDTHS = ("ep_size", "tp_size", "dp_size")
_RUNNER = (
    *("routing_ids", "quant", "activation", "gated", "limit", "alpha", "w13_layout", "bias"),
    *("weight_on_input", "hidden_size", "intermediate_size", "num_experts"),
)
ROLE_AXES: dict[str, tuple[str, ...]] = {
    "router": (
        *_EVERYWHERE,
        *("router", "scoring_func", "expert_groups", "correction_bias", "jitter"),
    ),
    "transport": (*_EVERYWHERE, *_TRANSPORT, *_WIDTHS),
    "runner": (*_EVERYWHERE, *_RUNNER),
    "fused": (*_EVERYWHERE, *dict.fromkeys(_TRANSPORT + _RUNNER + _WIDTHS)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One role of a backend.

    ``target``: ``"module:Class"``, imported only when a layer is built.
    ``takes``/``gives``: layouts. A transport's dispatch *gives* one of ``gives`` (the first that
    fits is used) and its combine *takes* one of ``takes``. A runner returns ``gives[i]`` for
    ``takes[i]``. A fused part goes from ``token_major`` to ``token_major``.
    ``pays``: debts that it always pays; ``may_pay``: debts that it can pay when asked to.
    ``needs``: requirement strings such as ``"triton>=3.3"``, looked up, not imported.
    ``check``: ``"module:function"``, called with the request; returns refusals that no table can
    express. The module must not import torch.
    ``mode``: tells apart parts of one role in one backend, chosen by ``NAME[mode=...]``.
    ``options``: other keys of ``NAME[key=value]`` with their allowed values, the default first.
    ``preference``: a higher one is tried first by ``auto``; a number, or one per device (0 where
    none is given): ``{"cuda": 20, "cpu": 1}``.
    """

    role: str
    target: str
    offer: Offer = field(default_factory=Offer)
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    pays: tuple[str, ...] = ()
    may_pay: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    check: str | None = None
    mode: str = ""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    preference: int | Mapping[str, int] = 0

    def __post_init__(self) -> None:
        faults = _shape_faults(self)
        if faults:  # the checks below take the shapes for granted
            raise ConfigError(faults)
        if self.role not in ROLES:
            faults.append(Fault("role", self.role, f"must be one of {', '.join(ROLES)}"))
        if ":" not in self.target:
            faults.append(Fault("target", self.target, "must look like 'module:Class'"))
        for name, allowed in (
            ("takes", LAYOUTS),
            ("gives", LAYOUTS),
            ("pays", DEBTS),
            ("may_pay", DEBTS),
        ):
            faults += [
                Fault(name, value, f"must be one of {', '.join(allowed)}")
                for value in getattr(self, name)
                if value not in allowed
            ]
        both = set(self.pays) & set(self.may_pay)
        if both:
            faults.append(Fault("may_pay", sorted(both), "is already in pays"))
        if self.role in ("transport", "runner") and not (self.takes and self.gives):
            faults.append(
                Fault("takes", list(self.takes), f"a {self.role} names what it takes and gives")
            )
        if self.role == "runner" and len(self.takes) != len(self.gives):
            faults.append(
                Fault("gives", list(self.gives), "a runner gives one layout per layout it takes")
            )
        if faults:
            raise ConfigError(faults)

    def preferred_on(self, device: str) -> int:
        """``preference`` for a device type."""
        if isinstance(self.preference, Mapping):
            return self.preference.get(device, 0)
        return self.preference


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A named set of parts. ``api`` is ``"major.minor"`` of the interface it was written for."""

    name: str
    api: str = API
    parts: tuple[Part, ...] = ()
    summary: str = ""

    def __post_init__(self) -> None:
        check_api(self.name, "code", self.api)
        faults: list[Fault] = []
        if not self.name.isidentifier():
            faults.append(Fault("name", self.name, "must be a Python identifier"))
        if not self.parts:
            faults.append(Fault("parts", [], f"{self.name} offers nothing"))
        if faults:
            raise ConfigError(faults)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], distribution: str = "code") -> Backend:
        """From manifest data. Raises ``BackendVersionError`` first, then ``ConfigError``."""
        name = str(data.get("name", "?"))
        check_api(name, distribution, str(data.get("api", "0.0")))
        faults = check_keys("", data, [f.name for f in fields(cls)])
        raw_parts = data.get("parts", ())
        parts: list[Part] = []
        if isinstance(raw_parts, list | tuple):
            for i, part in enumerate(cast("list[Any]", raw_parts)):
                try:
                    parts.append(_part(part))
                except ConfigError as error:
                    faults += [
                        Fault(f"parts[{i}].{f.field}", f.value, f.message) for f in error.faults
                    ]
        else:
            faults.append(Fault("parts", repr(raw_parts), "must be a list"))
        if faults:
            raise ConfigError(faults)
        return cls(
            name=name,
            api=str(data["api"]),
            parts=tuple(parts),
            summary=str(data.get("summary", "")),
        )


def check_api(name: str, distribution: str, api: str) -> None:
    """Same major, minor at most ours; raises ``BackendVersionError`` otherwise."""
    ours = [int(x) for x in API.split(".")]
    try:
        major, minor = (int(x) for x in api.split("."))
    except ValueError:
        raise BackendVersionError(name, distribution, api, API) from None
    if major != ours[0] or minor > ours[1]:
        raise BackendVersionError(name, distribution, api, API)


def _shape_faults(part: Part) -> list[Fault]:
    """What isn't the kind of value that a part's field holds."""
    faults: list[Fault] = []

    def must(name: str, good: bool, kind: str) -> None:
        if not good:
            faults.append(Fault(name, repr(getattr(part, name)), f"must be {kind}"))

    def strings(values: object) -> bool:
        return isinstance(values, tuple) and all(
            isinstance(v, str) for v in cast("tuple[Any, ...]", values)
        )

    for name in ("role", "target", "mode"):
        must(name, isinstance(getattr(part, name), str), "a string")
    for name in ("takes", "gives", "pays", "may_pay", "needs"):
        must(name, strings(getattr(part, name)), "a list of strings")
    check: Any = part.check
    must("check", check is None or (isinstance(check, str) and ":" in check), "'module:function'")
    preference: Any = part.preference
    if isinstance(preference, Mapping):
        by_device = cast("Mapping[Any, Any]", preference).items()
        good = all(isinstance(device, str) and _whole(value) for device, value in by_device)
    else:
        good = _whole(preference)
    must("preference", good, "an integer, or an object of integers by device")
    must("offer", isinstance(cast("Any", part.offer), Offer), "an object")
    options = cast("Any", part.options)
    named = isinstance(options, Mapping) and all(
        isinstance(k, str) and strings(v) and v
        for k, v in cast("Mapping[Any, Any]", options).items()
    )
    must("options", named, "an object of lists of strings, the default first")
    return faults


def _part(data: Any) -> Part:
    if isinstance(data, Part):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError([Fault("part", repr(data), "must be an object")])
    part = cast("Mapping[str, Any]", data)
    faults = check_keys("", part, [f.name for f in fields(Part)])
    faults += [Fault(k, None, "is required") for k in ("role", "target") if k not in part]
    if faults:
        raise ConfigError(faults)
    values: dict[str, Any] = {
        key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        for key, value in part.items()
    }
    if "offer" in values:
        values["offer"] = _offer(values["offer"])
    if isinstance(values.get("options"), Mapping):
        values["options"] = {
            k: tuple(cast("list[Any]", v)) if isinstance(v, list) else v
            for k, v in cast("Mapping[str, Any]", values["options"]).items()
        }
    return Part(**values)


def _offer(data: Any) -> Offer:
    if isinstance(data, Offer):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError([Fault("offer", repr(data), "must be an object")])
    offer = cast("Mapping[str, Any]", data)
    known = [f.name for f in fields(Offer)]
    faults = check_keys("offer", offer, known)
    values: dict[str, Any] = {}
    for key, value in offer.items():
        if isinstance(value, Mapping):
            bounds = cast("Mapping[str, Any]", value)
            wrong = check_keys(f"offer.{key}", bounds, ("min", "max", "multiple_of"))
            try:
                value = Range(**bounds) if not wrong else ANY
            except ConfigError as error:
                wrong = [Fault(f"offer.{key}.{f.field}", f.value, f.message) for f in error.faults]
            faults += wrong
            if wrong:
                continue
        elif isinstance(value, list):
            value = tuple(cast("list[Any]", value))
        values[key] = value
    try:
        offered = Offer(**{k: v for k, v in values.items() if k in known})
    except ConfigError as error:
        faults += error.faults
        raise ConfigError(faults) from None
    if faults:
        raise ConfigError(faults)
    return offered

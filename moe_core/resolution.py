"""From a config to the parts that will run it, or to every reason why none can.

``resolve`` is a pure function of its arguments, the installed backends and ``MOE_BACKEND``; it
never raises for a refusal. Building a layer raises ``ConfigError(resolution)`` when ``not ok``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from moe_core import environment, registry
from moe_core.capabilities import (
    Candidate,
    Path,
    Refusal,
    find_path,
    layer_refusals,
    part_refusals,
)
from moe_core.config import Faults, MoEConfig, ParallelConfig, dtype_name
from moe_core.errors import (
    BackendConflictError,
    BackendLoadError,
    BackendVersionError,
    UnknownBackendError,
)
from moe_core.manifest import API, PER_SLOT_LAYOUTS, Request
from moe_core.rules import POLICIES, adjusted, judge
from moe_core.spec import Alternative, NamedBackend, Spec, parse_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_core.converters import ConverterSpec

ROUTED_OUTSIDE = ("custom", "none")


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A field that a rule changed, and why (policy ``adjust`` only)."""

    rule: str
    field: str
    before: Any
    after: Any
    why: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """A rule that only warns, or puts a part before others: nothing is refused for it."""

    rule: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message} | {self.fix}"


@dataclass(frozen=True, slots=True)
class Resolution:
    """What was asked, what was chosen, and why not the others.

    ``parts``: role → candidate (``router`` absent where the caller routes; ``fused`` in place of
    ``transport`` and ``runner``). ``path``: how transport and runner meet. ``refusals``: of every
    candidate that was looked at. ``source``: where the spec came from (``argument``, ``config``,
    ``MOE_BACKEND``, ``auto``). ``would_work``: what ``auto`` would choose where the spec failed.
    ``request`` is the effective one: under policy ``adjust`` with the widths that ``adjustments``
    report. ``warnings``: what rules say without refusing; ``preferences``: for what rules the
    chosen parts come before others that would serve.
    """

    request: Request
    spec: str
    source: str
    parts: Mapping[str, Candidate]
    path: Path | None
    refusals: tuple[Refusal, ...]
    adjustments: tuple[Adjustment, ...] = ()
    would_work: str = ""
    warnings: tuple[Advice, ...] = ()
    preferences: tuple[Advice, ...] = ()
    policy: str = "strict"

    @property
    def ok(self) -> bool:
        return bool(self.parts)

    @property
    def parallel(self) -> ParallelConfig:
        """The effective widths: those that a layer is to be built with."""
        q = self.request
        names = ("ep_size", "tp_size", "dp_size", "rows", "final_sum")
        return ParallelConfig(**{name: getattr(q, name) for name in names})

    @property
    def converters(self) -> tuple[ConverterSpec, ...]:
        return (self.path.converter,) if self.path and self.path.converter else ()

    @property
    def name(self) -> str:
        """The chosen backends in spec form: ``"torch"``, ``"nccl+triton"``."""
        if "fused" in self.parts:
            return self.parts["fused"].backend.name
        names = [self.parts[r].backend.name for r in ("transport", "runner") if r in self.parts]
        return "+".join(dict.fromkeys(names))

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks iff they agree on what will run, versions included."""
        agreed = {
            "api": API,
            "request": self.request.to_dict(),
            "parts": {role: c.to_dict() for role, c in sorted(self.parts.items())},
            "path": asdict(self.path) if self.path else None,
        }
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "name": self.name,
            "spec": self.spec,
            "source": self.source,
            "fingerprint": self.fingerprint,
            "policy": self.policy,
            "request": self.request.to_dict(),
            "parallel": self.parallel.to_dict(),
            "parts": {role: c.to_dict() for role, c in self.parts.items()},
            "path": asdict(self.path) if self.path else None,
            "converters": [c.name for c in self.converters],
            "adjustments": [asdict(a) for a in self.adjustments],
            "warnings": [asdict(w) for w in self.warnings],
            "preferences": [asdict(p) for p in self.preferences],
            "refusals": [r.to_dict() for r in self.refusals],
            "would_work": self.would_work,
        }

    def table(self) -> str:
        """For people: the chosen parts, then every refusal."""
        lines = [
            f"asked for {self.spec!r} ({self.source}): " + (self.name if self.ok else "refused")
        ]
        for role in ("router", "transport", "runner", "fused"):
            if role in self.parts:
                c = self.parts[role]
                options = "".join(f" {k}={v}" for k, v in c.options.items())
                lines.append(f"  {role:<10} {c.label}  ({c.distribution} {c.version}){options}")
        if self.path:
            p = self.path
            steps = [p.dispatched, p.runner_in, p.runner_out, p.combined]
            via = f" (converter {p.converter.name})" if p.converter else ""
            shown = [s for i, s in enumerate(steps) if i == 0 or s != steps[i - 1]]
            lines.append(f"  {'rows':<10} {' -> '.join(shown)}{via}")
            lines.append(
                f"  {'paid by':<10} " + ", ".join(f"{d}: {w}" for d, w in p.payers.items())
            )
        for why in dict.fromkeys(a.why for a in self.adjustments):
            changed = [a for a in self.adjustments if a.why == why]
            steps = ", ".join(f"{a.field} {a.before} -> {a.after}" for a in changed)
            lines.append(f"  {'adjusted':<10} {steps} ({changed[0].rule}): {why}")
        lines += [f"  {'warning':<10} {w}" for w in self.warnings]
        lines += [f"  {'preferred':<10} {p}" for p in self.preferences]
        if self.refusals:
            lines.append("refusals:")
            lines += [f"  {r}" for r in self.refusals]
        if self.would_work:
            lines.append(f"backend='auto' would choose {self.would_work!r}")
        return "\n".join(lines)

    def why_not(self) -> str:
        head = f"backend {self.spec!r} (from {self.source}) can't serve this layer"
        lines = [head + (":" if self.refusals else ""), *(f"  {r}" for r in self.refusals)]
        if self.would_work:
            lines.append(f"backend='auto' would choose {self.would_work!r}")
        return "\n".join(lines)


def make_request(
    config: MoEConfig,
    parallel: ParallelConfig,
    *,
    device: str = "cpu",
    router: str | None = None,
    routing_ids: bool = True,
    max_tokens_per_rank: int | None = None,
    autograd: bool = True,
    compile: bool = False,
    cuda_graph: bool = False,
    num_routed_ids: int | None = None,
    ranks_per_node: int | None = None,
) -> Request:
    """``device`` is a type (``"cpu"``, ``"cuda"``); an index after it is dropped."""
    act, routing = config.activation, config.router
    num_ids = num_routed_ids or config.num_experts
    return Request(
        device=str(device).partition(":")[0],
        dtype=dtype_name(config.dtype),
        router=router or routing.kind,
        scoring_func=routing.scoring_func,
        expert_groups=routing.num_expert_group is not None,
        correction_bias=routing.correction_bias,
        jitter=routing.jitter > 0 and router != "custom",
        routing_ids=routing_ids,
        quant=config.quant or "none",
        activation=act.name,
        gated=act.gated,
        limit="none" if act.limit is None else act.limit_form,
        alpha=act.alpha is not None,
        w13_layout=config.w13_layout,
        bias=config.bias,
        weight_on_input=config.apply_router_weight_on_input,
        capacity=config.capacity_factor is not None and not routing_ids,
        combine=config.combine,
        dispatch_dtype=config.dispatch_dtype or config.dtype,
        combine_dtype=config.combine_dtype
        or ("float64" if config.dtype == "float64" else "float32"),
        rows=parallel.rows,
        final_sum=parallel.final_sum,
        uneven_experts=num_ids % parallel.ep_size != 0,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_experts=num_ids,
        top_k=config.routing_width,
        ep_size=parallel.ep_size,
        tp_size=parallel.tp_size,
        dp_size=parallel.dp_size,
        max_tokens_per_rank=max_tokens_per_rank
        and max_tokens_per_rank + config.padding_tokens(max_tokens_per_rank),
        ranks_per_node=ranks_per_node,
        autograd=autograd,
        compile=compile,
        cuda_graph=cuda_graph,
    )


def resolve(
    config: MoEConfig,
    parallel: ParallelConfig | None = None,
    backend: str | None = None,
    *,
    device: str = "cpu",
    router: str | None = None,
    routing_ids: bool = True,
    max_tokens_per_rank: int | None = None,
    autograd: bool = True,
    compile: bool = False,
    cuda_graph: bool = False,
    num_routed_ids: int | None = None,
    ranks_per_node: int | None = None,
    policy: str = "strict",
) -> Resolution:
    """What would run this layer. Precedence: argument > config > ``MOE_BACKEND`` > auto.

    ``router`` is ``"custom"`` or ``"none"`` where the caller routes. ``num_routed_ids``: how many
    a ``Placement`` has, shared slots aside, where that isn't one per expert. ``ranks_per_node``:
    how many neighbouring ranks share a node; None: what ``MOE_RANKS_PER_NODE`` or torchrun says.
    ``policy``: ``"strict"`` refuses widths that a part hasn't, ``"adjust"`` may change them as the
    rules say and reports it;
    a part that serves unchanged is then preferred. Raises ``ConfigError`` for a
    spec that can't be read, ``UnknownBackendError``, ``BackendConflictError``,
    ``BackendLoadError`` or ``BackendVersionError`` for the one backend that was named; in a list
    these are refusals and the next one is tried.
    """
    faults = Faults()
    faults.choice("policy", policy, POLICIES)
    if max_tokens_per_rank is not None:
        faults.integer("max_tokens_per_rank", max_tokens_per_rank)
    faults.settle()
    text, source = _spec_and_source(config, backend)
    request = make_request(
        config,
        parallel or ParallelConfig(),
        device=device,
        router=router,
        routing_ids=routing_ids,
        max_tokens_per_rank=max_tokens_per_rank,
        autograd=autograd,
        compile=compile,
        cuda_graph=cuda_graph,
        num_routed_ids=num_routed_ids,
        ranks_per_node=ranks_per_node or environment.ranks_per_node(),
    )
    spec = parse_spec(text)
    found = _try_all(spec, request, policy)
    if found.ok or spec.is_auto:
        would_work = ""
    else:
        would_work = _try_all(parse_spec("auto"), request, policy).name
    effective = found.request or request
    return Resolution(
        request=effective,
        spec=text,
        source=source,
        parts=found.parts,
        path=found.path,
        refusals=tuple(dict.fromkeys(found.refusals)),
        adjustments=found.adjustments,
        would_work=would_work,
        warnings=tuple(
            Advice(f.rule.id, f.message, f.fix) for f in judge(effective) if f.rule.action == "warn"
        ),
        preferences=found.preferences,
        policy=policy,
    )


def _spec_and_source(config: MoEConfig, backend: str | None) -> tuple[str, str]:
    if backend is not None:
        return backend, "argument"
    if config.backend is not None:
        return config.backend, "config"
    from_env = environment.backend()
    return (from_env, "MOE_BACKEND") if from_env else ("auto", "auto")


@dataclass(slots=True)
class _Found:
    parts: dict[str, Candidate] = field(default_factory=dict[str, Candidate])
    path: Path | None = None
    request: Request | None = None
    adjustments: tuple[Adjustment, ...] = ()
    preferences: tuple[Advice, ...] = ()
    refusals: list[Refusal] = field(default_factory=list[Refusal])

    @property
    def ok(self) -> bool:
        return bool(self.parts)

    @property
    def name(self) -> str:
        names = [c.backend.name for role, c in self.parts.items() if role != "router"]
        return "+".join(dict.fromkeys(names))


_LOAD_ERRORS = (
    UnknownBackendError,
    BackendConflictError,
    BackendLoadError,
    BackendVersionError,
)


def _try_all(spec: Spec, request: Request, policy: str) -> _Found:
    found = _Found()
    for alternative in spec.alternatives:
        try:
            _try_alternative(alternative, request, policy, found)
        except _LOAD_ERRORS as error:
            if len(spec.alternatives) == 1:
                raise
            name = "+".join(n.name for n in alternative.names)
            found.refusals.append(_load_refusal(name, error))
        if found.ok:
            break
    return found


def _load_refusal(name: str, error: Exception) -> Refusal:
    codes: dict[type[Exception], str] = {
        UnknownBackendError: "unknown",
        BackendConflictError: "conflict",
        BackendVersionError: "version",
    }
    code = codes.get(type(error), "broken")
    return Refusal(name, code, "backend", name, code, str(error))


def _try_alternative(
    alternative: Alternative, request: Request, policy: str, found: _Found
) -> None:
    named = [_parts_of(n, found.refusals) for n in alternative.names]
    roles: dict[str, list[Candidate]] = {}
    if len(named) == 2:
        wanted = (("transport", named[0]), ("runner", named[1]))
        for (role, parts), name in zip(wanted, alternative.names, strict=True):
            roles[role] = [c for c in parts if c.part.role == role]
            if not roles[role]:
                offered = ", ".join(dict.fromkeys(c.part.role for c in parts))
                fix = "TRANSPORT+RUNNER takes a transport first and a runner second"
                found.refusals.append(Refusal(name.name, "role", "role", role, offered, fix))
    elif named:
        for c in named[0]:
            roles.setdefault(c.part.role, []).append(c)
    others = _all_parts(found.refusals)
    if named and not any(named):
        return
    staged = "fused" not in roles or bool({"transport", "runner"} & set(roles))
    wanted_roles = ["router"] if request.router not in ROUTED_OUTSIDE else []
    wanted_roles += ["transport", "runner"] if staged else []
    wanted_roles += ["fused"] if not named or "fused" in roles else []

    def candidates(role: str) -> list[Candidate]:
        if role not in wanted_roles:
            return []
        return roles.get(role, [c for c in others if c.part.role == role])

    def refused(candidate: Candidate, request: Request) -> list[Refusal]:
        try:
            return part_refusals(candidate, request)
        except BackendLoadError as error:
            # One plugin's bug is an error for who named it, and no more than a refusal else.
            if candidate.part.role in roles:
                raise
            return [_load_refusal(candidate.label, error)]

    def serves(candidate: Candidate, request: Request) -> bool:
        refusals = refused(candidate, request)
        found.refusals += refusals
        return not refusals

    def drop_if_filled(role: str, start: int, able: object) -> None:
        """Of those who fill in a role that wasn't named, nobody's refusal matters if one can."""
        if named and role not in roles and able:
            del found.refusals[start:]

    start = len(found.refusals)
    routers = [c for c in candidates("router") if serves(c, request)]
    drop_if_filled("router", start, routers)
    impossible = layer_refusals(request)
    movers: list[_Mover] = []
    start = len(found.refusals)
    for c in [*candidates("transport"), *candidates("fused")]:
        mover = _mover(c, request, policy)
        if mover.adjustments:
            refusals = layer_refusals(mover.request, c.label) + refused(c, mover.request)
            if refusals:  # with other widths neither: say what is wrong with the first ones too
                refusals = impossible + refused(c, request) + refusals
        else:
            refusals = impossible + refused(c, request)
        found.refusals += refusals
        if not refusals:
            movers.append(mover)
    drop_if_filled("transport", start, movers)
    # A runner sees the widths of the transport that it would work with.
    widths = dict.fromkeys(m.request for m in movers if m.role == "transport") or [request]
    start = len(found.refusals)
    runners = {q: [c for c in candidates("runner") if serves(c, q)] for q in widths}
    drop_if_filled("runner", start, all(runners.values()))
    if "router" in wanted_roles and not routers:
        return
    best = _best_experts(movers, runners, found.refusals)
    if best is None:
        return
    if routers:
        found.parts["router"] = min(routers, key=lambda c: _order(c, request.device))
    mover, chosen, found.path = best
    found.parts.update(chosen)
    found.request, found.adjustments = mover.request, mover.adjustments
    found.preferences = mover.preferences


def _order(c: Candidate, device: str) -> tuple[int, str, str]:
    return -c.part.preferred_on(device), c.label, c.distribution


@dataclass(frozen=True, slots=True)
class _Mover:
    """A transport or a fused part, and the widths with which it would serve."""

    candidate: Candidate
    request: Request
    adjustments: tuple[Adjustment, ...] = ()

    @property
    def role(self) -> str:
        return self.candidate.part.role

    @property
    def preferences(self) -> tuple[Advice, ...]:
        findings = judge(self.request, self.candidate.part.offer, self.role)
        return tuple(
            Advice(f.rule.id, f.message, f.fix) for f in findings if f.rule.action == "prefer"
        )


def _mover(candidate: Candidate, request: Request, policy: str) -> _Mover:
    findings = judge(request, candidate.part.offer, candidate.part.role)
    finding = next((f for f in findings if f.rule.action == "adjust"), None)
    if policy != "adjust" or finding is None:
        return _Mover(candidate, request)
    after = adjusted(request, finding)
    assert finding.rule.change is not None
    why = f"{finding.message}; {finding.note}"
    changes = tuple(
        Adjustment(finding.rule.id, name, getattr(request, name), value, why)
        for name, value in finding.rule.change(request).items()
        if value != getattr(request, name)
    )
    return _Mover(candidate, after, changes)


def _best_experts(
    movers: list[_Mover], runners: Mapping[Request, list[Candidate]], refusals: list[Refusal]
) -> tuple[_Mover, dict[str, Candidate], Path | None] | None:
    """The preferred able pair, or fused part, with as few changed widths as possible, what a rule
    prefers first; ties: one backend, fewer converters, names."""
    choices: list[tuple[tuple[Any, ...], _Mover, dict[str, Candidate], Path | None]] = []
    for m in sorted(movers, key=lambda m: _order(m.candidate, m.request.device)):
        device = m.request.device
        t, changes = m.candidate, (len(m.adjustments), not m.preferences)
        if m.role == "fused":
            rank = (changes, -2 * t.part.preferred_on(device), False, False, False, t.label, "")
            choices.append((rank, m, {"fused": t}, None))
            continue
        for r in sorted(runners[m.request], key=lambda c: _order(c, device)):
            path = find_path(t, r, m.request)
            if isinstance(path, list):
                refusals += path
                continue
            together = t.backend.name == r.backend.name
            rank = (
                changes,
                -(t.part.preferred_on(device) + r.part.preferred_on(device)),
                not together,
                path.converter is not None,
                path.combined in PER_SLOT_LAYOUTS,
                t.label,
                r.label,
            )
            choices.append((rank, m, {"transport": t, "runner": r}, path))
    if not choices:
        return None
    _, mover, parts, path = min(choices, key=lambda c: c[0])
    return mover, parts, path


def _parts_of(named: NamedBackend, refusals: list[Refusal]) -> list[Candidate]:
    """The parts of a backend that a spec's name and options select."""
    entry = registry.get(named.name, named.distribution)
    parts = entry.backend.parts
    mode = named.options.get("mode")
    selected = [p for p in parts if mode is None or p.mode in ("", mode)]
    if mode is not None and not any(p.mode == mode for p in parts):
        modes = ", ".join(dict.fromkeys(p.mode for p in parts if p.mode)) or "none"
        refusals.append(
            Refusal(named.name, "option", "mode", mode, modes, "set mode to one of these")
        )
        return []
    # A key belongs to the parts that know it; one that no part knows is refused by all of them.
    known = {key for part in parts for key in part.options}
    return [
        Candidate(
            entry.backend,
            part,
            entry.distribution,
            entry.version,
            {
                key: value
                for key, value in named.options.items()
                if key != "mode" and (key in part.options or key not in known)
            },
        )
        for part in selected
    ]


def _all_parts(refusals: list[Refusal]) -> list[Candidate]:
    parts: list[Candidate] = []
    for info in registry.list_backends():
        if info.status == "available":
            parts += _parts_of(NamedBackend(info.name, info.distribution, {}), refusals)
        else:
            refusals.append(
                Refusal(info.name, info.status, "backend", info.name, info.status, info.reason)
            )
    return parts

"""Can this part serve this request? Every reason it can't, as data.

``part_refusals`` compares a part's ``Offer`` with a ``Request`` axis by axis, applies the rules
about widths (``moe_core.rules``), looks up what it needs, and asks its ``check``. ``find_path``
fits a transport and a runner together: layouts meet (through a converter where they must) and
every debt is paid exactly once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_core.converters import CONVERTERS, ConverterSpec
from moe_core.environment import requirement_fault
from moe_core.errors import BackendLoadError, nearest
from moe_core.manifest import (
    DEBTS,
    PER_SLOT_LAYOUTS,
    ROLE_AXES,
    ROW_LAYOUTS,
    Backend,
    Part,
    Request,
    meets,
    show,
)
from moe_core.rules import judge

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one part can't serve. ``code``: ``axis`` (the offer says no), ``rule`` (``axis`` is then
    the rule's id and ``wanted`` its message), ``check`` (the part's own check says no), ``option``,
    ``needs``, ``role``, ``no_path``, ``debt``, ``broken``, ``conflict``, ``version``, ``unknown``.
    ``fix`` is a sentence. ``part`` is ``layer`` where no part could serve."""

    part: str
    code: str
    axis: str
    wanted: str
    offered: str
    fix: str

    def __str__(self) -> str:
        if self.code == "rule":
            return f"{self.part} | {self.axis}: {self.wanted} | {self.fix}"
        return (
            f"{self.part} | {self.axis}: wanted {self.wanted}, offers {self.offered} | {self.fix}"
        )

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part of an installed backend, with the options the spec gave it."""

    backend: Backend
    part: Part
    distribution: str
    version: str
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def label(self) -> str:
        mode = f"[mode={self.part.mode}]" if self.part.mode else ""
        return f"{self.backend.name}{mode}.{self.part.role}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend.name,
            "role": self.part.role,
            "mode": self.part.mode,
            "target": self.part.target,
            "distribution": self.distribution,
            "version": self.version,
            "options": dict(self.options),
        }


_FIX = {
    "device": "build the layer on another device",
    "dtype": "set dtype to one of these",
    "autograd": "build the layer with inference=True",
    "compile": "build it without compile=True",
    "cuda_graph": "build it without cuda_graph=True",
    "quant": "set quant to one of these",
    "ep_size": "set ParallelConfig.ep_size to a width it has",
    "tp_size": "set ParallelConfig.tp_size to a width it has",
    "dp_size": "set ParallelConfig.dp_size to a width it has",
    "capacity": "leave capacity_factor unset",
    "routing_ids": "route before the layer",
    "router": "set router.kind to one of these",
    "scoring_func": "set router.scoring_func to one of these",
    "expert_groups": "leave router.num_expert_group unset",
    "correction_bias": "set router.correction_bias=false",
    "activation": "set activation.name to one of these",
    "gated": "set activation.gated to one of these",
    "limit": "set activation.limit_form to one of these (none: no activation.limit)",
    "alpha": "leave activation.alpha unset",
    "bias": "set bias=false",
    "weight_on_input": "set apply_router_weight_on_input=false",
    "final_sum": "leave ParallelConfig.final_sum at 'layer'",
}


def part_refusals(candidate: Candidate, request: Request) -> list[Refusal]:
    """All reasons for which this part can't serve; an empty list means that it can."""
    part, label = candidate.part, candidate.label
    broken = [f for f in judge(request, part.offer, part.role) if f.rule.action != "prefer"]
    refusals = [Refusal(label, "rule", f.rule.id, f.message, "", f.fix) for f in broken]
    told = {axis for f in broken for axis in f.rule.axes}
    if request.ep_size * request.tp_size == 1:  # the local path: nothing travels
        told |= {"ep_size", "tp_size", "dispatch_dtype", "combine_dtype"}
    if request.copies == 1:  # each row is one rank's, and nothing is left to sum
        told.add("final_sum")
    if request.tp_size > 1:  # what a part sees is the slice: a rule compares that
        told.add("intermediate_size")
    for axis in ROLE_AXES[part.role]:
        if axis in told:
            continue
        wanted, offered = getattr(request, axis), getattr(part.offer, axis)
        if axis == "router" and wanted in ("custom", "none"):
            continue
        if not meets(wanted, offered):
            fix = _FIX.get(axis, f"set {axis} to a value it has")
            refusals.append(
                Refusal(
                    label,
                    "axis",
                    axis,
                    show(wanted),
                    show(offered),
                    f"{fix}, or choose another backend",
                )
            )
    refusals += _option_refusals(candidate)
    for need in part.needs:
        fault = requirement_fault(need)
        if fault:
            refusals.append(Refusal(label, "needs", need, need, "not installed", fault))
    if part.check is not None and not refusals:
        refusals += [
            Refusal(label, "check", axis, wanted, offered, fix)
            for axis, wanted, offered, fix in _checked(candidate, request)
        ]
    return refusals


def layer_refusals(request: Request, who: str = "layer") -> list[Refusal]:
    """Widths that no part could serve; ``who`` is the part for which they were adjusted."""
    return [
        Refusal(who, "rule", f.rule.id, f.message, "", f.fix)
        for f in judge(request)
        if f.rule.action != "warn"
    ]


def _option_refusals(candidate: Candidate) -> list[Refusal]:
    part, found = candidate.part, list[Refusal]()
    for key, value in candidate.options.items():
        if key not in part.options:
            known = ", ".join(part.options) or "none"
            hint = f"leave it out{nearest(key, part.options)}"
            found.append(Refusal(candidate.label, "option", key, f"{key}={value}", known, hint))
        elif value not in part.options[key]:
            allowed = ", ".join(part.options[key])
            hint = f"set {key} to one of these{nearest(value, part.options[key])}"
            found.append(Refusal(candidate.label, "option", key, value, allowed, hint))
    return found


def _checked(candidate: Candidate, request: Request) -> list[tuple[str, str, str, str]]:
    """An exception in a check is a bug of the plugin, not a refusal."""
    check = candidate.part.check or ""
    try:
        module, _, name = check.partition(":")
        options = filled_options(candidate)
        answer: Any = getattr(import_module(module), name)(request, options)
        return [(str(a), str(w), str(o), str(f)) for a, w, o, f in answer]
    except Exception as error:
        reason = f"its check raised {type(error).__name__}: {error}"
        raise BackendLoadError(
            candidate.backend.name, candidate.distribution, check, reason
        ) from error


def filled_options(candidate: Candidate) -> dict[str, str]:
    """The spec's options with the defaults (each option's first value) for the rest."""
    return {k: candidate.options.get(k, v[0]) for k, v in candidate.part.options.items()}


_ONE_PAYER = "choose a transport and a runner of which exactly one pays it"


@dataclass(frozen=True, slots=True)
class Path:
    """How one transport and one runner meet.

    ``dispatched`` → [converter] → ``runner_in`` → ``runner_out`` → [converter's way back] →
    ``combined``. ``payers``: debt → ``"transport"``, ``"runner"`` or ``"converter"``; ``"caller"``
    for the sums that ``ParallelConfig.final_sum`` leaves to the layer's.
    """

    converter: ConverterSpec | None
    dispatched: str
    runner_in: str
    runner_out: str
    combined: str
    payers: Mapping[str, str]


def find_path(transport: Candidate, runner: Candidate, request: Request) -> Path | list[Refusal]:
    """The first path with the fewest converters and copies, or why there is none."""
    debt_refusals: list[Refusal] = []
    for dispatched, runner_in, runner_out, combined, converter in _routes(transport, runner):
        payers, problems = _assign_debts(transport, runner, runner_out, request)
        if not problems:
            return Path(converter, dispatched, runner_in, runner_out, combined, payers)
        debt_refusals += problems
    if debt_refusals:
        return list(dict.fromkeys(debt_refusals))
    pair = f"{transport.label} + {runner.label}"
    return [
        Refusal(
            pair,
            "no_path",
            "layout",
            f"{', '.join(transport.part.gives)} to {', '.join(transport.part.takes)}",
            f"{', '.join(runner.part.takes)} to {', '.join(runner.part.gives)}",
            f"no converter leads there (there are: {', '.join(c.name for c in CONVERTERS)})",
        )
    ]


def _routes(
    transport: Candidate, runner: Candidate
) -> list[tuple[str, str, str, str, ConverterSpec | None]]:
    t, r = transport.part, runner.part
    ports = list(zip(r.takes, r.gives, strict=True))
    direct = [
        (given, given, back, back, None)
        for given in t.gives
        for taken, back in ports
        if taken == given and back in t.takes
    ]
    # of the converters, first those that leave the rows where they are
    converted = [
        (c.takes, c.gives, c.back_takes, c.back_gives, c)
        for c in sorted(CONVERTERS, key=lambda c: c.copies)
        for given in t.gives
        for taken, back in ports
        if c.takes == given
        and c.gives == taken
        and c.back_takes == back
        and c.back_gives in t.takes
    ]
    return [*direct, *converted]


def _assign_debts(
    transport: Candidate, runner: Candidate, runner_out: str, request: Request
) -> tuple[dict[str, str], list[Refusal]]:
    """Fixed payers first; what is left goes to whoever can, as late as possible (the sum then
    works on unrounded products). The weight on input is the runner's in any case."""
    stages = {"runner": runner.part, "transport": transport.part}
    pair = f"{transport.label} + {runner.label}"
    payers: dict[str, str] = {}
    problems: list[Refusal] = []
    for debt in DEBTS:
        on_input = debt == "weight" and request.weight_on_input
        where = ("runner",) if on_input else ("runner", "transport")
        fixed = [name for name, part in stages.items() if debt in part.pays]
        able = [name for name in where if debt in stages[name].may_pay]
        if len(fixed) > 1 or not set(fixed) <= set(where):
            problem = "paid on output" if on_input else "paid twice"
            problems.append(Refusal(pair, "debt", debt, "paid once", problem, _ONE_PAYER))
        elif fixed or able:
            payers[debt] = (fixed or able)[-1]
            left = request.tp_size if debt == "tp_sum" else request.copies // request.tp_size
            if request.final_sum == "caller" and debt in ("rank_sum", "tp_sum") and left > 1:
                payers[debt] = "caller"
        else:
            problems.append(Refusal(pair, "debt", debt, "paid once", "not paid", _ONE_PAYER))
    rows_out = runner_out in ROW_LAYOUTS
    if not problems and rows_out != (payers["slot_sum"] == "runner"):
        problems.append(
            Refusal(
                pair,
                "debt",
                "slot_sum",
                f"a runner that returns {runner_out}",
                "slots summed" if not rows_out else "slots not summed",
                f"rows per slot ({', '.join(PER_SLOT_LAYOUTS)}) are summed by the transport",
            )
        )
    return payers, problems

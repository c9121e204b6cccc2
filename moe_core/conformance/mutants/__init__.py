"""Faulty parts, each a few lines away from a right one, that the suites have to catch.

A mutant wraps a part of an installed backend, its *carrier*, at the boundary of its role and breaks
one thing. It is registered as the backend ``mutant``, with a manifest made from the carrier's, in a
process of its own, so nothing of it is seen elsewhere. ``moe-core conformance --mutants`` runs all
of them (``mutants.run``). To add one, write it in the module of its role under that module's
decorator: the name is what is wrong, the docstring says it in a sentence, and ``killer`` names the
test to be tried first. It must be wrong by the contract; one that survives shows a hole in the
suites.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_core import registry
from moe_core.conformance.target import Target
from moe_core.errors import ConfigError, Fault, nearest
from moe_core.manifest import ROLE_AXES, ROLES, Backend, Offer, Part, Range, meets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moe_core.capabilities import Candidate

NAME = "mutant"
"""The backend that stands for the active mutant."""
MODULES = ("routers", "runners", "transports", "fused", "claims")
LOCAL, ALL_TO_ALL, REPLICATED = "torch", "nccl[mode=all_to_all]", "nccl[mode=replicated]"
CARRIERS = {
    "router": LOCAL,
    "runner": LOCAL,
    "transport": ALL_TO_ALL,
    "fused": f"{ALL_TO_ALL}+{LOCAL}",
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One faulty part.

    ``target``: ``"module:name"``. ``killer``: part of the name of the test that is tried first.
    ``takes``: the layout at which a runner is wrapped, and the only one that it then takes.
    ``ranks``: world sizes to test with. ``needs``: what the carrier has to offer for the fault to
    be one. ``offer``: what the manifest says in place of the carrier's words. ``control``: not
    faulty at all, and left out unless it is named.
    """

    name: str
    role: str
    what: str
    target: str
    killer: str = ""
    carrier: str = ""
    takes: str = ""
    ranks: tuple[int, ...] = (1,)
    needs: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    offer: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    control: bool = False

    @property
    def short(self) -> str:
        return self.name.partition(".")[2]


_table: dict[str, Mutant] = {}


def mutant(role: str, base: type, method: str, **how: Any) -> Callable[[Any], Any]:
    """Decorator: puts a class, or a function that becomes the ``method`` of a ``base``, into the
    table; the keywords are fields of ``Mutant``."""

    def add(made: Any) -> Any:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", made.__name__).lower()
        name, what = f"{role}.{words}", str(made.__doc__).strip()
        assert name not in _table, f"two mutants are called {name}"
        given = {"carrier": CARRIERS[role], **how}
        target = f"{made.__module__}:{made.__name__}"
        _table[name] = Mutant(name=name, role=role, what=what, target=target, **given)
        if isinstance(made, type):
            return made
        own = {method: made, "__doc__": made.__doc__, "__module__": made.__module__}
        return type(made.__name__, (base,), own)

    return add


def every() -> dict[str, Mutant]:
    """All of them by name, those that are none (``control``) included."""
    for module in MODULES:
        import_module(f"{__name__}.{module}")
    return dict(_table)


def select(pattern: str = "*", roles: tuple[str, ...] = ROLES) -> list[Mutant]:
    """Those whose name, with or without its role, matches the shell pattern.

    Raises ``ConfigError`` where nothing matches.
    """
    known = every().values()
    found = [
        m
        for m in known
        if m.role in roles
        and (fnmatchcase(m.name, pattern) or fnmatchcase(m.short, pattern))
        and (not m.control or pattern in (m.name, m.short))
    ]
    if not found:
        hint = nearest(pattern, [m.name for m in known])
        raise ConfigError([Fault("mutants", pattern, f"no mutant is called so{hint}")])
    return found


def control(like: Mutant) -> Mutant:
    """The same carrier with nothing wrong."""
    (plain,) = [m for m in every().values() if m.control and m.role == like.role]
    return replace(plain, carrier=like.carrier, takes=like.takes, ranks=like.ranks)


# -- the manifest


active: dict[str, Candidate] = {}
"""Role → the part of the carrier that the active mutant wraps."""


def carried_by(found: Mutant, spec: str) -> Mutant | None:
    """The same around the parts of another backend; None where they don't reach the fault."""
    owner = Target(spec)
    if found.role == "fused":
        roles = ("transport", "runner") if len(owner.names) == 2 else ("fused",)
    else:
        roles = (found.role,)
    if not set(roles) <= set(owner.roles):
        return None
    moved = replace(found, carrier=spec)
    parts = [_one(moved, owner, role) for role in roles]
    wanted = dict(found.needs) | ({"ep_size": 2} if max(found.ranks) > 1 else {})
    for part in parts:
        if part is None:
            return None
        offered = {axis: getattr(part.part.offer, axis) for axis in ROLE_AXES[part.part.role]}
        if not all(meets(value, offered.get(axis)) for axis, value in wanted.items()):
            return None
    return moved


def _one(found: Mutant, owner: Target, role: str) -> Candidate | None:
    """The first of its parts; of runners the first that takes the layout."""
    for candidate in owner.of(role):
        if role != "runner" or not found.takes or found.takes in candidate.part.takes:
            return candidate
    return None


def install(found: Mutant) -> None:
    """Registers the mutant as the backend ``mutant`` of this process and of its forks."""
    owner = Target(found.carrier)
    roles = ("transport", "runner") if found.role == "fused" else (found.role,)
    active.clear()
    for role in roles:
        candidate = _one(found, owner, role)
        assert candidate is not None, f"{found.carrier} has no {role} that takes {found.takes}"
        active[role] = candidate
    if found.role == "fused":
        offer = _both(*(active[role] for role in roles))
        part = Part(role="fused", target=found.target, offer=offer)
    else:
        part = replace(active[found.role].part, target=found.target, mode="", preference=-100)
    if found.takes:
        port = part.takes.index(found.takes)
        part = replace(part, takes=part.takes[port : port + 1], gives=part.gives[port : port + 1])
    part = replace(part, offer=replace(part.offer, **found.offer))
    registry.register_backend(Backend(name=NAME, parts=(part,), summary=found.what))


def _both(transport: Candidate, runner: Candidate) -> Offer:
    """What the two offer together."""
    of = {c.part.role: c.part.offer for c in (transport, runner)}
    made: dict[str, Any] = {}
    for axis in (f.name for f in fields(Offer)):
        known = [o for role, o in of.items() if axis in ROLE_AXES[role]]
        first, *rest = [getattr(o, axis) for o in known or [of["transport"]]]
        for other in rest:
            if isinstance(first, bool):
                first = first and other
            elif isinstance(first, tuple):
                first = tuple(v for v in first if meets(v, other))
            elif first == Range():
                first = other
        made[axis] = first
    return Offer(**made)

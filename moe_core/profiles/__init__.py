"""What another framework would do with given flags, as data, and what that is in our widths.

A profile is a JSON file in this folder: ``flags`` (with defaults), ``rows`` in the order in which
the framework looks at things, each with ``where`` (file and lines there), ``when`` (an expression
over the flags), an ``action`` (``set`` other flags, ``refuse``, or ``note``), a sentence, and two
examples: flags that break the row and flags that don't. Nothing of the framework is imported.

``run`` goes through all rows, so it shows every refusal where the framework stops at the first.
"""
# pyright: strict

from __future__ import annotations

import ast
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core.config import ParallelConfig
from moe_core.errors import ConfigError, Fault, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = str | int | bool
_FOLDER = Path(__file__).parent
_ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.Compare, ast.cmpop),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.IfExp),
    *(ast.Name, ast.Load, ast.Constant, ast.Tuple),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``set``: flag → expression. ``breaks`` and ``fits``: flags as a user types them."""

    id: str
    where: str
    when: str
    action: str
    says: str
    breaks: str
    fits: str
    set: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``names``: lists that expressions may use. ``pairs``: transport → runners it goes with."""

    name: str
    source: str
    flags: Mapping[str, Mapping[str, Any]]
    names: Mapping[str, list[str]]
    pairs: Mapping[str, list[str]]
    rows: tuple[Row, ...]

    def parse(self, texts: list[str]) -> dict[str, Value]:
        """``["tp=8,ep=4", "moe-a2a-backend=deepep"]`` as flags. Raises ``ConfigError`` with all
        faults: unknown names (with the nearest), values that a flag hasn't."""
        shorts = {f["short"]: name for name, f in self.flags.items() if "short" in f}
        faults: list[Fault] = []
        given: dict[str, Value] = {}
        for pair in (part for text in texts for part in text.split(",") if part.strip()):
            key, equals, text = (piece.strip() for piece in pair.partition("="))
            name = key.lstrip("-").replace("-", "_")
            name = shorts.get(name, name)
            if name not in self.flags or not equals:
                hint = nearest(name, [*self.flags, *shorts])
                faults.append(Fault(key, text, f"{self.name} has no such FLAG=VALUE{hint}"))
                continue
            try:
                given[name] = _value(text, self.flags[name])
            except ValueError as error:
                faults.append(Fault(key, text, str(error)))
        if faults:
            raise ConfigError(faults)
        return given


@dataclass(frozen=True, slots=True)
class Step:
    """A row that fired. ``changes``: flag → (before, after)."""

    row: Row
    says: str
    changes: Mapping[str, tuple[Value, Value]]

    def __str__(self) -> str:
        changed = ", ".join(f"{n} {a} -> {b}" for n, (a, b) in self.changes.items())
        text = f"{changed}: {self.says}" if changed else self.says
        return f"{self.row.action:<6} {self.row.id}: {text} [{self.row.where}]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``flags``: what they are in the end. ``parallel``: the same in our widths (SGLang's rank
    order is ours: dp, then ep, then tp), None where ours have no such thing."""

    profile: Profile
    given: Mapping[str, Value]
    flags: Mapping[str, Value]
    steps: tuple[Step, ...]

    @property
    def refused(self) -> tuple[Step, ...]:
        return tuple(s for s in self.steps if s.row.action == "refuse")

    @property
    def parallel(self) -> ParallelConfig | None:
        f = {name: int(v) for name, v in self.flags.items() if not isinstance(v, str)}
        tp = f["tp_size"] // f["ep_size"] // f["moe_dp_size"]
        if tp * f["ep_size"] * f["moe_dp_size"] != f["tp_size"] or f["dwdp_size"] > 1:
            return None
        shared = f["ep_size"] > 1 and self.flags["moe_a2a_backend"] == "none"
        return ParallelConfig(
            ep_size=f["ep_size"],
            tp_size=tp,
            dp_size=f["moe_dp_size"],
            rows="replicated" if shared else "distinct",
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "profile": self.profile.name,
            "ok": not self.refused,
            "given": dict(self.given),
            "flags": dict(self.flags),
            "steps": [asdict(s.row) | {"says": s.says, "changes": s.changes} for s in self.steps],
            "parallel": self.parallel.to_dict() if self.parallel else None,
        }

    def table(self) -> str:
        asked = ", ".join(f"{name}={value}" for name, value in self.given.items()) or "no flags"
        lines = [f"{self.profile.name} with {asked}:", *(f"  {step}" for step in self.steps)]
        if self.refused:
            lines.append(f"it stops at the first refusal, {self.refused[0].row.id}")
        else:
            lines.append("it starts" if self.steps else "it starts, with all as given")
        if self.parallel is None:
            lines.append("in our widths: there is nothing like it")
        else:
            widths = ", ".join(f"{n}={v}" for n, v in self.parallel.to_dict().items())
            lines.append(f"in our widths: {widths}")
        return "\n".join(lines)


def names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def load(name: str) -> Profile:
    """Raises ``ConfigError`` for a name that no file here has."""
    if name not in names():
        message = f"no such profile{nearest(name, names())}; there are: {', '.join(names())}"
        raise ConfigError([Fault("profile", name, message)])
    data = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Profile(**data | {"rows": tuple(Row(**row) for row in data["rows"])})


def run(profile: Profile, given: Mapping[str, Value]) -> Outcome:
    flags: dict[str, Value] = {name: f["default"] for name, f in profile.flags.items()}
    flags |= given
    steps: list[Step] = []
    for row in profile.rows:
        names = dict(profile.names) | flags
        names |= {f["short"]: flags[n] for n, f in profile.flags.items() if "short" in f}
        names["pairs"] = profile.pairs.get(str(flags["moe_a2a_backend"]), [])
        try:
            if not evaluate(row.when, names):
                continue
        except ZeroDivisionError:  # a width of 0 is left, which an earlier row has refused
            continue
        new = {name: evaluate(text, names) for name, text in (row.set or {}).items()}
        changes = {n: (flags[n], v) for n, v in new.items() if v != flags[n]}
        steps.append(Step(row, row.says.format_map(flags), changes))
        flags |= new
    return Outcome(profile, dict(given), flags, tuple(steps))


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """Comparisons and whole-number arithmetic over names; nothing that calls or reaches out."""
    return eval(_compiled(text), {"__builtins__": {}}, dict(names))


@cache
def _compiled(text: str) -> Any:
    tree = ast.parse(text, mode="eval")
    bad = [type(node).__name__ for node in ast.walk(tree) if not isinstance(node, _ALLOWED)]
    if bad:
        raise ValueError(f"{text!r} holds {', '.join(bad)}, which a profile's expressions can't")
    return compile(tree, "<profile>", "eval")


def _value(text: str, flag: Mapping[str, Any]) -> Value:
    """Raises ``ValueError`` with what is possible."""
    default = flag["default"]
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ValueError("must be true or false")
        return text == "true"
    if isinstance(default, int):
        least = 1 if default else -1  # 0 stands for "not known", -1 for "off"
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise ValueError(f"must be an integer of at least {least}")
        return int(text)
    choices = flag.get("choices", [text])
    if text not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}{nearest(text, choices)}")
    return text

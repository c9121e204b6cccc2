"""Which backend, as one string.

::

    spec        = alternative , { "," , alternative } ;      (* the first that serves *)
    alternative = "auto" | backend , [ "+" , backend ] ;     (* transport + runner *)
    backend     = [ distribution , ":" ] , name , [ options ] ;
    options     = "[" , option , { ";" , option } , "]" ;
    option      = key , "=" , value ;
    name        = ? Python identifier other than auto ? ;
    key         = ? Python identifier ? ;
    distribution = ? letters, digits and . _ - with a letter or digit at both ends ? ;
    value       = ? one or more characters other than [ ] ; = and blanks ? ;

Blanks around names and signs don't count. ``NAME`` alone takes every role that the backend offers
and leaves the others to auto. ``dist:NAME`` picks one of several distributions that claim a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTO = "auto"
EXAMPLES = "'auto', 'NAME', 'TRANSPORT+RUNNER', 'NAME[key=value]', 'FIRST,SECOND' or 'dist:NAME'"

_BACKEND = re.compile(
    r"(?:(?P<dist>[^\[:]*):)?(?P<name>[^\[]*)(?P<options>\[.*\])?(?P<rest>.*)", re.S
)
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VALUE = re.compile(r"[^\[\];=\s]+")


@dataclass(frozen=True, slots=True)
class NamedBackend:
    """One backend, of one distribution if that is set, with ``NAME[key=value]`` options."""

    name: str
    distribution: str | None = None
    options: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def __str__(self) -> str:
        dist = f"{self.distribution}:" if self.distribution else ""
        pairs = ";".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{dist}{self.name}" + (f"[{pairs}]" if pairs else "")


@dataclass(frozen=True, slots=True)
class Alternative:
    """``names``: none = auto, one = all of its roles, two = transport and runner."""

    names: tuple[NamedBackend, ...] = ()

    def __str__(self) -> str:
        return "+".join(map(str, self.names)) or AUTO


@dataclass(frozen=True, slots=True)
class Spec:
    """``alternatives`` in the order to try them; ``text`` as it was written."""

    alternatives: tuple[Alternative, ...]
    text: str = field(compare=False)

    @property
    def is_auto(self) -> bool:
        return self.alternatives == (Alternative(),)

    def __str__(self) -> str:
        """The canonical form: no blanks, options by key."""
        return ",".join(map(str, self.alternatives))


def parse_spec(text: str, field: str = "backend") -> Spec:
    """Raises ``ConfigError`` with every fault; ``field`` is what the faults say was set."""
    return _Parser(text, field).parse()


class _Parser:
    def __init__(self, text: object, field: str) -> None:
        self.text, self.field = text, field
        self.faults: list[Fault] = []

    def parse(self) -> Spec:
        text = self.text
        alternatives: list[Alternative] = []
        if not isinstance(text, str) or not text.strip():
            self.faults.append(Fault(self.field, text, f"must be a string like {EXAMPLES}"))
        elif self._brackets_match(text):
            for start, piece in _split(text, 0, ","):
                alternative = self._alternative(start, piece)
                if alternative in alternatives:
                    self._fault(start, f"{alternative} stands in the list twice")
                elif Alternative() in alternatives:
                    self._fault(start, "auto tries every backend, so it must be the last in a list")
                if alternative is not None:
                    alternatives.append(alternative)
        if self.faults:
            raise ConfigError(self.faults)
        return Spec(tuple(alternatives), str(text))

    def _fault(self, position: int, message: str) -> None:
        rest = str(self.text)[position:]
        position += len(rest) - len(rest.lstrip())
        self.faults.append(Fault(self.field, self.text, f"at character {position + 1}: {message}"))

    def _brackets_match(self, text: str) -> bool:
        opened: int | None = None
        for i, char in enumerate(text):
            if char == "[" and opened is not None:
                self._fault(i, "'[' inside '[...]'; a value can't hold one")
                return False
            if char == "]" and opened is None:
                self._fault(i, "']' closes nothing")
                return False
            if char in "[]":
                opened = i if char == "[" else None
        if opened is not None:
            self._fault(opened, "'[' is never closed")
        return opened is None

    def _alternative(self, start: int, piece: str) -> Alternative | None:
        if piece.strip() == AUTO:
            return Alternative()
        pieces = _split(piece, start, "+")
        if len(pieces) > 2:
            self._fault(pieces[2][0] - 1, "at most two backends, TRANSPORT+RUNNER")
        names = [self._backend(at, one, combined=len(pieces) > 1) for at, one in pieces]
        good = tuple(name for name in names if name is not None)
        return Alternative(good) if len(good) == len(names) else None

    def _backend(self, start: int, piece: str, combined: bool) -> NamedBackend | None:
        before = len(self.faults)
        found = _BACKEND.fullmatch(piece)
        assert found is not None  # each of its parts may be empty
        dist, name = found["dist"], found["name"].strip()
        at_name = start + found.start("name")
        if dist is not None and not _DISTRIBUTION.fullmatch(dist.strip()):
            self._fault(start, f"{dist.strip()!r} before ':' is not the name of a distribution")
        if name == AUTO:
            way = "name both sides of '+', or one backend alone" if combined else "write it alone"
            self._fault(at_name, f"auto takes no options, distribution or partner; {way}")
        elif not name:
            self._fault(at_name, "a backend's name is missing")
        elif not name.isidentifier():
            self._fault(at_name, f"{name!r} is not a backend's name (letters, digits and _)")
        if found["rest"].strip():
            self._fault(start + found.start("rest"), "expected '+' or ',' or the end after ']'")
        options: dict[str, str] = {}
        if found["options"]:
            inner = found["options"][1:-1]
            for at, pair in _split(inner, start + found.start("options") + 1, ";"):
                self._option(at, pair, options)
        if len(self.faults) > before:
            return None
        return NamedBackend(name, dist.strip() if dist else None, dict(sorted(options.items())))

    def _option(self, start: int, pair: str, options: dict[str, str]) -> None:
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key.isidentifier() or not _VALUE.fullmatch(value):
            self._fault(start, f"{pair.strip()!r} must look like key=value")
        elif key in options:
            self._fault(start, f"option {key!r} is given twice")
        else:
            options[key] = value


def _split(text: str, start: int, separator: str) -> list[tuple[int, str]]:
    """The parts between separators that are outside ``[]``, each with its place in the spec."""
    parts: list[tuple[int, str]] = []
    begin, depth = 0, 0
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == separator and depth == 0:
            parts.append((start + begin, text[begin:i]))
            begin = i + 1
    return [*parts, (start + begin, text[begin:])]

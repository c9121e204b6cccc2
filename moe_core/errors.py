"""Errors are data plus one clear sentence: what was asked, what is possible, what to do.

Every class pickles (worker processes send them to their parent) and keeps what it was built
from as attributes; the text is made from those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_core.resolution import Resolution


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the closest known name, else an empty string."""
    options = sorted(known)
    if name in options:
        return ""
    close = get_close_matches(name, options, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a configuration or a spec.

    ``field`` is the dotted name of what was set (``"router.topk_group"``), ``value`` what it was
    set to (as JSON), ``message`` a sentence that says what is possible.
    """

    field: str
    value: Any
    message: str

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class MoEError(Exception):
    """Base class of every error that moe-core raises on purpose."""


class UnknownBackendError(MoEError, LookupError):
    """A backend name that nothing installed provides."""

    def __init__(self, name: str, known: Sequence[str], install: str | None = None) -> None:
        super().__init__(name, tuple(known), install)
        self.name, self.known, self.install = name, tuple(known), install

    def __str__(self) -> str:
        hint = f"; to get it: {self.install}" if self.install else nearest(self.name, self.known)
        listed = ", ".join(self.known) or "none"
        return f"no backend named {self.name!r}{hint}. Installed: {listed}"


class BackendLoadError(MoEError, ImportError):
    """A backend exists but its code can't be loaded; ``__cause__`` is what it raised."""

    def __init__(self, name: str, distribution: str, target: str, reason: str) -> None:
        super().__init__(name, distribution, target, reason)
        self.name, self.distribution = name, distribution
        self.target, self.reason = target, reason

    def __str__(self) -> str:
        return (
            f"backend {self.name!r} of {self.distribution} can't be loaded from "
            f"{self.target!r}: {self.reason}"
        )


class BackendConflictError(MoEError):
    """Two distributions claim one name; ``dist:name`` picks one of them."""

    def __init__(self, name: str, distributions: Sequence[str]) -> None:
        super().__init__(name, tuple(distributions))
        self.name, self.distributions = name, tuple(distributions)

    def __str__(self) -> str:
        ways = " or ".join(f"{d}:{self.name}" for d in self.distributions)
        return (
            f"backend {self.name!r} is claimed by {len(self.distributions)} distributions "
            f"({', '.join(self.distributions)}); say which: {ways}"
        )


class BackendVersionError(MoEError):
    """A backend was written for another version of the backend interface."""

    def __init__(self, name: str, distribution: str, wanted: str, offered: str) -> None:
        super().__init__(name, distribution, wanted, offered)
        self.name, self.distribution = name, distribution
        self.wanted, self.offered = wanted, offered

    def __str__(self) -> str:
        newer = _version(self.wanted) > _version(self.offered)
        fix = "upgrade moe-core" if newer else f"upgrade {self.distribution}"
        return (
            f"backend {self.name!r} of {self.distribution} is written for backend API "
            f"{self.wanted}, this moe-core has {self.offered}: {fix}"
        )


class ConfigError(MoEError, ValueError):
    """A configuration that can't work. Lists every fault, not only the first.

    ``faults`` are faults of the config itself, ``resolution`` (if a backend was looked for) holds
    every refusal of every candidate.
    """

    def __init__(
        self, faults: Sequence[Fault] | Resolution = (), resolution: Resolution | None = None
    ) -> None:
        if not isinstance(faults, Sequence):
            faults, resolution = (), faults
        super().__init__(tuple(faults), resolution)
        self.faults: tuple[Fault, ...] = tuple(faults)
        self.resolution = resolution

    def __str__(self) -> str:
        lines = [str(f) for f in self.faults]
        if self.resolution is not None:
            lines.append(self.resolution.why_not())
        return "\n".join(lines)


class InputError(MoEError, ValueError):
    """Tensors handed to a layer that do not fit it (shape, dtype, device or values)."""


class HandleError(MoEError, RuntimeError):
    """A dispatch handle used twice, or given to a transport that didn't make it."""


def check_keys(where: str, given: Mapping[str, Any], known: Iterable[str]) -> list[Fault]:
    """A fault, with the nearest name, for each key that isn't known."""
    names = list(known)
    prefix = f"{where}." if where else ""
    return [
        Fault(f"{prefix}{key}", value, f"unknown key{nearest(key, names)}")
        for key, value in given.items()
        if key not in names
    ]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())

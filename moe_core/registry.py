"""Which backends there are, without importing their code.

Entry points of the group ``moe_core.backends`` are read once per process. Each names a manifest
(``moe_core.manifest``), which is loaded when its name is asked for, and kept; a backend that can't
be loaded is kept as its error and hinders no other. A name that two distributions claim has to be
written ``dist:name``.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, cast

from moe_core import __version__, environment
from moe_core.errors import (
    BackendConflictError,
    BackendLoadError,
    BackendVersionError,
    ConfigError,
    Fault,
    MoEError,
    UnknownBackendError,
    nearest,
)
from moe_core.manifest import GROUP, Backend
from moe_core.spec import AUTO

CORE = "moe-core"
IN_PROCESS = "in-process"
_LATER = f"install a later version of moe-core; {__version__} doesn't have it yet"
_INCOMPLETE = "install moe-core itself (pip install -e . in a checkout), its metadata is missing"
KNOWN_BACKENDS = {
    **dict.fromkeys(("deepep", "fused", "triton"), _LATER),
    **dict.fromkeys(("nccl", "reference", "torch"), _INCOMPLETE),
}
"""Names that people ask for and what to do where nothing installed provides them."""

_STATUS: dict[type[MoEError], str] = {
    BackendConflictError: "conflict",
    BackendLoadError: "broken",
    BackendVersionError: "version",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegisteredBackend:
    """A backend that was loaded. ``target`` is what its entry point names."""

    backend: Backend
    distribution: str
    version: str
    target: str


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One line of ``moe-core list``.

    ``status``: ``available`` (its manifest can be read), ``broken``, ``version`` (written for
    another interface) or ``conflict`` (``dist:name`` still works). ``reason`` says why it isn't
    available, ``traceback`` where a broken one failed. What ``installed`` returns was not loaded:
    there it is ``claimed``, ``conflict`` or ``not allowed`` (by ``MOE_PLUGINS``).
    """

    name: str
    distribution: str
    version: str
    target: str
    status: str
    reason: str = ""
    summary: str = ""
    roles: tuple[str, ...] = ()
    traceback: str = ""


@dataclass(slots=True)
class _Entry:
    name: str
    distribution: str
    version: str
    target: str
    point: metadata.EntryPoint | None = None
    loaded: Backend | MoEError | None = None


@dataclass(slots=True)
class _State:
    """What one process knows. A forked child keeps in-process backends and reads the rest anew."""

    pid: int
    in_process: dict[str, _Entry]
    entries: list[_Entry] | None = None
    generation: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)


_state = _State(os.getpid(), {})


def _current() -> _State:
    global _state
    if _state.pid != os.getpid():
        _state = _State(os.getpid(), dict(_state.in_process))
    return _state


def refresh() -> None:
    """Forget what was discovered, for backends installed since. In-process ones stay."""
    _current().entries = None
    _current().generation += 1


def generation() -> int:
    """Another number after every change to what is registered, for caches of what was chosen."""
    return _current().generation


def get(name: str, distribution: str | None = None) -> RegisteredBackend:
    """The backend of that name, loading its manifest and no other's.

    Raises ``UnknownBackendError``, ``BackendConflictError`` (two distributions, none named),
    ``BackendLoadError`` or ``BackendVersionError``.
    """
    state = _current()
    with state.lock:
        claims = _claims(state, name, distribution)
        if not claims:
            raise _unknown(state, name, distribution)
        if len(claims) > 1:
            raise BackendConflictError(name, [e.distribution for e in claims])
        entry = claims[0]
        loaded = _load(entry)
        if isinstance(loaded, MoEError):
            raise _again(loaded)
        return RegisteredBackend(loaded, entry.distribution, entry.version, entry.target)


def all_names() -> tuple[str, ...]:
    """Sorted; nothing is loaded."""
    state = _current()
    with state.lock:
        return tuple(sorted({*state.in_process, *(e.name for e in _visible(state))}))


def installed(name: str | None = None, distribution: str | None = None) -> list[BackendInfo]:
    """Every entry point (of that name, of that distribution), by name and distribution.

    Nothing is loaded, so none can do harm. In-process backends are not among them. ``MOE_PLUGINS``
    naming what isn't there is no error.
    """
    state = _current()
    allowed = environment.plugins()
    with state.lock:
        found = _discovered(state)
    visible = [e for e in found if _allows(allowed, e)]
    claims = Counter(e.name for e in visible)
    infos: list[BackendInfo] = []
    for e in found:
        if name not in (None, e.name):
            continue
        if distribution is not None and _normal(e.distribution) != _normal(distribution):
            continue
        status = "conflict" if claims[e.name] > 1 else "claimed"
        status = status if e in visible else "not allowed"
        infos.append(BackendInfo(e.name, e.distribution, e.version, e.target, status))
    return infos


def list_backends() -> list[BackendInfo]:
    """Every backend, by name and distribution; loads all manifests (they are light).

    With ``MOE_STRICT_PLUGINS=1`` one that isn't available raises its error; notes name the others.
    """
    state = _current()
    infos: list[BackendInfo] = []
    errors: list[MoEError] = []
    with state.lock:
        for name in all_names():
            claims = _claims(state, name, None)
            conflict = BackendConflictError(name, [e.distribution for e in claims])
            for entry in claims:
                info, error = _describe(entry, conflict if len(claims) > 1 else None)
                infos.append(info)
                if error is not None and error not in errors:
                    errors.append(error)
    if errors and environment.strict_plugins():
        for error in errors[1:]:
            errors[0].add_note(str(error))
        raise errors[0]
    return infos


def register_backend(
    backend: Backend | Mapping[str, Any], *, replace: bool = False
) -> RegisteredBackend:
    """Add a backend to this process and to those forked from it (spawned ones have to repeat it).

    Raises ``BackendConflictError`` where the name is taken, unless ``replace``: the bare name then
    means this backend, and ``dist:name`` still the other. Raises ``ConfigError`` for a manifest
    with faults and ``BackendVersionError``.
    """
    built = _build(backend, None, IN_PROCESS)
    state = _current()
    with state.lock:
        taken = [e.distribution for e in _claims(state, built.name, None)]
        if taken and not replace:
            error = BackendConflictError(built.name, [*taken, IN_PROCESS])
            error.add_note("register_backend(..., replace=True) takes the name over")
            raise error
        state.in_process[built.name] = _Entry(built.name, IN_PROCESS, "", "", loaded=built)
        state.generation += 1
    return RegisteredBackend(built, IN_PROCESS, "", "")


def unregister_backend(name: str) -> None:
    """Undo ``register_backend``. Raises ``UnknownBackendError`` where it wasn't called."""
    state = _current()
    with state.lock:
        if state.in_process.pop(name, None) is None:
            raise UnknownBackendError(f"{IN_PROCESS}:{name}", sorted(state.in_process))
        state.generation += 1


def _claims(state: _State, name: str, distribution: str | None) -> list[_Entry]:
    """Who claims the name; one registered in this process has the bare name for itself."""
    if name in state.in_process and distribution in (None, IN_PROCESS):
        return [state.in_process[name]]
    entries = [e for e in _visible(state) if e.name == name]
    if distribution is None:
        return entries
    return [e for e in entries if _normal(e.distribution) == _normal(distribution)]


def _unknown(state: _State, name: str, distribution: str | None) -> UnknownBackendError:
    if distribution is not None:
        known = [f"{e.distribution}:{e.name}" for e in _visible(state)]
        return UnknownBackendError(f"{distribution}:{name}", known)
    if any(e.name == name for e in _discovered(state)):
        install = f"add it to the variable MOE_PLUGINS={os.environ.get('MOE_PLUGINS')!r}"
    else:
        install = KNOWN_BACKENDS.get(name)
    return UnknownBackendError(name, all_names(), install)


def _describe(
    entry: _Entry, conflict: BackendConflictError | None
) -> tuple[BackendInfo, MoEError | None]:
    loaded = _load(entry)
    failed = isinstance(loaded, MoEError)
    error = _again(loaded) if failed else conflict
    cause = error.__cause__ if error else None
    info = BackendInfo(
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        target=entry.target,
        status=_STATUS[type(error)] if error else "available",
        reason=str(error) if error else "",
        summary="" if failed else loaded.summary,
        roles=() if failed else tuple(dict.fromkeys(part.role for part in loaded.parts)),
        traceback="".join(traceback.format_exception(cause)) if cause else "",
    )
    return info, error


def _again(error: MoEError) -> MoEError:
    """The same error anew, so that the kept one gathers no traceback and no notes."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _visible(state: _State) -> list[_Entry]:
    """What ``MOE_PLUGINS`` lets through; a name in it that nothing has is a ``ConfigError``."""
    entries = _discovered(state)
    allowed = environment.plugins()
    if allowed is None:
        return entries
    known = {e.name for e in entries}
    faults = [
        Fault("MOE_PLUGINS", name, f"no installed backend has that name{nearest(name, known)}")
        for name in allowed
        if name not in known
    ]
    if faults:
        raise ConfigError(faults)
    return [e for e in entries if _allows(allowed, e)]


def _allows(allowed: tuple[str, ...] | None, entry: _Entry) -> bool:
    return allowed is None or _normal(entry.distribution) == CORE or entry.name in allowed


def _discovered(state: _State) -> list[_Entry]:
    if state.entries is None:
        state.entries = _discover()
    return state.entries


def _discover() -> list[_Entry]:
    found: dict[tuple[str, str], _Entry] = {}
    for point in _entry_points():
        distribution, version = _owner(point)
        entry = _Entry(point.name, distribution, version, point.value, point)
        first = found.setdefault((entry.name, _normal(distribution)), entry)
        if first.target != entry.target:  # equal ones are the same thing seen twice
            first.target = f"{first.target} and {entry.target}"
            reason = "one distribution names two things for it"
            first.loaded = BackendLoadError(entry.name, distribution, first.target, reason)
    return [entry for _, entry in sorted(found.items(), key=lambda item: item[0])]


def _entry_points() -> list[metadata.EntryPoint]:
    try:
        return list(metadata.entry_points(group=GROUP))
    except Exception:  # one distribution's file can't be parsed; find it and do without it
        points: list[metadata.EntryPoint] = []
        seen: set[str] = set()
        for distribution in metadata.distributions():
            try:
                name = _normal(distribution.name)
                if name not in seen:  # as on import, the first on the path counts
                    points += distribution.entry_points.select(group=GROUP)
                seen.add(name)
            except Exception as error:
                where = getattr(distribution, "_path", distribution)
                _log.warning("entry points of %s can't be read and are left out: %r", where, error)
        return points


def _owner(point: metadata.EntryPoint) -> tuple[str, str]:
    try:
        assert point.dist is not None
        return point.dist.name or "unknown", point.dist.version or "unknown"
    except Exception:  # metadata without a name
        return "unknown", "unknown"


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _load(entry: _Entry) -> Backend | MoEError:
    if entry.loaded is None:
        entry.loaded = _try_to_load(entry)
    return entry.loaded


def _try_to_load(entry: _Entry) -> Backend | MoEError:
    try:
        assert entry.point is not None
        return _build(entry.point.load(), entry.name, entry.distribution)
    except KeyboardInterrupt:
        raise
    except BackendVersionError as error:
        return BackendVersionError(entry.name, entry.distribution, error.wanted, error.offered)
    # Not only Exception: importing a plugin may end in SystemExit or in an extension's own class.
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, ConfigError):
            reason = "; ".join(map(str, error.faults))
        failure = BackendLoadError(entry.name, entry.distribution, entry.target, reason)
        failure.__cause__ = error
        return failure


def _build(value: object, entry_name: str | None, distribution: str) -> Backend:
    """Checked; ``entry_name`` is None for a backend that no entry point names."""
    if isinstance(value, Backend):
        backend = value
    elif isinstance(value, Mapping):
        backend = Backend.from_dict(cast("Mapping[str, Any]", value), distribution)
    else:
        message = "must be a mapping (see moe_core.manifest) or a Backend"
        raise ConfigError([Fault("manifest", type(value).__name__, message)])
    faults: list[Fault] = []
    if entry_name not in (None, backend.name):
        faults.append(Fault("name", backend.name, f"its entry point is called {entry_name!r}"))
    if backend.name == AUTO:
        faults.append(Fault("name", AUTO, "has a meaning of its own in a spec"))
    for need in (need for part in backend.parts for need in part.needs):
        try:
            environment.parse_requirement(need)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return backend

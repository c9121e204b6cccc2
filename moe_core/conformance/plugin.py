"""The pytest plugin: which backend is tested, known faults, and what came of it.

``pytest -p moe_core.conformance.plugin --moe-backend NAME ...``; ``moe-core conformance NAME`` does
that with the suites of this package. No entry point loads it, so it is in nobody's other runs.

Tests are counted by the ``profile`` of their class. A skip says by how its reason begins what kind
it is: not claimed by the manifest, or not checkable on this machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from moe_core import __version__
from moe_core.errors import MoEError
from moe_core.manifest import ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moe_core.conformance.target import Target

SUITE = "1.0"
"""Changes when a contract is added or read more strictly."""
PROFILES = ("core", *ROLES)
USAGE = 2
NOT_CLAIMED, NOT_HERE = "not claimed: ", "not checkable here: "  # as in target, which needs torch

pytest.register_assert_rewrite(
    *(f"moe_core.conformance.{name}" for name in ("claims", "core", *ROLES, "pairs", "target"))
)


@dataclass
class Settings:
    """What was asked for on the command line; the suites read it when they are collected."""

    backend: str = ""
    device: str = "cpu"
    ranks: tuple[int, ...] = (1, 2, 4)


settings = Settings()


@dataclass
class Outcome:
    profile: str
    kind: str  # passed, failed, known, not_claimed, not_here or skipped
    message: str = ""


@dataclass
class Run:
    """One session."""

    target: Target
    xfails: Mapping[str, str]
    report: str | None
    started: float = field(default_factory=time.monotonic)
    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    not_claimed: dict[str, None] = field(default_factory=dict[str, None])
    not_here: dict[str, None] = field(default_factory=dict[str, None])
    collected: set[str] = field(default_factory=set[str])  # profiles
    widths: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    problems: list[str] = field(default_factory=list[str])

    def count(self, profile: str, *kinds: str) -> int:
        found = (o for o in self.outcomes.values() if o.profile == profile)
        return sum(1 for o in found if o.kind in kinds)

    def executed(self, profile: str) -> int:
        return self.count(profile, "passed", "failed", "known")

    @property
    def shown(self) -> list[str]:
        return [p for p in PROFILES if p in self.collected]

    def badge(self, ok: bool) -> str:
        parts = [f"{p} {self.count(p, 'passed')}/{self.executed(p)}" for p in self.shown]
        parts += [f"{k} {','.join(map(str, sorted(v)))}" for k, v in self.widths.items()]
        text = f"{settings.backend}: {'conforms' if ok else 'does NOT conform'} ({', '.join(parts)}"
        for words, reasons in (
            ("not claimed", _grouped(self.not_claimed)),
            ("not checkable here", list(self.not_here)),
        ):
            text += f"; {words}: {', '.join(reasons)}" if reasons else ""
        return f"{text}; moe-core {__version__}, suite {SUITE})"

    def to_dict(self, ok: bool) -> dict[str, Any]:
        kinds = ("passed", "failed", "known", "not_claimed", "not_here", "skipped")
        by_kind = {
            kind: {i: o.message for i, o in self.outcomes.items() if o.kind == kind}
            for kind in ("failed", "known", "not_claimed", "not_here", "skipped")
        }
        return {
            "backend": settings.backend,
            "ok": ok,
            "badge": self.badge(ok),
            "suite": SUITE,
            "moe_core": __version__,
            "device": settings.device,
            "ranks": list(settings.ranks),
            "widths": {k: sorted(v) for k, v in self.widths.items()},
            "seconds": round(time.monotonic() - self.started, 1),
            "roles": list(self.target.roles),
            "profiles": {p: {k: self.count(p, k) for k in kinds} for p in self.shown},
            "not_claimed": _grouped(self.not_claimed),
            "not_checkable_here": list(self.not_here),
            "problems": self.problems,
            "tests": by_kind,
        }


_run: list[Run] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moe-core", "conformance of a moe-core backend")
    group.addoption("--moe-backend", metavar="SPEC", help="NAME, NAME[key=value] or A+B")
    group.addoption("--moe-device", metavar="DEVICE", default="cpu", help="default: cpu")
    group.addoption("--moe-ranks", metavar="N,N", default="1,2,4", help="world sizes to test with")
    group.addoption("--moe-xfails", metavar="FILE", help="TOML: known faults, test id = 'reason'")
    group.addoption("--moe-report", metavar="FILE", help="write what came of it, as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"moe_profile(name): the contract a test belongs to, {', '.join(PROFILES)}"
    )
    spec, device = (str(config.getoption(o) or "") for o in ("--moe-backend", "--moe-device"))
    if not spec:
        _usage("no backend is named: add --moe-backend NAME")
    from moe_core.conformance import pool
    from moe_core.conformance.target import target  # imports torch

    if pool.METHOD == "spawn" and "forkserver" in multiprocessing.get_all_start_methods():
        pool.METHOD = "forkserver"
    try:
        settings.ranks = read_ranks(str(config.getoption("--moe-ranks")))
        xfails = read_xfails(config.getoption("--moe-xfails"))
        settings.backend, settings.device = spec, device
        found = target(spec, device)
    except (MoEError, ValueError) as error:
        _usage(str(error))
    _run[:] = [Run(found, xfails, config.getoption("--moe-report"))]


def pytest_unconfigure() -> None:
    _run.clear()


def _usage(message: str) -> NoReturn:
    pytest.exit(f"moe-core conformance: {message}", returncode=USAGE)


def read_ranks(text: str) -> tuple[int, ...]:
    """Raises ``ValueError``."""
    sizes = [part.strip() for part in text.split(",")]
    if not all(size in ("1", "2", "4") for size in sizes):
        raise ValueError(f"ranks {text!r}: must be some of 1, 2 and 4, by commas")
    return tuple(sorted({int(size) for size in sizes}))


def read_xfails(path: str | None) -> dict[str, str]:
    """Raises ``ValueError`` for a file that isn't a table of ids with reasons."""
    if path is None:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"known faults in {path}: {error}") from error
    for name, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"known faults in {path}: {name!r} needs a reason in words")
    return table


def profile_of(item: pytest.Item) -> str:
    return str(getattr(getattr(item, "cls", None), "profile", ""))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out roles that the backend hasn't, before -k and the like choose among the rest."""
    (run,) = _run
    offered = {"core", *run.target.roles}
    away = [i for i in items if (p := profile_of(i)) in PROFILES and p not in offered]
    items[:] = [i for i in items if i not in away]
    if away:
        config.hook.pytest_deselected(items=away)
    names = {_name(i.nodeid): i for i in items}
    classes = {_name(i.nodeid).partition("::")[0] for i in [*items, *away]}
    for name, reason in run.xfails.items():
        if name in names:
            names[name].add_marker(pytest.mark.xfail(reason=reason, strict=True))
        elif name.partition("::")[0] in classes or not _one_of_ours(name):
            run.problems.append(f"no test is called {name!r}, which is listed as a known fault")
    for item in items:
        profile = profile_of(item)
        if profile in PROFILES:
            item.add_marker(pytest.mark.moe_profile(profile))
            item.user_properties.append(("moe_profile", profile))
            width = getattr(item, "callspec", None) and item.callspec.params.get("width")  # pyright: ignore[reportAttributeAccessIssue]
            item.user_properties.append(("moe_width", width))
            run.collected.add(profile)


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def _one_of_ours(name: str) -> bool:
    """Whether a suite that wasn't collected this time may have it."""
    known = ("TestClaims", *(f"Test{p.title()}" for p in PROFILES))
    return name.partition("::")[0] in known


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and profile_of(item) == "core" and not _reason(report).startswith(NOT_HERE):
        report.outcome = "failed"
        report.longrepr = f"a test of the core can't be skipped: {_reason(report)}"
    return report


def _reason(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    (run,) = _run
    properties = list(report.user_properties)
    profile = next((str(v) for k, v in properties if k == "moe_profile"), "")
    if not profile or (report.when != "call" and report.passed):
        return
    name = _name(report.nodeid)
    width: Any = next((v for k, v in properties if k == "moe_width"), None)
    if width is not None and not report.skipped:
        worlds = {"ranks": "world", "ep": "ep", "tp": "tp", "dp": "dp"}
        for shown, kind in worlds.items():
            run.widths.setdefault(shown, set()).add(getattr(width, f"{kind}_size"))
    known = getattr(report, "wasxfail", None)
    if report.failed:
        made = Outcome(profile, "failed", report.longreprtext.strip()[-2000:])
    elif report.passed:
        made = Outcome(profile, "passed")
    elif known is not None:
        made = Outcome(profile, "known", run.xfails.get(name, str(known)))
    else:
        reason = _reason(report)
        kind = "skipped"
        for prefix, value, found in (
            (NOT_CLAIMED, "not_claimed", run.not_claimed),
            (NOT_HERE, "not_here", run.not_here),
        ):
            if reason.startswith(prefix):
                kind, reason = value, reason.removeprefix(prefix)
                found.setdefault(reason)
        made = Outcome(profile, kind, reason)
    if name not in run.outcomes or report.failed:  # a failing teardown counts
        run.outcomes[name] = made
    if report.when == "call":
        run.not_claimed |= {str(v): None for k, v in properties if k == "not_claimed"}
        run.not_here |= {str(v): None for k, v in properties if k == "not_here"}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not _run:
        return
    (run,) = _run
    narrowed = session.config.getoption("keyword") or session.config.getoption("maxfail")
    ran = [p for p in run.shown if run.executed(p)]
    if not ran:
        run.problems.append("nothing was executed, and that proves nothing")
    elif not narrowed:
        idle = [p for p in run.shown if p not in ran]
        run.problems += [f"of {p}, which it offers, nothing was executed" for p in idle]
    if run.problems and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if run.report:
        text = json.dumps(run.to_dict(_ok(session)), indent=2)
        Path(run.report).write_text(text + os.linesep, encoding="utf-8")


def _ok(session: pytest.Session) -> bool:
    return session.exitstatus == pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _run:
        return
    (run,) = _run
    write = terminalreporter.write_line
    terminalreporter.section(f"{settings.backend} on {settings.device}")
    words = {
        "failed": "failed",
        "known": "known to be wrong",
        "not_claimed": "not claimed",
        "not_here": "not checkable here",
        "skipped": "skipped",
    }
    for profile in PROFILES:
        if profile not in run.collected:
            continue
        score = f"{run.count(profile, 'passed')}/{run.executed(profile)}"
        rest = [f"{n} {word}" for kind, word in words.items() if (n := run.count(profile, kind))]
        write(f"{profile:<10}{score:>9}  {', '.join(rest)}".rstrip())
    absent = [role for role in ROLES if role not in run.target.roles]
    write(f"{'no part':<10}{', '.join(absent) or 'none':>9}")
    for name, outcome in run.outcomes.items():
        if outcome.kind == "known":
            write(f"known fault: {name}: {outcome.message}")
    for problem in run.problems:
        write(f"PROBLEM: {problem}")
    write(run.badge(_ok(terminalreporter._session)))


def _grouped(claims: Mapping[str, Any]) -> list[str]:
    """``dtype=a``, ``dtype=b`` → ``dtype (a, b)``; ``compile=yes`` → ``compile``."""
    found: dict[str, list[str]] = {}
    for claim in claims:
        for one in claim.split(", "):
            axis, _, value = one.partition("=")
            values = found.setdefault(axis, [])
            if value not in ("", "yes", *values):
                values.append(value)
    return [f"{axis} ({', '.join(v)})" if v else axis for axis, v in found.items()]

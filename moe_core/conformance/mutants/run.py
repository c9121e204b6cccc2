"""Runs mutants: each in a fork of one warmed process, until its first failing test.

A fork starts in no time, keeps what it registers to itself, and may die or hang. It reports each
test that begins and the first that fails; one that doesn't end in ``LIMIT`` seconds is ended with
its ranks and counts as failed. At the end the unchanged carriers have to pass every test that
killed a mutant of theirs, else a kill would mean nothing.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from moe_core.conformance import mutants, pool
from moe_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moe_core.conformance.mutants import Mutant

LIMIT = 60.0
"""Seconds for one test, in which a healthy part needs a few."""

NO_MUTANT = r"[\w.]*(Name|Attribute|Type|Import|ModuleNotFound|BackendLoad|UnboundLocal)Error: "
"""What a slip in a mutant's own code raises: any test would fail for it, so it proves nothing."""


@dataclass
class Outcome:
    """What came of one mutant. ``by``: the test that failed, as ``TestX::test_y[z]``."""

    mutant: Mutant
    by: str = ""
    reason: str = ""
    problem: str = ""
    """Why nothing can be said of it."""
    ran: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict[str, str])


class Watch:
    """The plugin in the fork: chooses and orders the tests, and tells the parent of each."""

    def __init__(self, pipe: Connection, first: str, only: frozenset[str]) -> None:
        self.pipe, self.first, self.only = pipe, first, only

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        if self.only:
            gone = [i for i in items if name(i.nodeid) not in self.only]
            items[:] = [i for i in items if name(i.nodeid) in self.only]
            config.hook.pytest_deselected(items=gone)
        elif self.first:
            items.sort(key=lambda i: self.first not in i.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.pipe.send(("begins", name(nodeid), ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.pipe.send(("broken", name(report.nodeid), last_line(report.longreprtext)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.pipe.send(("fails", name(report.nodeid), last_line(report.longreprtext)))


def name(nodeid: str) -> str:
    return nodeid.partition("::")[2] or nodeid


def last_line(text: str) -> str:
    """What was raised, of a traceback, without pytest's frame around it."""
    raised = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    lines = raised or text.strip().splitlines() or [""]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception): (?!--- rank \d$)", line)
    ]
    silent = [line for line in lines if "did not finish" in line]
    return (errors or silent or lines)[0][:300]


@dataclass
class Child:
    """A fork at work on one mutant."""

    outcome: Outcome
    pid: int
    pipe: Connection
    only: frozenset[str]
    started: float
    test: str = ""
    since: float = 0.0


def run(
    todo: Iterable[tuple[Mutant, frozenset[str]]],
    jobs: int,
    say: Any = lambda _: None,
    match: str = "",
) -> list[Outcome]:
    """Runs each with its tests, ``jobs`` at a time. An empty set: all (that pytest's -k ``match``
    leaves), until the first that fails. ``say`` hears of each outcome as it comes."""
    waiting, running, done = deque(todo), list[Child](), list[Outcome]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(*waiting.popleft(), match))
        until = min(c.since for c in running) + LIMIT
        ready = wait([c.pipe for c in running], max(until - time.monotonic(), 0))
        for child in list(running):
            if child.pipe in ready:
                over = _listen(child)
            elif over := time.monotonic() - child.since > LIMIT:
                what = f"not done after {LIMIT:g} s, ended"
                if child.test:
                    child.outcome.failed.setdefault(child.test, what)
                else:
                    child.outcome.problem = f"collecting the suite: {what}"
            if over:
                running.remove(child)
                done.append(_end(child))
                say(done[-1])
    return done


def _listen(child: Child) -> bool:
    """Whether it is done."""
    try:
        kind, test, text = child.pipe.recv()
    except EOFError:
        if child.test and child.test not in child.outcome.failed:
            child.outcome.failed[child.test] = "the process died"
        return True
    child.since = time.monotonic()
    if kind == "begins":
        child.test = test
        child.outcome.ran += 1
    elif kind == "fails":
        child.outcome.failed.setdefault(test, text)
        return not child.only  # nothing after the first failure is of interest
    elif kind == "broken":
        child.outcome.problem = f"the suite can't be collected: {text}"
    return kind == "done"


def _end(child: Child) -> Outcome:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # its ranks are in its group
    os.waitpid(child.pid, 0)
    child.pipe.close()
    outcome = child.outcome
    outcome.seconds = time.monotonic() - child.started
    outcome.by, outcome.reason = next(iter(outcome.failed.items()), ("", ""))
    if re.match(NO_MUTANT, outcome.reason):
        outcome.problem, outcome.by = f"is broken, and not wrong: {outcome.reason}", ""
    if not outcome.ran and not outcome.problem:
        outcome.problem = "no test was run"
    return outcome


def _start(mutant: Mutant, only: frozenset[str], match: str) -> Child:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(mutant, theirs, only, match)
    theirs.close()
    with contextlib.suppress(OSError):  # the child does the same: whoever comes first
        os.setpgid(pid, pid)
    now = time.monotonic()
    return Child(Outcome(mutant), pid, ours, only, now, since=now)


def _child(mutant: Mutant, pipe: Connection, only: frozenset[str], match: str) -> NoReturn:
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        _test(mutant, pipe, only, match)
        pipe.send(("done", "", ""))
        code = 0
    except BaseException as error:
        pipe.send(("broken", "", f"{type(error).__name__}: {error}"))
        pipe.send(("done", "", ""))
    finally:
        os._exit(code)


def _test(mutant: Mutant, pipe: Connection, only: frozenset[str], match: str) -> None:
    import torch

    from moe_core.conformance.arguments import arguments

    torch.set_num_threads(1)
    mutants.install(mutant)
    pool.METHOD, pool.GRACE = "fork", 0.5
    for count in mutant.ranks:
        if count > 1:  # before torch starts a thread of its own
            pool.ranks(count).start()
    profiles = ("core", mutant.role)
    ranks = ",".join(map(str, mutant.ranks))
    given = arguments(profiles, backend=mutants.NAME, ranks=ranks)
    some = () if only else ("-x", *(("-k", match) if match else ()))
    pytest.main([*given, "--assert=plain", *some], plugins=[Watch(pipe, mutant.killer, only)])


# -- the command


def kill(found: list[Mutant], jobs: int, say: Any, match: str = "") -> dict[str, Any]:
    """The report: what ``--json`` prints."""
    started = time.monotonic()
    outcomes = run([(m, frozenset()) for m in found], jobs, say, match)
    killed = {o.mutant.name: o for o in outcomes if o.by}
    report: dict[str, Any] = {
        "killed": len(killed),
        "total": len(found),
        "by": {m.name: killed[m.name].by for m in found if m.name in killed},
        "reasons": {m.name: killed[m.name].reason for m in found if m.name in killed},
        "survived": sorted(o.mutant.name for o in outcomes if not o.by and not o.problem),
        "problems": {o.mutant.name: o.problem for o in outcomes if o.problem and not o.by},
        "carriers": _carriers(list(killed.values()), jobs),
        "roles": {r: sum(m.role == r for m in found) for r in sorted({m.role for m in found})},
    }
    report["seconds"] = round(time.monotonic() - started, 1)
    whole = report["killed"] == report["total"] > 0
    report["ok"] = whole and not any(report["carriers"].values())
    return report


def _carriers(killed: list[Outcome], jobs: int) -> dict[str, dict[str, str]]:
    """Carrier → what it fails of the tests that killed its mutants. (A test that is there for a
    false claim only is no test of the carrier.)"""
    tests: dict[Mutant, set[str]] = {}
    by_name: dict[tuple[Any, ...], Mutant] = {}
    for outcome in killed:
        plain = mutants.control(outcome.mutant)
        key = (plain.role, plain.carrier, plain.takes, plain.ranks)
        tests.setdefault(by_name.setdefault(key, plain), set()).add(outcome.by)
    found: dict[str, dict[str, str]] = {}
    for o in run([(m, frozenset(t)) for m, t in tests.items()], jobs):
        failed = dict(o.failed)
        if o.problem and o.problem != "no test was run":
            failed["-"] = o.problem
        found.setdefault(f"{o.mutant.role} of {o.mutant.carrier}", {}).update(failed)
    return found


def main(argv: list[str]) -> int:
    """``argv``: JSON with ``pattern``, ``roles``, ``spec``, ``match``, ``jobs`` and ``json``.
    0: all were killed, 1: not all, 2: none has such a name."""
    asked = json.loads(argv[0])
    try:
        found = mutants.select(asked["pattern"], tuple(asked["roles"]))
    except ConfigError as error:
        sys.stderr.write(f"moe-core: {error}\n")
        return 2
    left_out: list[str] = []
    if asked["spec"]:
        moved = {m.name: mutants.carried_by(m, asked["spec"]) for m in found}
        left_out = [n for n, m in moved.items() if m is None]
        found = [m for m in moved.values() if m is not None]
    write = (sys.stderr if asked["json"] else sys.stdout).write

    def say(o: Outcome) -> None:
        told = f"killed by {o.by}: {o.reason}" if o.by else o.problem or "SURVIVED"
        write(f"{o.mutant.name:<42} {o.seconds:5.1f} s  {told}"[:200] + "\n")
        sys.stdout.flush()

    report: dict[str, Any] = kill(found, asked["jobs"], say, asked["match"])
    report["left_out"] = left_out
    what = {m.name: m.what for m in found}
    lines = [f"SURVIVED: {n}: {what[n]}" for n in report["survived"]]
    lines += [f"PROBLEM: {n}: {problem}" for n, problem in report["problems"].items()]
    for carrier, failed in report["carriers"].items():
        lines += [
            f"PROBLEM: the {carrier}, nothing wrong, fails {t}: {e}" for t, e in failed.items()
        ]
    if left_out:
        lines.append(f"{asked['spec']} can't carry {', '.join(left_out)}")
    by_role = ", ".join(f"{n} {role}" for role, n in report["roles"].items())
    lines.append(
        f"{report['killed']}/{report['total']} mutants killed ({by_role}) in {report['seconds']} s"
    )
    write("\n".join([*lines, ""]))
    if asked["json"]:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

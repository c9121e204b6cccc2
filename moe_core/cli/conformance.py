"""``moe-core conformance``: does a backend keep every contract that it claims to keep?

Runs the suites of ``moe_core.conformance`` in a process of their own, which no configuration of
pytest around it can change. What follows ``--`` goes to pytest (``-- -x``: stop at the first
fault). ``--mutants`` tests the suites: each of its faulty parts has to fail one of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core import registry
from moe_core.cli import BUG, COMMANDS, INTERRUPTED, NO, OK, USAGE
from moe_core.errors import ConfigError, Fault
from moe_core.manifest import ROLES
from moe_core.spec import parse_spec

if TYPE_CHECKING:
    import argparse

PROFILES = ("core", *ROLES)
# pytest's exit codes: ok, a test failed, interrupted (also: a file can't be collected), internal
# error, usage, nothing collected
_CODES = {0: OK, 1: NO, 2: USAGE, 3: BUG, 4: USAGE, 5: NO}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("conformance", help=COMMANDS["conformance"], description=__doc__)
    parser.add_argument(
        "backend", metavar="SPEC", nargs="?", help="NAME, NAME[key=value] or TRANSPORT+RUNNER"
    )
    parser.add_argument("--json", action="store_true", help="the report; pytest writes to stderr")
    parser.add_argument(
        "--profile",
        action="append",
        choices=PROFILES,
        help="only this contract (may be repeated); default: all that the backend has parts for",
    )
    parser.add_argument("-k", metavar="EXPR", help="only tests whose names match")
    parser.add_argument("--ranks", metavar="N,N", default="1,2,4", help="default: 1,2,4")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument(
        "--xfails", metavar="FILE", help="known faults: TOML, \"TestX::test_y[z]\" = 'the reason'"
    )
    parser.add_argument(
        "--mutants",
        metavar="PATTERN",
        nargs="?",
        const="*",
        help="test the suites with faulty parts (whose names match); with SPEC, its parts made so",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="mutants at a time; default: one per core, 4 at most"
    )
    parser.set_defaults(takes_rest=True)


def run(args: argparse.Namespace) -> int:
    missing = [name for name in ("pytest", "hypothesis") if not importlib.util.find_spec(name)]
    if missing:
        message = f"{' and '.join(missing)} not installed: pip install 'moe-core[conformance]'"
        raise ConfigError([Fault("conformance", args.backend, message)])
    for alternative in parse_spec(args.backend or "auto").alternatives:
        for named in alternative.names:
            registry.get(named.name, named.distribution)
    if args.mutants is not None:
        return _mutants(args)
    if args.backend is None:
        raise ConfigError([Fault("backend", None, "name the one to test, or ask for --mutants")])
    from moe_core.conformance.arguments import arguments

    with tempfile.TemporaryDirectory(prefix="moe_core_conformance_") as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-P", "-m", "pytest"),
            *arguments(
                args.profile or PROFILES,
                backend=args.backend,
                device=args.device,
                ranks=args.ranks,
            ),
            *("--moe-report", str(report)),
            *(("--moe-xfails", os.path.abspath(args.xfails)) if args.xfails else ()),
            *(("-k", args.k) if args.k else ()),
            *args.rest,
        ]
        done = _start(command, folder, stdout=sys.stderr if args.json else None)
        if args.json and report.is_file():
            print(report.read_text(encoding="utf-8").strip())
    if done.returncode < 0:
        return INTERRUPTED
    return _CODES.get(done.returncode, BUG)


def _start(command: list[str], folder: str, stdout: Any = None) -> subprocess.CompletedProcess[str]:
    steering = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
    env = {name: value for name, value in os.environ.items() if name not in steering}
    env["HYPOTHESIS_STORAGE_DIRECTORY"] = folder  # nothing is left in the caller's folder
    sys.stdout.flush()
    return subprocess.run(command, env=env, stdout=stdout, check=False, text=True)


def _mutants(args: argparse.Namespace) -> int:
    """In a process that has done nothing yet, since it forks."""
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError([Fault("jobs", args.jobs, "must be at least 1")])
    if not hasattr(os, "fork"):
        raise ConfigError([Fault("mutants", args.mutants, "needs a system that can fork")])
    asked = {
        "pattern": args.mutants,
        "roles": [p for p in args.profile or ROLES if p in ROLES],
        "spec": args.backend or "",
        "match": args.k or "",
        "jobs": args.jobs or min(len(os.sched_getaffinity(0)), 4),
        "json": args.json,
    }
    run = (sys.executable, "-P", "-m", "moe_core.conformance.mutants.run", json.dumps(asked))
    with tempfile.TemporaryDirectory(prefix="moe_core_mutants_") as folder:
        done = _start([*run], folder)
    return (
        INTERRUPTED if done.returncode < 0 else {0: OK, 1: NO, 2: USAGE}.get(done.returncode, BUG)
    )

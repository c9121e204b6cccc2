"""``moe-core conformance``: does a backend keep every contract that it claims to keep?

Runs the suites of ``moe_core.conformance`` in a process of their own, which no configuration of
pytest around it can change. What follows ``--`` goes to pytest (``-- -x``: stop at the first
fault).
"""

from __future__ import annotations

import importlib.util
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
SUITE = Path(__file__).resolve().parents[1] / "conformance" / "suite"
# pytest's exit codes: ok, a test failed, interrupted (also: a file can't be collected), internal
# error, usage, nothing collected
_CODES = {0: OK, 1: NO, 2: USAGE, 3: BUG, 4: USAGE, 5: NO}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("conformance", help=COMMANDS["conformance"], description=__doc__)
    parser.add_argument("backend", metavar="SPEC", help="NAME, NAME[key=value] or TRANSPORT+RUNNER")
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
    parser.set_defaults(takes_rest=True)


def run(args: argparse.Namespace) -> int:
    missing = [name for name in ("pytest", "hypothesis") if not importlib.util.find_spec(name)]
    if missing:
        message = f"{' and '.join(missing)} not installed: pip install 'moe-core[conformance]'"
        raise ConfigError([Fault("conformance", args.backend, message)])
    for alternative in parse_spec(args.backend).alternatives:
        for named in alternative.names:
            registry.get(named.name, named.distribution)
    with tempfile.TemporaryDirectory(prefix="moe_core_conformance_") as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-P", "-m", "pytest", "-c", os.devnull, "--rootdir", str(SUITE)),
            *("-p", "no:cacheprovider", "-p", "moe_core.conformance.plugin"),
            *("-q", "--no-header", "--tb=short"),
            *(str(SUITE / f"test_{profile}.py") for profile in args.profile or PROFILES),
            *("--moe-backend", args.backend, "--moe-device", args.device),
            *("--moe-ranks", args.ranks, "--moe-report", str(report)),
            *(("--moe-xfails", os.path.abspath(args.xfails)) if args.xfails else ()),
            *(("-k", args.k) if args.k else ()),
            *args.rest,
        ]
        steering = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
        env = {name: value for name, value in os.environ.items() if name not in steering}
        env["HYPOTHESIS_STORAGE_DIRECTORY"] = folder  # nothing is left in the caller's folder
        sys.stdout.flush()
        done = subprocess.run(
            command, env=env, stdout=sys.stderr if args.json else None, check=False
        )
        if args.json and report.is_file():
            print(report.read_text(encoding="utf-8").strip())
    if done.returncode < 0:
        return INTERRUPTED
    return _CODES.get(done.returncode, BUG)

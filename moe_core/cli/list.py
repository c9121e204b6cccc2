"""``moe-core list``: what is installed under which name, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moe_core.cli import COMMANDS, OK
from moe_core.registry import list_backends

if TYPE_CHECKING:
    import argparse

COLUMNS = ("NAME", "DISTRIBUTION", "VERSION", "STATUS", "ROLES", "SUMMARY")


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("list", help=COMMANDS["list"], description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs; holds tracebacks too")


def run(args: argparse.Namespace) -> int:
    with redirect_stdout(sys.stderr):  # manifests are third-party code, and may print
        backends = list_backends()
    if args.json:
        print(json.dumps([asdict(b) for b in backends], indent=2))
        return OK
    rows: list[tuple[str, ...]] = [COLUMNS]
    for b in backends:
        about = " ".join((b.reason or b.summary).split())
        rows.append((b.name, b.distribution, b.version, b.status, ",".join(b.roles), about))
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return OK

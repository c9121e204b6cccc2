"""``moe-core plan-placement``: from tokens per expert to replicas and who holds what.

COUNTS is JSON: ``[layers][experts]`` numbers (or those of one layer), as
``moe_core.balance.expert_load`` returns them, or an object with them under ``"counts"``. The plan
keeps experts of one group on one node if ``--groups`` and ``--nodes`` say so. ``--json`` prints
what ``Placement.from_dict`` and ``--current`` read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moe_core.balance.plan import arrivals, max_over_mean, plan_placement
from moe_core.cli import COMMANDS, OK
from moe_core.errors import ConfigError, Fault
from moe_core.placement import Placement

if TYPE_CHECKING:
    import argparse

COLUMNS = ("LAYER", "TOKENS", "BEFORE", "AFTER", "ARRIVE")
MOST_SHOWN = 64  # arrivals of one layer


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "plan-placement", help=COMMANDS["plan-placement"], description=__doc__
    )
    parser.add_argument("counts", metavar="COUNTS", help="a JSON file")
    parser.add_argument(
        "--ep-size", type=int, required=True, metavar="N", help="ranks that experts are spread over"
    )
    parser.add_argument(
        "--slots",
        "--replicas",
        type=int,
        metavar="N",
        help="physical slots on all ranks together, replicas included (default: one per expert)",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="hosts (1)")
    parser.add_argument(
        "--groups", type=int, default=1, metavar="N", help="expert groups, each to stay on a node"
    )
    parser.add_argument(
        "--current", metavar="FILE", help="what --json printed for the placement of now"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    counts = _read(args.counts, "counts")
    layers = counts if all(isinstance(row, list) for row in counts) else [counts]
    current = None
    if args.current:
        current = _placements(_read(args.current, "placements"))
    num_experts = len(layers[0]) if layers else 0
    slots = num_experts if args.slots is None else args.slots
    plan = plan_placement(layers, slots, args.ep_size, args.nodes, args.groups, current=current)
    contiguous = Placement(num_experts, args.ep_size)
    befores = current or [contiguous] * len(plan)
    report = [
        {
            "tokens": sum(row),
            "before": max_over_mean(row, before),
            "after": max_over_mean(row, after),
            "moves": [{"rank": r, "expert": e} for r, e in arrivals(before, after)],
        }
        for row, before, after in zip(layers, befores, plan, strict=True)
    ]
    if args.json:
        sizes = {name: getattr(args, name) for name in ("ep_size", "nodes", "groups")}
        placements = [placement.to_dict() for placement in plan]
        print(json.dumps({"slots": slots, **sizes, "layers": report, "placements": placements}))
        return OK
    print(_head(args, num_experts, slots))
    print("".join(_cells(COLUMNS)))
    for number, layer in enumerate(report):
        numbers = (f"{layer['before']:.3f}", f"{layer['after']:.3f}", str(len(layer["moves"])))
        print("".join(_cells((str(number), f"{layer['tokens']:,}", *numbers))))
    print("BEFORE, AFTER: the fullest rank's tokens over the mean. ARRIVE: experts sent to ranks:")
    for number, layer in enumerate(report):
        print(f"  layer {number}: {_moves(layer['moves'])}")
    return OK


def _head(args: argparse.Namespace, num_experts: int, slots: int) -> str:
    text = f"{num_experts} experts in {slots} slots over {args.ep_size} ranks"
    if args.groups > 1 and args.nodes > 1:
        text += f" of {args.nodes} nodes, groups of {num_experts // args.groups} kept on one node"
    return text


def _cells(row: tuple[str, ...]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(row, (5, 16, 9, 9, 9), strict=True)]


def _moves(moves: list[dict[str, int]]) -> str:
    by_rank: dict[int, list[str]] = {}
    for move in moves[:MOST_SHOWN]:
        by_rank.setdefault(move["rank"], []).append(str(move["expert"]))
    text = "; ".join(f"rank {rank} gets {' '.join(got)}" for rank, got in by_rank.items())
    if len(moves) > MOST_SHOWN:
        text += f"; and {len(moves) - MOST_SHOWN} more (--json has all)"
    return text or "none"


def _placements(data: list[Any]) -> list[Placement]:
    """Raises ``ConfigError``, naming layers."""
    faults: list[Fault] = []
    found: list[Placement] = []
    for number, fields in enumerate(data):
        try:
            found.append(Placement.from_dict(fields))
        except ConfigError as error:
            faults += [replace(f, field=f"layer {number}.{f.field}") for f in error.faults]
    if faults:
        raise ConfigError(faults)
    return found


def _read(path: str, key: str) -> list[Any]:
    """The list in a JSON file, or under ``key`` of the object there. Raises ``ConfigError``."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        message = f"can't be read: {error.strerror or error}"
        raise ConfigError([Fault(key, path, message)]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([Fault(key, path, f"is not JSON: {error}")]) from error
    found = data.get(key) if isinstance(data, dict) else data
    if not isinstance(found, list):
        raise ConfigError([Fault(key, path, f"must be a list, or an object with {key!r}")])
    return found

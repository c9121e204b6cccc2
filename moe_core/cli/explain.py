"""``moe-core explain``: which parts would run a layer, and every refusal of the others.

Nothing is built. The layer comes from a JSON file, from flags, or from both (flags win).
``--sglang`` tells instead what SGLang would do with flags of its own, and ``--rules`` lists the
rules about widths.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moe_core import profiles
from moe_core.cli import COMMANDS, NO, OK
from moe_core.cli.layer_flags import add_layer, add_place, layer_config, wants
from moe_core.config import ParallelConfig
from moe_core.resolution import make_request, resolve
from moe_core.rules import POLICIES, RULES, judge

if TYPE_CHECKING:
    import argparse

PROFILE = "sglang-0.5.23"


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("explain", help=COMMANDS["explain"], description=__doc__)
    parser.add_argument(
        "--backend",
        metavar="SPEC",
        help="auto, NAME, TRANSPORT+RUNNER, NAME[key=value], FIRST,SECOND or dist:NAME "
        "(default: the config's, then MOE_BACKEND, then auto)",
    )
    add_layer(parser)
    where = add_place(parser)
    for width, what in (("ep", "expert"), ("tp", "tensor"), ("dp", "data")):
        where.add_argument(f"--{width}", type=int, default=1, metavar="N", help=f"{what} parallel")
    where.add_argument(
        "--policy", choices=POLICIES, default="strict", help="adjust: a rule may change widths"
    )
    other = parser.add_argument_group("instead")
    other.add_argument(
        "--sglang",
        action="append",
        metavar="FLAG=VALUE,...",
        help="what SGLang would do with its own flags, e.g. tp=8,ep=4,moe_a2a_backend=deepep",
    )
    other.add_argument(
        "--profile",
        choices=profiles.names(),
        help=f"which SGLang (default {PROFILE}); without --sglang, list what it looks at",
    )
    other.add_argument("--rules", action="store_true", help="the rules about widths, as Markdown")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    if args.rules:
        print(rules_table())
        return OK
    if args.sglang or args.profile:
        return _profile(args)
    resolution = resolve(
        layer_config(args),
        ParallelConfig(ep_size=args.ep, tp_size=args.tp, dp_size=args.dp, rows=args.rows),
        args.backend,
        policy=args.policy,
        **wants(args),
    )
    print(json.dumps(resolution.to_dict(), indent=2) if args.json else resolution.table())
    return OK if resolution.ok else NO


def rules_table() -> str:
    """Each rule by its example, as Markdown (docs/choosing.md holds this text)."""
    lines = ["| rule | action | says, for example | and advises to |", "|---|---|---|---|"]
    for rule in RULES:
        e = rule.example
        request = make_request(
            e.config,
            e.parallel,
            max_tokens_per_rank=e.max_tokens_per_rank,
            ranks_per_node=e.ranks_per_node,
        )
        found = judge(request, e.offer, rule.roles[0] if rule.roles else "")
        (finding,) = (f for f in found if f.rule is rule)
        lines.append(f"| `{rule.id}` | {rule.action} | {finding.message} | {finding.fix} |")
    return "\n".join(lines)


def _profile(args: argparse.Namespace) -> int:
    profile = profiles.load(args.profile or PROFILE)
    if not args.sglang:
        rows = [f"{r.action:<6} {r.id} [{r.where}]\n       when {r.when}" for r in profile.rows]
        print(json.dumps(asdict(profile), indent=2) if args.json else "\n".join(rows))
        return OK
    config = layer_config(args)
    layer: dict[str, profiles.Value] = {
        "num_experts": config.num_experts,
        "intermediate_size": config.intermediate_size,
    }
    outcome = profiles.run(profile, layer | profile.parse(args.sglang))
    print(json.dumps(outcome.to_dict(), indent=2) if args.json else outcome.table())
    return NO if outcome.refused else OK

"""``moe-core explain``: which parts would run a layer, and every refusal of the others.

Nothing is built. The layer comes from a JSON file, from flags, or from both (flags win).
``--sglang`` tells instead what SGLang would do with flags of its own, and ``--rules`` lists the
rules about widths.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moe_core import profiles
from moe_core.cli import COMMANDS, NO, OK
from moe_core.config import DTYPES, ROWS, MoEConfig, ParallelConfig
from moe_core.errors import ConfigError, Fault
from moe_core.resolution import make_request, resolve
from moe_core.rules import POLICIES, RULES, judge

if TYPE_CHECKING:
    import argparse

PROFILE = "sglang-0.5.23"
DEFAULTS = {"hidden_size": 1024, "intermediate_size": 2048, "num_experts": 8, "top_k": 2}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("explain", help=COMMANDS["explain"], description=__doc__)
    parser.add_argument(
        "--backend",
        metavar="SPEC",
        help="auto, NAME, TRANSPORT+RUNNER, NAME[key=value], FIRST,SECOND or dist:NAME "
        "(default: the config's, then MOE_BACKEND, then auto)",
    )
    layer = parser.add_argument_group("the layer")
    layer.add_argument("--config", metavar="FILE", help="a MoEConfig as JSON")
    for name, value in DEFAULTS.items():
        flag = "--" + name.replace("_", "-")
        layer.add_argument(flag, type=int, metavar="N", help=f"without a file {value}")
    layer.add_argument("--dtype", choices=DTYPES)
    layer.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of MoEConfig, e.g. bias=true, router.scoring_func=sigmoid",
    )
    where = parser.add_argument_group("where it runs")
    for width, what in (("ep", "expert"), ("tp", "tensor"), ("dp", "data")):
        where.add_argument(f"--{width}", type=int, default=1, metavar="N", help=f"{what} parallel")
    where.add_argument("--rows", choices=ROWS, default="distinct", help="over the ep group")
    where.add_argument("--max-tokens-per-rank", type=int, metavar="N", help="if it is known")
    where.add_argument(
        "--policy", choices=POLICIES, default="strict", help="adjust: a rule may change widths"
    )
    where.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    where.add_argument("--inference", action="store_true", help="no gradients wanted")
    where.add_argument("--compile", action="store_true", help="under torch.compile, full graph")
    where.add_argument("--cuda-graph", action="store_true", help="captured in a CUDA graph")
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
        _config(args),
        ParallelConfig(ep_size=args.ep, tp_size=args.tp, dp_size=args.dp, rows=args.rows),
        args.backend,
        device=args.device,
        max_tokens_per_rank=args.max_tokens_per_rank,
        autograd=not args.inference,
        compile=args.compile,
        cuda_graph=args.cuda_graph,
        policy=args.policy,
    )
    print(json.dumps(resolution.to_dict(), indent=2) if args.json else resolution.table())
    return OK if resolution.ok else NO


def rules_table() -> str:
    """Each rule by its example, as Markdown (docs/choosing.md holds this text)."""
    lines = ["| rule | action | says, for example | and advises to |", "|---|---|---|---|"]
    for rule in RULES:
        e = rule.example
        request = make_request(e.config, e.parallel, max_tokens_per_rank=e.max_tokens_per_rank)
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
    config = _config(args)
    layer: dict[str, profiles.Value] = {
        "num_experts": config.num_experts,
        "intermediate_size": config.intermediate_size,
    }
    outcome = profiles.run(profile, layer | profile.parse(args.sglang))
    print(json.dumps(outcome.to_dict(), indent=2) if args.json else outcome.table())
    return NO if outcome.refused else OK


def _config(args: argparse.Namespace) -> MoEConfig:
    given = MoEConfig.from_json(args.config).to_dict() if args.config else DEFAULTS
    data: dict[str, Any] = deepcopy(given)
    for name in (*DEFAULTS, "dtype"):
        if getattr(args, name) is not None:
            data[name] = getattr(args, name)
    faults: list[Fault] = []
    for text in args.set:
        path, equals, value = text.partition("=")
        *parents, last = path.strip().split(".")
        place: Any = data
        for parent in parents:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else None
        if not equals or not isinstance(place, dict):
            faults.append(Fault("--set", text, "must look like bias=true or router.kind=hash"))
        else:
            place[last] = _value(value.strip())
    if faults:
        raise ConfigError(faults)
    return MoEConfig.from_dict(data)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # a bare word is a string

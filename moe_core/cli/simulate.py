"""``moe-core simulate``: what a layer would send between ranks and nodes, how even its load is.

Nothing is built and nothing is sent: each rank's routing is drawn, or read from a file, and
counted. A file is what ``Trace.save_routing`` wrote, all of its calls or the one that ``--call``
names, or any safetensors file with ``topk_ids [T, K]``. Exit codes: 0 done, 1 no backend serves the
layer, 2 a wrong flag, config or file, 3 a backend whose code isn't here.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core.cli import COMMANDS, OK
from moe_core.cli.layer_flags import add_layer, add_place, layer_config, wants
from moe_core.cli.report import Canvas
from moe_core.config import ParallelConfig
from moe_core.errors import InputError
from moe_core.placement import Placement

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from moe_core.traffic import Recorded, Traffic

MOST_SHOWN = 8  # ranks or nodes whose links are shown one by one
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("simulate", help=COMMANDS["simulate"], description=__doc__)
    parser.add_argument("--backend", metavar="SPEC", help="as for explain")
    add_layer(parser)
    where = add_place(parser)
    for width, what in (("ep", "expert"), ("tp", "tensor"), ("dp", "data")):
        where.add_argument(f"--{width}", type=int, default=1, metavar="N", help=f"{what} parallel")
    where.add_argument("--ranks-per-node", type=int, metavar="N", help="neighbours on one node")
    where.add_argument(
        "--placement",
        metavar="FILE",
        help="a Placement as JSON, or what plan-placement --json says",
    )
    tokens = parser.add_argument_group("the tokens")
    tokens.add_argument(
        "--routing",
        default="uniform",
        metavar="HOW",
        help="uniform (default), zipf:S, hot, balanced, or a file",
    )
    tokens.add_argument(
        "--tokens",
        metavar="N,...",
        help="drawn, of each rank with tokens of its own (4096), or one number for each of them",
    )
    tokens.add_argument("--seed", type=int, help="of a draw (0)")
    tokens.add_argument(
        "--call", type=int, metavar="N", help="of a file, from 0 (default: the sum)"
    )
    out = parser.add_argument_group("what comes out")
    out.add_argument("--png", metavar="DIR", help="links.png and rows.png; needs matplotlib")
    out.add_argument("--output", metavar="FILE", help="all matrices, as safetensors")
    out.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    import torch

    from moe_core.traffic import simulate
    from moe_core.traffic.pictures import check_matplotlib, save_pictures

    torch.set_num_threads(1)  # one rank's tokens at a time are too few to share out
    if args.png:
        check_matplotlib()  # before the work
    config, placements = layer_config(args), _placements(args.placement)
    how = {k: v for k, v in wants(args).items() if v is not None}
    routings, drawn = _routings(args)
    if len(placements) not in (1, len(routings)):
        raise InputError(
            f"--placement {args.placement} holds {len(placements)} placements, for {len(routings)} "
            "calls: it takes one, or one for each"
        )
    placements *= 1 if len(placements) == len(routings) else len(routings)
    found = [
        simulate(
            config,
            ParallelConfig(ep_size=args.ep, tp_size=args.tp, dp_size=args.dp, rows=args.rows),
            args.backend,
            routing=routing,
            ranks_per_node=args.ranks_per_node,
            placement=placement,
            **drawn,
            **how,
        )
        for routing, placement in zip(routings, placements, strict=True)
    ]
    traffic = reduce(add, found)
    if args.output:
        traffic.save(args.output)
    pictures = save_pictures(traffic, args.png) if args.png else []
    if args.json:
        print(json.dumps(traffic.to_dict() | {"pictures": [str(path) for path in pictures]}))
    else:
        show(traffic, Canvas(sys.stdout))
        for path in pictures:
            print(f"wrote {path}")
    return OK


def _routings(args: argparse.Namespace) -> tuple[list[str | Recorded], dict[str, Any]]:
    """Of each call, and what goes with a draw."""
    from moe_core.traffic import Draw, load_routing

    given = {n: getattr(args, n) for n in ("tokens", "seed") if getattr(args, n) is not None}
    if not Path(args.routing).is_file():
        if args.call is not None:
            raise InputError("--call picks from a file of routing, and this one is drawn")
        try:
            Draw.parse(args.routing)
        except InputError as error:
            raise InputError(
                f"--routing: {error}, or a file (there is none of that name)"
            ) from None
        if "tokens" in given:
            given["tokens"] = _numbers(given["tokens"])
        return [args.routing], given
    if given:
        flags = " and ".join(f"--{name}" for name in given)
        raise InputError(f"{flags}: for a draw, and {args.routing} is a recording")
    calls = load_routing(args.routing)
    if args.call is not None:
        if not 0 <= args.call < len(calls):
            raise InputError(f"--call {args.call}: {args.routing} has calls 0 to {len(calls) - 1}")
        calls = [calls[args.call]]
    return list(calls), {}


def _numbers(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--tokens {text!r}: must be a number, or numbers by commas") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _placements(path: str | None) -> list[Placement | None]:
    if path is None:
        return [None]
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--placement {path} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"--placement {path} is not JSON: {error}") from error
    several = data["placements"] if isinstance(data, dict) and "placements" in data else [data]
    if not isinstance(several, list) or not several:
        raise InputError(f"--placement {path}: placements must be a list of at least one")
    return [Placement.from_dict(one) for one in several]


# ------------------------------------------------------------------------------------ for people


def show(traffic: Traffic, canvas: Canvas) -> None:
    """A page of text."""
    found = traffic.to_dict()
    widths = found["widths"]
    shape = " ".join(f"{n}={widths[f'{n}_size']}" for n in ("ep", "tp", "dp"))
    nodes = f"{found['nodes']:,} nodes of {found['ranks_per_node']}"
    on = nodes if found["ranks_per_node"] else "one node"
    canvas.line(
        f"{found['backend']} ({found['transport']}), {found['ranks']:,} ranks ({shape}) on {on}"
    )
    calls = f", {found['calls']} calls" if found["calls"] > 1 else ""
    canvas.line(f"routing    {found['routing']}, {found['tokens']:,} tokens{calls}")
    canvas.line(f"rows       {_spread(found['rows'])}{_times(found['imbalance'])}")
    busiest = max(found["rows_per_expert"], default=0)
    canvas.line(
        f"experts    busiest {busiest:,} choices{_times(found['expert_imbalance'])}; "
        f"{found['rows_per_expert'].count(0):,} idle"
    )
    canvas.line(f"buffers    {_sizes(found['buffer_bytes'])}")
    if any(found["summed_bytes_per_rank"]):
        mean = sum(found["summed_bytes_per_rank"]) / found["ranks"]
        canvas.line(f"sums       {_size(mean)} per rank go into all-reduces, not counted below")
    canvas.line()
    heads = ("TOTAL", "BETWEEN NODES", "SENT PER RANK", "WORST", "RECEIVED, WORST", "WORST LINK")
    canvas.line(f"{'':<9}" + "".join(f"{head:>17}" for head in heads))
    for kind, one in found["bytes"].items():
        sent, received = one["sent_per_rank"], one["received_per_rank"]
        cells = (one["total"], one["between_nodes"], sent["mean"], sent["worst"])
        cells = (*cells, received["worst"], one["busiest_link"])
        canvas.line(f"{kind:<9}" + "".join(f"{_size(cell):>17}" for cell in cells))
    for name, bound, ratio in (
        ("one row per token and remote rank", "bound_bytes", "payload_over_bound"),
        ("and per token and remote node", "node_bound_bytes", "node_payload_over_bound"),
    ):
        if found[ratio] is not None:
            canvas.line(f"  {name}: {_size(found[bound])}, dispatch/bound = {found[ratio]:.2f}")
    _matrix(canvas, found, traffic)


def _matrix(canvas: Canvas, found: Mapping[str, Any], traffic: Traffic) -> None:
    """Dispatched bytes from rank to rank, or from node to node, where there are few enough."""
    if 1 < traffic.world_size <= MOST_SHOWN:
        what, cells = "rank", traffic.dispatch.tolist()
    elif 1 < traffic.num_nodes <= MOST_SHOWN:
        what, cells = "node", found["node_links"]["dispatch"]
    else:
        return
    scale, unit = _unit(max(map(max, cells)))
    canvas.line()
    canvas.line(f"token rows dispatched, {unit} (row: from, column: to)")
    canvas.line("  from  " + "".join(f"{f'{what} {dst}':>10}" for dst in range(len(cells))))
    for src, row in enumerate(cells):
        shown = [f"{sent / scale:,.1f}" if sent else "·" for sent in row]
        canvas.line(f"  {what} {src:<3}" + "".join(f"{cell:>10}" for cell in shown))


def _unit(num_bytes: float) -> tuple[int, str]:
    return next(((s, u) for s, u in UNITS if num_bytes >= s), (1, "bytes"))


def _size(num_bytes: float) -> str:
    scale, unit = _unit(num_bytes)
    return f"{num_bytes:,.0f} bytes" if scale == 1 else f"{num_bytes / scale:,.1f} {unit}"


def _spread(one: Mapping[str, Any]) -> str:
    return f"mean {one['mean']:,.1f}, worst {one['worst']:,} (rank {one['worst_rank']})"


def _sizes(one: Mapping[str, Any]) -> str:
    return f"mean {_size(one['mean'])}, worst {_size(one['worst'])} (rank {one['worst_rank']})"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f", {ratio:.2f} times the mean"

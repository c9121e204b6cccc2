"""``moe-core matrix``: every installed transport with every runner, on this machine.

Each pair that may serve the layer that the flags describe is built small and run, on one process
and on several, and compared with the float64 reference. Exit codes: 0 all that may run do, 1 one
of them fails or nothing may run, 2 a wrong flag, config or variable.
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import traceback
import warnings
from contextlib import closing, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moe_core import registry
from moe_core.capabilities import Candidate, Refusal, find_path, layer_refusals, part_refusals
from moe_core.cli import COMMANDS, NO, OK
from moe_core.cli.layer_flags import add_layer, add_place, layer_config, wants
from moe_core.cli.report import Canvas, Progress
from moe_core.config import MoEConfig, ParallelConfig
from moe_core.errors import BackendLoadError, MoEError
from moe_core.resolution import Resolution, make_request

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

LIMIT_S = 120.0
TINY = 64  # hidden and intermediate size of what is run, where the parts have it
TOKENS = 6
BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(slots=True)
class Cell:
    """``status``: ``refused``, ``serves`` (not tried), ``runs`` or ``fails``. ``error``: relative,
    of the output. ``output``: the ranks' tracebacks."""

    ranks: int
    resolution: Resolution
    status: str
    reason: str = ""
    error: float | None = None
    output: str = ""

    def to_dict(self) -> dict[str, Any]:
        refusals = [asdict(r) for r in self.resolution.refusals]
        told = {n: getattr(self, n) for n in ("ranks", "status", "reason", "error", "output")}
        return {**told, "refusals": refusals}


@dataclass(slots=True)
class Row:
    """A transport with a runner, or a fused part alone."""

    mover: Candidate
    runner: Candidate | None
    cells: list[Cell] = field(default_factory=list[Cell])

    @property
    def candidates(self) -> list[Candidate]:
        return [c for c in (self.mover, self.runner) if c is not None]

    @property
    def converter(self) -> Any:
        paths = [cell.resolution.path for cell in self.cells]
        return next((p.converter for p in paths if p is not None), None)

    def to_dict(self) -> dict[str, Any]:
        request, converter = self.cells[0].resolution.request, self.converter
        moved = 0
        if converter is not None:
            size = BITS[request.dtype] // 8
            moved = converter.bytes_moved(1, request.top_k, request.hidden_size, size)
        return {
            "spec": "+".join(map(_name, self.candidates)),
            **{c.part.role: c.to_dict() for c in self.candidates},
            "converter": converter.name if converter else None,
            "bytes_per_token": moved,
            "host_syncs": converter.host_syncs if converter else 0,
            "cells": [cell.to_dict() for cell in self.cells],
        }


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("matrix", help=COMMANDS["matrix"], description=__doc__)
    add_layer(parser)
    where = add_place(parser)
    where.add_argument(
        "--nproc", type=int, default=2, metavar="N", help="ranks, expert parallel (default 2)"
    )
    where.add_argument("--dry", action="store_true", help="say what would serve, run nothing")
    where.add_argument(
        "--timeout",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"seconds for each run (default {LIMIT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="for programs; holds every refusal")


def run(args: argparse.Namespace) -> int:
    """Raises ``ConfigError`` for a config that can't be."""
    config = layer_config(args)
    widths = [ParallelConfig(ep_size=n, rows=args.rows) for n in dict.fromkeys((1, args.nproc))]
    with redirect_stdout(sys.stderr):  # manifests are third-party code, and may print
        candidates, left_out = installed_parts()
        rows = decide(candidates, config, widths, wants(args))
        if not args.dry:
            execute(rows, config, wants(args), args.timeout)
    report = {
        "config": config.to_dict(),
        "device": args.device,
        "rows": [row.to_dict() for row in rows],
        "left_out": left_out,
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, Canvas(sys.stdout))
    statuses = {cell.status for row in rows for cell in row.cells}
    return OK if statuses & {"runs", "serves"} and "fails" not in statuses else NO


def installed_parts() -> tuple[list[Candidate], list[dict[str, str]]]:
    """The parts of every backend that can be named, and which backends can't be."""
    candidates: list[Candidate] = []
    left_out: list[dict[str, str]] = []
    for info in registry.list_backends():
        if not info.roles:
            names = ("name", "distribution", "status", "reason")
            left_out.append({n: getattr(info, n) for n in names})
            continue
        found = registry.get(info.name, info.distribution).backend
        about = found, info.distribution, info.version
        candidates += [Candidate(about[0], part, *about[1:]) for part in found.parts]
    return candidates, left_out


def decide(
    candidates: Iterable[Candidate],
    config: MoEConfig,
    widths: Iterable[ParallelConfig],
    wanted: dict[str, Any],
) -> list[Row]:
    """Which pair may serve which widths; nothing is built."""
    by_role: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.label, c.distribution)):
        by_role.setdefault(candidate.part.role, []).append(candidate)
    movers = by_role.get("transport", [])
    rows = [Row(mover, runner) for mover in movers for runner in by_role.get("runner", [])]
    rows += [Row(fused, None) for fused in by_role.get("fused", [])]
    for row in rows:
        for parallel in widths:
            resolution = _resolve(row, config, parallel, wanted)
            reason = str(resolution.refusals[0]) if resolution.refusals else ""
            status = "refused" if reason else "serves"
            row.cells.append(Cell(parallel.ep_size, resolution, status, reason))
    return rows


def _resolve(
    row: Row, config: MoEConfig, parallel: ParallelConfig, wanted: dict[str, Any]
) -> Resolution:
    request = make_request(config, parallel, router="none", **wanted)
    refusals, path = layer_refusals(request), None
    for candidate in row.candidates:
        try:
            refusals += part_refusals(candidate, request)
        except BackendLoadError as error:  # its own check is broken
            name = candidate.backend.name
            refusals.append(Refusal(candidate.label, "broken", "check", name, "", str(error)))
    if row.runner is not None:
        found = find_path(row.mover, row.runner, request)
        if isinstance(found, list):
            refusals += found
        else:
            path = found
    parts = {} if refusals else {c.part.role: c for c in row.candidates}
    spec = "+".join(map(_name, row.candidates))
    return Resolution(request, spec, "argument", parts, path, tuple(refusals))


def _name(candidate: Candidate) -> str:
    """As a spec has it."""
    claims = registry.installed(candidate.backend.name)
    name = f"{candidate.distribution}:" if len(claims) > 1 else ""
    mode = f"[mode={candidate.part.mode}]" if candidate.part.mode else ""
    return f"{name}{candidate.backend.name}{mode}"


def execute(rows: list[Row], config: MoEConfig, wanted: dict[str, Any], limit: float) -> None:
    """Runs each cell that serves, in child processes; ranks other than CPUs' aren't started."""
    from moe_core.conformance.pool import RankPool

    device = wanted["device"]
    cells = [
        (row, cell)
        for row in rows
        for cell in row.cells
        if cell.status == "serves" and (cell.ranks == 1 or device == "cpu")
    ]
    progress = Progress(len(cells), "running") if sys.stderr.isatty() else None
    with closing(RankPool(max((cell.ranks for _, cell in cells), default=1))) as pool:
        for done, (row, cell) in enumerate(cells):
            if progress is not None:
                progress.update(done, "+".join(map(_name, row.candidates)))
            parallel = cell.resolution.parallel
            small = replace(
                config,
                hidden_size=min(config.hidden_size, TINY),
                intermediate_size=min(config.intermediate_size, TINY),
            )
            resolution = _resolve(row, small, parallel, wanted)
            if not resolution.ok:  # a kernel with a larger least size
                small, resolution = config, cell.resolution
            try:
                answers = pool.run(run_small, small, resolution, device, limit=limit)
                cell.output = next((a for a in answers if isinstance(a, str)), "")
            except AssertionError as error:
                answers, cell.output = [], str(error)
            if cell.output:
                cell.status, cell.reason = "fails", _last_words(cell.output)
                continue
            error, bound = max(a for a in answers if not isinstance(a, str))
            cell.status, cell.error = "runs", error if math.isfinite(error) else None
            if not error <= bound:
                cell.status = "fails"
                cell.reason = f"relative error {error:.1e}, and rounding explains {bound:.1e}"
    if progress is not None:
        progress.close()


def run_small(config: MoEConfig, resolution: Resolution, device: str) -> tuple[float, float] | str:
    """On each rank: the output's relative error, and the bound. Or the traceback, unless other
    ranks wait for this one: then it raises, and the pool ends them."""
    try:
        return _run_small(config, resolution, device)
    except Exception:
        if resolution.parallel.world_size > 1:
            raise
        return traceback.format_exc()


def _run_small(config: MoEConfig, resolution: Resolution, device: str) -> tuple[float, float]:
    import torch

    from moe_core.building import Plan
    from moe_core.cli.layer_check import error_bound, relative_error
    from moe_core.experts import Experts
    from moe_core.groups import make_groups
    from moe_core.placement import Placement

    os.dup2(2, 1)  # what a backend prints is not a result
    request, parallel = resolution.request, resolution.parallel
    placement = Placement(config.num_experts, parallel.ep_size)
    plan = Plan(resolution, make_groups(parallel, None, device), placement)
    draw = torch.Generator().manual_seed(0)
    experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    shapes = [(experts, config.w13_rows, hidden), (experts, hidden, inner)]
    shapes += [s[:2] for s in shapes] if config.bias else []
    weights = [torch.randn(s, generator=draw) / s[-1] ** 0.5 for s in shapes]
    draw.manual_seed(1 if request.rows == "replicated" else 1 + plan.groups.rank)
    tokens = min(TOKENS, request.max_tokens_per_rank or TOKENS)
    x = torch.randn(tokens, hidden, generator=draw).to(getattr(torch, config.dtype))
    topk_ids = torch.randint(experts, (tokens, config.top_k), generator=draw)
    topk_ids[0] = -1
    topk_weights = torch.rand(tokens, config.top_k, generator=draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = Experts(config, parallel, device=device, inference=not request.autograd, plan=plan)
        layer.load_full_weights(*weights)
        here = x.detach().to(device).requires_grad_(request.autograd)
        out = layer(here, topk_ids.to(device), topk_weights.to(device))
        if request.autograd:
            out.sum().backward()
            grads = [here.grad, *(p.grad for p in layer.parameters())]
            if not all(g is not None and bool(g.isfinite().all()) for g in grads):
                raise MoEError("a gradient is missing or not finite")
    exact = replace(config, dtype="float64", dispatch_dtype=None, combine_dtype=None, backend=None)
    oracle = Experts(exact, backend="reference", inference=True)
    oracle.load_full_weights(*(w.to(x.dtype).double() for w in weights))
    with torch.no_grad():
        expected = oracle(x.double(), topk_ids, topk_weights)
    passed = (request.dtype, request.dispatch_dtype, request.combine_dtype)
    bound = error_bound(replace(config, dtype=min(passed, key=BITS.__getitem__)))
    return relative_error(out, expected), bound


def _last_words(text: str) -> str:
    """The exception of the first rank that has one, else why there is none."""
    first = text.partition("\n--- rank")[0]
    return first.strip().splitlines()[-1].removeprefix("--- ")


_COLOURS = {"runs": 32, "serves": 32, "refused": 33, "fails": 31}


def _show(report: dict[str, Any], canvas: Canvas) -> None:
    config = report["config"]
    canvas.line(
        f"hidden {config['hidden_size']}, intermediate {config['intermediate_size']}, "
        f"{config['num_experts']} experts, top {config['top_k']}, {config['dtype']} on "
        f"{report['device']}"
    )
    notes: dict[str, int] = {}
    lines: list[list[str]] = []
    for row in report["rows"]:
        transport, _, runner = row["spec"].partition("+")
        shown = [transport, runner or "(fused)"]
        for cell in row["cells"]:
            number = (
                f" {notes.setdefault(cell['reason'], len(notes) + 1)}" if cell["reason"] else ""
            )
            shown.append(cell["status"] + number)
        shown += [row["converter"] or "-", f"{row['bytes_per_token']:,}"]
        lines.append(shown)
    ranks = [cell["ranks"] for cell in report["rows"][0]["cells"]] if report["rows"] else []
    head = ["TRANSPORT", "RUNNER", *("1 RANK" if n == 1 else f"{n} RANKS" for n in ranks)]
    head += ["CONVERTER", "BYTES/TOKEN"]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    spare = canvas.width - sum(widths[2:]) - 2 * (len(widths) - 1)
    widths[1] = min(widths[1], max(spare // 2, 12))
    widths[0] = min(widths[0], max(spare - widths[1], 12))
    for line in (head, *lines):
        cells = [
            (text if len(text) <= width else text[: width - 2] + "..").ljust(width)
            for text, width in zip(line, widths, strict=True)
        ]
        cells[-1] = line[-1].rjust(widths[-1])
        colours = [_COLOURS.get(text.split()[0]) for text in line]
        cells = [canvas.paint(c, n) if n else c for c, n in zip(cells, colours, strict=True)]
        canvas.line("  ".join(cells))
    for reason, number in notes.items():
        for text in textwrap.wrap(f"{number:>2}  {reason}", canvas.width, subsequent_indent="    "):
            canvas.line(text)
    for backend in report["left_out"]:
        text = f"left out: {backend['distribution']}:{backend['name']}: {backend['reason']}"
        for line in textwrap.wrap(text, canvas.width, subsequent_indent="    "):
            canvas.line(line)

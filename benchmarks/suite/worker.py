"""The process that holds the device: checks and times cells, and says so line by line.

It is a process of its own because a wrong kernel can end it or hang it: whoever started it then
knows, from the last line, which contender of which cell did that, and starts another without it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from moe_core.timing import Spread, alternate
from suite.contenders import CONTENDERS, OURS, Contender
from suite.machine import Before, ceilings, versions
from suite.problem import Problem, Weights
from suite.shapes import CELLS, Cell, tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SIGN = "@suite "
"""How a line begins that is for whoever started this process."""
SAMPLES, WARMUP, CELL_LIMIT_S = 40, 3, 2.5


def say(event: str, **what: Any) -> None:
    print(SIGN + json.dumps({"event": event, **what}), flush=True)


def row(
    contender: str, metric: str, unit: str, value: float | Spread, **more: Any
) -> dict[str, Any]:
    """As the CSV has it, but for what is the same in all of a run. A Spread is in seconds."""
    if isinstance(value, Spread):
        scale = {"us": 1e6, "s": 1.0}[unit]
        numbers = {p: getattr(value, p) * scale for p in ("p20", "p50", "p80")}
        numbers["samples"] = value.samples
    else:
        numbers = {"p20": value, "p50": value, "p80": value, "samples": 1}
    return {"contender": contender, "metric": metric, "unit": unit, **numbers, "note": "", **more}


def run(names: Iterable[str], skip: set[tuple[str, str]], on_cpu: bool, seconds: float) -> None:
    """``skip``: pairs of cell and contender to leave out. Begins no cell past ``seconds``."""
    begun = time.monotonic()
    device = torch.device("cpu" if on_cpu else "cuda")
    say("versions", **versions(device))
    rows = [row("machine", name, unit, value) for name, (value, unit) in ceilings(device).items()]
    say("rows", cell="machine", rows=rows)
    cells = {cell.name: cell for cell in CELLS}
    before, weights, longest = Before(device), None, 0.0
    for name in names:
        left = seconds - (time.monotonic() - begun)
        if left < 1.5 * longest:
            say("late", cell=name, left=left)
            return
        since = time.monotonic()
        cell = tiny(cells[name]) if on_cpu else cells[name]
        if weights is None or weights.shape != cell.shape:
            weights = None  # one shape's are in memory at a time
            if not on_cpu:
                torch.cuda.empty_cache()
            weights = Weights(cell.shape, device)
        rows = measure(name, cell, weights, before, {c for n, c in skip if n == name})
        say("rows", cell=name, rows=rows)
        longest = max(longest, time.monotonic() - since)
    say("done")


def measure(
    name: str, cell: Cell, weights: Weights, before: Before, skip: set[str]
) -> list[dict[str, Any]]:
    """All rows of a cell: whoever can do it, is right and isn't to be skipped is timed."""
    problem, device = Problem(cell, weights), weights.device
    rows = [row("suite", "experts hit", "", float(problem.experts_hit))]
    calls: dict[str, Callable[[], object]] = {}
    for contender in CONTENDERS:
        if contender.name in skip:
            continue
        say("begin", cell=name, contender=contender.name)
        reason = contender.why_not(problem)
        if reason:
            rows.append(row(contender.name, "left out", "", 0.0, note=reason))
            continue
        try:
            call, worst = prepared(contender, problem)
        except Exception as error:
            if device.type == "cuda" and not still_works(device):
                raise
            rows.append(row(contender.name, "failed", "", 0.0, note=told(error)))
            continue
        rows.append(row(contender.name, "error", "of bound", max(worst.values()), note=str(worst)))
        if max(worst.values()) > 1:
            rows.append(row(contender.name, "failed", "", 0.0, note=f"wrong: {worst}"))
            continue
        how, note = "stream", ""
        if cell.is_decode and device.type == "cuda" and not contender.syncs:
            try:
                call, how = captured(call), "graph"
            except Exception as error:
                if not still_works(device):
                    raise
                note = told(error)
        calls[contender.name] = call
        rows.append(row(contender.name, how, "", 1.0, note=note))
    if calls:
        say("begin", cell=name, contender="timing")
        few = device.type != "cuda"
        times = alternate(
            calls,
            device,
            samples=1 if few else SAMPLES,
            warmup=0 if few else WARMUP,
            limit_s=CELL_LIMIT_S,
            before=before,
        )
        rows += [row(who, "time", "us", spread) for who, spread in times.items()]
    if OURS in calls and device.type == "cuda":
        try:
            rows += kernels(calls[OURS])
        except Exception as error:  # a profiler that isn't there costs nothing else
            if not still_works(device):
                raise
            rows.append(row(OURS, "no kernel times", "", 0.0, note=told(error)))
    return rows


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", "; ")[:500]


def prepared(
    contender: Contender, problem: Problem
) -> tuple[Callable[[], object], dict[str, float]]:
    """What is timed, and how far it is off, over the bound."""
    forward = contender.inference(problem) if not problem.trains else None
    if forward is not None:
        return forward, {"forward": problem.forward_error(forward())}
    train = contender.training(problem)
    grads = contender.in_shape_layout(problem, train())
    return train, problem.gradient_errors(grads)


def still_works(device: torch.device) -> bool:
    """Whether the device answers: after an illegal access nothing does."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except Exception:
        return False
    return True


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a graph. Its outputs live in the graph's own memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def kernels(call: Callable[[], object], most: int = 12) -> list[dict[str, Any]]:
    """Time of each kernel of one call, the longest first: where to look when a cell is slow."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    taken = [(e.key, e.device_time_total, e.count) for e in found.key_averages()]
    taken.sort(key=lambda one: -one[1])
    return [
        row(OURS, f"kernel {key[:60]}", "us", float(total), note=f"{count} launches")
        for key, total, count in taken[:most]
        if total
    ]


def main(argv: list[str]) -> None:
    """One argument: JSON with ``cells``, ``skip``, ``on_cpu`` and ``seconds``."""
    asked = json.loads(argv[0])
    run(asked["cells"], {tuple(pair) for pair in asked["skip"]}, asked["on_cpu"], asked["seconds"])


if __name__ == "__main__":
    main(sys.argv[1:])

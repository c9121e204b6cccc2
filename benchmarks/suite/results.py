"""The CSV that grows cell by cell, and what is made of it: a table of text and a picture."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Any

from suite import predict
from suite.shapes import CELLS, Cell

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

COLUMNS = (
    "cell", "pass", "tokens", "contender", "metric", "unit", "p20", "p50", "p80", "samples", "note",
    "gpu", "torch", "triton", "python",
)  # fmt: skip
OURS = "triton"
LEAST_RATIO = 0.85
NO_GPU = "none"


class Table:
    """Rows of a CSV file. A cell's are written together, so that one that is there is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))

    def add(self, cell: str, rows: Iterable[dict[str, Any]], versions: dict[str, str]) -> None:
        known = next((c for c in CELLS if c.name == cell), None)
        about = {
            "cell": cell,
            "pass": known.passes if known else "",
            "tokens": str(known.tokens) if known else "",
            **versions,
        }
        fresh = [{**about, **{k: _text(v) for k, v in row.items()}} for row in rows]
        new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, restval="")
            if new:
                writer.writeheader()
            writer.writerows(fresh)
        self.rows += fresh

    @property
    def finished(self) -> set[str]:
        return {row["cell"] for row in self.rows if row["metric"] == "experts hit"}

    def of(self, cell: str, metric: str) -> dict[str, dict[str, str]]:
        """By contender, the last that was written."""
        found = [r for r in self.rows if (r["cell"], r["metric"]) == (cell, metric)]
        return {r["contender"]: r for r in found}

    def times(self, cell: str) -> dict[str, float]:
        """Medians in seconds by contender."""
        return {who: float(r["p50"]) * 1e-6 for who, r in self.of(cell, "time").items()}

    def ceiling(self, name: str, otherwise: float) -> float:
        """In FLOP/s and B/s: what was measured here, the last time."""
        rows = [r for r in self.rows if r["contender"] == "machine" and r["metric"] == name]
        return float(rows[-1]["p50"]) * 1e12 if rows else otherwise


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def best_peer(times: dict[str, float]) -> tuple[str, float] | None:
    peers = {who: seconds for who, seconds in times.items() if who != OURS}
    return min(peers.items(), key=lambda one: one[1]) if peers else None


def ratios(table: Table) -> dict[str, float]:
    """Cell → the best peer's time over ours: above 1 we are faster."""
    found: dict[str, float] = {}
    for cell in CELLS:
        times = table.times(cell.name)
        peer = best_peer(times)
        if OURS in times and peer is not None:
            found[cell.name] = peer[1] / times[OURS]
    return found


def shares(table: Table, cell: Cell, seconds: float) -> tuple[float, float]:
    """Of the measured matrix rate and of the measured memory rate, operations and bytes counted
    as the floor counts them, for the experts that were really hit."""
    matrix = table.ceiling("matrix", predict.MATRIX_RATE)
    memory = table.ceiling("copy", predict.MEMORY_RATE)
    hit = table.of(cell.name, "experts hit")
    moved = predict.floor_bytes(cell)
    if hit and cell.passes == "forward":
        real = float(hit["suite"]["p50"])
        moved += predict.weight_bytes(cell) * (real / predict.experts_hit(cell) - 1)
    return predict.flops(cell) / seconds / matrix, moved / seconds / memory


def verdict(table: Table, cell: Cell, seconds: float) -> str:
    """Against the goals, with the rates measured here."""
    matrix, memory = shares(table, cell, seconds)
    if cell.tokens >= 4096:
        return f"{'met' if matrix >= 0.6 else 'MISSED'}: {matrix:.0%} of the matrix rate, goal 60%"
    if not cell.is_decode:
        return ""
    if cell.tokens >= 16:
        return f"{'met' if memory >= 0.85 else 'MISSED'}: {memory:.0%} of the memory rate, goal 85%"
    if cell.tokens == 1:
        over = seconds * (1 - memory) * 1e6
        return f"{'met' if over <= 12 else 'MISSED'}: {over:.1f} us over bytes / rate, goal 12"
    return ""


def report(table: Table) -> str:
    """The short table: every cell that is there, then what it comes to."""
    tried = bool(table.rows) and table.rows[-1].get("gpu", "").startswith(NO_GPU)
    lines = ["Tried on a CPU at tiny sizes: times and shares mean nothing.", ""] if tried else []
    lines += [
        f"{'CELL':<32} {'OURS US':>10} {'BEST PEER':>12} {'PEER US':>10} {'RATIO':>6} "
        f"{'MATRIX':>6} {'MEMORY':>6}  GOAL"
    ]
    for cell in sorted(CELLS, key=lambda c: (c.shape.name, c.passes, c.tokens)):
        if cell.name not in table.finished:
            continue
        times = table.times(cell.name)
        peer = best_peer(times) or ("none", math.nan)
        if OURS not in times:
            lines.append(f"{cell.name:<32} {'-':>10} {peer[0]:>12} {peer[1] * 1e6:>10.1f}")
            continue
        ours = times[OURS]
        matrix, memory = shares(table, cell, ours)
        lines.append(
            f"{cell.name:<32} {ours * 1e6:>10.1f} {peer[0]:>12} {peer[1] * 1e6:>10.1f} "
            f"{peer[1] / ours:>6.2f} {matrix:>6.0%} {memory:>6.0%}  {verdict(table, cell, ours)}"
        )
    return "\n".join([*lines, "", *summary(table)])


def summary(table: Table) -> list[str]:
    found = ratios(table)
    lines = [f"cells: {len(table.finished)} of {len(CELLS)} done"]
    for name, unit in (("matrix", "TFLOP/s"), ("copy", "TB/s"), ("stream", "TB/s")):
        if value := table.ceiling(name, 0):
            lines.append(f"ceiling, {name}: {value / 1e12:.4g} {unit}")
    if found:
        mean = math.exp(sum(map(math.log, found.values())) / len(found))
        worst = min(found, key=lambda cell: found[cell])
        lines.append(f"geometric mean against the best peer: {mean:.3f} (goal 1.0)")
        lines.append(f"worst cell: {worst} at {found[worst]:.3f} (goal {LEAST_RATIO})")
        below = [cell for cell, ratio in found.items() if ratio < LEAST_RATIO]
        lines.append(f"cells below {LEAST_RATIO}: {', '.join(below) or 'none'}")
    goals = [verdict(table, c, t[OURS]) for c in CELLS if OURS in (t := table.times(c.name))]
    told = [goal for goal in goals if goal]
    if told:
        lines.append(f"goals met: {sum(g.startswith('met') for g in told)} of {len(told)}")
    for metric, what in (("left out", "left out"), ("failed", "FAILED"), ("tests", "tests")):
        notes: dict[tuple[str, str], list[str]] = {}
        for row in table.rows:
            if row["metric"] == metric:
                notes.setdefault((row["contender"], row["note"]), []).append(row["cell"])
        for (who, note), cells in notes.items():
            where = f" ({len(cells)} cells)" if len(cells) > 1 else f" ({cells[0]})"
            lines.append(f"{what}: {who}{where}: {note}")
    return lines


def picture(table: Table, path: Path) -> None:
    """Ratios to the best peer, and shares of the ceilings, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = ratios(table)
    cells = [cell for cell in CELLS if cell.name in found]
    cells.sort(key=lambda c: (c.passes, c.shape.name, c.tokens))
    names = [cell.name for cell in cells]
    places = list(range(len(cells)))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(15, 2 + 0.22 * len(cells)), sharey=True, constrained_layout=True
    )
    values = [found[name] for name in names]
    colours = [
        "tab:green" if v >= 1 else "tab:orange" if v >= LEAST_RATIO else "tab:red" for v in values
    ]
    left.barh(places, values, color=colours)
    left.axvline(1, color="black", linewidth=1)
    left.axvline(LEAST_RATIO, color="grey", linewidth=1, linestyle=":")
    left.set_xlabel("time of the best peer / time of triton")
    left.set_yticks(places, names, fontsize=7)
    left.invert_yaxis()
    for index, label in enumerate(("matrix rate", "memory rate")):
        share = [shares(table, c, table.times(c.name)[OURS])[index] for c in cells]
        right.plot(share, places, "o" if index else "s", label=f"share of the {label}")
    right.set_xlim(0, 1)
    right.set_xlabel("triton's share of what this machine can do")
    right.grid(axis="x", alpha=0.3)
    right.legend(loc="lower right")
    about = table.rows[-1] if table.rows else {}
    figure.suptitle(f"{about.get('gpu')}, torch {about.get('torch')}, triton {about.get('triton')}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

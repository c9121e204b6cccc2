"""Rendering for terminals: bars, times, verdicts; plain ASCII where the stream can't do better."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any, TextIO

BLOCKS = " ▏▎▍▌▋▊▉█"
MOST_EXPERTS = 32  # shown one by one


class Canvas:
    """Knows what a stream can show. Colours only on terminals and without ``NO_COLOR``."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        tty = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.coloured = tty and not os.environ.get("NO_COLOR")
        try:
            (BLOCKS + "·").encode(stream.encoding or "ascii")
            self.unicode = True
        except (UnicodeError, LookupError):
            self.unicode = False

    def line(self, text: str = "") -> None:
        if not self.unicode:
            text = text.replace("·", "-")
            text = text.encode("ascii", "backslashreplace").decode()
        print(text, file=self.stream)

    def paint(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self.coloured else text

    def bar(self, share: float, width: int) -> str:
        """``width`` cells, ``share`` of them filled, to the eighth of a cell."""
        if not self.unicode:
            return ("#" * round(share * width)).ljust(width)
        full, eighths = divmod(round(share * width * 8), 8)
        return (BLOCKS[8] * full + (BLOCKS[eighths] if eighths else "")).ljust(width)


class Progress:
    """A bar on a terminal, a line for each tenth elsewhere; both on stderr."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what = max(total, 1), what
        self.start, self.tenth, self.shown = time.monotonic(), 0, 0.0
        self.canvas = Canvas(sys.stderr)
        self.tty = sys.stderr.isatty()

    def update(self, done: int, note: str = "") -> None:
        share, now = min(done / self.total, 1.0), time.monotonic()
        if self.tty:
            if share < 1 and now - self.shown < 0.2:
                return
            self.shown = now
            text = f"{self.what} |{self.canvas.bar(share, 30)}| {share:4.0%}  {note}"
            print(f"\r\x1b[K{text[: self.canvas.width - 1]}", end="", file=sys.stderr, flush=True)
        elif int(share * 10) > self.tenth:
            self.tenth = int(share * 10)
            took = now - self.start
            print(f"{self.what} {share:4.0%}  {took:.0f} s  {note}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def show(report: dict[str, Any], stream: TextIO) -> None:
    """Prints what ``run`` found; ``report`` is the object that ``--json`` prints."""
    canvas = Canvas(stream)
    backend = report["backend"]
    parts = ", ".join(f"{role} {label}" for role, label in backend["parts"].items())
    canvas.line(f"backend   {backend['name']}, asked for {backend['spec']!r} ({backend['source']})")
    canvas.line(f"          {parts}; {report['dtype']} on {report['device']}")
    if "text" in report:
        _score(canvas, report)
    for layer in report["layers"]:
        canvas.line()
        _layer(canvas, layer)
    if report.get("traffic"):
        canvas.line()
        _traffic(canvas, report["traffic"])
    if report["trace"]:
        canvas.line()
        _trace(canvas, report["trace"])
    if report["layers"]:
        canvas.line()
        _verdict(canvas, report)


def _score(canvas: Canvas, report: dict[str, Any]) -> None:
    text, score = report["text"], report["score"]
    more = f" (stopped by --max-bytes, of {text['size']:,})" if text["truncated"] else ""
    count = f"{text['windows']:,} window{'s' if text['windows'] > 1 else ''}"
    canvas.line(f"text      {text['name']}: {text['bytes']:,} bytes{more}, {count}")
    canvas.line(
        f"score     {score['bits_per_byte']:.3f} bits per byte, perplexity "
        f"{score['perplexity_per_byte']:.2f} per byte"
    )


def _traffic(canvas: Canvas, traffic: dict[str, Any]) -> None:
    """Rank by rank, in KiB, all layers together."""
    rows, size = traffic["payload_bytes"], len(traffic["payload_bytes"])
    canvas.line(f"token rows sent between {size} ranks, KiB (row: from, column: to)")
    canvas.line("  from  " + "".join(f"{f'rank {dst}':>10}" for dst in range(size)))
    for src in range(size):
        cells = [f"{sent / 1024:,.1f}" for sent in rows[src]]
        cells[src] = "·"
        canvas.line(f"  rank {src:<3}" + "".join(f"{cell:>10}" for cell in cells))
    total, least, home, meta = (
        sum(map(sum, traffic[f"{kind}_bytes"])) / 1024
        for kind in ("payload", "bound", "combine", "meta")
    )
    ratio = traffic["payload_over_bound"]
    canvas.line(
        f"  payload {total:,.1f} KiB, bound {least:,.1f} KiB (one row per token and remote rank)"
        + (f": payload/bound = {ratio:.2f}" if ratio is not None else "")
    )
    canvas.line(f"  results coming home {home:,.1f} KiB; ids, weights, counts {meta:,.1f} KiB")


def _layer(canvas: Canvas, layer: dict[str, Any]) -> None:
    rows, tokens = layer["rows_per_expert"], layer["tokens"]
    canvas.line(
        f"{layer['name']} · {layer['router']} routing · {tokens:,} tokens, top "
        f"{layer['top_k']} of {layer['num_experts']} experts"
    )
    stages = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in layer["seconds"].items()]
    canvas.line("  time    " + "  ".join(stages))
    shown = sorted(range(len(rows)), key=lambda e: (-rows[e], e))[:MOST_EXPERTS]
    busiest, total = max(rows), sum(rows)
    for expert in sorted(shown):
        share = rows[expert] / busiest if busiest else 0.0
        bar = canvas.paint(canvas.bar(share, max(10, canvas.width - 46)), 36)
        part = rows[expert] / total if total else 0.0
        canvas.line(f"  expert {expert:>4} {bar} {rows[expert]:>9,} rows {part:>6.1%}")
    if len(rows) > len(shown):
        rest = [n for e, n in enumerate(rows) if e not in set(shown)]
        canvas.line(f"  and {len(rest)} with {min(rest):,} to {max(rest):,} rows each")
    load = layer["max_over_mean_load"]
    canvas.line(f"  load    busiest / mean {load:.2f}" if load else "  load    no rows")
    if layer["agrees"] is None:
        return
    flips = layer["routing_flips"]
    routed = (
        "route was given" if flips is None else f"{flips:,} of {tokens:,} tokens routed otherwise"
    )
    if layer["wrong_routes"]:
        routed += f", {layer['wrong_routes']:,} of them beyond rounding"
    weights = layer["weight_relative_error"]
    weights_text = "" if weights is None else f", routing weights {weights:.1e}"
    canvas.line(
        f"  check   worst relative error {_number(layer['relative_error'])}{weights_text}; {routed}"
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _trace(canvas: Canvas, trace: dict[str, Any]) -> None:
    name = f"token {trace['token']}" + (f" ({trace['what']})" if trace["what"] else "")
    canvas.line(f"{name}: row {trace['layers'][0]['row']:,} of its batch")
    for layer in trace["layers"]:
        again = " (contributions computed again by the reference)" if layer["recomputed"] else ""
        canvas.line(f"  {layer['name']}{again}")
        for slot in layer["slots"]:
            if slot["expert"] < 0:
                canvas.line(f"    slot {slot['slot']}: no expert")
                continue
            row = "?" if slot["buffer_row"] is None else f"{slot['buffer_row']:,}"
            canvas.line(
                f"    slot {slot['slot']}: expert {slot['expert']:>3} (rank {slot['rank']}, local "
                f"{slot['local_expert']})  buffer row {row:>6}  weight {slot['weight']:.4f}  "
                f"contribution {_length(slot['contribution'])}"
            )
        if layer["shared_contribution"] is not None:
            canvas.line(f"    shared expert: contribution {layer['shared_contribution']:.4f}")
        canvas.line(f"    output row: length {_length(layer['output'])}")


def _length(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _verdict(canvas: Canvas, report: dict[str, Any]) -> None:
    if report["agrees"] is None:
        canvas.line("not compared with the reference (--no-check)")
        return
    error, bound = _number(report["worst_relative_error"]), report["bound"]
    verdict = "agrees with" if report["agrees"] else "DISAGREES with"
    text = f"{verdict} the float64 reference: worst relative error {error}, bound {bound:.1e}"
    canvas.line(canvas.paint(text, 32 if report["agrees"] else 31))

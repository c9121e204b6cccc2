"""What a cell should take, from its floating-point operations and bytes: no device is asked.

The floor is what nothing can beat: every operation at the matrix rate, or every byte that has to be
read or written at the memory's, whichever takes longer. The prediction is for the kernels of the
``triton`` backend: each with its own operations (tiles that are not full count whole) and bytes
(intermediate results are written and read), one after the other, plus a launch each, at an assumed
share of the two rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from suite.shapes import CELLS, FORWARD, Cell

MATRIX_RATE = 790e12
"""Dense bfloat16 product of 8192 cubed on an H200, random numbers, FLOP/s."""
MEMORY_RATE = 4.3e12
"""Copy within an H200's memory, bytes read and written, B/s."""
MATRIX_SHARE, MEMORY_SHARE = 0.75, 0.9
"""Assumed of every kernel while it runs: the part of either rate that it reaches."""
LAUNCH_S = 2e-6
"""From one kernel of a graph to the next: drain, start, first loads."""
ELEMENT = 2
"""Bytes of a bfloat16."""


def rows_of_an_expert(cell: Cell) -> list[float]:
    """Probability that an expert has 0, 1, ... rows: each token chooses it with K / E, apart."""
    n, p = cell.tokens, cell.shape.top_k / cell.shape.num_experts
    if p >= 1:
        return [0.0] * n + [1.0]
    logs = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        + i * math.log(p) + (n - i) * math.log1p(-p)
        for i in range(n + 1)
    ]  # fmt: skip
    return [math.exp(x) for x in logs]


def experts_hit(cell: Cell) -> float:
    """How many experts have a row, on average."""
    return cell.shape.num_experts * (1 - rows_of_an_expert(cell)[0])


def tile_rows(cell: Cell, height: int) -> float:
    """Rows of all tiles of ``height`` rows, full or not, on average."""
    tiles = sum(p * math.ceil(n / height) for n, p in enumerate(rows_of_an_expert(cell)))
    return cell.shape.num_experts * tiles * height


def tile_height(cell: Cell) -> int:
    """As ``moe_triton.configs`` chooses it: about the rows that an expert has on average."""
    average = cell.rows / cell.shape.num_experts
    return next((height for height in (16, 32, 64) if average <= height), 128)


def flops(cell: Cell, rows: float | None = None) -> float:
    """Of the matrix products: three per expert and row forward, twice as many backward."""
    s = cell.shape
    once = 2 * (cell.rows if rows is None else rows) * 3 * s.hidden_size * s.intermediate_size
    return once if cell.passes == FORWARD else 3 * once


def weight_bytes(cell: Cell) -> float:
    """Of the experts that have rows."""
    s = cell.shape
    return experts_hit(cell) * 3 * s.hidden_size * s.intermediate_size * ELEMENT


def floor_bytes(cell: Cell) -> float:
    """Weights and rows in, rows out; in training the gradients of rows in and of rows and of every
    expert's weights out too, weights and rows being read once more for them."""
    s = cell.shape
    rows = cell.tokens * s.hidden_size * ELEMENT
    if cell.passes == FORWARD:
        return weight_bytes(cell) + 2 * rows
    all_weights = s.num_experts * 3 * s.hidden_size * s.intermediate_size * ELEMENT
    return 2 * weight_bytes(cell) + all_weights + 5 * rows


def floor(cell: Cell) -> float:
    """Seconds."""
    return max(flops(cell) / MATRIX_RATE, floor_bytes(cell) / MEMORY_RATE)


@dataclass(frozen=True)
class Step:
    """A kernel: operations (of whole tiles), and bytes to and from memory."""

    name: str
    flops: float
    bytes: float

    @property
    def seconds(self) -> float:
        by_matrix = self.flops / (MATRIX_SHARE * MATRIX_RATE)
        return max(by_matrix, self.bytes / (MEMORY_SHARE * MEMORY_RATE)) + LAUNCH_S


def steps(cell: Cell) -> list[Step]:
    """The kernels of the ``triton`` backend in order."""
    s, rows = cell.shape, cell.rows
    hidden, inner = s.hidden_size, s.intermediate_size
    filled = tile_rows(cell, tile_height(cell))
    tokens = cell.tokens * hidden * ELEMENT
    slots, acts = rows * hidden * ELEMENT, rows * inner * ELEMENT
    weights = weight_bytes(cell) / 3
    ids = rows * 16
    sort = [Step(f"sort {n + 1}", 0, ids) for n in range(1 if rows <= 4096 else 3)]
    train = cell.passes != FORWARD
    up = Step("up", 4 * filled * hidden * inner, 2 * weights + tokens + acts * (3 if train else 1))
    down = Step("down", 2 * filled * hidden * inner, weights + acts + slots)
    combine = Step("sum", 0, slots + tokens)
    if not train:
        return [*sort, up, down, combine]
    every = s.num_experts * hidden * inner * ELEMENT
    return [
        *sort, up, down, combine,
        Step("grad of slots", 0, tokens + slots),
        Step("down backward", 2 * filled * hidden * inner, weights + slots + 5 * acts),
        Step("grad of w2", 2 * rows * hidden * inner, slots + acts + every),
        Step("grad of w13", 4 * rows * hidden * inner, tokens + 2 * acts + 2 * every),
        Step("up backward", 4 * filled * hidden * inner, 2 * weights + 2 * acts + slots),
        Step("sum of grads", 0, slots + tokens),
    ]  # fmt: skip


def predicted(cell: Cell) -> float:
    """Seconds."""
    return sum(step.seconds for step in steps(cell))


def goal(cell: Cell) -> float | None:
    """Seconds that the goals allow on an H200, None where they say nothing: 60 % of the matrix rate
    from 4096 tokens; decode at 85 % of the memory's from 16, and 12 µs over it for one."""
    if cell.tokens >= 4096:
        return flops(cell) / (0.6 * MATRIX_RATE)
    if not cell.is_decode:
        return None
    if cell.tokens == 1:
        return floor_bytes(cell) / MEMORY_RATE + 12e-6
    return floor_bytes(cell) / (0.85 * MEMORY_RATE) if cell.tokens >= 16 else None


def table() -> str:
    """Of all cells, as Markdown."""
    lines = [
        "| cell | rows | experts hit | tile fill | GFLOP | MB | bound by | floor µs | predicted µs "
        "| of the floor's rate | goal µs | meets it |",
        "|---|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|---|",
    ]
    for cell in sorted(CELLS, key=lambda c: (c.shape.name, c.passes, c.tokens)):
        by_matrix = flops(cell) / MATRIX_RATE > floor_bytes(cell) / MEMORY_RATE
        time, wanted = predicted(cell), goal(cell)
        verdict = "" if wanted is None else ("yes" if time <= wanted else "no")
        values = (
            cell.name,
            f"{cell.rows:,}",
            f"{experts_hit(cell):.0f}",
            f"{cell.rows / tile_rows(cell, tile_height(cell)):.0%}",
            f"{flops(cell) / 1e9:,.1f}",
            f"{floor_bytes(cell) / 1e6:,.0f}",
            "matrix" if by_matrix else "memory",
            f"{floor(cell) * 1e6:,.0f}",
            f"{time * 1e6:,.0f}",
            f"{floor(cell) / time:.0%}",
            "" if wanted is None else f"{wanted * 1e6:,.0f}",
            verdict,
        )
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def goals_met() -> str:
    """A sentence."""
    told = [(cell, wanted) for cell in CELLS if (wanted := goal(cell)) is not None]
    missed = [f"`{cell.name}`" for cell, wanted in told if predicted(cell) > wanted]
    text = f"Of {len(told)} cells with a goal, {len(told) - len(missed)} should meet it"
    return f"{text}; these should not: {', '.join(missed)}." if missed else f"{text}."

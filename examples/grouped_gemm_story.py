"""Three ways to run the same experts: a loop, one padded batched product, one grouped product.

All three are the whole routed part, ``hidden_states [T, H]`` in, ``[T, H]`` out:

    loop      for each expert: find its rows, two products, add the result where it belongs
    batched   pad every expert's rows to the longest list, two batched products (``torch.bmm``)
    grouped   rows sorted by expert, two grouped products (backend ``torch[gemm=grouped]``)

Launches are the matrix products that Python asks for, counted by the dispatcher. Times are medians
over alternating rounds, after a warm-up, of the machine that this runs on: CPU time of one thread,
so that other work on the machine counts less, or elapsed time on a GPU.

    python examples/grouped_gemm_story.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moe_core import moe_forward

TOP_K = 2
FADED = 1.25
"""The gain has faded where the loop takes less than this many times the grouped time."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "moe_torch::grouped_mm"}
Way = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Point:
    """``tokens_per_expert``: the mean. ``padded_rows``: rows of zeros that ``batched`` computes.
    ``launches`` and ``ms`` (median milliseconds): by way."""

    routing: str
    tokens_per_expert: int
    rows: int
    active_experts: int
    longest: int
    padded_rows: int
    launches: dict[str, int]
    ms: dict[str, float]

    @property
    def gain(self) -> float:
        return self.ms["loop"] / self.ms["grouped"]


def loop(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(w2.shape[0]):
        token, slot = torch.where(ids == expert)
        if len(token):
            y = F.linear(_gate(F.linear(x[token], w13[expert])), w2[expert])
            out.index_add_(0, token, y * weights[token, slot, None])
    return out


def batched(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    experts, counts = flat[order], flat.bincount(minlength=w2.shape[0])
    longest = int(counts.max())
    starts = counts.cumsum(0) - counts
    places = experts * longest + torch.arange(len(flat), device=x.device) - starts[experts]
    padded = x.new_zeros(w2.shape[0] * longest, x.shape[1])
    padded[places] = x[order // TOP_K]
    h = torch.bmm(padded.view(w2.shape[0], longest, -1), w13.transpose(1, 2))
    y = torch.bmm(_gate(h), w2.transpose(1, 2)).flatten(0, 1)
    slots = torch.empty(len(flat), x.shape[1], dtype=x.dtype, device=x.device)
    slots[order] = y[places]
    return (slots.view(*ids.shape, -1) * weights[..., None]).sum(1)


def grouped(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return moe_forward(x, ids, weights, w13, w2, backend="torch[gemm=grouped]")


WAYS: dict[str, Way] = {"loop": loop, "batched": batched, "grouped": grouped}


def _gate(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


class LaunchCount(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.launches += func.name().split(".")[0] in PRODUCTS
        return func(*args, **(kwargs or {}))


def row_counts(num_experts: int, tokens_per_expert: int, routing: str) -> list[int]:
    """Rows per expert, ``num_experts * tokens_per_expert`` together. ``even``: all the same.
    ``skewed``: in proportion to 1, 1/2, 1/3, ..., rounded by largest remainder."""
    if routing == "even":
        return [tokens_per_expert] * num_experts
    total = num_experts * tokens_per_expert
    scale = total / sum(1 / (e + 1) for e in range(num_experts))
    shares = [scale / (e + 1) for e in range(num_experts)]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(num_experts), key=lambda e: counts[e] - shares[e])
    for e in by_remainder[: total - sum(counts)]:
        counts[e] += 1
    return counts


def measure(
    num_experts: int, size: int, tokens_per_expert: int, routing: str, seconds: float, device: str
) -> Point:
    """One line of the table; ``size`` is both H and I. Checks first that the three ways agree."""
    # the grouped kernels of GPUs are written for bfloat16
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    counts = row_counts(num_experts, tokens_per_expert, routing)
    num_tokens = sum(counts) // TOP_K
    # No expert has more than T rows, so the two halves give each token two different experts.
    ids = torch.arange(num_experts).repeat_interleave(torch.tensor(counts)).view(TOP_K, -1).T
    ids = ids[torch.randperm(num_tokens, generator=generator)].contiguous()
    arguments = [
        normal(num_tokens, size).to(device, dtype),
        ids.to(device),
        torch.full((num_tokens, TOP_K), 1 / TOP_K).to(device, dtype),
        normal(num_experts, 2 * size, size).div(size**0.5).to(device, dtype),
        normal(num_experts, size, size).div(size**0.5).to(device, dtype),
    ]

    def timed(way: Way) -> float:
        start = _now(device)
        way(*arguments)
        return 1e3 * (_now(device) - start)

    launches: dict[str, int] = {}
    expected = loop(*arguments)
    for name, way in WAYS.items():
        with LaunchCount() as counter:
            out = way(*arguments)
        launches[name] = counter.launches
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        timed(way)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    deadline, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or (time.perf_counter() < deadline and rounds < 200):
        for name in sorted(WAYS, reverse=bool(rounds % 2)):
            times[name].append(timed(WAYS[name]))
        rounds += 1
    return Point(
        routing=routing,
        tokens_per_expert=tokens_per_expert,
        rows=sum(counts),
        active_experts=sum(map(bool, counts)),
        longest=max(counts),
        padded_rows=num_experts * max(counts) - sum(counts),
        launches=launches,
        ms={name: statistics.median(values) for name, values in times.items()},
    )


def _now(device: str) -> float:
    if device == "cpu":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def fade(points: Sequence[Point]) -> str:
    """What these points say about loop against grouped, as a sentence."""
    best = max(points, key=lambda p: p.gain)
    after = [p for p in points if p.tokens_per_expert >= best.tokens_per_expert]
    faded = [p for p in after if p.gain < FADED]
    where = f"{best.gain:.1f} x at {best.tokens_per_expert} tokens per expert"
    if best.gain < FADED:
        return f"No gain to speak of here: at most {where}."
    if not faded:
        last = after[-1]
        return (
            f"The gain is largest, {where}, and still {last.gain:.2f} x at "
            f"{last.tokens_per_expert}, the last point."
        )
    return (
        f"The gain is largest, {where}, and has faded (below {FADED} x) at "
        f"{faded[0].tokens_per_expert}, where the loop takes {faded[0].gain:.2f} x."
    )


def print_table(points: Sequence[Point]) -> None:
    print("tokens/   active  padded        launches                median ms          loop /")
    print("expert   experts    rows  loop batched grouped      loop batched grouped  grouped")
    for p in points:
        n, t = p.launches, p.ms
        waste = p.padded_rows / (p.padded_rows + p.rows)
        print(
            f"{p.tokens_per_expert:6d} {p.active_experts:9d} {waste:7.0%}"
            f" {n['loop']:5d} {n['batched']:7d} {n['grouped']:7d}"
            f" {t['loop']:9.2f} {t['batched']:8.2f} {t['grouped']:8.2f} {p.gain:8.2f}"
            f"  {'#' * min(40, round(4 * p.gain))}"
        )


def main(arguments: Sequence[str] | None = None) -> list[Point]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 small experts, two lines each")
    parser.add_argument("--json", action="store_true", help="print the points as JSON only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    experts, size, seconds = (8, 32, 0.05) if options.quick else (64, 128, 0.8)
    sweep = {"even": (1, 4, 16, 64, 256, 1024), "skewed": (1, 4, 16, 64)}
    if options.quick:
        sweep = {"even": (1, 16), "skewed": (4, 16)}
    with torch.no_grad():
        points = [
            measure(experts, size, n, routing, seconds, device)
            for routing, numbers in sweep.items()
            for n in numbers
        ]
    name = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    machine = f"torch {torch.__version__}, {name}, {experts} experts, top-{TOP_K}, H = I = {size}"
    if options.json:
        print(json.dumps([asdict(p) for p in points]))
        return points
    print(machine)
    for routing in sweep:
        chosen = [p for p in points if p.routing == routing]
        print(f"\n{routing} routing")
        print_table(chosen)
        print(fade(chosen))
    return points


if __name__ == "__main__":
    main()

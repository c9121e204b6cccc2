"""Times of calls that are to be compared: in turn, so that whatever drifts drifts for all.

CUDA devices are timed by their own clock (events), everything else by the host's.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FEWEST = 3
"""Samples that are taken whatever the limit on time is."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of one call: median, 20th and 80th percentile of ``samples`` calls."""

    p20: float
    p50: float
    p80: float
    samples: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def spread(seconds: Sequence[float]) -> Spread:
    """Percentiles between neighbours in proportion. Raises ``ValueError`` without samples."""
    if not seconds:
        raise ValueError("no samples: there is nothing to take a median of")
    ordered = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return Spread(at(0.2), at(0.5), at(0.8), len(ordered))


def alternate(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    samples: int = 20,
    warmup: int = 3,
    limit_s: float = float("inf"),
    before: Callable[[], object] | None = None,
) -> dict[str, Spread]:
    """Each call ``samples`` times, one after the other, each round beginning with the next one.

    ``warmup`` untimed rounds come first. Past ``limit_s`` seconds no further round is begun, once
    there are ``FEWEST``. ``before`` runs ahead of each sample, untimed: to empty a cache, or, on a
    CUDA device, to keep it busy until the call is queued, so that the host isn't in the time.
    """
    names = list(calls)
    for _ in range(warmup):
        for call in calls.values():
            call()
    clock = _device_clock if device.type == "cuda" else _host_clock
    taken: dict[str, list[float]] = {name: [] for name in names}
    begun = time.perf_counter()
    for n in range(samples):
        turn = n % len(names) if names else 0
        order = names[turn:] + names[:turn]
        for name, seconds in zip(order, clock([calls[x] for x in order], before), strict=True):
            taken[name].append(seconds)
        if n + 1 >= FEWEST and time.perf_counter() - begun > limit_s:
            break
    return {name: spread(seconds) for name, seconds in taken.items()}


def _host_clock(
    calls: Sequence[Callable[[], object]], before: Callable[[], object] | None
) -> list[float]:
    taken: list[float] = []
    for call in calls:
        if before is not None:
            before()
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return taken


def _device_clock(
    calls: Sequence[Callable[[], object]], before: Callable[[], object] | None
) -> list[float]:
    """All are queued, then waited for once."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for call in calls:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if before is not None:
            before()
        pair[0].record()
        call()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return [first.elapsed_time(last) / 1000 for first, last in events]

"""Experts into bins of equal size, so that the fullest bin is as light as possible. Plain numbers.

``weights[e]``: the load of expert e. An expert with ``c`` replicas puts ``weights[e] / c`` on each.
A bin is the list of experts on one rank; with *twins* it holds one expert twice.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Bins = list[list[int]]

LEAST_GAIN = 1e-9  # of the fullest bin's load: less is rounding, and could go round in circles
NEAR_ENOUGH = 1.001  # times the lower bound: estimates of loads aren't worth more
KICKS = 48
MOST_STEPS = 8  # improvements per slot; a bound on the time, seldom met


def replica_counts(weights: Sequence[float], num_slots: int, most: int | None = None) -> list[int]:
    """How many slots each expert gets: one, and each further one to whom has the most per slot.

    ``most`` limits an expert's slots (where that leaves enough); ties then go to the expert with
    fewer. Without it, this is what DeepSeek's EPLB does, ties to the lower id.
    """
    counts = [1] * len(weights)
    if most is not None:
        most = max(most, -(-num_slots // len(weights)))
    heap = [(-weight, 1, expert) for expert, weight in enumerate(weights)]
    if most is None:
        heap = [(load, 0, expert) for load, _, expert in heap]
    heapq.heapify(heap)
    for _ in range(num_slots - len(weights)):
        _, _, expert = heap[0]
        counts[expert] += 1
        count = counts[expert]
        if count == most:
            heapq.heappop(heap)
        else:
            again = (-weights[expert] / count, 0 if most is None else count, expert)
            heapq.heapreplace(heap, again)
    return counts


def pack(
    weights: Sequence[float], counts: Sequence[int], num_bins: int, *, apart: bool = True
) -> Bins:
    """Heaviest replica first, into the lightest bin that has room (ties: the first).

    ``apart``: a bin that has the expert already comes last. Without it, this is what DeepSeek's
    EPLB does.
    """
    items = list(range(len(weights)))
    items += [e for e, count in enumerate(counts) for _ in range(count - 1)]
    items.sort(key=lambda e: -weights[e] / counts[e])
    size = len(items) // num_bins
    bins: Bins = [[] for _ in range(num_bins)]
    loads = [0.0] * num_bins
    for expert in items:
        best = min(
            (b for b in range(num_bins) if len(bins[b]) < size),
            key=lambda b: (apart and expert in bins[b], loads[b]),
        )
        bins[best].append(expert)
        loads[best] += weights[expert] / counts[expert]
    return bins


def bin_loads(weights: Sequence[float], bins: Bins) -> list[float]:
    """The load of each bin, replicas of an expert sharing it equally."""
    counts = Counter(expert for held in bins for expert in held)
    return [sum(weights[expert] / counts[expert] for expert in held) for held in bins]


def num_twins(bins: Bins) -> int:
    """Slots that hold an expert which their bin holds already."""
    return sum(len(held) - len(set(held)) for held in bins)


def part_twins(weights: Sequence[float], bins: Bins) -> Bins:
    """Swaps replicas between bins until no bin holds an expert twice, if that can be."""
    bins = [list(held) for held in bins]
    counts = Counter(expert for held in bins for expert in held)
    while True:  # each swap leaves fewer twins
        loads, number_in = bin_loads(weights, bins), [Counter(held) for held in bins]
        best: tuple[float, int, int, int, int] | None = None
        for a, i, expert in _twins(bins):
            for b, held in enumerate(bins):
                if number_in[b][expert]:
                    continue
                for j, other in enumerate(held):
                    if number_in[a][other] and number_in[b][other] == 1:
                        continue  # one pair of twins for another
                    gain = weights[expert] / counts[expert] - weights[other] / counts[other]
                    worst = max(loads[a] - gain, loads[b] + gain)
                    if best is None or worst < best[0]:
                        best = (worst, a, i, b, j)
            if best is not None:
                break
        if best is None:
            return bins
        _, a, i, b, j = best
        bins[a][i], bins[b][j] = bins[b][j], bins[a][i]


def _twins(bins: Bins) -> Iterator[tuple[int, int, int]]:
    """(bin, place, expert) of each second one."""
    for a, held in enumerate(bins):
        for i, expert in enumerate(held):
            if expert in held[:i]:
                yield a, i, expert


def refined(weights: Sequence[float], bins: Bins, enough: float = 0.0) -> Bins:
    """Improves the fullest bin for as long as one step does: a swap of two slots, or a slot given
    from an expert that has others to another expert. Stops early where no bin has more than
    ``enough``.

    The sorted loads only ever go down, and no twins are added.
    """
    state = _Refining(weights, bins)
    for _ in range(MOST_STEPS * sum(map(len, bins))):
        if max(state.loads) <= enough or not (state.swap() or state.retarget()):
            break
    return state.bins


class _Refining:
    def __init__(self, weights: Sequence[float], bins: Bins) -> None:
        self.weights, self.bins = weights, [list(held) for held in bins]
        self.counts = Counter(expert for held in bins for expert in held)
        self.loads = bin_loads(weights, bins)

    def share(self, expert: int) -> float:
        return self.weights[expert] / self.counts[expert]

    def fullest(self) -> tuple[int, float]:
        """The bin, and below what its load has to come to be better."""
        a = max(range(len(self.bins)), key=self.loads.__getitem__)
        return a, self.loads[a] * (1 - LEAST_GAIN)

    def settle(self, touched: Iterable[int]) -> None:
        for b in touched:
            self.loads[b] = sum(map(self.share, self.bins[b]))

    def swap(self) -> bool:
        """With the lightest bin that has a slot to swap for one of the fullest."""
        a, limit = self.fullest()
        mine = self.bins[a]
        for b in sorted(range(len(self.bins)), key=self.loads.__getitem__):
            theirs, best = self.bins[b], (limit, -1, -1)
            if self.loads[b] >= limit:
                return False
            others = [(j, y, self.share(y)) for j, y in enumerate(theirs) if y not in mine]
            for i, x in enumerate(mine):
                if x in theirs:
                    continue
                mine_without, theirs_with = (
                    self.loads[a] - self.share(x),
                    self.loads[b] + self.share(x),
                )
                for j, _, load in others:
                    worst = max(mine_without + load, theirs_with - load)
                    if worst < best[0]:
                        best = (worst, i, j)
            _, i, j = best
            if i >= 0:
                mine[i], theirs[j] = theirs[j], mine[i]
                self.settle((a, b))
                return True
        return False

    def retarget(self) -> bool:
        """A slot of an expert with replicas becomes one of another expert: elsewhere, one more of
        an expert of the fullest bin; in the fullest bin, any."""
        a, limit = self.fullest()
        w, c, loads = self.weights, self.counts, self.loads
        where: dict[int, list[int]] = defaultdict(list)
        for b in sorted(range(len(loads)), key=lambda b: -loads[b]):
            for expert in self.bins[b]:
                where[expert].append(b)
        best: tuple[float, int, int, int] = (limit, -1, -1, -1)
        for b, held in enumerate(self.bins):
            wanted = range(len(w)) if b == a else self.bins[a]
            for i, x in enumerate(held):
                if c[x] == 1:
                    continue
                fullest = next((r for r in where[x] if r != b), b)
                least = loads[fullest] + w[x] / (c[x] - 1) - w[x] / c[x]
                for y in wanted:
                    new = w[y] / (c[y] + 1)
                    # most candidates fail one of these two, which take less than _after
                    if least - w[y] / c[y] + new >= best[0] or y in held:
                        continue
                    if loads[b] - w[x] / c[x] + new >= best[0]:
                        continue
                    worst = self._after(where, a, b, x, y)
                    if worst < best[0]:
                        best = (worst, b, i, y)
        _, b, i, y = best
        if b < 0:
            return False
        x = self.bins[b][i]
        self.bins[b][i] = y
        self.counts[x] -= 1
        self.counts[y] += 1
        self.settle({b, *where[x], *where[y]})
        return True

    def _after(self, where: dict[int, list[int]], a: int, b: int, x: int, y: int) -> float:
        """The largest load among the bins that would change; no gain if ``a`` isn't one of them."""
        w, c = self.weights, self.counts
        more, less = w[x] / (c[x] - 1) - w[x] / c[x], w[y] / c[y] - w[y] / (c[y] + 1)
        change: dict[int, float] = defaultdict(float)
        for place in where[x]:
            change[place] += more
        for place in where[y]:
            change[place] -= less
        change[b] += w[y] / (c[y] + 1) - w[x] / (c[x] - 1)
        if a not in change:
            return float("inf")
        return max(self.loads[place] + delta for place, delta in change.items())


def solved(weights: Sequence[float], num_slots: int, num_bins: int) -> tuple[Bins, float]:
    """Bins of equal size, and the load of the fullest one by DeepSeek's EPLB, never exceeded.

    Without twins unless every way found of avoiding them is less balanced than that, or there are
    more slots than ``len(weights) * num_bins``.
    """
    greedy = pack(weights, replica_counts(weights, num_slots), num_bins, apart=False)
    limit = max(bin_loads(weights, greedy))
    spread = min(num_bins, num_slots - len(weights) + 1)  # the most bins that one expert can be in
    enough = max(sum(weights) / num_bins, max(weights) / spread) * NEAR_ENOUGH
    counts, chance = replica_counts(weights, num_slots, num_bins), random.Random(0)
    best: tuple[bool, int, float, Bins] | None = None
    for attempt in range(3 + KICKS):
        if attempt == 0:
            start = part_twins(weights, pack(weights, counts, num_bins))
        elif attempt == 1:
            start = part_twins(weights, greedy)
        elif attempt == 2 or best is None:
            start = greedy  # whatever comes of the others, this keeps to the limit
        else:
            start = part_twins(weights, _kicked(best[-1], len(weights), chance))
        bins = refined(weights, start)
        worst = max(bin_loads(weights, bins))
        found = (worst > limit, num_twins(bins), worst, bins)
        best = found if best is None else min(best, found)
        if best[:2] == (False, 0) and best[2] <= enough:
            break
    assert best is not None
    return best[-1], limit


def _kicked(bins: Bins, num_experts: int, chance: random.Random) -> Bins:
    """A few slots changed at random, to leave a place where no single step helps."""
    bins = [list(held) for held in bins]
    counts = Counter(expert for held in bins for expert in held)
    for _ in range(3):
        b, i = chance.randrange(len(bins)), chance.randrange(len(bins[0]))
        x = bins[b][i]
        if counts[x] > 1:
            y = bins[b][i] = chance.randrange(num_experts)
            counts[x] -= 1
            counts[y] += 1
        else:
            a, j = chance.randrange(len(bins)), chance.randrange(len(bins[0]))
            bins[b][i], bins[a][j] = bins[a][j], x
    return bins

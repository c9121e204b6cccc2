"""From counts to placements: which expert gets replicas, and which rank holds what. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from moe_core.balance.packing import Bins, bin_loads, num_twins, pack, refined, solved
from moe_core.config import Faults
from moe_core.errors import ConfigError, Fault
from moe_core.placement import Placement

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from moe_core.balance.move import Moved

STAY_WITHIN = 1.01
"""A plan near the current placement is taken if its fullest rank has at most this times the load of
the best plan's: a move costs time, and counts are only an estimate."""

MOST_TOKENS = 2**63
"""Of an expert, and no more: what an int64 counts. Sums of these are exact enough in floats."""


class PlacementPlan(list[Placement]):
    """One ``Placement`` per layer."""

    def apply(
        self, model: nn.Module, optimizer: Optimizer | None = None, **options: Any
    ) -> list[Moved]:
        """Moves the experts of a layer or model; see ``moe_core.balance.move.move_experts``."""
        from moe_core.balance.move import move_experts

        return move_experts(model, self, optimizer, **options)


def plan_placement(
    counts: Any,
    num_slots: int,
    ep_size: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    *,
    current: Sequence[Placement] | None = None,
) -> PlacementPlan:
    """A placement for each layer that balances ``counts`` over the ranks.

    ``counts [layers, E]``: tokens per logical expert, ints or floats below 2^63, as a tensor or
    lists (one list ``[E]`` is one layer). ``num_slots``: physical slots on all ranks together, as
    many on each; beyond E they are replicas, which share an expert's tokens equally. With
    ``num_groups`` > 1 and ``num_nodes`` > 1 an expert group (E / ``num_groups`` consecutive
    experts, of a router with ``num_expert_group``) stays on one node (ep ranks ``ep_size /
    num_nodes`` at a time), replicas too, and each node has as many groups; else nodes make no
    difference. ``current``: what the ranks hold now (default: contiguous), so that little has to
    move.

    The fullest rank of each layer has at most the load that DeepSeek's EPLB
    (github.com/deepseek-ai/EPLB, ``rebalance_experts``) would give it: that plan is one of several
    starts, improved until no swap of two slots and no change of one helps. No rank holds an expert
    twice, unless there are more slots than experts times ranks (of all, or of a node where groups
    stay on one) or every plan found without that is less balanced than DeepSeek's. The same input
    gives the same plan everywhere. Raises ``ConfigError``.
    """
    rows = _rows(counts)
    faults = _faults(rows, num_slots, ep_size, num_nodes, num_groups, current)
    if faults:
        raise ConfigError(faults)
    num_experts = len(rows[0])
    hierarchical = num_groups > 1 and num_nodes > 1
    nodes, groups = (num_nodes, num_groups) if hierarchical else (1, 1)
    plan = PlacementPlan()
    for layer, weights in enumerate(rows):
        before = Placement(num_experts, ep_size) if current is None else current[layer]
        held: Bins = [list(before.experts_of(rank)) for rank in range(ep_size)]
        bins = _balanced(weights, num_slots, nodes, groups, held)
        slots = [expert for rank in _aligned(bins, held, nodes) for expert in rank]
        plan.append(Placement(num_experts, ep_size, tuple(slots)))
    return plan


def rank_loads(counts: Sequence[float], placement: Placement) -> list[float]:
    """Tokens of one layer per ep rank, replicas sharing an expert's equally."""
    bins = [list(placement.experts_of(rank)) for rank in range(placement.ep_size)]
    return bin_loads(counts, bins)


def max_over_mean(counts: Sequence[float], placement: Placement) -> float:
    """The fullest rank's load over the ranks' mean: 1 is perfect balance (as is no load)."""
    loads = rank_loads(counts, placement)
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def arrivals(before: Placement, after: Placement) -> list[tuple[int, int]]:
    """(rank, expert): what a rank holds after that it didn't hold before, and must be sent."""
    found: list[tuple[int, int]] = []
    for rank in range(after.ep_size):
        new = {*after.experts_of(rank)} - {*before.experts_of(rank)}
        found += [(rank, expert) for expert in sorted(new)]
    return found


def _balanced(weights: list[float], num_slots: int, nodes: int, groups: int, held: Bins) -> Bins:
    """The experts of each rank, in no particular order, ranks node by node."""
    group_size, ranks_per_node = len(weights) // groups, len(held) // nodes
    by_group = [sum(weights[g * group_size :][:group_size]) for g in range(groups)]
    greedy = pack(by_group, [1] * groups, nodes)
    packings = [greedy, refined(by_group, greedy)] if nodes > 1 else [greedy]
    found: list[tuple[int, float, int, Bins]] = []
    limit = math.inf
    for number, packing in enumerate(packings):
        bins: Bins = []
        limits: list[float] = []
        for packed in packing:
            experts = [g * group_size + i for g in sorted(packed) for i in range(group_size)]
            local, most = solved([weights[e] for e in experts], num_slots // nodes, ranks_per_node)
            bins += [[experts[i] for i in rank] for rank in local]
            limits.append(most)
        limit = min(limit, max(limits))  # the first packing is DeepSeek's
        found.append((num_twins(bins), max(bin_loads(weights, bins)), number, bins))
    twins, least, _, best = min(f for f in found if f[1] <= limit)
    enough = min(limit, least * STAY_WITHIN)
    near = _near(weights, num_slots, nodes, groups, held, enough)
    if near is None or num_twins(near) > twins or max(bin_loads(weights, near)) > enough:
        return best
    return near


def _near(
    weights: list[float], num_slots: int, nodes: int, groups: int, held: Bins, enough: float
) -> Bins | None:
    """What the ranks hold, improved step by step until no rank has more than ``enough`` or no step
    helps; None where it has another shape."""
    if sum(map(len, held)) != num_slots:
        return None
    if nodes == 1:
        return refined(weights, held, enough)
    group_size, ranks = len(weights) // groups, len(held) // nodes
    bins: Bins = []
    for first in range(0, len(held), ranks):
        node = held[first : first + ranks]
        experts = sorted({e for rank in node for e in rank})
        whole = len({e // group_size for e in experts}) * group_size
        if not len(experts) == whole == len(weights) // nodes:
            return None  # a group isn't on one node
        number = {e: i for i, e in enumerate(experts)}
        local = [[number[e] for e in rank] for rank in node]
        local = refined([weights[e] for e in experts], local, enough)
        bins += [[experts[i] for i in rank] for rank in local]
    return bins


def _aligned(bins: Bins, held: Bins, nodes: int) -> Bins:
    """The same bins with nodes, ranks and slots in another order: what can stay, stays."""
    size = len(bins) // nodes
    parts = [range(n * size, (n + 1) * size) for n in range(nodes)]
    there = [{e for b in part for e in bins[b]} for part in parts]
    here = [{e for r in part for e in held[r]} for part in parts]
    aligned: Bins = [[] for _ in bins]
    for to_node, node in enumerate(_matched(there, here)):
        ranks, part = parts[to_node], parts[node]
        matched = _matched([{*bins[b]} for b in part], [{*held[r]} for r in ranks])
        for rank, b in zip(ranks, matched, strict=True):
            aligned[rank] = _in_place(bins[part[b]], held[rank])
    return aligned


def _matched(new: Sequence[set[int]], old: Sequence[set[int]]) -> list[int]:
    """For each old set a new one: pairs with the most in common first, ties in order."""
    of: dict[int, list[int]] = {}
    for n, experts in enumerate(new):
        for expert in experts:
            of.setdefault(expert, []).append(n)
    common = Counter(
        (o, n) for o, experts in enumerate(old) for e in experts for n in of.get(e, ())
    )
    chosen, free = dict[int, int](), dict.fromkeys(range(len(new)))
    for o, n in sorted(common, key=lambda pair: (-common[pair], pair)):
        if o not in chosen and n in free:
            chosen[o] = n
            del free[n]
    rest = iter(free)
    return [chosen[o] if o in chosen else next(rest) for o in range(len(old))]


def _in_place(new: list[int], old: list[int]) -> list[int]:
    """``new`` reordered: experts that ``old`` has at the same place there, the others ascending."""
    left = Counter(new)
    slots = [-1] * len(new)
    for place, expert in enumerate(old[: len(new)]):
        if left[expert]:
            slots[place] = expert
            left[expert] -= 1
    rest = iter(sorted(left.elements()))
    return [next(rest) if expert < 0 else expert for expert in slots]


def _rows(counts: Any) -> list[list[float]]:
    """``[layers][E]``. Raises ``ConfigError`` for anything else."""
    given = _plain(counts)
    rows: list[Any] = [given]
    if isinstance(given, list):
        rows = [_plain(row) for row in cast("list[Any]", given)]
        if rows and not any(isinstance(row, list) for row in rows):
            rows = [rows]
    wrong = None
    if not all(isinstance(row, list) for row in rows):
        wrong = "holds what isn't a list of numbers"
    elif not rows or not all(rows):
        wrong = "holds nothing to plan from"
    elif len({len(row) for row in rows}) > 1:
        wrong = f"layers differ in their experts: {sorted({len(row) for row in rows})}"
    elif not all(_is_count(value) for row in rows for value in row):
        wrong = "holds what isn't a number of tokens: each must be at least 0 and below 2^63"
    if wrong:
        shape = [len(row) if isinstance(row, list) else type(row).__name__ for row in rows][:8]
        raise ConfigError([Fault("counts", shape, f"{wrong}; they are [layers, num_experts]")])
    return [[v if isinstance(v, int) else float(v) for v in row] for row in rows]


def _plain(values: Any) -> Any:
    """A list of what a tensor, an array or anything else that can be gone through holds."""
    if hasattr(values, "tolist"):
        return values.tolist()
    single = isinstance(values, str | bytes | dict) or not isinstance(values, Iterable)
    return values if single else list(cast("Iterable[Any]", values))


def _is_count(value: Any) -> bool:
    good = isinstance(value, Real) and not isinstance(value, bool)
    return good and 0 <= cast("float", value) < MOST_TOKENS


def _faults(
    rows: list[list[float]],
    num_slots: int,
    ep_size: int,
    num_nodes: int,
    num_groups: int,
    current: Sequence[Placement] | None,
) -> list[Fault]:
    num_experts, faults = len(rows[0]), Faults()
    sizes = {"num_slots": num_slots, "ep_size": ep_size}
    for name, size in (sizes | {"num_nodes": num_nodes, "num_groups": num_groups}).items():
        faults.integer(name, size)
    placed = current is None or (
        isinstance(current, Sequence) and all(isinstance(p, Placement) for p in current)
    )
    if not placed:
        faults.add("current", type(current).__name__, "must be placements, one per layer")
    if faults:
        return faults
    if num_slots < num_experts:
        message = f"each of the {num_experts} experts needs a slot"
        faults.append(Fault("num_slots", num_slots, message))
    if num_slots % ep_size:
        up = -(-max(num_slots, num_experts) // ep_size) * ep_size
        message = f"every rank has equally many: a multiple of ep_size={ep_size}, such as {up}"
        faults.append(Fault("num_slots", num_slots, message))
    if ep_size % num_nodes:
        message = f"every node has equally many ranks: must divide ep_size={ep_size}"
        faults.append(Fault("num_nodes", num_nodes, message))
    if num_experts % num_groups:
        message = f"must divide the {num_experts} experts"
        faults.append(Fault("num_groups", num_groups, message))
    elif num_groups > 1 and num_groups % num_nodes:
        message = (
            f"{num_groups} groups can't be spread evenly over {num_nodes} nodes: set num_groups=1 "
            "to place experts wherever they fit"
        )
        faults.append(Fault("num_groups", num_groups, message))
    if current is not None:
        if len(current) != len(rows):
            message = f"one placement for each of the {len(rows)} layers, not {len(current)}"
            faults.append(Fault("current", len(current), message))
        found = {(p.num_experts, p.ep_size) for p in current} - {(num_experts, ep_size)}
        for experts, ranks in sorted(found):
            message = f"placements of {num_experts} experts over {ep_size} ranks are wanted"
            faults.append(Fault("current", f"{experts} experts over {ranks} ranks", message))
    return faults

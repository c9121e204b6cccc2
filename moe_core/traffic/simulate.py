"""What a layer would send, without a cluster: each rank's routing, drawn or recorded, is counted.

The way of the ids is that of ``pipeline``: capacity, padding, placement, home; then the transport's
class says what it sends for them. One rank's tokens are in memory at a time.

Shapes: T tokens of one rank, K choices per token, EP ranks of an ep group, W ranks, N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core import environment
from moe_core.capabilities import filled_options
from moe_core.capacity import drop_over_capacity, pad_to_capacity
from moe_core.config import MoEConfig, ParallelConfig
from moe_core.contracts import INVALID, Routing
from moe_core.errors import ConfigError, Fault, InputError
from moe_core.pipeline import load_target
from moe_core.placement import Placement
from moe_core.resolution import Resolution, resolve
from moe_core.slot_map import SlotMap
from moe_core.traffic.draws import Draw
from moe_core.traffic.flow import Flow
from moe_core.traffic.recorded import Recorded
from moe_core.traffic.result import Traffic

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 4096


def simulate(
    config: MoEConfig,
    parallel: ParallelConfig | None = None,
    backend: str | None = None,
    *,
    routing: str | Draw | Recorded | Sequence[Tensor] = "uniform",
    tokens: int | Sequence[int] | None = None,
    ranks_per_node: int | None = None,
    placement: Placement | None = None,
    seed: int = 0,
    **wants: Any,
) -> Traffic:
    """What one forward of a ``MoELayer`` sends at any widths, and how loaded its ranks are.

    Tokens belong to *holders*, in rank order: one per (dp, ep) rank, or one per dp rank where rows
    are replicated. ``routing``: a ``Draw`` or its text (``"uniform"``, ``"zipf:1.2"``, ``"hot"``,
    ``"balanced"``) with ``tokens`` (4,096) of each holder or of all of them and a ``seed``; or ids
    ``[T, K]`` per holder; or what a trace recorded, whose tokens are cut into equal parts, in their
    order, where it has another number of holders. ``ranks_per_node``: neighbours that share a node
    (default: what ``MOE_RANKS_PER_NODE`` or torchrun says, else all do). ``wants``: more of what
    ``resolve`` takes; ``max_tokens_per_rank`` is the largest T unless told otherwise.

    Raises ``ConfigError`` with every fault and refusal, ``InputError`` for routing that doesn't
    fit, ``BackendLoadError`` for a backend whose code isn't here and ``MoEError`` for a fused one
    that doesn't say what it sends.
    """
    parallel = parallel or ParallelConfig()
    draw = Draw.parse(routing, seed) if isinstance(routing, str) else routing
    if not isinstance(draw, Draw | Recorded):
        draw = Recorded(tuple(ids.cpu() for ids in draw), (None,) * len(draw))
    if isinstance(draw, Recorded):
        _check_recorded(draw, config)
    if wants.get("policy", "strict") != "strict":
        raise InputError(
            "widths are simulated as they are: moe-core explain --policy adjust shows "
            "what a rule would make of them"
        )
    holders = parallel.dp_size * (parallel.ep_size if parallel.rows == "distinct" else 1)
    sizes = _sizes(draw, tokens, holders)
    wants.setdefault("max_tokens_per_rank", max(sizes) or None)
    asked = placement or Placement(config.num_experts, parallel.ep_size)
    resolution = _resolve(config, parallel, backend, asked, ranks_per_node, wants)
    if isinstance(draw, Recorded):
        ids = _Replay(draw.over(holders))
    else:
        ids = _Drawn(draw, asked, config.top_k, sizes)
    about = {
        "backend": resolution.name,
        "transport": resolution.parts["transport" if resolution.path else "fused"].label,
        "widths": parallel.to_dict(),
        "config": config.to_dict(),
        "ranks_per_node": resolution.request.ranks_per_node,
        "routing": str(draw)
        if isinstance(draw, Draw)
        else f"recorded{draw.name and ' '}{draw.name}",
        "seed": draw.seed if isinstance(draw, Draw) else None,
        "recorded_parts": len(draw.ids) if isinstance(draw, Recorded) else None,
        "tokens": sum(sizes),
        "calls": 1,
    }
    return _Simulation(config, resolution, asked, ids).run(about)


def _sizes(routing: Draw | Recorded, tokens: int | Sequence[int] | None, holders: int) -> list[int]:
    """T per holder."""
    if isinstance(routing, Recorded):
        if tokens is not None:
            raise InputError("tokens are drawn or recorded: leave tokens out with recorded routing")
        return [len(part) for part in routing.over(holders).ids]
    counts = [TOKENS if tokens is None else tokens] if not isinstance(tokens, Sequence) else tokens
    sizes = list(counts) * holders if len(counts) == 1 else list(counts)
    if len(sizes) != holders or min(sizes) < 0:
        raise InputError(
            f"tokens must be one number from 0, or {holders} of them (one per rank with tokens of "
            f"its own), not {len(sizes)} from {min(sizes, default=0)} to {max(sizes, default=0)}"
        )
    return sizes


def _resolve(
    config: MoEConfig,
    parallel: ParallelConfig,
    backend: str | None,
    placement: Placement,
    ranks_per_node: int | None,
    wants: dict[str, Any],
) -> Resolution:
    faults = environment.check_environment()
    for name, wanted in (("num_experts", config.num_experts), ("ep_size", parallel.ep_size)):
        value = getattr(placement, name)
        if value != wanted:
            faults.append(Fault(f"placement.{name}", value, f"the layer has {wanted}"))
    if ranks_per_node is not None and ranks_per_node < 1:
        faults.append(Fault("ranks_per_node", ranks_per_node, "must be at least 1"))
    if faults:
        raise ConfigError(faults)
    resolution = resolve(
        config,
        parallel,
        backend,
        num_routed_ids=replace(placement, shared_slots=0).num_physical_slots,
        ranks_per_node=ranks_per_node,
        **wants,
    )
    if not resolution.ok:
        raise ConfigError((), resolution)
    return resolution


def _check_recorded(recorded: Recorded, config: MoEConfig) -> None:
    experts, top_k = config.num_experts, config.top_k
    if not recorded.ids:
        raise InputError("the routing holds no ids: it needs those of one rank at least")
    if recorded.num_experts not in (None, experts):
        raise InputError(
            f"the routing was recorded with num_experts={recorded.num_experts}, the layer has "
            f"{experts}"
        )
    for part, ids in enumerate(recorded.ids):
        if ids.ndim != 2 or ids.shape[1] != top_k or ids.dtype not in (torch.int32, torch.int64):
            said = f"{ids.dtype} {list(ids.shape)}"
            raise InputError(f"part {part}: ids must be integers [T, top_k={top_k}], not {said}")
        if ids.numel() and not INVALID <= int(ids.min()) <= int(ids.max()) < experts:
            said = f"{int(ids.min())} to {int(ids.max())}"
            raise InputError(f"part {part}: ids are {said}, and must be in [0, {experts}) or -1")


class _Drawn:
    def __init__(self, draw: Draw, placement: Placement, top_k: int, sizes: list[int]) -> None:
        self.sampler, self.sizes = draw.sampler(placement, top_k), sizes
        self.before = [0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()]

    def part(self, holder: int) -> tuple[Tensor, Tensor | None]:
        return self.sampler.ids(holder, self.sizes[holder], self.before[holder]), None


class _Replay:
    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded

    def part(self, holder: int) -> tuple[Tensor, Tensor | None]:
        return self.recorded.ids[holder].to(torch.int64), self.recorded.masks[holder]


@dataclass
class _Counts:
    """Of one dp rank's ep group; ``raw_tokens``: without padding. ``node_pairs``: per pattern."""

    raw_tokens: Tensor
    tokens: Tensor
    pairs: Tensor
    slots: Tensor
    node_pairs: list[Tensor]


class _Simulation:
    def __init__(
        self, config: MoEConfig, resolution: Resolution, placement: Placement, ids: _Drawn | _Replay
    ) -> None:
        self.config, self.ids, self.request = config, ids, resolution.request
        part = resolution.parts["transport" if resolution.path else "fused"]
        self.target, self.options = load_target(part), filled_options(part)
        # A shared slot is one more choice of every token, and known without a map.
        self.slot_map = SlotMap(replace(placement, shared_slots=0), "cpu")
        q = self.request
        self.shape = (q.dp_size, q.ep_size, q.tp_size)
        world = math.prod(self.shape)
        self.node_of = torch.arange(world) // (q.ranks_per_node or world)
        self.links: dict[str, Tensor] = {}
        self.rows, self.buffers, self.summed = (
            torch.zeros(self.shape, dtype=torch.int64) for _ in range(3)
        )
        self.rows_per_expert = torch.zeros(config.num_experts, dtype=torch.int64)
        nodes = int(self.node_of[-1]) + 1
        self.node_bound = torch.zeros(nodes, nodes, dtype=torch.int64)
        self.bound = 0

    def run(self, about: dict[str, Any]) -> Traffic:
        for dp_rank in range(self.shape[0]):
            self._replica(dp_rank)
        return Traffic(
            links=self.links,
            rows=self.rows.flatten(),
            rows_per_expert=self.rows_per_expert,
            buffers=self.buffers.flatten(),
            summed=self.summed.flatten(),
            bound=self.bound,
            node_bound=self.node_bound,
            node_of=self.node_of,
            about=about,
        )

    def _replica(self, dp_rank: int) -> None:
        # Where ranks of an ep group lie on nodes, which may differ from one tp rank to the next.
        patterns: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
        for tp_rank, column in enumerate(self.node_of.view(self.shape)[dp_rank].unbind(1)):
            names, place = torch.unique_consecutive(column, return_inverse=True)
            patterns.setdefault(tuple(place.tolist()), []).append((tp_rank, names))
        counts = self._count(dp_rank, [torch.tensor(pattern) for pattern in patterns])
        distinct = self.request.rows == "distinct"
        self.rows[dp_rank] = (counts.slots.sum(0) if distinct else counts.slots[0])[:, None]
        for (pattern, found), node_pairs in zip(patterns.items(), counts.node_pairs, strict=True):
            flow = Flow(
                request=self.request,
                tokens=counts.tokens,
                pairs=counts.pairs,
                slots=counts.slots,
                node_of=torch.tensor(pattern),
                node_pairs=node_pairs,
                options=self.options,
            )
            for tp_rank, names in found:
                self._add(dp_rank, tp_rank, flow, names)
        if self.config.shared_tp and self.request.tp_size > 1:
            self.summed[dp_rank] += counts.raw_tokens[:, None] * flow.sum_row  # pyright: ignore[reportPossiblyUnbound]

    def _count(self, dp_rank: int, patterns: list[Tensor]) -> _Counts:
        ep, distinct = self.request.ep_size, self.request.rows == "distinct"
        holders = range(dp_rank * ep, (dp_rank + 1) * ep) if distinct else [dp_rank]
        found: list[list[Tensor]] = []
        for ep_rank, holder in enumerate(holders):
            raw, rank_of = self._homes(holder, ep_rank if distinct else None)
            per_node = [
                _distinct_counts(torch.where(rank_of < 0, -1, place[rank_of]), int(place[-1]) + 1)
                for place in patterns
            ]
            lengths = torch.tensor([raw, len(rank_of)])
            found.append([lengths, _distinct_counts(rank_of, ep), _counts(rank_of, ep), *per_node])
        if not distinct:
            found *= ep
        lengths, pairs, slots, *node_pairs = map(torch.stack, zip(*found, strict=True))
        return _Counts(lengths[:, 0], lengths[:, 1], pairs, slots, node_pairs)

    def _homes(self, holder: int, ep_rank: int | None) -> tuple[int, Tensor]:
        """T and, as the pipeline makes it, each choice's ep rank ``[T + padding, K + shared]``, -1
        for none. ``ep_rank`` None: all ranks have these tokens."""
        ids, mask = self.ids.part(holder)
        if mask is not None:
            ids = ids.masked_fill(~mask[:, None], INVALID)
        routing = Routing(ids, torch.zeros(ids.shape), token_mask=mask)
        if self.config.capacity_factor is not None:
            routing, _ = drop_over_capacity(routing, self.config)
        kept, _ = routing.ids_and_weights()
        self.rows_per_expert += _counts(kept, len(self.rows_per_expert))
        if self.config.capacity_factor is not None and self.config.capacity_policy == "pad":
            _, routing = pad_to_capacity(torch.empty(len(ids), 0), routing, self.config)
        self.slot_map.first_turn = ep_rank or 0  # one map serves all: in nothing else they differ
        rank_of, _ = self.slot_map.homes(self.slot_map.physical(routing))
        if self.config.shared_slots:
            ep_size, rows = self.request.ep_size, torch.arange(len(rank_of))
            owner = rows % ep_size if ep_rank is None else torch.full_like(rows, ep_rank)
            rank_of = torch.cat([rank_of, owner[:, None].expand(-1, self.config.shared_slots)], 1)
        return len(ids), rank_of

    def _add(self, dp_rank: int, tp_rank: int, flow: Flow, names: Tensor) -> None:
        sent = self.target.traffic(flow)
        self.summed[dp_rank, :, tp_rank] += sent.summed
        for kind, matrix in sent.links.items():
            self.buffers[dp_rank, :, tp_rank] += matrix.sum(0)
            if kind not in self.links:
                world = len(self.node_of)
                self.links[kind] = torch.zeros(world, world, dtype=torch.int64)
            part = self.links[kind].view(self.shape * 2)[dp_rank, :, tp_rank, dp_rank, :, tp_rank]
            part.copy_(matrix)
            part.fill_diagonal_(0)
        if self.request.rows == "distinct":
            away = flow.pairs.sum() - flow.pairs.diagonal().sum()
            self.bound += int(away) * flow.dispatch_row
            remote = flow.node_pairs.scatter(1, flow.node_of[:, None], 0) * flow.dispatch_row
            self.node_bound.index_put_(
                (names[flow.node_of][:, None], names[None]), remote, accumulate=True
            )


def _counts(groups: Tensor, size: int) -> Tensor:
    """Numbers below ``size``, -1 = none → ``[size]``: how often each occurs."""
    return torch.bincount(groups.flatten() + 1, minlength=size + 1)[1:]


def _distinct_counts(groups: Tensor, size: int) -> Tensor:
    """``[T, K]`` likewise → ``[size]``: in how many rows each occurs."""
    ordered = groups.sort(1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return _counts(torch.where(first, ordered, -1), size)

"""Moving experts between slots and ranks: weights, gradients and optimizer state. Collective.

Only what a slot holds changes. Where a slot is, and how many a rank has, stays, so transports,
buffers and captured graphs know of nothing; the map from experts to slots is updated in place.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_core.agreement import agree
from moe_core.balance.load import layers_of
from moe_core.balance.plan import arrivals
from moe_core.building import placement_faults
from moe_core.config import Faults
from moe_core.errors import ConfigError, Fault
from moe_core.placement import Placement

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from moe_core.experts import Experts

STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class Moved:
    """What a layer's move took on this rank. ``received``: experts that came from other ranks;
    ``sent_bytes``: to other ranks, all tensors together; ``staging_bytes``: extra memory."""

    received: int
    sent_bytes: int
    staging_bytes: int


def move_experts(
    model: nn.Module,
    placements: Sequence[Placement],
    optimizer: Optimizer | None = None,
    *,
    staging_bytes: int = STAGING_BYTES,
) -> list[Moved]:
    """Puts the experts of each layer of ``model`` where its placement says, over its ep group.

    ``model``: a layer, or a model with as many expert layers as there are placements, which have as
    many slots as the layers. ``optimizer``: the one that trains them, if one does. Parameters,
    pending gradients and all optimizer state with one value (or row) per slot change in place; the
    next step is that of a model that didn't move. A parameter that several layers share moves once;
    they need the same placement. Call it on every rank, between steps: not between a forward and
    its backward.

    Nothing is written before all ranks agree: a bad plan, another plan on one rank, state that
    can't be moved or a rank without the memory raise ``ConfigError`` on every rank, naming ranks.
    An expert crosses the wire once per rank that gets it. Extra memory on a rank is at most
    ``staging_bytes``, or what one row of each slot that moves takes if that is more: tensors go one
    after the other, in slices that fit. A layer with prepared weights makes them again afterwards,
    beside the old ones. (A rank that dies meanwhile leaves a half-moved layer.)
    """
    error: Exception | None = None
    moves: list[_Move] = []
    scratch: dict[torch.device, Tensor] = {}
    layers = layers_of(model)
    try:
        moves = _planned(layers, placements, optimizer, staging_bytes)
        for device in {move.device for move in moves}:
            most = max(move.staging for move in moves if move.device == device)
            scratch[device] = torch.empty(most, dtype=torch.uint8, device=device)
    except Exception as raised:  # out of memory, too: the other ranks have to hear of it
        error = raised
    spread = next((e for e in layers if e.is_distributed and not e.w13.is_meta), None)
    if spread is not None:
        mine = {"refused": str(error)} if error else _statement(moves)
        agree(
            spread.groups.ranks,
            spread.groups.rank,
            mine,
            absent="moved no experts with these ranks",
            duty="apply the same plan to the same layers",
        )
    if error is not None:
        raise error
    return [move.carry_out(scratch[move.device]) for move in moves]


def _planned(
    layers: list[Experts],
    placements: Sequence[Placement],
    optimizer: Optimizer | None,
    staging_bytes: int,
) -> list[_Move]:
    """Raises ``ConfigError`` with whatever speaks against it here."""
    faults = Faults()
    faults.integer("staging_bytes", staging_bytes)
    if not isinstance(placements, Sequence) or not all(
        isinstance(placement, Placement) for placement in placements
    ):
        faults.add("placements", type(placements).__name__, "must be a list of Placement")
        faults.settle()
    if len(placements) != len(layers):
        message = f"one for each of the {len(layers)} expert layers of this model"
        faults.append(Fault("placements", len(placements), message))
    if len({e.groups.ranks for e in layers if e.is_distributed}) > 1:
        message = "layers that span different ranks: apply each part of the plan by itself"
        faults.append(Fault("model", "layers", message))
    moves: list[_Move] = []
    seen: dict[int, tuple[int, tuple[Any, ...]]] = {}
    for i, (experts, wanted) in enumerate(zip(layers, placements, strict=False)):
        before = experts.placement
        after = replace(wanted, holes=before.holes, shared_slots=before.shared_slots)
        request = experts.resolution.request
        found = placement_faults(
            after,
            experts.config,
            experts.parallel,
            before.shared_slots,
            {"autograd": not experts.inference, "routing_ids": request.routing_ids},
        )
        found += [] if found else experts.pipeline.slot_map.faults_of(after)
        how = (before.slot_experts, before.shared_slots, after.slot_experts)
        moved = _moved_before(experts, i, how, seen, found)
        tensors, scalars = _tensors(experts, optimizer, moved, found)
        faults += [replace(f, field=f"layer {i}.{f.field}") for f in found]
        if not faults:
            moves.append(_Move(experts, after, tensors, scalars, staging_bytes))
    if faults:
        raise ConfigError(faults)
    return moves


def _moved_before(
    experts: Experts,
    number: int,
    how: tuple[Any, ...],
    seen: dict[int, tuple[int, tuple[Any, ...]]],
    faults: list[Fault],
) -> set[str]:
    """Names of this layer's parameters that are an earlier one's too, and move with that."""
    names: set[str] = set()
    for name, parameter in experts.named_parameters():
        first, theirs = seen.setdefault(id(parameter), (number, how))
        if first == number:
            continue
        names.add(name)
        if theirs != how:
            message = f"is layer {first}'s too, which has or gets another placement"
            faults.append(Fault(name, "shared", message))
    return names


def _tensors(
    experts: Experts, optimizer: Optimizer | None, moved: set[str], faults: list[Fault]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What has a row per slot, by name; and the optimizer's numbers that are one per parameter.
    Without parameters that have ``moved``."""
    parameters = dict(experts.named_parameters())
    if experts.w13.is_meta:
        faults.append(Fault("device", "meta", "there are no weights to move yet"))
    if optimizer is not None and any(p.requires_grad for p in parameters.values()):
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in trained for p in parameters.values()):
            message = "trains none of this layer's weights: pass the one that does"
            faults.append(Fault("optimizer", type(optimizer).__name__, message))
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, float] = {}
    for name, parameter in parameters.items():
        if name in moved:
            continue
        tensors[name] = parameter.detach()  # shares the version, which prepared weights look at
        if parameter.grad is not None:
            tensors[f"{name}.grad"] = parameter.grad
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in sorted(state.items()):
            if not isinstance(value, torch.Tensor):
                if _holds_tensors(value):
                    message = "tensors within optimizer state don't move with a weight"
                    faults.append(Fault(f"{name}.{key}", type(value).__name__, message))
                continue
            per_slot = value.ndim == parameter.ndim and value.shape[0] == parameter.shape[0]
            if per_slot and value.device == parameter.device:
                tensors[f"{name}.{key}"] = value
            elif not per_slot and value.numel() == 1:
                scalars[f"{name}.{key}"] = float(value)
            else:
                message = (
                    f"optimizer state of shape {tuple(value.shape)} on {value.device} doesn't move "
                    f"with a weight of shape {tuple(parameter.shape)} on {parameter.device}"
                )
                faults.append(Fault(f"{name}.{key}", str(value.dtype), message))
    return tensors, scalars


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*value.values()]
    parts = value if isinstance(value, list | tuple | set | deque) else ()
    return any(isinstance(part, torch.Tensor) or _holds_tensors(part) for part in parts)


def _statement(moves: list[_Move]) -> dict[str, Any]:
    """What all ranks have to say alike. Slots of other ranks may be more or fewer by one."""
    said: dict[str, Any] = {"layers that move": len(moves)}
    for i, move in enumerate(moves):
        said[f"layer {i}.placement"] = move.after.to_dict()
        said[f"layer {i}.placement until now"] = move.before.to_dict()
        said[f"layer {i}.staging_bytes"] = move.limit
        for name, tensor in move.tensors.items():
            said[f"layer {i}.{name}"] = f"{tensor.dtype} {list(tensor.shape[1:])}"
        said |= {f"layer {i}.{name}": value for name, value in move.scalars.items()}
    return said


@dataclass(frozen=True)
class _Route:
    """One rank's part. ``send[r]``: its slots whose experts rank r gets; ``receive[r]``: how many
    come from rank r; ``stay``: slots that are copied within the rank; ``fill``: (row, slot), the
    rows being what was received and then what stays."""

    send: list[list[int]]
    receive: list[int]
    stay: list[int]
    fill: list[tuple[int, int]]

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.send)) + sum(self.receive) + len(self.stay)


def routes(before: Placement, after: Placement) -> list[_Route]:
    """Each rank's part in a move. An expert that several ranks hold is sent by the least busy."""
    ranks = range(before.ep_size)
    old = [before.experts_of(rank) for rank in ranks]
    busy: Counter[int] = Counter()
    sends: dict[tuple[int, int], list[int]] = {}
    for rank, expert in arrivals(before, after):
        source = min((r for r in ranks if expert in old[r]), key=lambda r: (busy[r], r))
        busy[source] += 1
        sends.setdefault((source, rank), []).append(expert)
    found: list[_Route] = []
    for rank in ranks:
        send = [[old[rank].index(e) for e in sends.get((rank, r), ())] for r in ranks]
        received = [e for r in ranks for e in sends.get((r, rank), ())]
        new = after.experts_of(rank)
        changed = [slot for slot, expert in enumerate(new) if expert != old[rank][slot]]
        stay = sorted({new[slot] for slot in changed} - {*received})
        row_of = {expert: row for row, expert in enumerate([*received, *stay])}
        found.append(
            _Route(
                send=send,
                receive=[len(sends.get((r, rank), ())) for r in ranks],
                stay=[old[rank].index(expert) for expert in stay],
                fill=[(row_of[new[slot]], slot) for slot in changed],
            )
        )
    return found


class _Move:
    """One layer's; made without writing anything."""

    def __init__(
        self,
        experts: Experts,
        after: Placement,
        tensors: dict[str, Tensor],
        scalars: dict[str, float],
        limit: int,
    ) -> None:
        self.experts, self.before, self.after = experts, experts.placement, after
        self.tensors, self.scalars, self.limit = tensors, scalars, limit
        self.device = experts.w13.device
        every = routes(self.before, after)
        self.route = every[experts.groups.ep_rank]
        self.travels = any(sum(route.receive) for route in every)
        self.most_rows = max(route.num_rows for route in every)  # all ranks cut into equal slices
        sizes = [self._slice(t) * _row_bytes(t) * self.route.num_rows for t in tensors.values()]
        self.staging = max(sizes, default=0)

    def _slice(self, tensor: Tensor) -> int:
        """How much of dimension 1 goes at a time."""
        most = self.limit // max(self.most_rows * _row_bytes(tensor), 1)
        return min(max(most, 1), tensor.shape[1])

    @torch.no_grad()
    def carry_out(self, scratch: Tensor) -> Moved:
        sent = 0
        if self.most_rows:
            for tensor in self.tensors.values():
                step = self._slice(tensor)
                for start in range(0, tensor.shape[1], step):
                    part = tensor.narrow(1, start, min(step, tensor.shape[1] - start))
                    sent += self._move_slice(part, scratch)
        self.experts.set_placement(self.after)
        return Moved(sum(self.route.receive), sent, self.staging)

    def _move_slice(self, part: Tensor, scratch: Tensor) -> int:
        """``part [slots, n, ...]``; returns the bytes that were sent."""
        route = self.route
        outgoing = [slot for slots in route.send for slot in slots]
        per_slot = _row_bytes(part) * part.shape[1]
        staged = scratch[: route.num_rows * per_slot].view(part.dtype)
        staged = staged.view(route.num_rows, *part.shape[1:])
        for row, slot in zip(staged, outgoing, strict=False):
            row.copy_(part[slot])
        inside = staged[len(outgoing) :]
        for row, slot in zip(inside[sum(route.receive) :], route.stay, strict=True):
            row.copy_(part[slot])
        if self.travels:
            raw = scratch[: route.num_rows * per_slot].view(route.num_rows, per_slot)
            dist.all_to_all_single(
                raw[len(outgoing) :][: sum(route.receive)],
                raw[: len(outgoing)],
                route.receive,
                [len(slots) for slots in route.send],
                group=self.experts.groups.ep,
            )
        for row, slot in route.fill:
            part[slot].copy_(inside[row])
        return len(outgoing) * per_slot


def _row_bytes(tensor: Tensor) -> int:
    """Of one slot, one step of dimension 1."""
    return tensor.element_size() * math.prod(tensor.shape[2:])

"""Which rank holds which expert, and which rows of it: plain integers, no torch.

Three words, never mixed:

* a *logical* expert is one of the model's ``num_experts``; a router's ids are logical;
* a *physical* slot is a place for one expert's weights on one rank. Its id says where it is.
  Usually there is one per expert; a replicated expert has several, and every rank may have slots
  for the shared experts and *holes*, ids without weights;
* *routing width* is how many slots one token goes to: ``top_k``, and one per shared slot.

A rank's ids are consecutive: routed slots, shared slots, holes. So a *local* slot, counted from the
rank's first id, is always an index into the rank's parameters. Routed slots lie in contiguous
blocks; the first ``num_routed_slots % ep_size`` ranks hold one more than the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from moe_core.errors import ConfigError, Fault, check_keys

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Placement:
    """``num_experts`` logical experts over ``ep_size`` ranks.

    ``slot_experts``: the logical expert of each routed slot, in the order of their ids; default
    ``0, 1, ..., num_experts - 1``. An expert that occurs twice has two replicas (on one rank or
    on two); each must occur. ``holes``: every rank gets as many ids as the fullest one, for kernels
    that find a rank by dividing. ``shared_slots``: per rank, see ``MoEConfig.shared_placement``.

    Raises ``ConfigError`` with all faults.
    """

    num_experts: int
    ep_size: int = 1
    slot_experts: tuple[int, ...] = ()
    holes: bool = False
    shared_slots: int = 0

    def __post_init__(self) -> None:
        faults: list[Fault] = []
        for name, least in (("num_experts", 1), ("ep_size", 1), ("shared_slots", 0)):
            if getattr(self, name) < least:
                faults.append(Fault(name, getattr(self, name), f"must be at least {least}"))
        slots = tuple(self.slot_experts) or tuple(range(self.num_experts))
        object.__setattr__(self, "slot_experts", slots)
        strange = sorted({e for e in slots if not 0 <= e < self.num_experts})
        absent = sorted(set(range(self.num_experts)) - {*slots})
        if strange:
            message = f"names experts outside [0, {self.num_experts}): {_some(strange)}"
            faults.append(Fault("slot_experts", _some(slots), message))
        if absent:
            message = f"every expert needs a slot, and these have none: {_some(absent)}"
            faults.append(Fault("slot_experts", _some(slots), message))
        if faults:
            raise ConfigError(faults)

    @property
    def num_routed_slots(self) -> int:
        """Routed slots that have weights, on all ranks; at least ``num_experts``."""
        return len(self.slot_experts)

    @property
    def num_physical_slots(self) -> int:
        """Ids on all ranks: routed and shared slots, and holes."""
        return self.first_slot(self.ep_size)

    @property
    def has_replicas(self) -> bool:
        return self.num_routed_slots > self.num_experts

    @property
    def is_identity(self) -> bool:
        """Physical ids equal logical ones."""
        uneven = self.num_experts % self.ep_size != 0
        plain = self.slot_experts == tuple(range(self.num_experts))
        return plain and not self.shared_slots and not (self.holes and uneven)

    def num_local_experts(self, ep_rank: int) -> int:
        """Routed slots on a rank."""
        base, extra = divmod(self.num_routed_slots, self.ep_size)
        return base + (ep_rank < extra)

    def first_expert(self, ep_rank: int) -> int:
        """Where a rank's part of ``slot_experts`` begins; its first expert without replicas."""
        base, extra = divmod(self.num_routed_slots, self.ep_size)
        return ep_rank * base + min(ep_rank, extra)

    def experts_of(self, ep_rank: int) -> tuple[int, ...]:
        """The logical experts of a rank's routed slots, in local order."""
        first = self.first_expert(ep_rank)
        return self.slot_experts[first : first + self.num_local_experts(ep_rank)]

    def num_local_slots(self, ep_rank: int) -> int:
        """Slots of a rank that have weights: the first dimension of its parameters."""
        return self.num_local_experts(ep_rank) + self.shared_slots

    def first_slot(self, ep_rank: int) -> int:
        """The id of a rank's first slot (``ep_size``: one past the last id)."""
        if self.holes:
            return ep_rank * self.num_local_slots(0)
        return self.first_expert(ep_rank) + ep_rank * self.shared_slots

    def shared_ids(self, ep_rank: int) -> tuple[int, ...]:
        first = self.first_slot(ep_rank) + self.num_local_experts(ep_rank)
        return tuple(range(first, first + self.shared_slots))

    def home(self, physical: int) -> tuple[int, int]:
        """``(ep_rank, local slot)``. Raises ``IndexError`` for a hole or an id that isn't one."""
        count = self.num_physical_slots
        if not 0 <= physical < count:
            raise IndexError(f"physical slot {physical} is not in [0, {count})")
        # bisect finds the last of several empty ranks that begin with the same id
        rank = bisect_right(range(self.ep_size), physical, key=self.first_slot) - 1
        slot = physical - self.first_slot(rank)
        if slot >= self.num_local_slots(rank):
            raise IndexError(f"physical slot {physical} is a hole: no expert is there")
        return rank, slot

    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Per logical expert the physical ids of its slots, ascending."""
        found = [list[int]() for _ in range(self.num_experts)]
        for rank in range(self.ep_size):
            first = self.first_slot(rank)
            for slot, expert in enumerate(self.experts_of(rank)):
                found[expert].append(first + slot)
        return tuple(tuple(ids) for ids in found)

    def physical_id(self, logical: int, token: int = 0, ep_rank: int = 0) -> int:
        """The slot that a token goes to for an expert; see ``choose_replica``.

        ``ep_rank``: of the rank that brings the token, 0 where all bring the same ones.
        """
        ids = self.replicas()[logical]
        return ids[int(choose_replica(token + ep_rank, logical, len(ids)))]

    def balanced_ids(self, num_tokens: int, top_k: int) -> list[list[int]]:
        """``[T, K]`` logical ids that load the ranks of an even placement evenly, for simulations.

        Tokens take experts round robin, one per rank before a second one of any rank, so any number
        of (token, slot) in a row differ by at most one between ranks. Distinct within a token.
        """
        homes = [self.home(ids[0]) for ids in self.replicas()]
        order = sorted(range(self.num_experts), key=lambda expert: homes[expert][::-1])
        flat = [order[i % self.num_experts] for i in range(num_tokens * top_k)]
        return [flat[i : i + top_k] for i in range(0, len(flat), top_k)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Placement:
        """From what ``to_dict`` gave, through JSON or not. Raises ``ConfigError``."""
        if not isinstance(data, Mapping):
            raise ConfigError([Fault("placement", str(data), "must be an object with its fields")])
        given = {str(key): value for key, value in cast("Mapping[Any, Any]", data).items()}
        faults = check_keys("placement", given, [f.name for f in fields(cls)])
        if "num_experts" not in given:
            faults.append(Fault("placement.num_experts", None, "is missing"))
        for name, value in given.items():
            if name == "slot_experts":
                good = isinstance(value, list | tuple) and all(
                    type(expert) is int for expert in cast("Sequence[Any]", value)
                )
            else:
                good = type(value) is (bool if name == "holes" else int)
            if not good and not any(f.field == f"placement.{name}" for f in faults):
                faults.append(Fault(f"placement.{name}", value, "is of the wrong type"))
        if faults:
            raise ConfigError(faults)
        return cls(**given)


def choose_replica(token: Any, logical: Any, count: Any) -> Any:
    """Which of ``count`` replicas: ``(token + logical) % count``, for ints or integer tensors.

    ``token``: the row in its rank's batch, plus the ep rank where ranks bring different tokens (or
    the first rows of all of them would meet at one replica). All ranks that hold a row (tensor
    parallel, replicated rows) must pick alike or the result is summed twice, so nothing but row, ep
    rank and id may matter. Any ``count`` consecutive rows with an expert take each replica once.
    """
    return (token + logical) % count


def router_kind(layer_id: int, num_hash_layers: int, *, is_nextn: bool = False) -> str:
    """``RouterConfig.kind`` of a layer in a model whose first layers are hash-routed.

    DeepSeek-V4's rule (SGLang, models/deepseek_v2.py): ``"hash"`` for ``layer_id <
    num_hash_layers``, but never in a next-token-prediction (NextN, MTP) layer. Those count their
    ``layer_id`` from 0 again and may be called without ``input_ids``, which hash routing needs.
    """
    return "hash" if layer_id < num_hash_layers and not is_nextn else "topk"


def w13_blocks(
    intermediate_size: int, gated: bool, w13_layout: str, tp_rank: int, tp_size: int
) -> list[tuple[int, int]]:
    """Rows ``(start, end)`` of one expert's whole ``w13`` that make up a tp rank's ``w13``.

    Gate and up are cut separately; ``tp_size`` must divide ``intermediate_size``.
    """
    share = intermediate_size // tp_size
    start = tp_rank * share
    if not gated:
        return [(start, start + share)]
    if w13_layout == "interleaved":
        return [(2 * start, 2 * (start + share))]
    second = intermediate_size + start
    return [(start, start + share), (second, second + share)]


def _some(values: tuple[int, ...] | list[int]) -> list[int | str]:
    return [*values[:8], *(["..."] if len(values) > 8 else [])]

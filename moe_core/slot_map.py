"""A ``Placement`` as tensors: from a router's ids to slots, on the device, without a host sync."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from moe_core.contracts import IdSpace, Routing
from moe_core.errors import ConfigError, Fault, MoEError
from moe_core.placement import Placement, choose_replica

if TYPE_CHECKING:
    from torch import Tensor


class SlotMap:
    """Logical id → physical slot → (rank, local slot), for the tokens of one rank.

    ``replicated``: the ranks of the ep group hold the same tokens; a token's shared slots are then
    those of rank ``token % ep_size``, else those of its own rank ``ep_rank``, so that they are
    computed once. Ids are checked before they come here: -1 or in range.

    The tables lie on the device and keep their shapes, and which of them are read doesn't depend on
    what they hold: after ``update`` a captured graph or compiled code goes by the new placement.
    """

    def __init__(
        self,
        placement: Placement,
        device: torch.device | str,
        ep_rank: int = 0,
        *,
        replicated: bool = False,
    ) -> None:
        self.placement, self.ep_rank, self.replicated = placement, ep_rank, replicated
        self.num_shared = placement.shared_slots
        self.has_replicas = placement.has_replicas
        # one rank's slots in order need no table; several ranks' might not stay in order
        self.is_fixed = placement.is_identity and placement.ep_size == 1
        # ranks begin with different replicas, or the first rows of all would go to the same one
        self.first_turn = 0 if replicated else ep_rank
        self._place(torch.device(device))

    def _place(self, device: torch.device) -> None:
        def table(rows: object) -> Tensor:
            return torch.tensor(rows, dtype=torch.int64, device=device)

        placement, ranks = self.placement, range(self.placement.ep_size)
        self._replicas, self._first_replica, self._num_replicas = map(table, _columns(placement))
        homes = [(-1, -1)] * placement.num_physical_slots
        for rank in ranks:
            first = placement.first_slot(rank)
            for slot in range(placement.num_local_slots(rank)):
                homes[first + slot] = (rank, slot)
        self._rank_of, self._slot_of = table(homes).unbind(1)  # [P] each, -1 for a hole
        # [R, S]: whose shared slots a token goes to, token by token in turn
        owners = ranks if self.replicated else [self.ep_rank]
        self._shared = table([placement.shared_ids(rank) for rank in owners])

    def faults_of(self, placement: Placement) -> list[Fault]:
        """What keeps ``update`` from following: a rank's slots must stay as many, of each kind."""
        faults = [
            Fault(f"placement.{name}", getattr(placement, name), f"must stay {built}")
            for name in ("num_experts", "ep_size", "num_routed_slots", "holes", "shared_slots")
            if getattr(placement, name) != (built := getattr(self.placement, name))
        ]
        if self.is_fixed and not placement.is_identity:
            message = "on one rank there is nothing to balance: it keeps its experts in order"
            faults.append(Fault("placement.slot_experts", len(placement.slot_experts), message))
        return faults

    def update(self, placement: Placement) -> None:
        """Follow weights that have moved, in place.

        Where a physical slot is doesn't change, only which expert it holds. Raises ``ConfigError``
        with ``faults_of``.
        """
        faults = self.faults_of(placement)
        if faults:
            raise ConfigError(faults)
        self.placement = placement
        tables = (self._replicas, self._first_replica, self._num_replicas)
        for table, column in zip(tables, _columns(placement), strict=True):
            table.copy_(torch.tensor(column, dtype=torch.int64))

    def _follow(self, device: torch.device) -> None:
        """A layer made on the meta device can get its parameters without anybody being told
        (``load_state_dict(assign=True)``), and one on a GPU can move to the next."""
        if device != self._rank_of.device:
            self._place(device)

    def physical(self, routing: Routing, *, shared_weight: float = 1.0) -> Routing:
        """Logical ids ``[T, K]`` → physical ones ``[T, K + S]``, -1 kept; weights to match.

        The S last columns are the shared slots, for every token, with ``shared_weight``. A routing
        without ids (the kernel routes) passes as it is. Raises ``MoEError`` for ids that aren't
        logical: they were mapped already.
        """
        if not routing.has_ids:
            return routing
        ids, weights = routing.ids_and_weights()
        if routing.id_space is not IdSpace.LOGICAL:
            raise MoEError(
                f"these ids are {routing.id_space} and not logical: they were mapped already"
            )
        if not self.is_fixed:
            self._follow(ids.device)
            valid = ids.clamp(min=0)
            mapped, tokens = self._first_replica[valid], None
            if self.has_replicas or self.num_shared:
                tokens = torch.arange(ids.shape[0], device=ids.device)[:, None]
            if self.has_replicas:
                assert tokens is not None
                turn = choose_replica(tokens + self.first_turn, valid, self._num_replicas[valid])
                mapped = mapped + turn
            ids = torch.where(ids < 0, ids, self._replicas[mapped])
            if self.num_shared:
                assert tokens is not None
                shared = self._shared[tokens[:, 0] % self._shared.shape[0]]
                ids = torch.cat([ids, shared], 1)
                weights = torch.cat([weights, weights.new_full(shared.shape, shared_weight)], 1)
        return Routing(ids, weights, routing.router_logits, id_space=IdSpace.PHYSICAL)

    def homes(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Physical ids ``[T, K]`` → (ep rank, local slot), both ``[T, K]``, -1 where the id is.

        Raises ``MoEError`` for ids that aren't physical.
        """
        ids, _ = routing.ids_and_weights()
        if routing.id_space is not IdSpace.PHYSICAL:
            raise MoEError(f"ranks are found from physical ids, and these are {routing.id_space}")
        self._follow(ids.device)
        gone, valid = ids < 0, ids.clamp(min=0)
        rank, slot = self._rank_of[valid], self._slot_of[valid]
        return rank.masked_fill(gone, -1), slot.masked_fill(gone, -1)


def _columns(placement: Placement) -> tuple[list[int], list[int], list[int]]:
    """Physical ids of the routed slots, expert by expert; where each expert's begin; their number.

    This way the sizes don't depend on who has how many replicas.
    """
    replicas = placement.replicas()
    counts = [len(ids) for ids in replicas]
    return [i for ids in replicas for i in ids], [0, *accumulate(counts[:-1])], counts


def remap_topk_for_shared_slots(
    topk_ids: Tensor,
    topk_weights: Tensor,
    placement: Placement,
    ep_rank: int,
    *,
    scale_is_folded: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``[T, K]`` → ``[T, K + S]``: ids with the shared slots of ``ep_rank`` in the last columns.

    With L routed and S shared slots per rank, id e becomes ``e + e // L * S`` and shared slot j is
    ``ep_rank * (L + S) + L + j`` (SGLang, layers/moe/topk.py,
    ``remap_topk_for_per_rank_shared_slots``). Its weight is 1 where ``routed_scaling_factor`` is
    folded into ``topk_weights``, as it always is here; a kernel that scales the sum afterwards
    needs 1 / factor.
    """
    weight = 1.0 if scale_is_folded else 1.0 / routed_scaling_factor
    mapped = SlotMap(placement, topk_ids.device, ep_rank).physical(
        Routing(topk_ids, topk_weights), shared_weight=weight
    )
    return mapped.ids_and_weights()

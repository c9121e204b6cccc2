"""Rows travel once per (token, node) and fan out inside the node; results are summed in it first.

Rank n * L + l of an ep group is rank l of node n (L ranks on each of N nodes). Two hops each way:
between the ranks l of all nodes, over the network, then inside a node. Out, a row goes to rank l of
every node that needs it, which sends it on to the ranks there that do. Home, the ranks of a node
send their sums back to its rank l, and that sends one sum per (token, node). Gradients go the same
ways. Results of single slots (``combine="per_slot"``) can't be summed on the way, so each crosses.

The idea is DeepEP's (its internode kernels, deepseek-ai/DeepEP) and older: Tutel's 2DH all-to-all
(arXiv 2206.03382) aggregates messages along the same two hops, without leaving out copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from moe_core.contracts import ExchangePlan, Handle, Pending
from moe_core.convert import gather
from moe_core.errors import MoEError
from moe_core.layouts import RankGrouped, Record, SlotList
from moe_core.local import check_weight_is_paid_once, sum_indexed
from moe_nccl import cost
from moe_nccl.base import DistributedTransport
from moe_nccl.channel import Channel, Splits, wait
from moe_nccl.spread import Spread, inverse, slot_hits, slot_places, spread, transposed

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import BuildContext, Routing
    from moe_core.traffic.flow import Flow, Sent


@dataclass(frozen=True)
class Hop:
    """Rows and (row, slot) pairs per ep rank that this rank sends on the way out, and receives."""

    send_rows: Splits
    receive_rows: Splits
    send_slots: Splits
    receive_slots: Splits


@dataclass(frozen=True)
class NodePlan(ExchangePlan):
    """``between`` and ``within`` nodes: the two hops, and which copies they are made of.

    ``first``: from this rank's T tokens to N nodes. ``second``: from the G rows that came in from
    this rank's counterparts to the L ranks here. ``slot_index`` int64 ``[T, K]``, per_slot: where a
    slot's result is among those that come home, -1 = none; ``turned_slots [S]``: its (row, slot)
    order for each result that comes back to the second hop. ``row_order [R]``, ``slot_order``:
    where each received row and slot, source ranks ascending, is among those that came; None: there.
    ``received_weights [R, K]``: the routing weights that came with the rows.
    """

    between: Hop
    within: Hop
    first: Spread
    second: Spread
    slot_index: Tensor
    turned_slots: Tensor | None
    row_order: Tensor | None
    slot_order: Tensor | None
    received_weights: Tensor
    dtype: torch.dtype

    @property
    def slot_rows(self) -> Tensor:
        """int64 ``[T, K]``: the row of the first send buffer that carries each slot, -1 = none."""
        return self.first.slot_copies


class HierarchicalTransport(DistributedTransport[NodePlan]):
    """Two exchanges of counts, two of ids, weights and rows each per dispatch; two per combine.

    The counts are the one host sync; where the host waits for its collectives (gloo), also the
    first hop. Rows go in ``dispatch_dtype``. per_rank: slots are summed in a rank, ranks ascending
    in a node, nodes ascending; both sums that travel do so in ``combine_dtype``, and so do sums of
    gradients between nodes. That is one rounding more than ``all_to_all`` has, and none where sums
    travel in what they are made in, which is the default.
    """

    payload = "nodes"

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        per_node = context.request.ep_ranks_per_node
        assert per_node is not None, "the rule nodes-unfit lets no such group through"
        self.per_node = per_node
        self.num_nodes = self.ep.size // per_node
        self.node, self.place = divmod(self.ep.rank, per_node)
        placement = self.slot_map.placement
        self.most_slots = max(placement.num_local_slots(r) for r in range(placement.ep_size))

    def dispatch_begin(
        self, hidden_states: Tensor, routing: Routing
    ) -> Pending[tuple[Record, Handle[NodePlan]]]:
        topk_ids, topk_weights = routing.ids_and_weights()
        rows, weights = self.enter(hidden_states, topk_weights)
        rank_of, slot_of = self.homes(routing)
        nodes, ranks = self.num_nodes, self.per_node
        of_slots = slot_hits(rank_of, self.ep.size)
        hits = of_slots.any(-1)  # [EP, T]
        node_hits = hits.view(nodes, ranks, -1).any(1)
        counts = torch.cat(
            [
                hits.sum(1).view(nodes, ranks),
                of_slots.sum((1, 2)).view(nodes, ranks),
                node_hits.sum(1, keepdim=True),
            ],
            1,
        )
        tables, segments = self._exchange_tables(counts, None)
        between, within = self._hops(*tables)

        node_of = torch.where(rank_of < 0, -1, rank_of // ranks)
        first = spread(node_of, node_hits, sum(between.send_rows))
        # Which of a node's ranks and which slot there, in one number.
        codes = torch.where(rank_of < 0, -1, rank_of % ranks * self.most_slots + slot_of)
        codes = torch.where(first.there, codes[first.rows], -1).to(torch.int32)
        codes, work = self._send("dispatch.ids", codes, between)
        wait([work])
        via = torch.where(codes < 0, -1, codes // self.most_slots)
        second = spread(via, slot_hits(via, ranks).any(-1), sum(within.send_rows))
        ids = torch.where(second.there, codes[second.rows] % self.most_slots, -1)
        ids, work = self._send("dispatch.ids", ids, within)
        works = [work]
        out_rows, out_weights = _Route.apply(  # pyright: ignore[reportGeneralTypeIssues]
            self, between, within, first, second, works, rows, weights
        )

        def finish() -> tuple[Record, Handle[NodePlan]]:
            wait(works)
            num_rows, num_slots = sum(within.receive_rows), sum(within.receive_slots)
            row_order = slot_order = turned_slots = None
            if nodes > 1 and ranks > 1:  # else what came is in order of source ranks already
                row_order = transposed(segments[..., 0], num_rows)
                slot_order = transposed(segments[..., 1], num_slots)
            if self.per_slot:
                turned_slots = _valid(slot_places(via), sum(within.send_slots))
            plan = NodePlan(
                num_tokens=topk_ids.shape[0],
                topk_ids=topk_ids,
                topk_weights=weights,
                between=between,
                within=within,
                first=first,
                second=second,
                slot_index=slot_places(node_of) if self.per_slot else first.copies,
                turned_slots=turned_slots,
                row_order=row_order,
                slot_order=slot_order,
                received_weights=_reorder(out_weights, row_order),
                dtype=hidden_states.dtype,
            )
            record = RankGrouped(
                rows=_reorder(out_rows, row_order).to(plan.dtype),
                topk_ids=(ids if row_order is None else ids[row_order]).to(torch.int64),
                topk_weights=plan.received_weights,
                num_slots=num_slots,
            )
            return record, Handle(plan, self)

        return Pending(finish)

    def combine_begin(self, record: Record, handle: Handle[NodePlan]) -> Pending[Tensor]:
        plan = handle.consume(self)
        if not isinstance(record, SlotList):
            raise MoEError(f"HierarchicalTransport combines slot_list, not {record.layout}")
        check_weight_is_paid_once(record, record.paid, self.context.pays)
        between, within = plan.between, plan.within
        if self.per_slot:
            rows = _restore(record.rows, plan.slot_order)
            rows = self._bring(rows, within.receive_slots, within.send_slots)
            rows = _reorder(rows, plan.turned_slots)
            send, receive = between.receive_slots, between.send_slots
        else:
            weights = plan.received_weights if self.pays_weight else None
            part = sum_indexed(record.rows, record.slot_index, weights).to(self.combine_dtype)
            part = _restore(part, plan.row_order)
            part = self._bring(part, within.receive_rows, within.send_rows)
            rows = sum_indexed(part, plan.second.copies, None).to(self.combine_dtype)
            send, receive = between.receive_rows, between.send_rows
        (home,), works = self.ep.exchange("combine", (rows,), send, receive)

        def finish() -> Tensor:
            wait(works)
            weights = plan.topk_weights if self.per_slot and self.pays_weight else None
            return self.leave(sum_indexed(home, plan.slot_index, weights), plan.dtype)

        return Pending(finish)

    def _bring(self, rows: Tensor, send: Splits, receive: Splits) -> Tensor:
        (came,), works = self.ep.exchange("combine", (rows,), send, receive)
        wait(works)
        return came

    def _send(self, kind: str, tensor: Tensor, hop: Hop) -> Any:
        return self.ep.all_to_all(kind, tensor, hop.send_rows, hop.receive_rows)

    @classmethod
    def traffic(cls, flow: Flow) -> Sent:
        return cost.hierarchical(flow)

    def exchange_counts(self, counts: Tensor | None, fault: str | None) -> list[list[int]]:
        return self._exchange_tables(counts, fault)[0][0]

    def _exchange_tables(
        self, counts: Tensor | None, fault: str | None
    ) -> tuple[tuple[list[list[int]], list[list[int]], list[list[list[int]]]], Tensor]:
        """``counts [N, 2L + 1]``: per node rows for each rank, slots for each rank, rows at all.

        → what this rank sends to nodes, what came from them for this one (both ``[N, 2L + 2]``),
        and rows, slots and fault of each source (l, n) for this rank (``[L, N, 3]``, also as a
        tensor).
        """
        nodes, ranks = self.num_nodes, self.per_node
        mine = torch.zeros(nodes, 2 * ranks + 2, dtype=torch.int64, device=self.context.device)
        if counts is not None:
            mine[:, :-1] = counts
        mine[:, -1] = self.shared_fault(fault)
        across, inside = self._across([1] * nodes), self._inside([1] * ranks)
        came, work = self.ep.all_to_all("counts", mine, across, across)
        wait([work])
        told = torch.stack(
            [came[:, :ranks], came[:, ranks:-2], came[:, -1:].expand(-1, ranks)], -1
        )  # [N, L, 3]
        told, work = self.ep.all_to_all("counts", told.transpose(0, 1), inside, inside)
        wait([work])
        flat = torch.cat([mine.flatten(), came.flatten(), told.flatten()]).cpu()  # one host sync
        sizes = [mine.numel(), mine.numel(), told.numel()]
        out, back, sources = flat.split(sizes)
        tables = (
            out.view_as(mine).tolist(),
            back.view_as(mine).tolist(),
            sources.view_as(told).tolist(),
        )
        self.raise_together([source[2] for place in tables[2] for source in place], fault)
        return tables, told

    def _hops(
        self, out: list[list[int]], came: list[list[int]], sources: list[list[list[int]]]
    ) -> tuple[Hop, Hop]:
        ranks = self.per_node

        def slots(table: list[list[int]]) -> Splits:
            return self._across([sum(row[ranks : 2 * ranks]) for row in table])

        between = Hop(
            send_rows=self._across([row[2 * ranks] for row in out]),
            receive_rows=self._across([row[2 * ranks] for row in came]),
            send_slots=slots(out),
            receive_slots=slots(came),
        )
        within = Hop(
            send_rows=self._inside([sum(row[r] for row in came) for r in range(ranks)]),
            receive_rows=self._inside([sum(n[0] for n in place) for place in sources]),
            send_slots=self._inside([sum(row[ranks + r] for row in came) for r in range(ranks)]),
            receive_slots=self._inside([sum(n[1] for n in place) for place in sources]),
        )
        return between, within

    def _across(self, values: Splits) -> Splits:
        """A value per node, for this rank's counterpart there; 0 for all others."""
        splits = [0] * self.ep.size
        splits[self.place :: self.per_node] = values
        return splits

    def _inside(self, values: Splits) -> Splits:
        """A value per rank of this node; 0 for all others."""
        splits, start = [0] * self.ep.size, self.node * self.per_node
        splits[start : start + self.per_node] = values
        return splits


class _Route(torch.autograd.Function):
    """Rows ``[T, H]`` and weights ``[T, K]`` → those of the copies that came here, both hops; not
    ready before the ``works`` are. Backward: each node sums its ranks' gradients in float32
    (float64), sends the sums on in ``combine_dtype``, and they are summed and rounded once."""

    @staticmethod
    def forward(
        ctx: Any,
        transport: HierarchicalTransport,
        between: Hop,
        within: Hop,
        first: Spread,
        second: Spread,
        works: list[Any],
        rows: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.transport, ctx.hops, ctx.copies = transport, (between, within), (first, second)
        ctx.dtype = rows.dtype
        rows = rows.to(transport.dispatch_dtype)
        begun: list[Any] = []
        for copies, hop in ((first, between), (second, within)):
            wait(begun)
            rows, work = transport._send("dispatch", gather(rows, copies.rows, copies.copies), hop)
            carried = torch.where(copies.there, gather(weights, copies.rows, copies.copies), 0)
            weights, other = transport._send("dispatch.weights", carried, hop)
            begun += [work, other]
        works += begun
        return rows, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        transport: HierarchicalTransport = ctx.transport
        rows, weights = grads
        for copies, hop in zip(ctx.copies[::-1], ctx.hops[::-1], strict=True):
            rows = _back(transport.ep, "dispatch.backward", rows, hop)
            weights = _back(transport.ep, "dispatch.weights.backward", weights, hop)
            rows = sum_indexed(rows, copies.copies, None)
            weights = torch.where(copies.there, weights, 0)
            weights = sum_indexed(weights, copies.copies, None)
            if copies is ctx.copies[1]:
                rows = rows.to(transport.combine_dtype)
        return None, None, None, None, None, None, rows.to(ctx.dtype), weights


def _back(channel: Channel, kind: str, tensor: Tensor, hop: Hop) -> Tensor:
    came, work = channel.all_to_all(kind, tensor, hop.receive_rows, hop.send_rows)
    wait([work])
    return came


def _valid(places: Tensor, total: int) -> Tensor:
    """The ``total`` places that aren't -1, in order."""
    flat = places.flatten()
    return flat[torch.nonzero_static(flat >= 0, size=total).squeeze(1)]


def _reorder(rows: Tensor, order: Tensor | None) -> Tensor:
    """``rows[order]`` for a permutation; None: as they are. Differentiable without atomics."""
    return rows if order is None else gather(rows, order, inverse(order)[:, None])


def _restore(rows: Tensor, order: Tensor | None) -> Tensor:
    """The rows that ``_reorder`` took."""
    return rows if order is None else gather(rows, inverse(order), order[:, None])

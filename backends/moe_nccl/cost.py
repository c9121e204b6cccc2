"""What the modes send in a forward, by the names that a trace shows (``Transport.traffic``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_core.traffic.flow import Sent

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.traffic.flow import Flow

INT64, INT32 = 8, 4


def all_to_all(flow: Flow) -> Sent:
    """Rows, weights and ids of each pair; rows, slots and a fault flag counted for each rank."""
    width = flow.request.top_k
    back = flow.slots * flow.row if flow.per_slot else flow.pairs * flow.combine_row
    links = {
        "counts": flow.everywhere(3 * INT64),
        "dispatch": flow.pairs * flow.dispatch_row,
        "dispatch.1": flow.pairs * (width * flow.weight),
        "dispatch.2": flow.pairs * (width * INT32),
        "combine": back.t(),
    }
    return Sent(links, _over_tp(flow))


def hierarchical(flow: Flow) -> Sent:
    """Rows, weights and ids of each pair of token and node, then of token and rank, and back.
    Counts go the same ways: rows and slots for each rank of a node, rows at all and a fault flag;
    then rows, slots and flag of the sender's place on each node."""
    width, rows = flow.request.top_k, flow.pairs_by_node()
    back = flow.slots_by_node() * flow.row if flow.per_slot else rows * flow.combine_row
    places, nodes = flow.request.ep_ranks_per_node or flow.ep_size, flow.node_pairs.shape[1]
    place = torch.arange(flow.ep_size) % places
    across, inside = (same[:, None] == same for same in (place, flow.node_of))
    links = {
        "counts": across * (2 * places + 2) * INT64 + inside * nodes * 3 * INT64,
        "dispatch.ids": rows * (width * INT32),
        "dispatch": rows * flow.dispatch_row,
        "dispatch.weights": rows * (width * flow.weight),
        "combine": back.t(),
    }
    return Sent(links, _over_tp(flow))


def replicated(flow: Flow) -> Sent:
    """As many of everything as the rank with the most tokens has; the number of tokens and a fault
    flag for each rank. Replicated rows are here already, and results are summed over the group."""
    tokens, width = flow.tokens, flow.request.top_k
    links = {"counts": flow.everywhere(2 * INT64)}
    if flow.request.rows == "replicated":
        part = flow.sum_row if flow.request.final_sum == "layer" else 0
        part = width * flow.row if flow.per_slot else part
        return Sent(links, _over_tp(flow) + tokens * (part if flow.ep_size > 1 else 0))
    most = int(tokens.max())
    back = width * flow.row if flow.per_slot else flow.combine_row
    links |= {
        "dispatch.ids": flow.everywhere(most * width * 2 * INT64),  # the slot and its rank
        "dispatch": flow.everywhere(most * flow.dispatch_row),
        "dispatch.weights": flow.everywhere(most * width * flow.weight),
        "combine": flow.everywhere(most * back),
    }
    return Sent(links, _over_tp(flow))


def _over_tp(flow: Flow) -> Tensor:
    """A fault flag, and every token's sum unless that is left to the caller. Sums are made in
    float32, in float64 of what came home in it."""
    q = flow.request
    if q.tp_size == 1:
        return torch.zeros_like(flow.tokens)
    came = q.dtype if flow.per_slot or q.rows == "replicated" else q.combine_dtype
    row = q.hidden_size * (8 if came == "float64" else 4)
    return flow.tokens * (row if q.final_sum == "layer" else 0) + INT64

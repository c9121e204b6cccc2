"""What a forward has to move within one ep group, and what moving it costs: plain counts.

Shapes: EP ranks of one ep group, N nodes. Everything is int64 on the CPU; matrices are ``[source,
destination]`` and count what stays on a rank too.
"""
# pyright: strict

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from moe_core.errors import MoEError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moe_core.manifest import Request

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PAYLOADS = ("pairs", "nodes", "slots", "all")


@dataclass(frozen=True)
class Flow:
    """One forward's routing as a transport sees it.

    ``request``: what the layer asked for, the wire dtypes and the routing width (``top_k``) among
    it; ``options``: the transport's own, defaults filled in.
    ``tokens [EP]``: T of each rank, capacity padding included.
    ``pairs [EP, EP]``: tokens of the source with an expert on the destination; ``slots [EP, EP]``:
    its (token, slot) choices there. Where rows are replicated, every source brings the same.
    ``node_of [EP]``: each rank's node, counted from 0; ``node_pairs [EP, N]``: tokens of the source
    with an expert on that node.
    """

    request: Request
    tokens: Tensor
    pairs: Tensor
    slots: Tensor
    node_of: Tensor
    node_pairs: Tensor
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def ep_size(self) -> int:
        return len(self.tokens)

    @property
    def per_slot(self) -> bool:
        return self.request.combine == "per_slot"

    @property
    def row(self) -> int:
        """Bytes of a row in the layer's dtype: what a ``per_slot`` combine brings home."""
        return self.request.hidden_size * BYTES[self.request.dtype]

    @property
    def dispatch_row(self) -> int:
        """Bytes of a row on its way out; nothing is rounded for a layer on one rank."""
        return self.row if self._is_local else self._row(self.request.dispatch_dtype)

    @property
    def sum_row(self) -> int:
        """Bytes of a sum in float32 (float64 in a float64 layer)."""
        return self.request.hidden_size * self.weight

    @property
    def combine_row(self) -> int:
        """Bytes of a ``per_rank`` sum on its way home."""
        return self.sum_row if self._is_local else self._row(self.request.combine_dtype)

    @property
    def weight(self) -> int:
        """Bytes of a routing weight."""
        return 8 if self.request.dtype == "float64" else 4

    @property
    def _is_local(self) -> bool:
        return self.request.ep_size * self.request.tp_size == 1

    def _row(self, dtype: str) -> int:
        return self.request.hidden_size * BYTES[dtype]

    def everywhere(self, num_bytes: int) -> Tensor:
        """``[EP, EP]``: so many from every rank to every rank."""
        return torch.full((self.ep_size, self.ep_size), num_bytes, dtype=torch.int64)

    def sent(self, payload: str) -> Sent:
        """Rows alone, as a ``payload`` says (see ``Dispatcher``), and back: no ids, weights, counts
        and no sums over tp. On one rank nothing.

        Raises ``MoEError`` for a payload that doesn't say which rows go where.
        """
        nothing = torch.zeros_like(self.tokens)
        if self._is_local:
            return Sent({}, nothing)
        if payload not in PAYLOADS:
            raise MoEError(
                f"what is sent can't be told from payload {payload!r}, only from one of "
                f"{', '.join(PAYLOADS)}: the backend's class has to override traffic(flow)"
            )
        back_row = self.row if self.per_slot else self.combine_row
        if payload == "all":
            most, width = int(self.tokens.max()), self.request.top_k if self.per_slot else 1
            if self.request.rows == "replicated":  # they are everywhere already, and are summed
                return Sent({}, self.tokens * width * back_row)
            rows, back = self.everywhere(most), self.everywhere(most * width)
        elif payload == "nodes":
            rows = self.pairs_by_node()
            back = self.slots_by_node() if self.per_slot else rows
        else:
            rows = self.pairs if payload == "pairs" else self.slots
            back = self.slots if self.per_slot else rows
        return Sent({"dispatch": rows * self.dispatch_row, "combine": back.t() * back_row}, nothing)

    def pairs_by_node(self) -> Tensor:
        """``[EP, EP]`` rows in two hops: once to each node that needs a row, to the rank with the
        sender's place there, which sends it on to the ranks that do. Raises ``MoEError`` where the
        ranks don't lie evenly on nodes."""
        return self._hops(self.node_pairs, self.pairs)

    def slots_by_node(self) -> Tensor:
        """Likewise where each (token, slot) travels for itself."""
        nodes = torch.zeros_like(self.node_pairs)
        return self._hops(nodes.index_add_(1, self.node_of, self.slots), self.slots)

    def _hops(self, to_nodes: Tensor, to_ranks: Tensor) -> Tensor:
        places, nodes = self.request.ep_ranks_per_node, to_nodes.shape[1]
        if places is None or places * nodes != self.ep_size:
            raise MoEError(
                f"an ep group of {self.ep_size} ranks doesn't lie evenly on {nodes} nodes, so its "
                "ranks have no places that are the same on each"
            )
        shape = (nodes, places, nodes, places)
        total = self.everywhere(0)
        across = total.view(shape).diagonal(dim1=1, dim2=3)  # [N, N, place]
        across += to_nodes.view(nodes, places, nodes).transpose(1, 2)
        inside = total.view(shape).diagonal(dim1=0, dim2=2)  # [place, place, N]
        inside += to_ranks.view(shape).sum(0).transpose(1, 2)
        return total


@dataclass(frozen=True)
class Sent:
    """What one ep group's ranks send in a forward, in bytes.

    ``links``: kind of exchange → ``[EP, EP]``. ``"dispatch"`` and ``"combine"`` are rows; whatever
    other kinds there are is ids, weights and counts. The diagonal is what a rank keeps: it needs
    room and isn't sent. ``summed [EP]``: what each rank brings to sums over ranks (all-reduce),
    whose way the collective library chooses.
    """

    links: Mapping[str, Tensor]
    summed: Tensor

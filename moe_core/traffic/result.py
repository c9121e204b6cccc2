"""What a simulation found: bytes between ranks and nodes, rows and buffers per rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

ROWS = ("dispatch", "combine")
SHOWN_RANKS = 64


@dataclass(frozen=True)
class Traffic:
    """One forward, or the sum of several, over W ranks on N nodes, E experts.

    Tensors are int64 on the CPU, bytes unless said otherwise; matrices are ``[source,
    destination]`` and have zeros for what stays on a rank. They are what ``trace()`` counts, to the
    byte, for a transport that says what it sends (``Transport.traffic``).

    ``links``: kind of exchange → ``[W, W]``. ``rows [W]``: (token, expert) rows that a rank's
    experts compute. ``rows_per_expert [E]``: choices per logical expert. ``buffers [W]``: what
    arrives on a rank in all of a forward's exchanges, what it keeps for itself included; the most
    of any forward. ``summed [W]``: what a rank brings to sums over ranks (all-reduce), which take
    a way of their own and are in no matrix. ``bound``: a dispatch with one row per (token, rank)
    that needs it; ``node_bound [N, N]``: one per (token, node). ``node_of [W]``. ``about``: what
    was simulated, as JSON data.
    """

    links: Mapping[str, Tensor]
    rows: Tensor
    rows_per_expert: Tensor
    buffers: Tensor
    summed: Tensor
    bound: int
    node_bound: Tensor
    node_of: Tensor
    about: Mapping[str, Any]

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def num_nodes(self) -> int:
        return len(self.node_bound)

    @property
    def dispatch(self) -> Tensor:
        """``[W, W]``: token rows on their way to the experts."""
        return self._of("dispatch")

    @property
    def combine(self) -> Tensor:
        """``[W, W]``: result rows on their way home."""
        return self._of("combine")

    @property
    def meta(self) -> Tensor:
        """``[W, W]``: everything else: counts, ids, weights."""
        return self._of(*(kind for kind in self.links if kind not in ROWS))

    def _of(self, *kinds: str) -> Tensor:
        total = torch.zeros(self.world_size, self.world_size, dtype=torch.int64)
        for kind in kinds:
            if kind in self.links:
                total += self.links[kind]
        return total

    def between_nodes(self, matrix: Tensor) -> Tensor:
        """``[W, W]`` → ``[N, N]``; the diagonal is what travels inside a node."""
        count = self.num_nodes
        half = matrix.new_zeros(count, self.world_size).index_add_(0, self.node_of, matrix)
        return matrix.new_zeros(count, count).index_add_(1, self.node_of, half)

    @property
    def imbalance(self) -> float | None:
        """Rows of the fullest rank ÷ the mean; None without rows."""
        return _over_mean(self.rows)

    @property
    def payload_over_bound(self) -> float | None:
        """Dispatched row bytes ÷ ``bound``; None where the routing asks for nothing."""
        return int(self._of("dispatch").sum()) / self.bound if self.bound else None

    @property
    def node_payload_over_bound(self) -> float | None:
        """Dispatched row bytes that change nodes ÷ ``node_bound``; None where nothing has to."""
        bound = int(self.node_bound.sum())
        return _leaving(self.between_nodes(self.dispatch)) / bound if bound else None

    def __add__(self, other: Traffic) -> Traffic:
        """Two forwards of the same layer at the same widths, such as two steps of a recording.
        Raises ``InputError`` for widths that differ."""
        alike = ("world_size", "num_nodes")
        if any(getattr(self, n) != getattr(other, n) for n in alike) or len(
            self.rows_per_expert
        ) != len(other.rows_per_expert):
            raise InputError("traffic of other widths or experts can't be added")
        kinds = {**self.links, **other.links}
        return replace(
            self,
            links={kind: self._of(kind) + other._of(kind) for kind in kinds},
            rows=self.rows + other.rows,
            rows_per_expert=self.rows_per_expert + other.rows_per_expert,
            buffers=torch.maximum(self.buffers, other.buffers),
            summed=self.summed + other.summed,
            bound=self.bound + other.bound,
            node_bound=self.node_bound + other.node_bound,
            about={**self.about, "calls": self.about["calls"] + other.about["calls"]}
            | {"tokens": self.about["tokens"] + other.about["tokens"]},
        )

    def to_dict(self, shown_ranks: int = SHOWN_RANKS) -> dict[str, Any]:
        """JSON data. ``links`` (rank to rank, by kind) is None for more than ``shown_ranks`` ranks,
        ``save`` writes them; sums per rank and matrices of nodes are there always."""
        kinds = {"dispatch": self.dispatch, "combine": self.combine, "meta": self.meta}
        return {
            **self.about,
            "ranks": self.world_size,
            "nodes": self.num_nodes,
            "rows_per_rank": self.rows.tolist(),
            "rows": _spread(self.rows),
            "imbalance": self.imbalance,
            "rows_per_expert": self.rows_per_expert.tolist(),
            "expert_imbalance": _over_mean(self.rows_per_expert),
            "buffer_bytes": _spread(self.buffers),
            "buffer_bytes_per_rank": self.buffers.tolist(),
            "summed_bytes_per_rank": self.summed.tolist(),
            "bytes": {kind: self._summary(matrix) for kind, matrix in kinds.items()},
            "bound_bytes": self.bound,
            "payload_over_bound": self.payload_over_bound,
            "node_bound_bytes": int(self.node_bound.sum()),
            "node_payload_over_bound": self.node_payload_over_bound,
            "node_links": {k: self.between_nodes(m).tolist() for k, m in kinds.items()},
            "links": {k: m.tolist() for k, m in self.links.items()}
            if self.world_size <= shown_ranks
            else None,
        }

    def _summary(self, matrix: Tensor) -> dict[str, Any]:
        return {
            "total": int(matrix.sum()),
            "between_nodes": _leaving(self.between_nodes(matrix)),
            "sent_per_rank": _spread(matrix.sum(1)),
            "received_per_rank": _spread(matrix.sum(0)),
            "busiest_link": int(matrix.max()),
        }

    def save(self, path: str | Path) -> None:
        """Every tensor as safetensors: ``links.<kind>``, ``rows``, ... Raises ``InputError``."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {f"links.{kind}": matrix.contiguous() for kind, matrix in self.links.items()}
        names = ("rows", "rows_per_expert", "buffers", "summed", "node_bound", "node_of")
        tensors |= {name: getattr(self, name) for name in names}
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} can't be written: {error}") from error


def _leaving(nodes: Tensor) -> int:
    return int(nodes.sum() - nodes.diagonal().sum())


def _over_mean(counts: Tensor) -> float | None:
    total = int(counts.sum())
    return int(counts.max()) * len(counts) / total if total else None


def _spread(values: Tensor) -> dict[str, Any]:
    """``worst_rank``: the first with the most."""
    worst = int(values.max())
    return {
        "mean": int(values.sum()) / len(values),
        "worst": worst,
        "worst_rank": int((values == worst).nonzero()[0]),
    }

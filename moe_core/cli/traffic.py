"""What ``run`` counts between ranks, and the least that the routing asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_core.placement import Placement
from moe_core.tracing import add_matrices, zeros

if TYPE_CHECKING:
    from moe_core.config import MoEConfig
    from moe_core.tracing import LayerCall

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Traffic:
    """Sums over layers, steps and ranks; matrices are ``[src][dst]`` in bytes."""

    def __init__(self, config: MoEConfig, size: int) -> None:
        self.size, self.placement = size, Placement(config.num_experts, size)
        self.row = config.hidden_size * BYTES[config.dispatch_dtype or config.dtype]
        self.rows, self.sums, self.meta, self.bound = (zeros(size) for _ in range(4))

    def add(self, call: LayerCall) -> None:
        """Takes in what one rank saw of one layer call; its rank is where it sent from."""
        if self.size == 1 or call.routing is None or call.routing.topk_ids is None:
            return
        self.rows = add_matrices(self.size, (self.rows, call.payload_bytes))
        self.sums = add_matrices(self.size, (self.sums, call.combine_bytes))
        self.meta = add_matrices(self.size, (self.meta, call.meta_bytes))
        for ids in call.routing.topk_ids.tolist():
            for dst in {self.placement.home(expert)[0] for expert in ids if expert >= 0}:
                if dst != call.rank:
                    self.bound[call.rank][dst] += self.row

    def to_dict(self) -> dict[str, Any]:
        """``payload_over_bound``: row bytes sent ÷ (distinct (token, remote rank) pairs × bytes of
        a row); None where the routing asked for nothing."""
        least = sum(map(sum, self.bound))
        return {
            "payload_bytes": self.rows,
            "combine_bytes": self.sums,
            "meta_bytes": self.meta,
            "bound_bytes": self.bound,
            "payload_over_bound": sum(map(sum, self.rows)) / least if least else None,
        }

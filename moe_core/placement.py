"""Which rank holds which expert, and which rows of it: plain integers.

Experts lie in contiguous blocks. The first ``num_experts % ep_size`` ranks hold one expert more
than the others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """``num_experts`` logical experts over ``ep_size`` ranks."""

    num_experts: int
    ep_size: int = 1

    def num_local_experts(self, ep_rank: int) -> int:
        base, extra = divmod(self.num_experts, self.ep_size)
        return base + (ep_rank < extra)

    def first_expert(self, ep_rank: int) -> int:
        base, extra = divmod(self.num_experts, self.ep_size)
        return ep_rank * base + min(ep_rank, extra)

    def home(self, expert: int) -> tuple[int, int]:
        """``(ep_rank, local slot)`` of a logical expert. Raises ``IndexError`` outside [0, E)."""
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert} is not in [0, {self.num_experts})")
        base, extra = divmod(self.num_experts, self.ep_size)
        big = (base + 1) * extra
        if expert < big:
            return divmod(expert, base + 1)
        rank, slot = divmod(expert - big, base)
        return extra + rank, slot


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

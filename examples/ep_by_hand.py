"""Expert parallelism on paper: 4 ranks, 2 experts each, two tokens that live on rank 0.

    token A -> E1 (0.7), E5 (0.3)          token B -> E5 (0.4), E1 (0.6)

Expert e multiplies its input by 2^e, so that every number can be checked by hand. The four ranks
are played one after the other in this process: each gets the rows that were sent to it, runs its
own two experts on them with ``moe_forward``, and sends one partial sum per row home.

    python examples/ep_by_hand.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core import Activation, Experts, MoEConfig, moe_forward, trace
from moe_core.placement import Placement

RANKS, EXPERTS, HIDDEN = 4, 8, 4
SOURCE = 0  # the rank that both tokens live on
TOKENS = ("A", "B")
TOPK_IDS = torch.tensor([[1, 5], [5, 1]])
TOPK_WEIGHTS = torch.tensor([[0.7, 0.3], [0.4, 0.6]])
HIDDEN_STATES = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, -1.0, 0.5, 0.0]])
LINEAR = Activation(name="identity", gated=False)


@dataclass(frozen=True)
class Story:
    """``ranks[e]``: where expert e lives. ``sent[src][dst]``: rows of the dispatch; the combine
    sends as many back. ``rows_per_expert[e]``. ``partials[rank] [T, H]``: what each rank adds.
    ``output [T, H]``: their sum; ``local``: the same from one process that has all experts."""

    ranks: list[int]
    sent: list[list[int]]
    rows_per_expert: list[int]
    partials: list[Tensor]
    output: Tensor
    local: Tensor


def expert_weights() -> tuple[Tensor, Tensor]:
    """``w13 [E, H, H]`` and ``w2 [E, H, H]`` of eight experts E_e(x) = 2^e x."""
    one = torch.eye(HIDDEN).expand(EXPERTS, HIDDEN, HIDDEN)
    return one.contiguous(), one * 2.0 ** torch.arange(EXPERTS).view(-1, 1, 1)


def tell(backend: str = "torch") -> Story:
    w13, w2 = expert_weights()
    placement = Placement(EXPERTS, RANKS)
    home = torch.tensor([placement.home(e) for e in range(EXPERTS)])  # [E, 2]: rank, local slot
    slot_ranks, local_ids = home[TOPK_IDS].unbind(-1)  # [T, K] each

    sent = [[0] * RANKS for _ in range(RANKS)]
    partials: list[Tensor] = []
    for rank in range(RANKS):
        here = slot_ranks == rank
        # One row per (token, rank), however many experts the token wants there.
        tokens = here.any(dim=1).nonzero().squeeze(1)
        sent[SOURCE][rank] = len(tokens)
        first, count = placement.first_expert(rank), placement.num_local_experts(rank)
        rows = moe_forward(
            HIDDEN_STATES[tokens],
            torch.where(here, local_ids, -1)[tokens],  # -1: this slot is another rank's
            TOPK_WEIGHTS[tokens],
            w13[first : first + count],
            w2[first : first + count],
            activation=LINEAR,
            backend=backend,
        )
        partials.append(torch.zeros_like(HIDDEN_STATES).index_copy(0, tokens, rows))
    output = torch.stack(partials).sum(0)

    config = MoEConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_experts=EXPERTS,
        top_k=2,
        activation=LINEAR,
    )
    experts = Experts(config, backend=backend)
    experts.load_full_weights(w13, w2)
    with trace() as traced, torch.no_grad():
        local = experts(HIDDEN_STATES, TOPK_IDS, TOPK_WEIGHTS)
    return Story(home[:, 0].tolist(), sent, traced.rows_per_expert, partials, output, local)


def main() -> Story:
    story = tell()
    for e, (rank, rows) in enumerate(zip(story.ranks, story.rows_per_expert, strict=True)):
        print(f"E{e} lives on rank {rank}: {rows or 'no'} rows")
    print("\nrows sent by the dispatch (a row to oneself stays); the combine sends them back")
    print("from \\ to  " + "  ".join(f"rank {r}" for r in range(RANKS)))
    for rank, row in enumerate(story.sent):
        print(f"rank {rank}     " + "  ".join(f"{n:6d}" for n in row))
    print("\nwhat each rank adds")
    for rank, partial in enumerate(story.partials):
        idle = "" if partial.any() else "   (idle: it was sent nothing)"
        print(f"rank {rank}: A {_show(partial[0])}  B {_show(partial[1])}{idle}")
    print("\ny_A = 0.7 * E1(A) + 0.3 * E5(A) = (0.7 * 2 + 0.3 * 32) A = 11 A")
    print("y_B = 0.4 * E5(B) + 0.6 * E1(B) = (0.4 * 32 + 0.6 * 2) B = 14 B")
    for token, x, y in zip(TOKENS, HIDDEN_STATES, story.output, strict=True):
        print(f"{token} = {_show(x)} -> y_{token} = {_show(y)}")
    return story


def _show(row: Tensor) -> str:
    return "[" + ", ".join(f"{v:g}" for v in row.tolist()) + "]"


if __name__ == "__main__":
    main()

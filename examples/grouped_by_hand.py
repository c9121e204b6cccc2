"""Routing and sorting on paper: 4 tokens, 3 experts, top-2, and one router's arithmetic.

    token 0 -> E0 (0.7), E2 (0.3)          token 2 -> E1 (0.8), E0 (0.2)
    token 1 -> E2 (0.6), E1 (0.4)          token 3 -> E0 (0.9), E2 (0.1)

``Experts.dispatch`` sorts the eight (token, slot) pairs by expert, so that each expert's rows lie
together and one grouped product does the work of three. Expert e multiplies its input by 2^e.

    python examples/grouped_by_hand.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core import Activation, Experts, MoEConfig, RouterConfig, route
from moe_core.layouts import ExpertContiguous

EXPERTS, HIDDEN = 3, 4
TOPK_IDS = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 2]])
TOPK_WEIGHTS = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2], [0.9, 0.1]])
LOGITS = torch.tensor([[1.2, -0.3, 0.8, 2.1, -1.0, 0.5, 0.1, -0.7]])
ROUTERS = {
    "top-2, then softmax": RouterConfig(softmax_before_topk=False),
    "softmax, then top-2, renormalised": RouterConfig(renormalize=True),
    "softmax, then top-2": RouterConfig(),
}


@dataclass(frozen=True)
class Story:
    """``tokens``: whose row each row of the expert buffer is. ``counts`` and ``starts``: rows per
    expert and where they begin. ``row_weights``: routing weight of each row. ``factors``: what
    each token came back multiplied by. ``routes``: router → (experts, weights) for ``LOGITS``."""

    tokens: list[int]
    counts: list[int]
    starts: list[int]
    row_weights: Tensor
    factors: Tensor
    routes: dict[str, tuple[list[int], Tensor]]


def tell() -> Story:
    config = MoEConfig(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_experts=EXPERTS,
        top_k=2,
        activation=Activation(name="identity", gated=False),
    )
    experts = Experts(config, backend="torch")
    one = torch.eye(HIDDEN).expand(EXPERTS, HIDDEN, HIDDEN)
    experts.load_full_weights(one, one * 2.0 ** torch.arange(EXPERTS).view(-1, 1, 1))
    hidden_states = 2.0 ** torch.arange(4).view(-1, 1).expand(-1, HIDDEN)  # token t is all 2^t

    with torch.no_grad():
        record, handle = experts.dispatch(hidden_states, TOPK_IDS, TOPK_WEIGHTS)
        assert isinstance(record, ExpertContiguous)
        output = experts.combine(experts.run(record), handle)

    routes: dict[str, tuple[list[int], Tensor]] = {}
    for name, router in ROUTERS.items():
        ids, weights = route(LOGITS, 2, router).ids_and_weights()
        routes[name] = (ids[0].tolist(), weights[0])
    return Story(
        tokens=record.rows[:, 0].log2().long().tolist(),
        counts=record.tokens_per_expert.tolist(),
        starts=record.expert_starts.tolist(),
        row_weights=record.row_weights,
        factors=(output / hidden_states)[:, 0],
        routes=routes,
    )


def main() -> Story:
    story = tell()
    print("expert  rows   tokens       weights")
    for e, count in enumerate(story.counts):
        here = slice(story.starts[e], story.starts[e] + count)
        tokens = " ".join(map(str, story.tokens[here]))
        weights = " ".join(f"{w:.1f}" for w in story.row_weights[here].tolist())
        print(f"E{e}      {here.start}..{here.stop - 1}   {tokens:11}  {weights}")
    print("\neach token comes back multiplied by the sum of weight * 2^expert")
    for token, factor in enumerate(story.factors.tolist()):
        slots = zip(TOPK_WEIGHTS[token].tolist(), TOPK_IDS[token].tolist(), strict=True)
        print(f"token {token}: {' + '.join(f'{w:.1f} * {2**e}' for w, e in slots)} = {factor:.1f}")
    print(f"\nlogits {[round(x, 1) for x in LOGITS[0].tolist()]}, top-2")
    for name, (ids, weights) in story.routes.items():
        shown = ", ".join(f"E{e} {w:.3f}" for e, w in zip(ids, weights.tolist(), strict=True))
        print(f"{name:34} {shown}")
    return story


if __name__ == "__main__":
    main()

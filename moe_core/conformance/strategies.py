"""What hypothesis draws: routings with duplicates, -1, skews and nothing at all."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = settings(
    max_examples=25,
    derandomize=True,  # the same examples in each run: a red suite stays red
    database=None,
    deadline=None,
    # many classes inherit one test
    suppress_health_check=(HealthCheck.differing_executors, HealthCheck.too_slow),
)
ON_RANKS = settings(EXAMPLES, max_examples=8, phases=(Phase.explicit, Phase.generate))
"""Fewer, since each builds a layer on every rank. Without shrinking: a failure on one rank ends the
processes of all, and starting them is slow."""


@st.composite
def routings(
    draw: Any, num_experts: int, *, max_tokens: int = 12, max_top_k: int = 3, top_k: int = 0
) -> list[list[int]]:
    """Ids ``[T, K]``: any, skewed to one expert, or none valid. ``[]`` is no tokens."""
    top_k = top_k or draw(st.integers(1, max_top_k))
    any_id = st.integers(-1, num_experts - 1)
    favourite = draw(any_id)
    ids = draw(st.sampled_from([any_id, st.just(favourite), st.sampled_from([favourite, -1, 0])]))
    row = st.lists(ids, min_size=top_k, max_size=top_k)
    return draw(st.lists(row, max_size=max_tokens))

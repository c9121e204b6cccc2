"""Contract tests of a fused path: what transport and runner together owe, in one call.

class TestMine(FusedConformance):
    backend = "mine"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from moe_core import Experts, HandleError
from moe_core.config import LIMIT_FORMS, W13_LAYOUTS, Activation
from moe_core.conformance import bounds, on_ranks
from moe_core.conformance.cases import oracle, random_case, sum_length
from moe_core.conformance.transport import OnRanks

if TYPE_CHECKING:
    from moe_core.config import ParallelConfig

OPTIONS: list[dict[str, Any]] = [
    *({"activation": Activation(limit=0.5, limit_form=form)} for form in LIMIT_FORMS),
    {"activation": Activation(alpha=1.702, limit=0.5)},
    {"apply_router_weight_on_input": True},
    {"bias": True},
    *({"w13_layout": layout} for layout in W13_LAYOUTS),
]
"""What fused kernels have been seen to drop without a word (sgl-project/sglang#39920)."""


class FusedConformance(OnRanks):
    """Subclass it and set ``backend`` to a spec; tests collect the subclass."""

    profile: ClassVar[str] = "fused"
    role: ClassVar[str] = "fused"

    def test_every_option_at_every_width(self, spec: str, width: ParallelConfig) -> None:
        for option in OPTIONS:
            jobs = [self.job(spec, width, combine=c, **option) for c in self.combines(spec)]
            self.on(
                on_ranks.numbers,
                [j for j in jobs if self.target.resolve(j.config, width, spec=spec).ok],
            )

    def test_equals_the_staged_path(self) -> None:
        """The reference backend's stages, on one rank: apart by no more than both may be."""
        config = self.target.config()
        ids = torch.arange(9 * config.top_k).view(9, -1) % (config.num_experts + 1) - 1
        sizes = (config.num_experts, config.hidden_size, config.intermediate_size)
        case = random_case(ids, config.dtype, sizes=sizes)
        outs = []
        for spec, device in ((self.backend, self.device), ("reference", "cpu")):
            experts = Experts(config, backend=spec, device=device, inference=True)
            experts.load_full_weights(case.w13, case.w2)
            mine = case.to(device)
            outs.append(experts(mine.x, mine.ids, mine.topk).double().cpu())
        limit = 2 * bounds.forward(oracle(case)[1], case.w13.dtype, sum_length(case))
        assert ((outs[0] - outs[1]).abs() <= limit).all()

    def test_it_has_no_stages(self) -> None:
        config = self.target.config()
        experts = Experts(config, backend=self.backend, device=self.device, inference=True)
        x = torch.zeros(1, config.hidden_size, dtype=experts.dtype, device=self.device)
        ids = torch.zeros(1, config.top_k, dtype=torch.int64, device=self.device)
        with pytest.raises(HandleError, match="fused"):
            experts.dispatch(x, ids, ids.float())

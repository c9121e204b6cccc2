"""Every way in which transports and runners fit, one layout at a time, not only the one chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moe_core.activation import sum_dtype
from moe_core.capabilities import Candidate, Path, find_path
from moe_core.conformance.cases import exact_case, exact_result, slots
from moe_core.conformance.target import Target, target
from moe_core.contracts import ExpertWeights, Routing
from moe_core.errors import MoEError
from moe_core.interfaces import ExpertRunner
from moe_core.layouts import RankGrouped, Record, TokenMajor
from moe_core.manifest import Backend, Part
from moe_core.pipeline import Pipeline
from moe_core.placement import Placement
from moe_core.reference import expert_forward
from moe_core.resolution import Resolution, make_request

if TYPE_CHECKING:
    from moe_core.manifest import Request

IDS = [[2, 0], [0, -1], [3, 3], [-1, -1], [0, 2], [1, 0]]


@dataclass(frozen=True)
class Pair:
    """A transport and a runner, each narrowed to one layout each way, and how they meet."""

    transport: Candidate
    runner: Candidate
    path: Path
    request: Request

    def __str__(self) -> str:
        steps = (self.path.dispatched, self.path.runner_in, self.path.runner_out)
        layouts = " -> ".join([*steps, self.path.combined])
        return f"{self.transport.label} + {self.runner.label}: {layouts}"

    def build(self, owner: Target) -> Pipeline:
        parts = {"transport": self.transport, "runner": self.runner}
        found = Resolution(self.request, str(self), "argument", parts, self.path, ())
        experts = Placement(self.request.num_experts)
        return Pipeline(found, experts, self.request.dtype, owner.device)


class SummingRunner(ExpertRunner):
    """Rows in, rows out: pays the weight and the sum over slots itself, as some kernels do."""

    def run(self, record: Record, weights: ExpertWeights) -> Record:
        assert isinstance(record, TokenMajor | RankGrouped)
        rows = sum_dtype(record.rows.dtype)
        total = torch.zeros_like(record.rows, dtype=rows)
        for expert in range(weights.num_local_experts):
            token, slot = (record.topk_ids == expert).nonzero(as_tuple=True)
            y = expert_forward(record.rows[token], expert, weights).to(rows)
            y = y * record.topk_weights[token, slot].to(rows)[:, None]
            total = total.index_add(0, token, y)
        paid = (*record.paid, "weight", "slot_sum")
        return replace(record, rows=total.to(record.rows.dtype), paid=paid)


_SUMMING = Backend(
    name="summing",
    parts=(
        Part(
            role="runner",
            target=f"{__name__}:SummingRunner",
            takes=("token_major", "rank_grouped"),
            gives=("token_major", "rank_grouped"),
            pays=("weight", "slot_sum"),
        ),
    ),
)


def partners(role: str) -> list[Candidate]:
    """Parts that run everywhere, to try a part of the other role with."""
    found = [Candidate(_SUMMING, p, "moe-core", "") for p in _SUMMING.parts if p.role == role]
    for name in ("reference", "torch"):
        try:
            found += target(name).of(role)
        except MoEError:  # the plugin's test has hidden it
            continue
    return found


def pairs(owner: Target, transports: list[Candidate], runners: list[Candidate]) -> list[Pair]:
    config = owner.config()
    request = make_request(config, owner.parallel, device=owner.device, autograd=owner.autograd)
    found: dict[str, Pair] = {}
    for t in transports:
        for given in t.part.gives:
            for combined in t.part.takes:
                one = replace(t, part=replace(t.part, gives=(given,), takes=(combined,)))
                for r in runners:
                    for taken, back in zip(r.part.takes, r.part.gives, strict=True):
                        other = replace(r, part=replace(r.part, takes=(taken,), gives=(back,)))
                        path = find_path(one, other, request)
                        if isinstance(path, Path):
                            pair = Pair(one, other, path, request)
                            found[str(pair)] = pair
    return list(found.values())


def check_pairs(owner: Target, transports: list[Candidate], runners: list[Candidate]) -> list[Pair]:
    """The same exact numbers through every pair → the pairs."""
    tried = pairs(owner, transports, runners)
    config = owner.config()
    sizes = (config.num_experts, config.hidden_size, config.intermediate_size)
    ids = slots([row * (config.top_k // 2) + row[: config.top_k % 2] for row in IDS])
    case = exact_case(ids, getattr(torch, config.dtype), sizes)
    mine = case.to(owner.device)
    for pair in tried:
        out = pair.build(owner).forward(
            mine.x, Routing(mine.ids, mine.topk), case.weights(owner.device)
        )
        assert torch.equal(out.cpu(), exact_result(case)), f"wrong numbers by way of {pair}"
    return tried

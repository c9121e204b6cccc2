"""One rank of a conformance job: its layer, its tokens, and checks that say where they failed.

A *holder* is a set of ranks with the same tokens: its own on every (dp, ep) rank, or one per dp
rank where rows are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from moe_core import Experts, MoEConfig, ParallelConfig
from moe_core.conformance.cases import Case, exact_case, poison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Job:
    """One layer over ``parallel``; ``tokens`` and ``ids`` are per holder."""

    spec: str
    config: MoEConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tokens: tuple[int, ...] = (5,)
    ids: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    device: str = "cpu"
    autograd: bool = True


class Rank:
    """This rank's layer, its place, and what every holder has."""

    def __init__(self, job: Job, **wants: Any) -> None:
        self.job, self.config = job, job.config
        number = dist.get_rank() if job.parallel.world_size > 1 else 0
        torch.manual_seed(1000 + number)  # nothing may rely on ranks that draw alike
        self.layer = self.another(**wants)
        self.groups = self.layer.groups
        distinct = job.parallel.rows == "distinct"
        self.per_replica = job.parallel.ep_size if distinct else 1
        self.holder = self.groups.ep_rank if distinct else 0  # within this replica

    def another(self, **wants: Any) -> Experts:
        job = self.job
        wants = {"inference": not job.autograd, "device": job.device} | wants
        return Experts(job.config, job.parallel, job.spec, **wants)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    @property
    def transport(self) -> Any:
        return self.layer.pipeline.transport

    def fail(self, what: str) -> NoReturn:
        widths = {
            k: v
            for k, v in self.job.parallel.to_dict().items()
            if v not in (1, "distinct", "layer")
        }
        where = f"rank {self.groups.rank}, {widths or 'local'}, {self.config.dtype}"
        raise AssertionError(f"{where}, {self.config.combine}: {what}")

    def check(self, good: bool, what: str) -> None:
        if not good:
            self.fail(what)

    def equal(self, got: Tensor, want: Tensor, what: str) -> None:
        if got.shape != want.shape or got.dtype != want.dtype:
            self.fail(f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {want.shape}")
        wrong = (got.detach().cpu() != want).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            said = f"{got[at].item()} instead of {want[at].item()} at {at}"
            self.fail(f"{what}: {len(wrong)} of {want.numel()} elements differ, first {said}")

    def within(self, got: Tensor, want: Tensor, limit: Tensor | float, what: str) -> None:
        self.check(got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}")
        error = (got.detach().double().cpu() - want.detach()).abs()
        excess = (~(error <= limit)).nonzero()  # NaN is no number within a bound
        if len(excess):
            at = tuple(excess[0].tolist())
            most = limit[at].item() if isinstance(limit, torch.Tensor) else limit
            self.fail(f"{what}: off by {error[at]:.2e}, bound {most:.2e}, first at {at}")

    def ids(self, pattern: str, tokens: Sequence[int]) -> list[Tensor]:
        """``[T, K]`` of each holder in this replica."""
        top_k, last = self.config.top_k, self.config.num_experts - 1
        found: list[Tensor] = []
        for holder in self.holders:
            shape = (tokens[holder], top_k)
            generator = torch.Generator().manual_seed(97 + holder)
            drawn = torch.randint(-1, last + 1, shape, generator=generator)
            if pattern == "skewed":  # one of many, then single tokens (vllm-ascend#14926)
                drawn = torch.where(torch.arange(shape[0])[:, None] % 4 == 3, drawn, 0)
            elif pattern != "any":
                drawn = drawn.fill_({"first": 0, "last": last, "none": -1}[pattern])
            found.append(drawn)
        return found

    @property
    def holders(self) -> range:
        """Those of this replica, by their number among all."""
        first = self.groups.dp_rank * self.per_replica
        return range(first, first + self.per_replica)

    def exact(self, ids: list[Tensor]) -> Case:
        """Exact rows of all holders of this replica, one after the other."""
        config = self.config
        sizes = (config.num_experts, config.hidden_size, config.intermediate_size)
        cases = [
            exact_case(own, self.dtype, sizes, holder)
            for own, holder in zip(ids, self.holders, strict=True)
        ]
        joined = {n: torch.cat([getattr(c, n) for c in cases]) for n in ("x", "ids", "topk")}
        whole = replace(cases[0], **joined)
        self.layer.load_full_weights(whole.w13, whole.w2)
        return whole

    def own(self, whole: Case, ids: list[Tensor]) -> slice:
        """Where this rank's tokens lie in what all holders have."""
        start = sum(len(i) for i in ids[: self.holder])
        return slice(start, start + len(ids[self.holder]))

    def run(self, case: Case) -> Tensor:
        """One forward in poisoned memory; nothing given is written to."""
        case = case.to(self.job.device)
        before = [t.clone() for t in case.tensors]
        poison(self.job.device, [*case.floats.values(), self.layer.w13], case.ids.numel())
        out = self.layer(case.x, case.ids, case.topk)
        for now, then in zip(case.tensors, before, strict=True):
            same = torch.equal(now.nan_to_num(77), then.nan_to_num(77))
            self.check(same, "an input was written to")
        return out

"""Contract tests of a transport, alone and over 2 and 4 processes on this machine.

    class TestMine(TransportConformance):
        backend = "mine"

Each of a backend's modes is tested by itself, over every width that it claims and that the ranks
allow. What is asserted, on every rank, is in ``on_ranks``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_core.config import Activation, ParallelConfig
from moe_core.conformance import on_ranks
from moe_core.conformance.pairs import check_pairs, partners
from moe_core.conformance.pool import ranks
from moe_core.conformance.rank import Job
from moe_core.conformance.strategies import ON_RANKS, routings
from moe_core.conformance.target import NOT_CLAIMED, NOT_HERE, PREFERRED, Conformance

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTHS = [
    ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    for ep, tp, dp in (
        (1, 1, 1),
        *((2, 1, 1), (1, 2, 1)),
        *((4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)),
    )
]
WIDTHS += [replace(w, rows="replicated") for w in WIDTHS if w.ep_size > 1 and w.dp_size == 1]
TOKENS = (5, 3, 0, 4)
"""Of the holders: one has none where there are three or more."""
MANY = (130, 1, 67, 0)
"""More than a buffer, a tile or a power of two holds, beside a rank with next to nothing."""
LIMIT = 30.0
"""Seconds for one task of a pool: what hangs is ended, and is a failure."""


def width_name(width: ParallelConfig) -> str:
    shown = {"ep": width.ep_size, "tp": width.tp_size, "dp": width.dp_size}
    text = "-".join(f"{k}{v}" for k, v in shown.items() if v > 1) or "local"
    return text + "-replicated" * (width.rows == "replicated")


class OnRanks(Conformance):
    """What transports and fused paths have in common."""

    role: ClassVar[str]
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 4)
    """World sizes to test with."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if not {"spec", "width"} <= set(metafunc.fixturenames):
            return
        if not self.backend:
            raise pytest.UsageError(f"{type(self).__name__} has no backend: set it to a spec")
        modes = [self.target.pinned(c) for c in self.target.of(self.role)]
        cases = [(spec, w) for spec in dict.fromkeys(modes) for w in self.widths(spec)]
        names = [
            width_name(w) if len(set(modes)) == 1 else f"{spec}-{width_name(w)}"
            for spec, w in cases
        ]
        metafunc.parametrize(("spec", "width"), cases, ids=names)

    def widths(self, spec: str) -> list[ParallelConfig]:
        """Those that the spec claims; that it refuses the others is for ``ClaimsConformance``."""
        return [
            w
            for w in WIDTHS
            if w.world_size in self.ranks
            and self.target.resolve(self.job(spec, w).config, w, spec=spec).ok
        ]

    def job(self, spec: str, width: ParallelConfig, **changes: Any) -> Job:
        """Sizes that the parts take, E not divisible by EP where that is claimed."""
        owner, tp = self.target, width.tp_size
        parts = [c for c in owner.of(self.role) if owner.pinned(c) == spec]
        uneven = all(c.part.offer.uneven_experts for c in parts)
        hidden = owner.fit("hidden_size", 8)
        share = owner.fit("intermediate_size", -(-2 * hidden // tp))
        asked: dict[str, Any] = {
            "hidden_size": hidden,
            "num_experts": 7 if uneven else 8,
            "top_k": 3,
            "combine": self.combines(spec)[0],
            **changes,
        }
        config = replace(owner.config(**asked), intermediate_size=share * tp)
        holders = width.dp_size * (width.ep_size if width.rows == "distinct" else 1)
        return Job(
            spec=spec,
            config=config,
            parallel=width,
            tokens=TOKENS[:holders],
            device=self.device,
            autograd=owner.autograd,
        )

    def combines(self, spec: str) -> list[str]:
        owner = self.target
        parts = [c for c in owner.of(self.role) if owner.pinned(c) == spec]
        return [str(v) for v in parts[0].part.offer.combine]

    def every(self, spec: str, width: ParallelConfig, **changes: Any) -> list[Job]:
        """One job per claimed dtype and kind of combine."""
        jobs = [
            self.job(spec, width, dtype=dtype, combine=combine, **changes)
            for dtype in self.target.dtypes
            for combine in self.combines(spec)
        ]
        return [j for j in jobs if self.target.resolve(j.config, width, spec=spec).ok]

    def best(self, spec: str, width: ParallelConfig, **changes: Any) -> list[Job]:
        """In the finest dtype that is claimed, with as much of a runner as is claimed."""
        dtypes = sorted(self.target.dtypes, key=["float64", *PREFERRED].index)
        for extra in ({"bias": True, "activation": Activation(limit=0.5)}, {"bias": True}, {}):
            jobs = [
                self.job(spec, width, dtype=dtypes[0], combine=combine, **extra, **changes)
                for combine in self.combines(spec)
            ]
            if all(self.target.resolve(j.config, width, spec=spec).ok for j in jobs):
                return jobs
        pytest.skip(f"{NOT_CLAIMED}{changes}")

    def on(self, task: Callable[[Job], None], jobs: list[Job] | Job) -> None:
        """On every rank of each job's world; a world of one is this process."""
        for job in [jobs] if isinstance(jobs, Job) else jobs:
            if job.parallel.world_size == 1:
                task(job)
            else:
                ranks(job.parallel.world_size).run(task, job, limit=LIMIT)

    # -- the tests

    def test_exact_numbers(self, spec: str, width: ParallelConfig) -> None:
        self.on(on_ranks.exact_numbers, self.every(spec, width))

    def test_numbers_and_gradients(self, spec: str, width: ParallelConfig) -> None:
        self.on(on_ranks.numbers, self.best(spec, width))

    def test_idle_ranks_keep_step(self, spec: str, width: ParallelConfig) -> None:
        jobs = [self.job(spec, width, combine=combine) for combine in self.combines(spec)]
        self.on(on_ranks.idle_steps, jobs)

    def test_large_batches(self, spec: str, width: ParallelConfig) -> None:
        # deepseek-ai/DeepEP#382: wrong from T = 128 on
        job = self.job(spec, width)
        self.on(on_ranks.large_batches, replace(job, tokens=MANY[: len(job.tokens)]))

    def test_bad_input_raises_on_every_rank(self, spec: str, width: ParallelConfig) -> None:
        if width.dp_size > 1:  # replicas don't meet in a forward
            width = replace(width, dp_size=1)
            if width.world_size not in self.ranks:
                pytest.skip(f"{NOT_HERE}needs {width.world_size} ranks")
        self.on(on_ranks.faults, self.job(spec, width))

    def test_placements(self, spec: str, width: ParallelConfig) -> None:
        self.on(on_ranks.placements, self.job(spec, width))

    def test_meta_device(self, spec: str, width: ParallelConfig) -> None:
        if torch.device(self.device).type != "cpu":
            pytest.skip(f"{NOT_HERE}a layer on the meta device is one for a CPU until it is moved")
        self.on(on_ranks.on_meta, self.job(spec, width))

    def test_layers_share_their_groups(self, spec: str, width: ParallelConfig) -> None:
        self.on(on_ranks.many_layers, self.job(spec, width))

    def test_parts_for_the_caller(self) -> None:
        """combine=per_rank at every width where several ranks hold the same rows."""
        asked = [
            self.job(spec, replace(width, final_sum="caller"), combine="per_rank")
            for spec in dict.fromkeys(self.target.pinned(c) for c in self.target.of(self.role))
            for width in self.widths(spec)
            if width.copies > 1
        ]
        jobs = [j for j in asked if self.target.resolve(j.config, j.parallel, spec=j.spec).ok]
        if not jobs:
            pytest.skip(f"{NOT_CLAIMED}final_sum=caller")
        self.on(on_ranks.parts, jobs)

    @ON_RANKS
    @given(data=st.data())
    def test_any_routing(self, spec: str, width: ParallelConfig, data: Any) -> None:
        job = self.job(spec, width)
        drawn = routings(job.config.num_experts, max_tokens=6, top_k=job.config.top_k)
        ids = [data.draw(drawn) for _ in job.tokens]
        self.on(on_ranks.exact_numbers, replace(job, ids=tuple(tuple(map(tuple, i)) for i in ids)))


class TransportConformance(OnRanks):
    """Subclass it and set ``backend`` to a spec; tests collect the subclass."""

    profile: ClassVar[str] = "transport"
    role: ClassVar[str] = "transport"

    def test_received_rows(self, spec: str, width: ParallelConfig) -> None:
        job = self.job(spec, width)
        # also with rows of two neighbours, whose order a detour over other ranks may turn round
        turned = replace(job, tokens=(*job.tokens[-1:], *job.tokens[:-1]))
        self.on(on_ranks.received_rows, [job, turned])

    def test_slots_are_summed_in_order(self, spec: str, width: ParallelConfig) -> None:
        if "per_slot" not in self.combines(spec):
            pytest.skip(f"{NOT_CLAIMED}combine=per_slot")
        jobs = self.every(spec, width)
        self.on(on_ranks.slot_order, [j for j in jobs if j.config.combine == "per_slot"])

    def test_bytes(self, spec: str, width: ParallelConfig) -> None:
        self.on(on_ranks.traffic, self.every(spec, width))

    def test_wire_dtypes(self, spec: str, width: ParallelConfig) -> None:
        """Each is one rounding of its own, and the bytes show it. (A local layer has none.)"""
        # rows that come home one by one come as they are: combine_dtype is that of sums
        combines = self.combines(spec)
        sums = "per_rank" if "per_rank" in combines else combines[0]
        jobs = [
            self.job(spec, width, combine=combine, **{name: dtype})
            for name, combine in (("dispatch_dtype", combines[-1]), ("combine_dtype", sums))
            for dtype in PREFERRED
        ]
        jobs = [j for j in jobs if self.target.resolve(j.config, width, spec=spec).ok]
        self.on(on_ranks.wire_dtypes, jobs)

    def test_handles(self, spec: str, width: ParallelConfig) -> None:
        self.on(on_ranks.handles, self.job(spec, width))

    def test_every_layout_that_it_gives_and_takes(self) -> None:
        """With each local runner, one layout each way at a time."""
        mine = self.target.of("transport")
        tried = check_pairs(self.target, mine, partners("runner") + self.target.of("runner"))
        reached = {(p.transport.label, p.path.dispatched, p.path.combined) for p in tried}
        given = {(c.label, layout) for c in mine for layout in c.part.gives}
        taken = {(c.label, layout) for c in mine for layout in c.part.takes}
        missing = given - {r[:2] for r in reached} | taken - {r[::2] for r in reached}
        if missing:
            pytest.skip(f"{NOT_HERE}no local runner meets {sorted(missing)}")

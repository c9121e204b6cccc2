"""The simulator of traffic: sums done by hand, then what real layers were seen to send."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_core import (
    ConfigError,
    InputError,
    MoEConfig,
    MoEError,
    MoELayer,
    ParallelConfig,
    Routing,
    trace,
)
from moe_core.cli import main
from moe_core.conformance.pool import ranks
from moe_core.interfaces import FusedPath
from moe_core.local import LocalTransport
from moe_core.placement import Placement
from moe_core.registry import register_backend, unregister_backend
from moe_core.tracing import LayerCall
from moe_core.traffic import Draw, Recorded, load_routing, save_routing, simulate
from moe_core.traffic.pictures import draw_links, draw_rows, save_pictures

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = MoEConfig(hidden_size=3, intermediate_size=4, num_experts=4, top_k=2)
TWO = ParallelConfig(ep_size=2)
# Experts 0 and 1 are on rank 0. Rank 0's tokens 1, 2 and 4 need rank 1, for 2, 1 and 2 slots.
IDS = [
    torch.tensor([[0, 1], [2, 3], [1, 2], [-1, -1], [3, 3]]),
    torch.tensor([[0, 0], [2, -1]]),
]
ROW = 3 * 4  # bytes
ALL_TO_ALL, REPLICATED = "nccl[mode=all_to_all]+torch", "nccl[mode=replicated]+torch"
HIERARCHICAL = "nccl[mode=hierarchical]+torch"


# ------------------------------------------------------------------------------------- by hand


def test_pairs_by_hand() -> None:
    t = simulate(SMALL, TWO, ALL_TO_ALL, routing=IDS)
    assert t.dispatch.tolist() == [[0, 3 * ROW], [1 * ROW, 0]]
    assert t.combine.tolist() == [[0, 1 * ROW], [3 * ROW, 0]]  # float32 sums, one per pair
    # int64 rows, slots and fault; a float32 weight and an int32 id for each of K = 2 slots
    assert t.meta.tolist() == [[0, 24 + 3 * 16], [24 + 1 * 16, 0]]
    assert t.rows.tolist() == [3 + 2, 5 + 1]
    assert t.rows_per_expert.tolist() == [1 + 2, 2, 2 + 1, 3]
    assert t.imbalance == 6 / 5.5
    assert (t.bound, t.payload_over_bound) == (4 * ROW, 1.0)
    # What stays needs room too: rank 0 keeps 2 tokens and gets 1, and 5 sums come to it.
    assert t.buffers.tolist() == [3 * ROW + 3 * 16 + 48 + 5 * ROW, 4 * ROW + 4 * 16 + 48 + 2 * ROW]
    assert t.summed.tolist() == [0, 0]


def test_slots_come_home_one_by_one() -> None:
    config = replace(SMALL, dtype="bfloat16", combine="per_slot", combine_dtype="float32")
    t = simulate(config, TWO, ALL_TO_ALL, routing=IDS)
    assert t.dispatch.tolist() == [[0, 3 * 6], [1 * 6, 0]]
    assert t.combine.tolist() == [[0, 2 * 6], [5 * 6, 0]]  # rows as they are: bfloat16


def test_everything_goes_everywhere() -> None:
    t = simulate(SMALL, TWO, REPLICATED, routing=IDS)
    off = torch.tensor([[0, 1], [1, 0]])
    # 5 tokens are the most; ids are two int64 per slot (rank, place), the count comes with a flag
    assert t.dispatch.equal(off * 5 * ROW)
    assert t.combine.equal(off * 5 * ROW)
    assert t.meta.equal(off * (16 + 5 * 2 * 16 + 5 * 2 * 4))
    assert t.rows.tolist() == [5, 6]
    assert t.payload_over_bound == 10 / 4
    per_slot = simulate(replace(SMALL, combine="per_slot"), TWO, REPLICATED, routing=IDS)
    assert per_slot.combine.equal(off * 5 * 2 * ROW)


def test_replicated_rows_are_summed_and_not_sent() -> None:
    parallel = ParallelConfig(ep_size=2, tp_size=2, rows="replicated")
    t = simulate(SMALL, parallel, REPLICATED, routing=IDS[:1])
    assert (int(t.dispatch.sum()), int(t.combine.sum()), t.bound) == (0, 0, 0)
    assert t.payload_over_bound is None
    assert t.rows.tolist() == [3, 3, 5, 5]  # ranks 0 and 1 are the slices of ep rank 0
    # over ep 5 sums, over tp as many and a fault flag
    assert t.summed.tolist() == [2 * 5 * ROW + 8] * 4


def test_a_row_crosses_to_a_node_once() -> None:
    """Four ranks of one expert each on two nodes. Rank 0's tokens need node 1 twice, ranks 2 and 3
    two and one times; rank 3's need node 0 once, for both of its ranks."""
    parallel = ParallelConfig(ep_size=4)
    none = torch.empty(0, 2, dtype=torch.int64)
    ids = [torch.tensor([[2, 3], [1, 2], [0, 0]]), none, none, torch.tensor([[0, 1]])]
    straight = simulate(SMALL, parallel, ALL_TO_ALL, routing=ids, ranks_per_node=2)
    assert (straight.dispatch / ROW).tolist() == [
        [0, 1, 2, 1],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 1, 0, 0],
    ]
    assert straight.between_nodes(straight.dispatch).tolist() == [[ROW, 3 * ROW], [2 * ROW, 0]]
    assert straight.node_bound.tolist() == [[0, 2 * ROW], [ROW, 0]]
    assert straight.node_payload_over_bound == 5 / 3

    by_node = simulate(SMALL, parallel, HIERARCHICAL, routing=ids, ranks_per_node=2)
    # 0 → 2 (its place on node 1) two rows, of which one goes on to 3; 3 → 1, which sends it to 0
    assert (by_node.dispatch / ROW).tolist() == [
        [0, 1, 2, 0],
        [0 + 1, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 1, 0, 0],
    ]
    assert by_node.combine.equal(by_node.dispatch.t())
    assert by_node.node_payload_over_bound == 1.0
    assert by_node.rows.equal(straight.rows)
    slots = simulate(
        replace(SMALL, combine="per_slot"), parallel, HIERARCHICAL, routing=ids, ranks_per_node=2
    )
    # nothing is summed on the way: 3 slots come home from node 1, and 2 from node 0
    assert (slots.combine / ROW).tolist() == [
        [0, 1, 0, 0],
        [1, 0, 0, 2],
        [3, 0, 0, 0],
        [0, 0, 1, 0],
    ]


def test_tensor_and_data_parallel_ranks_send_side_by_side() -> None:
    parallel = ParallelConfig(ep_size=2, tp_size=2, dp_size=2)
    t = simulate(SMALL, parallel, ALL_TO_ALL, routing=[*IDS, IDS[1], IDS[0]])
    want = torch.zeros(8, 8, dtype=torch.int64)
    # rank = (dp * 2 + ep) * 2 + tp; the second replica has the parts the other way round:
    # its ep rank 0 sends the one row of [2, -1], and ep rank 1 those of [0, 1] and [1, 2]
    for tp in range(2):
        want[tp, 2 + tp], want[2 + tp, tp] = 3 * ROW, 1 * ROW
        want[4 + tp, 6 + tp], want[6 + tp, 4 + tp] = 1 * ROW, 2 * ROW
    assert t.dispatch.equal(want)
    assert t.rows.tolist() == [5, 5, 6, 6, 5, 5, 6, 6]
    assert t.rows_per_expert.tolist() == [6, 4, 6, 6]
    assert t.summed.tolist() == [n * ROW + 8 for n in (5, 5, 2, 2, 2, 2, 5, 5)]


def test_one_rank_sends_nothing() -> None:
    t = simulate(SMALL, None, "torch", tokens=4)
    assert t.links == {}
    assert t.rows.tolist() == [8]
    assert (int(t.dispatch.sum()), t.payload_over_bound) == (0, None)
    assert simulate(SMALL, None, "torch", tokens=0).imbalance is None


def test_balanced_routing_is_balanced() -> None:
    """What another simulator got wrong: with E=256, K=8 over 16 ranks the odd ones were idle."""
    config = replace(SMALL, num_experts=256, top_k=8)
    one = ParallelConfig(ep_size=16)
    t = simulate(config, one, ALL_TO_ALL, routing="balanced", tokens=[8] + [0] * 15)
    assert t.rows.tolist() == [4] * 16
    all_of_them = simulate(config, one, ALL_TO_ALL, routing="balanced", tokens=8)
    assert all_of_them.rows.tolist() == [64] * 16
    assert all_of_them.dispatch.equal((1 - torch.eye(16, dtype=torch.int64)) * 4 * ROW)
    # ranks go on where the one before stopped, so that few tokens each are balanced as well
    few = simulate(config, one, ALL_TO_ALL, routing="balanced", tokens=[1, 0, 1] + [0] * 13)
    assert few.rows.tolist() == [1] * 16
    assert few.rows_per_expert[::16].tolist() == [1] * 16  # the first one of each rank


def test_hot_expert() -> None:
    t = simulate(SMALL, TWO, ALL_TO_ALL, routing="hot", tokens=50)
    assert int(t.rows_per_expert[0]) == 100
    assert t.dispatch[1, 0] == 50 * ROW
    single = simulate(replace(SMALL, top_k=1), TWO, ALL_TO_ALL, routing="hot", tokens=50)
    assert single.rows.tolist() == [100, 0]
    assert single.imbalance == 2.0


# -------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("text", ["uniform", "zipf:0.7", "zipf:1.2", "zipf:6", "zipf:60", "hot"])
def test_choices_of_a_token_differ(text: str) -> None:
    for experts, top_k, tokens in ((256, 8, 300), (8, 8, 50), (8, 1, 5), (5, 4, 0)):
        sampler = Draw.parse(text, seed=3).sampler(Placement(experts), top_k)
        ids = sampler.ids(2, tokens, 0)
        assert (ids.shape, ids.dtype) == ((tokens, top_k), torch.int64)
        assert ids.is_contiguous()
        assert not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < experts
        if tokens:
            assert int((ids.sort(1).values.diff(dim=1) == 0).sum()) == 0
        assert torch.equal(ids, sampler.ids(2, tokens, 0))
        if top_k < experts and tokens and text not in ("zipf:60", "hot"):
            assert not torch.equal(ids, sampler.ids(3, tokens, 0))


@pytest.mark.parametrize("offers", [4, 1])
def test_zipf_draws_without_returning(offers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert of popularity r weighs r**-s; (a, b, c) comes with w_a / all * w_b / (all - w_a) and
    so on, however often a choice that is taken has to be drawn again."""
    monkeypatch.setattr("moe_core.traffic.draws.OFFERS", offers)
    if offers == 1:
        monkeypatch.setattr("moe_core.traffic.draws.ROUNDS", 0)  # all by Gumbel noise
    count, exponent = 60_000, 1.5
    sampler = Draw("zipf", exponent, seed=1).sampler(Placement(4), 3)
    ids = sampler.ids(0, count, 0)
    weights = [r**-exponent for r in (1, 2, 3, 4)]
    popularity = torch.bincount(ids[:, 0], minlength=4).argsort(descending=True).tolist()
    for first in range(4):
        for second in set(range(4)) - {first}:
            for third in set(range(4)) - {first, second}:
                left, chance = sum(weights), 1.0
                for rank in (first, second, third):
                    chance *= weights[rank] / left
                    left -= weights[rank]
                wanted = torch.tensor([popularity[r] for r in (first, second, third)])
                seen = int((ids == wanted).all(1).sum())
                sigma = math.sqrt(count * chance * (1 - chance))
                assert abs(seen - count * chance) < 5 * sigma, (first, second, third)


def test_uniform_is_uniform() -> None:
    config = replace(SMALL, num_experts=64, top_k=4)
    t = simulate(config, ParallelConfig(ep_size=8), ALL_TO_ALL, routing="uniform", tokens=2000)
    mean = 8 * 2000 * 4 / 64
    assert float(t.rows_per_expert.double().sub(mean).abs().max()) < 5 * math.sqrt(mean)
    # a token needs a rank unless all of its 4 choices are among the 56 experts elsewhere
    share = 1 - math.comb(56, 4) / math.comb(64, 4)
    rows = t.dispatch[0, 1:] / ROW
    assert float((rows - 2000 * share).abs().max()) < 5 * math.sqrt(2000 * share)


@pytest.mark.parametrize(
    "text", ["zipf", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "even", "hot:1"]
)
def test_wrong_draws_are_told(text: str) -> None:
    with pytest.raises(InputError, match=r"zipf:S"):
        Draw.parse(text)


# ---------------------------------------------------------------------- simulated = measured


@dataclass(frozen=True)
class Job:
    """``tokens`` per holder; ``options``: of the layer. Every rank draws the same ids."""

    config: MoEConfig
    parallel: ParallelConfig
    spec: str
    tokens: tuple[int, ...]
    placement: Placement | None = None
    masked: bool = False
    ranks_per_node: int | None = None

    def parts(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        generator = torch.Generator().manual_seed(7)
        width = (self.config.num_experts, self.config.top_k)
        drawn: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for count in self.tokens:
            # -1 one time in E + 1, and duplicates
            ids = torch.randint(-1, width[0], (count, width[1]), generator=generator)
            ids[::4] = ids[::4, :1]
            mask = torch.rand(count, generator=generator) < 0.7 if self.masked else None
            drawn.append((ids, mask))
        return drawn


@dataclass(frozen=True)
class Seen:
    """Of one rank: what its trace says, bytes that went into sums, bytes that arrived in exchanges,
    rows that its runner was given."""

    links: dict[str, list[list[int]]]
    rows_per_expert: list[int]
    summed: int = 0
    arrived: int = 0
    rows: int = 0


@contextmanager
def watched(layer: MoELayer) -> Iterator[dict[str, int]]:
    """Counts where torch is called, and at the runner's door."""
    found = {"summed": 0, "arrived": 0, "rows": 0}
    runner: Any = layer.experts.pipeline.runner
    run = runner.run
    names = ("all_reduce", "all_to_all_single", "all_gather_into_tensor")
    real = {name: getattr(dist, name) for name in names}

    def counting(name: str, key: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found[key] += tensor.numel() * tensor.element_size()
            return real[name](tensor, *args, **kwargs)

        return call

    def counting_run(record: Any, weights: Any) -> Any:
        found["rows"] += int(record.tokens_per_expert.sum())
        return run(record, weights)

    runner.run = counting_run
    try:
        for name in names:
            setattr(dist, name, counting(name, "summed" if name == "all_reduce" else "arrived"))
        yield found
    finally:
        for name in names:
            setattr(dist, name, real[name])
        del runner.run


def run_layers(jobs: list[Job], folder: str) -> list[Seen]:
    """Each job's layer, once, on this rank; the routing of all ranks is saved."""
    seen: list[Seen] = []
    for index, job in enumerate(jobs):
        if job.ranks_per_node is not None:
            os.environ["MOE_RANKS_PER_NODE"] = str(job.ranks_per_node)
        try:
            layer = MoELayer(
                job.config, job.parallel, job.spec, inference=True, placement=job.placement
            )
        finally:
            os.environ.pop("MOE_RANKS_PER_NODE", None)
        groups, distinct = layer.experts.groups, job.parallel.rows == "distinct"
        holder = groups.dp_rank * job.parallel.ep_size + groups.ep_rank
        ids, mask = job.parts()[holder if distinct else groups.dp_rank]
        x = torch.randn(len(ids), job.config.hidden_size).to(layer.experts.dtype)
        routing = Routing(ids, torch.rand(ids.shape))
        with torch.no_grad(), trace() as tracer, watched(layer) as counted:
            layer(x, token_mask=mask, routing=routing)
        (call,) = tracer.calls
        tracer.save_routing(Path(folder) / f"{index}.safetensors")
        seen.append(Seen(call.traffic, call.rows_per_expert, **counted))
    return seen


def check(jobs: list[Job], folder: Path) -> None:
    """Every kind of exchange, each pair of ranks, to the byte; from ids and from the saved file."""
    world = jobs[0].parallel.world_size
    by_rank = ranks(world).run(run_layers, jobs, str(folder), limit=120)
    for index, job in enumerate(jobs):
        seen = [answers[index] for answers in by_rank]
        saved = load_routing(folder / f"{index}.safetensors")
        own = Recorded(*zip(*job.parts(), strict=True))
        for routing in (own, *saved):
            got = simulate(
                job.config,
                job.parallel,
                job.spec,
                routing=routing,
                placement=job.placement,
                ranks_per_node=job.ranks_per_node,
            )
            kinds = {kind for one in seen for kind in one.links} | set(got.links)
            for kind in kinds:
                zeros = [0] * world
                real = [
                    one.links[kind][r] if kind in one.links else zeros for r, one in enumerate(seen)
                ]
                simulated = got.links[kind].tolist() if kind in got.links else [zeros] * world
                assert simulated == real, (job, kind)
            assert got.summed.tolist() == [one.summed for one in seen], job
            if job.parallel.ep_size > 1:  # alone, a rank keeps its rows without torch's help
                assert got.buffers.tolist() == [one.arrived for one in seen], (job, routing)
            assert got.rows.tolist() == [one.rows for one in seen], job
            experts = torch.tensor([one.rows_per_expert for one in seen])
            copies = world // (len(job.tokens))
            assert got.rows_per_expert.equal(experts.sum(0) // copies), job


WIDTHS = [(2, 1, 1), (1, 2, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
TOKENS = {1: (5,), 2: (5, 3), 4: (9, 0, 1, 6)}
CONFIG = MoEConfig(hidden_size=6, intermediate_size=8, num_experts=7, top_k=3)


@pytest.mark.parametrize(("ep", "tp", "dp"), WIDTHS)
def test_simulated_is_measured(ep: int, tp: int, dp: int, tmp_path: Path) -> None:
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    tokens = TOKENS[ep * dp]
    jobs = [
        Job(replace(CONFIG, combine=combine, **dtypes), parallel, spec, tokens)
        for spec in (ALL_TO_ALL, REPLICATED)
        for combine in ("per_rank", "per_slot")
        for dtypes in (
            {"dtype": "float64"},
            {"dtype": "float64", "combine_dtype": "float32"},
            {"dtype": "bfloat16"},
            {"dispatch_dtype": "bfloat16", "combine_dtype": "float64"},  # 2, 8, and rows of 4
        )
    ]
    jobs.append(Job(CONFIG, parallel, ALL_TO_ALL, (0,) * len(tokens)))
    jobs.append(Job(CONFIG, parallel, REPLICATED, (0,) * len(tokens)))
    check(jobs, tmp_path)


@pytest.mark.parametrize(("ep", "tp", "dp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_simulated_is_measured_for_all_that_changes_a_routing(
    ep: int, tp: int, dp: int, tmp_path: Path
) -> None:
    """Capacity, masked padding, replicas, holes, shared experts, replicated rows."""
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    slots = (0, 1, 2, 3, 4, 5, 6, 0, 3, 3, 0)
    shared = {"num_shared_experts": 1}
    base = Job(CONFIG, parallel, ALL_TO_ALL, TOKENS[ep * dp])
    jobs = [
        replace(base, config=replace(CONFIG, capacity_factor=0.5), masked=True),
        replace(
            base, config=replace(CONFIG, capacity_factor=0.7, capacity_policy="pad"), masked=True
        ),
        replace(base, placement=Placement(7, ep, slot_experts=slots)),
        replace(base, placement=Placement(7, ep, holes=True)),
        replace(base, config=replace(CONFIG, shared_placement="slots", **shared)),
        replace(base, config=replace(CONFIG, shared_tp=True, **shared)),
    ]
    jobs += [replace(job, spec=REPLICATED) for job in jobs]
    everywhere, parts = replace(parallel, rows="replicated"), {"final_sum": "caller"}
    jobs.append(replace(base, parallel=replace(parallel, **parts)))
    jobs.append(
        replace(base, parallel=replace(everywhere, **parts), spec=REPLICATED, tokens=TOKENS[dp])
    )
    jobs += [
        replace(job, parallel=everywhere, spec=REPLICATED, tokens=TOKENS[dp])
        for job in (
            *jobs[:6],
            replace(base, config=replace(CONFIG, combine="per_slot")),
            replace(base, config=replace(CONFIG, combine_dtype="float64")),
        )
    ]
    check(jobs, tmp_path)


@pytest.mark.parametrize(("ep", "tp", "per_node"), [(4, 1, 2), (4, 1, 1), (2, 2, 2), (2, 1, 1)])
def test_simulated_is_measured_over_nodes(ep: int, tp: int, per_node: int, tmp_path: Path) -> None:
    parallel = ParallelConfig(ep_size=ep, tp_size=tp)
    slots = Placement(7, ep, slot_experts=(0, 1, 2, 3, 4, 5, 6, 0, 3, 3, 0))
    base = Job(CONFIG, parallel, HIERARCHICAL, TOKENS[ep], ranks_per_node=per_node)
    jobs = [
        base,
        replace(base, config=replace(CONFIG, combine="per_slot", dtype="bfloat16")),
        replace(base, placement=slots),
        replace(base, tokens=(0,) * ep),
        replace(base, spec=ALL_TO_ALL),
    ]
    check(jobs, tmp_path)


# ------------------------------------------------------------------------- what others bring


class Slots(LocalTransport):
    """A third party's: it says which rows it sends and nothing else."""

    payload = "slots"


class Nodes(LocalTransport):
    payload = "nodes"


class Odd(LocalTransport):
    payload = "some"


class Whole(FusedPath):
    def forward(self, hidden_states: Any, routing: Any, weights: Any) -> Any:
        raise AssertionError("nothing is run")


def offer(name: str, role: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Registers ``Slots`` and so on as a backend over any ep group; ``more``: of its offer."""
    monkeypatch.setitem(sys.modules, "of_others", sys.modules[__name__])
    widths = {n: {"min": 1} for n in ("ep_size", "tp_size", "dp_size")}
    part: dict[str, Any] = {
        "role": role,
        "target": f"of_others:{name}",
        "offer": {
            "autograd": True,
            "rows": ["distinct"],
            "uneven_experts": True,
            **widths,
            **more,
        },
    }
    if role == "transport":
        part |= {"gives": ["rank_grouped"], "takes": ["slot_list"]}
        part |= {"pays": ["slot_sum", "rank_sum", "tp_sum"], "may_pay": ["weight"]}
    else:
        part |= {"pays": ["weight", "slot_sum", "rank_sum", "tp_sum"]}
    register_backend({"name": name.lower(), "api": "1.0", "summary": "", "parts": [part]})


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = {"Slots": "transport", "Nodes": "transport", "Odd": "transport", "Whole": "fused"}
    for name, role in names.items():
        offer(name, role, monkeypatch)
    yield
    for name in names:
        unregister_backend(name.lower())


def test_rows_are_known_from_the_payload_alone(others: None) -> None:
    t = simulate(SMALL, TWO, "slots+torch", routing=IDS)
    assert t.dispatch.tolist() == [[0, 5 * ROW], [2 * ROW, 0]]
    assert t.combine.tolist() == [[0, 2 * ROW], [5 * ROW, 0]]
    assert (int(t.meta.sum()), int(t.summed.sum())) == (0, 0)
    assert t.payload_over_bound == 7 / 4
    ids = [torch.tensor([[2, 3]]), *[torch.empty(0, 2, dtype=torch.int64)] * 3]
    nodes = simulate(SMALL, ParallelConfig(ep_size=4), "nodes+torch", routing=ids, ranks_per_node=2)
    assert (nodes.dispatch / ROW).tolist() == [[0, 0, 1, 0], [0] * 4, [0, 0, 0, 1], [0] * 4]
    assert nodes.combine.equal(nodes.dispatch.t())


def test_what_cannot_be_told_is_refused(others: None) -> None:
    with pytest.raises(MoEError, match=r"payload 'some'.*override traffic"):
        simulate(SMALL, TWO, "odd+torch", routing=IDS)
    with pytest.raises(MoEError, match=r"override traffic"):
        simulate(SMALL, TWO, "whole", routing=IDS)
    assert simulate(SMALL, None, "whole", tokens=3).links == {}  # alone it sends nothing
    six = ParallelConfig(ep_size=6)
    with pytest.raises(MoEError, match=r"6 ranks doesn't lie evenly on 2 nodes"):
        simulate(replace(SMALL, num_experts=8), six, "nodes+torch", ranks_per_node=4)


# ---------------------------------------------------------------------------- recorded routing


def test_a_recording_of_one_rank_is_replayed_over_many(tmp_path: Path) -> None:
    """Its tokens, in order, in equal parts: 7 over 4 ranks are 2, 2, 2 and 1."""
    layer = MoELayer(SMALL, backend="torch", inference=True)
    ids = torch.tensor([[0, 1], [0, 1], [2, 3], [2, 3], [1, 0], [3, 2], [-1, 2]])
    with torch.no_grad(), trace() as seen:
        layer(torch.randn(7, 3), routing=Routing(ids, torch.rand(7, 2)))
        layer(torch.randn(1, 3), routing=Routing(ids[:1], torch.rand(1, 2)))
    seen.save_routing(tmp_path / "saved.safetensors")
    calls = load_routing(tmp_path / "saved.safetensors")
    assert [(c.num_tokens, c.num_experts, c.masks) for c in calls] == [
        (7, 4, (None,)),
        (1, 4, (None,)),
    ]
    assert calls[0].ids[0].equal(ids)
    t = simulate(SMALL, ParallelConfig(ep_size=4), ALL_TO_ALL, routing=calls[0])
    assert t.about["recorded_parts"] == 1
    assert t.about["tokens"] == 7
    assert (t.dispatch / ROW).tolist() == [[0, 2, 0, 0], [0, 0, 2, 2], [1, 1, 0, 1], [0, 0, 1, 0]]
    both = t + simulate(SMALL, ParallelConfig(ep_size=4), ALL_TO_ALL, routing=calls[1])
    assert (both.dispatch / ROW)[0].tolist() == [0, 3, 0, 0]
    assert both.rows.tolist() == [4, 4, 4, 3]
    assert (both.about["calls"], both.about["tokens"]) == (2, 8)
    assert both.buffers.equal(t.buffers)  # of the larger forward
    with pytest.raises(InputError, match="other widths"):
        _ = both + simulate(SMALL, TWO, ALL_TO_ALL, routing=calls[1])


def test_masked_tokens_stay_masked_when_they_move(tmp_path: Path) -> None:
    """Capacity is taken of real tokens: 4 of 8 here, so ceil(0.5 * 4 * 2 / 4) = 1 each."""
    config = replace(SMALL, capacity_factor=0.5)
    ids = torch.tensor([[0, 1]] * 8)
    mask = torch.tensor([True, False] * 4)
    layer = MoELayer(config, backend="torch", inference=True)
    with torch.no_grad(), trace() as seen:
        layer(torch.randn(8, 3), token_mask=mask, routing=Routing(ids, torch.rand(8, 2)))
    seen.save_routing(tmp_path / "saved.safetensors")
    (call,) = load_routing(tmp_path / "saved.safetensors")
    assert call.masks[0].equal(mask)
    halves = call.over(2)
    assert [m.tolist() for m in halves.masks] == [[True, False] * 2] * 2
    fresh = Recorded((ids,), (mask,)).over(2)  # ids before any capacity: one each from both halves
    assert simulate(config, TWO, ALL_TO_ALL, routing=fresh).rows_per_expert.tolist() == [2, 2, 0, 0]


def test_files_that_hold_no_routing_are_told(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    with pytest.raises(InputError, match=r"can't be read: No such file"):
        load_routing(path)
    path.write_text("no")
    with pytest.raises(InputError, match="is not a safetensors file"):
        load_routing(path)
    for tensors, about, message in (
        ({"other": torch.zeros(1)}, None, "holds no routing"),
        ({"topk_ids": torch.zeros(2, 2)}, None, r"must be int32 or int64 \[T, top_k\]"),
        ({"topk_ids": torch.zeros(2, dtype=torch.int64)}, None, r"not torch.int64 \[2\]"),
        (
            {"topk_ids": IDS[0], "token_mask": torch.ones(2, dtype=torch.bool)},
            None,
            r"token_mask must be bool \[5\]",
        ),
        ({"a": IDS[0]}, {"moe_core_routing": "{"}, "can't be read"),
        (
            {"a": IDS[0]},
            {"moe_core_routing": '[{"name": "", "num_experts": 4, "parts": 1}]'},
            "0.0.topk_ids",
        ),
    ):
        save_file(tensors, path, about)
        with pytest.raises(InputError, match=message):
            load_routing(path)
    save_file({"topk_ids": IDS[0], "output": torch.zeros(5, 3)}, path)
    (call,) = load_routing(path)
    assert call.ids[0].equal(IDS[0])
    assert (call.num_experts, call.masks) == (None, (None,))


def test_a_trace_without_routing_is_not_saved(tmp_path: Path) -> None:
    with trace() as seen:
        pass
    with pytest.raises(InputError, match="no layer was called"):
        seen.save_routing(tmp_path / "x")
    seen.calls.append(LayerCall("mine", 4))
    with pytest.raises(InputError, match=r"call 0 \('mine'\) has no ids"):
        seen.save_routing(tmp_path / "x")
    seen.calls[0].routing = Routing(IDS[0], torch.rand(5, 2))
    with pytest.raises(InputError, match="can't be written"):
        seen.save_routing(tmp_path / "no" / "x")


def save_apart(folder: str) -> str:
    """Two ranks without expert parallelism each have tokens of their own; then one has a call more,
    and one asks to write where it can't be: all are told."""
    rank, path = dist.get_rank(), Path(folder) / "apart.safetensors"
    layer = MoELayer(SMALL, backend="torch", inference=True)
    with torch.no_grad(), trace() as seen:
        layer(
            torch.randn(len(IDS[rank]), 3), routing=Routing(IDS[rank], torch.rand(IDS[rank].shape))
        )
    seen.save_routing(path)
    said: list[str] = []
    for calls, where in (([*seen.calls] * (1 + rank), path), (seen.calls, path / "not" / "here")):
        try:
            save_routing(calls, where)
        except InputError as error:
            said.append(str(error))
    return "; ".join(said)


def test_ranks_save_together(tmp_path: Path) -> None:
    said = ranks(2).run(save_apart, str(tmp_path))
    assert said[0] == said[1]
    assert "ranks traced [1, 2] calls" in said[0]
    assert "can't be written" in said[0]
    (call,) = load_routing(tmp_path / "apart.safetensors")
    assert [part.tolist() for part in call.ids] == [part.tolist() for part in IDS]


# ------------------------------------------------------------------------------- what is asked


def test_faults_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(SMALL, TWO, ALL_TO_ALL, placement=Placement(5, 3), ranks_per_node=0)
    fields = {fault.field for fault in caught.value.faults}
    assert fields == {"placement.num_experts", "placement.ep_size", "ranks_per_node"}
    with pytest.raises(ConfigError, match="expert-per-rank"):
        simulate(SMALL, ParallelConfig(ep_size=5), ALL_TO_ALL)
    with pytest.raises(ConfigError, match=r"torch.transport | ep_size"):
        simulate(SMALL, TWO, "torch")
    for routing, tokens, message in (
        ("uniform", [1, 2, 3], r"2 of them .*not 3"),
        ("uniform", -1, "from -1"),
        (IDS, 4, "leave tokens out"),
        ([IDS[0][:, :1]] * 2, None, r"part 0: ids must be integers \[T, top_k=2\]"),
        ([IDS[0], IDS[1].float()], None, r"part 1: .*float32"),
        ([IDS[0], IDS[1] + 2], None, r"part 1: ids are 1 to 4, and must be in \[0, 4\)"),
        (Recorded(tuple(IDS), (None, None), num_experts=8), None, "num_experts=8"),
        ([], None, "holds no ids"),
        ([IDS[0], IDS[1][:, :1], IDS[0]], None, "part 1"),
    ):
        with pytest.raises(InputError, match=message):
            simulate(SMALL, TWO, ALL_TO_ALL, routing=routing, tokens=tokens)
    with pytest.raises(InputError, match="as they are"):
        simulate(SMALL, TWO, ALL_TO_ALL, policy="adjust")


def test_a_batch_that_a_backend_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest T is known, so a part with fixed buffers is asked with it."""
    offer("Slots", "transport", monkeypatch, max_tokens_per_rank={"min": 1, "max": 128})
    try:
        simulate(SMALL, TWO, "slots+torch", tokens=[128, 3])
        with pytest.raises(ConfigError, match="129"):
            simulate(SMALL, TWO, "slots+torch", tokens=[3, 129])
    finally:
        unregister_backend("slots")


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_work_grows_with_ranks_and_memory_with_links() -> None:
    """Twice the ranks, twice the calls of torch: nothing is done per pair of ranks. No tensor is
    larger than the links, or than one rank's tokens."""
    config = replace(SMALL, num_experts=256, top_k=8)
    found: list[int] = []
    for dp in (1, 2, 4):
        with Counting() as counting:
            parallel = ParallelConfig(ep_size=128, dp_size=dp)
            t = simulate(config, parallel, ALL_TO_ALL, routing="balanced", tokens=64)
        found.append(counting.calls)
        assert counting.largest == max((dp * 128) ** 2, 64 * 256)
        assert int(t.rows.sum()) == dp * 128 * 64 * 8
    assert found[1] < 2.1 * found[0]
    assert found[2] < 2.1 * found[1]


def test_2048_ranks() -> None:
    slots = tuple(range(256)) * 8
    config = replace(SMALL, num_experts=256, top_k=8)
    t = simulate(
        config,
        ParallelConfig(ep_size=2048),
        ALL_TO_ALL,
        routing="balanced",
        tokens=2,
        ranks_per_node=8,
        placement=Placement(256, 2048, slot_experts=slots),
    )
    assert (t.world_size, t.num_nodes) == (2048, 256)
    assert int(t.rows.sum()) == 2048 * 2 * 8
    assert int(t.dispatch.sum()) == t.bound
    assert t.between_nodes(t.dispatch).sum() == t.dispatch.sum()
    shown = json.loads(json.dumps(t.to_dict()))
    assert shown["links"] is None
    assert len(shown["rows_per_rank"]) == 2048
    assert len(shown["node_links"]["dispatch"]) == 256


# ----------------------------------------------------------------------------------- pictures


def picture(path: Path) -> torch.Tensor:
    """``[height, width, 3]`` in 0 to 1."""
    from matplotlib.image import imread

    return torch.from_numpy(imread(path).copy())[..., :3].double()


def test_pictures_show_where_bytes_and_rows_go(tmp_path: Path) -> None:
    """Expert 0 is on rank 0: its column is dark and its bar is high."""
    t = simulate(
        replace(SMALL, num_experts=8, top_k=1),
        ParallelConfig(ep_size=8),
        ALL_TO_ALL,
        routing="hot",
        tokens=100,
        ranks_per_node=4,
    )
    assert [path.name for path in save_pictures(t, tmp_path / "new" / "folder")] == [
        "links.png",
        "rows.png",
    ]
    links, rows = (picture(tmp_path / "new" / "folder" / n) for n in ("links.png", "rows.png"))
    assert tuple(links.shape) == (600, 720, 3)
    assert tuple(rows.shape) == (408, 720, 3)
    dark = links.sum(2) < 1.2  # the darkest blue; not grey lines, light blue or the axes' black
    blue = dark & (links[..., 2] > links[..., 0] + 0.2)
    axes = blue[:, :620]  # left of the colour bar
    columns = axes.any(0).nonzero().flatten()
    wide = int(columns.max() - columns.min()) + 1
    cell = (604 - 107) / 8  # pixels; see the figure's layout
    assert abs(wide - cell) < 0.15 * cell
    # seven of the eight rows: rank 0 sends itself nothing
    assert abs(int(axes[:, int(columns.min()) + 5].sum()) - 7 * cell) < 0.15 * cell
    bar = (rows - torch.tensor([0x3B, 0x76, 0xAF]) / 255).abs().sum(2) < 0.05
    heights = bar.sum(0)
    assert int(heights.max()) > 200
    assert heights.argmax() < 720 / 4
    assert int(heights[720 // 3 :].sum()) == 0


def test_a_hot_rank_is_seen_among_many(tmp_path: Path) -> None:
    """600 ranks are more than cells: a cell shows the most of 3 by 3 links, not the mean."""
    config = replace(SMALL, num_experts=600, top_k=1)
    t = simulate(config, ParallelConfig(ep_size=600), ALL_TO_ALL, routing="hot", tokens=4)
    axes = draw_links(t).axes
    (image,) = axes[0].images
    cells = torch.from_numpy(image.get_array().data)
    assert tuple(cells.shape) == (200, 200)
    assert cells[:, 0].unique().tolist() == [4 * ROW]
    assert int((cells[:, 1:] != 0).sum()) == 0
    assert axes[1].get_ylabel() == "bytes per link, the most of 3 by 3 links"
    bars: Any = draw_rows(t).axes[0].patches[0]
    assert bars.get_data().values.tolist() == [2400.0] + [0.0] * 199


def test_pictures_of_nothing(tmp_path: Path) -> None:
    for parallel in (TWO, ParallelConfig()):
        assert len(save_pictures(simulate(SMALL, parallel, tokens=0), tmp_path)) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="pictures can't be written"):
        save_pictures(simulate(SMALL, TWO, tokens=1), tmp_path / "file")


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["simulate", "--png", str(tmp_path / "p")]) == 2
    assert 'pip install "moe-core[bench]"' in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


# ----------------------------------------------------------------------------------- command


SMALL_FLAGS = ["--hidden-size", "3", "--intermediate-size", "4", "--num-experts", "4"]


def command(capsys: pytest.CaptureFixture[str], *args: Any, code: int = 0) -> str:
    assert main(["simulate", *SMALL_FLAGS, *map(str, args)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_command_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = tmp_path / "ids.safetensors", tmp_path / "all.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({"topk_ids": torch.cat(IDS)}, path)
    flags = ("--backend", ALL_TO_ALL, "--ep", 2, "--routing", path)
    text = command(capsys, *flags, "--json", "--output", out, "--png", tmp_path)
    found = json.loads(text)
    ids = torch.cat(IDS)
    want = simulate(SMALL, TWO, ALL_TO_ALL, routing=[ids[:4], ids[4:]])
    assert {k: found[k] for k in want.to_dict() if k != "routing"} == {
        k: v for k, v in want.to_dict().items() if k not in ("routing", "recorded_parts")
    } | {"recorded_parts": 1}
    assert found["links"]["dispatch"] == want.dispatch.tolist()
    assert [Path(p).name for p in found["pictures"]] == ["links.png", "rows.png"]
    saved = load_file(out)
    assert saved["links.combine"].equal(want.combine)
    assert saved["rows"].equal(want.rows)


def test_command_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--backend", ALL_TO_ALL, "--top-k", 1, "--ep", 2, "--tp", 2, "--routing", "hot")
    text = command(capsys, *flags, "--tokens", "1000,24", "--ranks-per-node", 2)
    for line in (
        "nccl+torch (nccl[mode=all_to_all].transport), 4 ranks (ep=2 tp=2 dp=1) on 2 nodes of 2",
        "routing    hot, 1,024 tokens",
        "rows       mean 512.0, worst 1,024 (rank 0), 2.00 times the mean",
        "experts    busiest 1,024 choices, 4.00 times the mean; 3 idle",
        # 24 rows of 12 bytes twice, for each tp rank: 576
        "dispatch         576 bytes",
        "one row per token and remote rank: 576 bytes, dispatch/bound = 1.00",
        "  rank 2       288.0         ·         ·         ·",
    ):
        assert line in text, text
    nothing = command(capsys, "--backend", "torch", "--tokens", 0)
    assert "rows       mean 0.0, worst 0 (rank 0)\n" in nothing
    assert "bound" not in nothing


def test_command_takes_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Expert 0 on both ranks: what was hot on rank 0 is even."""
    path = tmp_path / "plan.json"
    placement = Placement(4, 2, slot_experts=(0, 1, 2, 0, 3, 0))
    flags = ("--top-k", 1, "--backend", ALL_TO_ALL, "--ep", 2, "--routing", "hot", "--json")
    for data in (placement.to_dict(), {"placements": [placement.to_dict()]}):
        path.write_text(json.dumps(data))
        found = json.loads(command(capsys, *flags, "--tokens", 9, "--placement", path))
        assert found["rows_per_rank"] == [6, 12]  # one of three replicas, two of three
    path.write_text(json.dumps({"placements": [placement.to_dict()] * 2}))
    assert "holds 2 placements, for 1 calls" in command(capsys, *flags, "--placement", path, code=2)


def test_command_adds_calls_or_takes_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "calls.safetensors"
    calls = [LayerCall("a", 4), LayerCall("b", 4)]
    for call, ids in zip(calls, IDS, strict=True):
        call.routing = Routing(ids, torch.rand(ids.shape))
    save_routing(calls, path)
    flags = ("--backend", ALL_TO_ALL, "--ep", 2, "--json", "--routing", path)
    found = [
        json.loads(command(capsys, *flags, *more)) for more in ((), ("--call", 0), ("--call", 1))
    ]
    assert [f["tokens"] for f in found] == [7, 5, 2]
    assert found[0]["rows_per_rank"] == [
        a + b for a, b in zip(found[1]["rows_per_rank"], found[2]["rows_per_rank"], strict=True)
    ]
    assert "has calls 0 to 1" in command(capsys, *flags, "--call", 2, code=2)
    assert "--tokens and --seed: for a draw" in command(
        capsys, *flags, "--tokens", 3, "--seed", 1, code=2
    )


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--routing", "zipff"), 2, "zipf:S"),
        (("--tokens", "1,x"), 2, "numbers by commas"),
        (("--call", "1"), 2, "this one is drawn"),
        (("--placement", "/nowhere"), 2, "can't be read"),
        (("--backend", "torch", "--ep", "2"), 1, "ep_size: wanted 2"),
        (("--backend", "torhc"), 2, "did you mean 'torch'"),
    ],
)
def test_command_says_what_is_wrong(
    flags: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in command(capsys, *flags, code=code)

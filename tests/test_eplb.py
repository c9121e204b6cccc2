"""Plans from counts, against DeepSeek's published algorithm; and the counts themselves."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from moe_core import (
    ConfigError,
    Experts,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Routing,
)
from moe_core.balance import (
    arrivals,
    expert_load,
    max_over_mean,
    plan_placement,
    rank_loads,
    record_load,
)
from moe_core.balance.packing import part_twins
from moe_core.balance.plan import _aligned
from moe_core.cli import main
from moe_core.conformance.pool import ranks
from moe_core.placement import Placement
from moe_core.slot_map import SlotMap

ROOT = Path(__file__).resolve().parents[1]

# DeepSeek's example (github.com/deepseek-ai/EPLB, README.md) and what it prints there: two layers,
# 16 slots, 4 groups, 2 nodes, 8 GPUs.
EXAMPLE = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def deepseek(weights: list[int], slots: int, gpus: int, nodes: int, groups: int) -> Placement:
    """DeepSeek's algorithm, from its description: groups to nodes, replicas within each node, and
    these to its GPUs; every packing takes the heaviest first and puts it where least is."""

    def packed(loads: list[float], bins: int) -> list[list[int]]:
        size, found, totals = len(loads) // bins, [list[int]() for _ in range(bins)], [0.0] * bins
        for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
            into = min((b for b in range(bins) if len(found[b]) < size), key=totals.__getitem__)
            found[into].append(item)
            totals[into] += loads[item]
        return found

    size = len(weights) // groups
    totals = [sum(weights[g * size : g * size + size]) for g in range(groups)]
    slot_experts: list[int] = []
    for node in packed(totals, nodes):
        experts = [g * size + i for g in node for i in range(size)]
        copies = list(range(len(experts)))  # by place among the node's experts
        for _ in range(slots // nodes - len(experts)):
            per_slot = [weights[e] / copies.count(i) for i, e in enumerate(experts)]
            copies.append(per_slot.index(max(per_slot)))
        loads = [weights[experts[i]] / copies.count(i) for i in copies]
        for gpu in packed(loads, gpus // nodes):
            slot_experts += [experts[copies[item]] for item in gpu]
    return Placement(len(weights), gpus, tuple(slot_experts))


def zipf(seed: int, num_experts: int = 256) -> list[int]:
    """Expert number i of a random order has 10^6 / i^s tokens, s from 0.5 to 1.45."""
    order = [round(1e6 / (i + 1) ** (0.5 + 0.05 * seed)) for i in range(num_experts)]
    random.Random(seed).shuffle(order)
    return order


def twins(placement: Placement) -> int:
    held = [placement.experts_of(rank) for rank in range(placement.ep_size)]
    return sum(len(experts) - len(set(experts)) for experts in held)


# (slots, ranks, nodes, groups) for 256 experts
SHAPES = {"flat": (288, 32, 1, 1), "hierarchical": (288, 32, 4, 8), "bare": (256, 16, 1, 1)}


def test_the_oracle_prints_what_is_published() -> None:
    for weights, slots in zip(EXAMPLE, PUBLISHED, strict=True):
        assert deepseek(weights, 16, 8, 2, 4).slot_experts == tuple(slots)


def test_loads_by_hand() -> None:
    # 12 tokens of expert 0 on two slots of rank 0 and one of rank 1: 4 each
    placement = Placement(3, 2, (0, 0, 1, 2, 0, 2))
    assert rank_loads([12, 5, 2], placement) == [4 + 4 + 5, 1 + 4 + 1]
    assert max_over_mean([12, 5, 2], placement) == pytest.approx(13 / 9.5)
    assert max_over_mean([0, 0, 0], placement) == 1.0
    assert arrivals(Placement(3, 2, (0, 1, 2, 2)), placement) == [(1, 0)]
    assert arrivals(placement, Placement(3, 2, (2, 0, 2, 1))) == [(0, 2), (1, 1)]


def test_plans_by_hand() -> None:
    # two more slots: 6 -> 3 + 3 -> 2 + 2 + 2, so six slots of 2 tokens, two on each rank
    (plan,) = plan_placement([6, 2, 2, 2], 6, 3)
    assert rank_loads([6, 2, 2, 2], plan) == [4, 4, 4]
    assert [len(ids) for ids in plan.replicas()] == [3, 1, 1, 1]
    # 9 + 1, 8 + 2, 7 + 3, 6 + 4 is the only even way
    (plan,) = plan_placement([1, 2, 3, 4, 6, 7, 8, 9], 8, 4)
    assert {frozenset(plan.experts_of(rank)) for rank in range(4)} == {
        frozenset(pair) for pair in ((7, 0), (6, 1), (5, 2), (4, 3))
    }
    # balanced already: nothing moves
    assert plan_placement([[5] * 6, [0] * 6], 6, 3) == [Placement(6, 3)] * 2
    assert plan_placement([[3, 1], [1, 3]], 2, 2) == [Placement(2, 2)] * 2


@pytest.mark.parametrize("hierarchical", [False, True])
def test_deepseeks_example_is_at_least_as_balanced(hierarchical: bool) -> None:
    nodes, groups = (2, 4) if hierarchical else (1, 1)
    plan = plan_placement(EXAMPLE, 16, 8, nodes, groups)
    for weights, ours in zip(EXAMPLE, plan, strict=True):
        theirs = deepseek(weights, 16, 8, nodes, groups)
        assert max_over_mean(weights, ours) <= max_over_mean(weights, theirs) + 1e-12
        assert twins(ours) == 0
    assert plan == plan_placement(torch.tensor(EXAMPLE), 16, 8, nodes, groups)


@pytest.mark.parametrize("shape", SHAPES)
def test_zipf_loads_are_at_least_as_balanced(shape: str) -> None:
    slots, gpus, nodes, groups = SHAPES[shape]
    better = 0
    for seed in range(20):
        weights = zipf(seed)
        (ours,) = plan_placement(weights, slots, gpus, nodes, groups)
        theirs = deepseek(weights, slots, gpus, nodes, groups)
        assert ours.num_routed_slots == slots
        got, limit = max_over_mean(weights, ours), max_over_mean(weights, theirs)
        assert got <= limit * (1 + 1e-12), seed
        better += got < limit * (1 - 1e-4)
        assert twins(ours) == 0, seed
        homes = [{home // (gpus // nodes) for home in where} for where in places(ours)]
        for first in range(0, 256, 256 // groups):
            # a group's experts, replicas and all, are on one node
            assert nodes == 1 or len(set.union(*homes[first : first + 256 // groups])) == 1
    assert better >= {"flat": 15, "hierarchical": 19, "bare": 0}[shape]


def places(placement: Placement) -> list[set[int]]:
    """Per expert the ranks that hold it."""
    return [{placement.home(i)[0] for i in ids} for ids in placement.replicas()]


def test_no_expert_twice_on_a_rank() -> None:
    """deepseek-ai/EPLB#22: 256 experts and 32 replicas on 32 GPUs of 2 nodes, 16 groups."""
    found = 0
    for seed in range(4, 8):
        found += twins(deepseek(zipf(seed), 288, 32, 2, 16))
        (ours,) = plan_placement(zipf(seed), 288, 32, 2, 16)
        assert twins(ours) == 0
    assert found > 0
    # three slots per rank for two experts: one of them twice, and it can't be helped
    (forced,) = plan_placement([1, 1], 6, 2)
    assert twins(forced) == 2
    assert max_over_mean([1, 1], forced) == 1.0


def test_twins_part_where_they_can() -> None:
    # 2 + 2 | 1 + 1 | 9: a 2 for a 1 leaves 3 | 3 | 9, and no other swap leaves 9 the most
    parted = part_twins([4, 1, 1, 9], [[0, 0], [1, 2], [3]])
    assert [sorted(held) for held in parted] == [[0, 1], [0, 2], [3]]
    # 1 is twice on the bin that lacks 0: both pairs part
    parted = part_twins([1, 1], [[0, 0], [1, 1]])
    assert sorted(map(sorted, parted)) == [[0, 1], [0, 1]]
    assert part_twins([1, 1], [[0, 0, 1], [1, 1, 0]]) == [[0, 0, 1], [1, 1, 0]]


def test_what_can_stay_stays() -> None:
    assert _aligned([[0, 1], [2, 3]], [[3, 2], [1, 0]], 1) == [[3, 2], [1, 0]]
    # the nodes change places; then each rank keeps one expert, at its place
    bins, held = [[0, 1], [2, 3], [4, 5], [6, 7]], [[7, 4], [5, 6], [2, 0], [3, 1]]
    assert _aligned(bins, held, 2) == [[5, 4], [7, 6], [1, 0], [3, 2]]
    # more slots than before: what is there keeps its place
    assert _aligned([[1, 2, 0], [0, 3, 1]], [[3, 1], [2, 0]], 1) == [[3, 1, 0], [2, 0, 1]]


@st.composite
def problems(draw: Any) -> tuple[list[int], int, int, int, int]:
    nodes = draw(st.integers(1, 2))
    groups = nodes * draw(st.integers(1, 2))
    gpus = nodes * draw(st.integers(1, 3))
    num_experts = groups * draw(st.integers(1, 3))
    least = -(-num_experts // gpus)
    slots = gpus * draw(st.integers(least, least + 2))
    weights = draw(st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts))
    return weights, slots, gpus, nodes, groups


@given(problems())
@settings(max_examples=150, deadline=None)
def test_any_problem_has_a_plan_that_is_no_worse(
    problem: tuple[list[int], int, int, int, int],
) -> None:
    weights, slots, gpus, nodes, groups = problem
    (plan,) = plan_placement(*problem)
    hierarchical = (nodes, groups) if groups > 1 and nodes > 1 else (1, 1)
    theirs = deepseek(weights, slots, gpus, *hierarchical)
    assert plan.num_routed_slots == slots  # and a Placement has every expert
    assert max(rank_loads(weights, plan)) <= max(rank_loads(weights, theirs)) * (1 + 1e-12)
    assert plan_placement(*problem, current=[plan]) == [plan]  # nothing to gain: nothing moves


def test_small_problems_are_solved_exactly() -> None:
    for seed in range(6):
        weights = [random.Random(seed).randint(1, 30) for _ in range(6)]
        best = min(
            max(sum(weights[e] for e in order[i : i + 2]) for i in (0, 2, 4))
            for order in itertools.permutations(range(6))
        )
        (plan,) = plan_placement(weights, 6, 3)
        assert max(rank_loads(weights, plan)) == best


def test_a_plan_near_the_current_one_is_preferred() -> None:
    weights = zipf(10)
    (plan,) = plan_placement(weights, 288, 32)
    (again,) = plan_placement(weights, 288, 32, current=[plan])
    assert again == plan
    # a tenth of one expert's tokens more: a few experts move, not all
    changed = list(weights)
    changed[weights.index(max(weights))] += max(weights) // 10
    (near,) = plan_placement(changed, 288, 32, current=[plan])
    (far,) = plan_placement(changed, 288, 32)
    assert max_over_mean(changed, near) <= 1.01 * max_over_mean(changed, far)
    assert len(arrivals(plan, near)) < 60 < 200 < len(arrivals(plan, far))
    theirs = deepseek(changed, 288, 32, 1, 1)
    assert max_over_mean(changed, near) <= max_over_mean(changed, theirs)


def test_bad_requests_are_refused_with_all_faults() -> None:
    def told(*args: Any, **options: Any) -> dict[str, str]:
        with pytest.raises(ConfigError) as error:
            plan_placement(*args, **options)
        return {f.field: f.message for f in error.value.faults}

    assert told([[1] * 6], 5, 4, 3, 4) == {
        "num_slots": "every rank has equally many: a multiple of ep_size=4, such as 8",
        "num_nodes": "every node has equally many ranks: must divide ep_size=4",
        "num_groups": "must divide the 6 experts",
    }
    assert "3 groups can't be spread evenly over 2 nodes" in told([1] * 6, 6, 2, 2, 3)["num_groups"]
    assert told([1, 2], 2, 0) == {"ep_size": "must be an integer of at least 1"}
    assert list(told([1, 2], 2.0, "1", True)) == ["num_slots", "ep_size", "num_nodes"]
    for counts in (
        *([], [[]], [[1, 2], [1]], [1, -1], [1, float("nan")], [1, True], ["ab"], [1, [2]]),
        *(None, 3, "ab", {"counts": [1, 2]}, [1, None], [1, 10**400], [1e308, 1e308], [1, 2**63]),
        *(torch.tensor(3), torch.ones(1, 2, 2), [1j, 2]),
    ):
        assert list(told(counts, 2, 1)) == ["counts"]
    for current in (Placement(2), [{"num_experts": 2}], 5):
        assert list(told([1, 2], 2, 1, current=current)) == ["current"]
    faults = told([1, 2], 2, 1, current=[Placement(3), Placement(2)])
    assert "placements of 2 experts over 1 ranks" in faults["current"]


def test_counts_of_any_kind_are_read_alike() -> None:
    want = plan_placement([[5, 1, 1, 1], [1, 1, 1, 5]], 6, 2)
    ints = torch.tensor([[5, 1, 1, 1], [1, 1, 1, 5]])
    for counts in (ints, ints.float(), list(ints), ints.numpy(), [list(r) for r in ints.numpy()]):
        assert plan_placement(counts, 6, 2) == want
    assert plan_placement((row for row in ints.tolist()), 6, 2) == want
    assert plan_placement(ints[1], 6, 2) == plan_placement([*ints[1]], 6, 2) == want[1:]


def test_with_groups_on_nodes_a_nodes_slots_count() -> None:
    """Four experts, two groups, two nodes of two ranks: two experts fill six slots of a node, at
    most four of them without twins. Wherever they fit, 12 slots on four ranks need no twins."""
    placements = plan_placement([1] * 4, 12, 4, 2, 2) + plan_placement([1] * 4, 12, 4)
    twins = [sum(3 - len({*p.experts_of(r)}) for r in range(4)) for p in placements]
    assert twins == [4, 0]


def test_a_placement_survives_json() -> None:
    (plan,) = plan_placement(zipf(3, 16), 20, 4)
    assert Placement.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    for wrong in (
        [],
        {},
        {"num_experts": "4"},
        {"num_experts": 4, "slot_experts": 4},
        {"num_experts": 4, "slot_experts": [0, 1, 2, 3.0]},
        {"num_experts": 4, "slots": []},
        {"num_experts": 4, "holes": 1},
    ):
        with pytest.raises(ConfigError, match="placement"):
            Placement.from_dict(wrong)


# Which replica a token goes to.


def test_replicas_take_even_turns_on_every_rank() -> None:
    (plan,) = plan_placement([90, 10, 10, 10], 8, 4)  # expert 0 is everywhere
    hot = plan.replicas()[0]
    assert len(hot) == 4
    for rows in (1, 6, 8, 63):
        ids, weights = torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1)
        load: dict[int, int] = dict.fromkeys(hot, 0)
        for rank in range(4):
            mapped = SlotMap(plan, "cpu", rank).physical(Routing(ids, weights)).topk_ids
            own = [mapped.flatten().tolist().count(slot) for slot in hot]
            assert max(own) - min(own) <= 1
            for slot, count in zip(hot, own, strict=True):
                load[slot] += count
        assert set(load.values()) == {rows}  # 4 ranks, 4 replicas: even to the token
    # ranks that hold the same tokens choose alike
    together = [SlotMap(plan, "cpu", rank, replicated=True) for rank in range(4)]
    ids = torch.tensor([[0, 2], [1, 0], [0, 3]])
    chosen = [m.physical(Routing(ids, torch.ones(3, 2))).topk_ids.tolist() for m in together]
    assert chosen == [chosen[0]] * 4


def test_simulated_balanced_routing_is_even() -> None:
    """Case 97 (sglang#37741): 256 experts, 8 choices, 16 ranks, 8 tokens are 4 for each rank."""
    planned = plan_placement([[1] * 256, zipf(5)], 256, 16)
    for placement in planned:
        ids = torch.tensor(placement.balanced_ids(8, 8))
        slot_map = SlotMap(placement, "cpu")
        rank_of, _ = slot_map.homes(slot_map.physical(Routing(ids, torch.ones(8, 8))))
        assert torch.bincount(rank_of.flatten(), minlength=16).tolist() == [4] * 16


# Counts.

E, H = 6, 8


def layer(parallel: ParallelConfig | None = None, **changes: Any) -> MoELayer:
    torch.manual_seed(0)
    sizes = {"hidden_size": H, "intermediate_size": 8, "num_experts": E, "top_k": 2}
    wants = {"inference": changes.pop("inference", False)}
    return MoELayer(MoEConfig(**sizes | {"dtype": "float64"} | changes), parallel, **wants)


def forced(ids: list[list[int]]) -> Routing:
    return Routing(torch.tensor(ids), torch.ones(len(ids), 2, dtype=torch.float64))


IDS = [[0, 1], [0, -1], [5, 5], [0, 3]]


@pytest.mark.parametrize("inference", [False, True])
def test_load_counts_what_is_computed(inference: bool) -> None:
    model = layer(inference=inference)
    x = torch.randn(4, H, dtype=torch.float64)
    model(x, routing=forced(IDS))
    assert "expert_load" not in model.stats()
    with pytest.raises(ConfigError, match="layer 0='not counted': call record_load"):
        expert_load(model)
    record_load(model)
    model.eval()
    model(x, routing=forced(IDS))  # -1 counts nowhere, a duplicate twice
    assert expert_load(model) == [[3, 1, 0, 1, 0, 2]]
    mask = torch.tensor([True, True, False, True])
    model(x, token_mask=mask, routing=forced(IDS))
    model(x[:0])
    assert expert_load(model, keep=0.5) == [[6, 2, 0, 2, 0, 2]]
    assert model.stats()["expert_load"].tolist() == [3, 1, 0, 1, 0, 1]
    assert expert_load(model, keep=0) == [[3, 1, 0, 1, 0, 1]]
    assert expert_load(model) == [[0] * E]
    record_load(model, False)
    assert "expert_load" not in model.stats()


def test_dropped_slots_are_no_load() -> None:
    # room for ceil(4 tokens * 2 / 6 * 0.75) = 1 slot of each expert
    model = layer(capacity_factor=0.75)
    record_load(model)
    model(torch.randn(4, H, dtype=torch.float64), routing=forced(IDS))
    assert expert_load(model) == [[1, 1, 0, 1, 0, 1]]
    assert model.stats()["tokens_per_expert"].tolist() == [3, 1, 0, 1, 0, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_counts_once(reentrant: bool) -> None:
    model = layer()
    record_load(model)
    x = torch.randn(7, H, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        y: Any = checkpoint(model, x, use_reentrant=reentrant)
        y.sum().backward()
    chosen = torch.bincount(model.router(x).topk_ids.flatten(), minlength=E)
    assert expert_load(model) == [(2 * chosen).tolist()]


def test_counting_follows_the_layer() -> None:
    model = layer()
    record_load(model)
    model(torch.randn(4, H, dtype=torch.float64), routing=forced(IDS))
    model.float()
    assert expert_load(model) == [[3, 1, 0, 1, 0, 2]]
    assert not any("load" in name for name in model.state_dict())
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.randn(4, H), routing=Routing(torch.tensor(IDS), torch.ones(4, 2)))
    assert expert_load(model, keep=0) == [[6, 2, 0, 2, 0, 4]]


def count_heavily(rows: str) -> tuple[list[list[int]], list[int], list[int]]:
    """All but a few of 2304 tokens go to the same two experts."""
    parallel = ParallelConfig(ep_size=2, rows=rows)
    experts = Experts(
        MoEConfig(hidden_size=4, intermediate_size=4, num_experts=E, top_k=2),
        parallel,
        inference=True,
    )
    record_load(experts)
    number = 0 if rows == "replicated" else dist.get_rank()
    ids = torch.tensor([[1, 4]]).repeat(2304, 1)
    ids[number::500] = torch.tensor([2, 5])
    ids[7] = -1
    x = torch.ones(2304, 4)
    record, handle = experts.dispatch(x, ids, torch.ones(2304, 2))
    received = record.tokens_per_expert.tolist()  # pyright: ignore
    experts.combine(experts.run(record), handle)
    expected = torch.bincount(ids[ids >= 0], minlength=E).tolist()
    return expert_load(experts), expected, received


@pytest.mark.parametrize("rows", ["distinct", "replicated"])
def test_heavy_imbalance_is_counted_exactly(rows: str) -> None:
    """Case 48 (deepseek-ai/DeepEP#427): what is received is what was chosen."""
    results = ranks(2).run(count_heavily, rows)
    first, second = (expected for _, expected, _ in results)
    both = [a + b for a, b in zip(first, second, strict=True)]
    total = first if rows == "replicated" else both  # replicated rows are the same tokens
    assert [load for load, _, _ in results] == [[total]] * 2
    assert results[0][2] + results[1][2] == total  # three experts each
    assert max(total) > 2200


# The command.


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan-placement", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(EXAMPLE))
    words = (str(file), "--ep-size", "8", "--slots", "16", "--nodes", "2", "--groups", "4")
    code, out, err = plan(capsys, *words)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[1] == ["LAYER", "TOKENS", "BEFORE", "AFTER", "ARRIVE"]
    # contiguous over 8 ranks, 2 each for the first four: layer 0 has 90 + 132 | 40 + 61 | 104 + 165
    # | 39 + 4 | 73 | 56 | 183 | 86, the most 269 of 1033; layer 1 187 + 157 = 344 -> rank 3 of 1156
    assert rows[2][:3] == ["0", "1,033", f"{269 * 8 / 1033:.3f}"]
    assert rows[3][:3] == ["1", "1,156", f"{344 * 8 / 1156:.3f}"]

    code, out, _ = plan(capsys, *words, "--json")
    data = json.loads(out)
    loaded = [Placement.from_dict(d) for d in data["placements"]]
    assert loaded == plan_placement(EXAMPLE, 16, 8, 2, 4)
    assert [f"{layer['after']:.3f}" for layer in data["layers"]] == [rows[2][3], rows[3][3]]
    pairs = [(m["rank"], m["expert"]) for m in data["layers"][0]["moves"]]
    assert pairs == arrivals(Placement(12, 8), loaded[0])
    assert int(rows[2][4]) == len(pairs)

    now = tmp_path / "plan.json"
    now.write_text(out)
    code, out, _ = plan(capsys, *words, "--current", str(now))
    assert out.count(": none") == 2  # nothing to gain any more


def test_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "counts.json"
    for text, said in (
        ("[1, 2", "is not JSON"),
        ('{"load": [1]}', "must be a list, or an object with 'counts'"),
        ('{"counts": [[1, 2], [1]]}', "layers differ in their experts: [1, 2]"),
        ("[]", "holds nothing"),
        ("[[1], 2]", "isn't a number of tokens"),
        ("[1, NaN]", "isn't a number of tokens"),
        (f"[1, 1{'0' * 400}]", "isn't a number of tokens"),
        ("[1e308, 1e308]", "isn't a number of tokens"),
        ("[" * 100_000, "is not JSON"),
    ):
        file.write_text(text)
        code, out, err = plan(capsys, str(file), "--ep-size", "1")
        assert (code, out) == (2, "")
        assert said in err
        assert "Traceback" not in err
    code, _, err = plan(capsys, str(tmp_path / "none.json"), "--ep-size", "1")
    assert code == 2
    assert "No such file" in err
    file.write_text('{"counts": [3, 1, 1, 3]}')
    assert plan(capsys, str(file), "--ep-size", "2")[0] == 0
    code, _, err = plan(capsys, str(file), "--ep-size", "2", "--slots", "5")
    assert code == 2
    assert "num_slots=5: every rank has equally many: a multiple of ep_size=2, such as 6" in err
    (tmp_path / "now.json").write_text("[4]")
    code, _, err = plan(
        capsys, str(file), "--ep-size", "2", "--current", str(tmp_path / "now.json")
    )
    assert code == 2
    assert "layer 0.placement='4': must be an object" in err


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    file.write_text("[3, 1, 1, 3]")
    source = (
        "import sys; from moe_core.cli import main; "
        f"code = main(['plan-placement', {str(file)!r}, '--ep-size', '2']); "
        "assert code == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, timeout=60)


# The page.


def test_the_balance_table_is_what_comes_out() -> None:
    """Each cell of docs/balance.md, ours and DeepSeek's."""
    page = (ROOT / "docs/balance.md").read_text(encoding="utf-8")
    cell = r" ([\d.]+) \|"
    rows = re.findall(rf"^\| (example|Zipf) \| ([^|]*) \|{cell * 3}$", page, re.M)
    assert len(rows) == 2 * 2 + 4 * 3
    for kind, what, *shown in rows:
        _, number, policy = what.replace(",", "").split()
        if kind == "example":
            weights = EXAMPLE[int(number)]
            shape = (16, 8, *((2, 4) if policy == "hierarchical" else (1, 1)))
        else:
            weights = zipf(round((float(number) - 0.5) / 0.05))
            shape = SHAPES[policy]
        (ours,) = plan_placement(weights, *shape)
        every = (ours, deepseek(weights, *shape), Placement(len(weights), shape[1]))
        assert shown == [f"{max_over_mean(weights, p):.3f}" for p in every], what

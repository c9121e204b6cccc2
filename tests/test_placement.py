"""Logical experts, physical slots, ranks: the plain numbers, the device map, and what runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_core import (
    Activation,
    ConfigError,
    Experts,
    InputError,
    MoEConfig,
    MoEError,
    MoELayer,
    ParallelConfig,
    Request,
    RouterConfig,
    Routing,
    register_backend,
    trace,
)
from moe_core.conformance.pool import ranks
from moe_core.contracts import BuildContext, IdSpace
from moe_core.placement import Placement, router_kind
from moe_core.registry import unregister_backend
from moe_core.slot_map import SlotMap, remap_topk_for_shared_slots
from moe_nccl.all_to_all import AllToAllTransport

# E_e(x) = (e + 1) x: where a row went is read off the result
SCALED = {
    "hidden_size": 4,
    "intermediate_size": 4,
    "activation": Activation(name="identity", gated=False),
    "dtype": "float64",
}
REPLICATED = (0, 1, 2, 0, 3, 0)  # four experts in six slots, expert 0 twice on the second rank


def scaled_weights(num_experts: int) -> tuple[Tensor, Tensor]:
    one = torch.eye(4, dtype=torch.float64).expand(num_experts, 4, 4)
    return one, one * torch.arange(1.0, num_experts + 1, dtype=torch.float64).view(-1, 1, 1)


def test_the_peers_vector() -> None:
    """SGLang's own test of its remap: 256 experts over 4 ranks, seen from rank 2."""
    ids, weights = torch.tensor([[0, 65], [63, 127]]), torch.tensor([[0.5, 0.25], [0.75, 0.125]])
    placement = Placement(256, 4, shared_slots=1)
    mapped, paid = remap_topk_for_shared_slots(ids, weights, placement, 2)
    assert mapped.tolist() == [[0, 66, 194], [63, 128, 194]]
    assert paid.tolist() == [[0.5, 0.25, 1.0], [0.75, 0.125, 1.0]]
    _, unscaled = remap_topk_for_shared_slots(
        ids, weights, placement, 2, scale_is_folded=False, routed_scaling_factor=2.5
    )
    assert unscaled[:, 2].tolist() == pytest.approx([0.4, 0.4])
    assert ids.tolist() == [[0, 65], [63, 127]]


def test_holes_are_ids_without_weights() -> None:
    # 3 experts and a shared one per rank: [0, 1, S] and [2, S, hole]
    padded = Placement(3, 2, holes=True, shared_slots=1)
    assert padded.num_physical_slots == 6
    assert [padded.home(i) for i in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [padded.num_local_slots(r) for r in (0, 1)] == [3, 2]
    assert [padded.shared_ids(r) for r in (0, 1)] == [(2,), (4,)]
    with pytest.raises(IndexError, match="5 is a hole"):
        padded.home(5)
    # without: [0, 1, S] and [2, S]
    tight = Placement(3, 2, shared_slots=1)
    assert tight.num_physical_slots == 5
    assert tight.replicas() == ((0,), (1,), (3,))
    assert not tight.is_identity
    # fewer experts than ranks: the last two have nothing
    assert Placement(2, 4).home(1) == (1, 0)
    assert [Placement(2, 4, holes=True).num_local_slots(r) for r in range(4)] == [1, 1, 0, 0]
    assert Placement(2, 4, holes=True).is_identity is False
    assert Placement(8, 4, holes=True).is_identity


def test_replicas_take_turns_by_token_and_id() -> None:
    placement = Placement(4, 2, REPLICATED)
    assert placement.replicas() == ((0, 3, 5), (1,), (2,), (4,))
    assert [placement.experts_of(r) for r in (0, 1)] == [(0, 1, 2), (0, 3, 0)]
    assert [placement.physical_id(0, token) for token in range(4)] == [0, 3, 5, 0]
    both = Placement(2, 2, (0, 1, 0, 1))
    # two tokens that take both experts load the ranks alike: (0 + 0, 0 + 1) and (1 + 0, 1 + 1) % 2
    assert [[both.home(both.physical_id(e, t))[0] for e in (0, 1)] for t in (0, 1)] == [
        [0, 1],
        [1, 0],
    ]


def test_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Placement(4, 0, (0, 1, 1, 9))
    faults = {(f.field, f.message) for f in error.value.faults}
    assert faults == {
        ("ep_size", "must be at least 1"),
        ("slot_experts", "names experts outside [0, 4): [9]"),
        ("slot_experts", "every expert needs a slot, and these have none: [2, 3]"),
    }


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_experts = draw(st.integers(1, 9))
    copies = draw(st.lists(st.integers(0, num_experts - 1), max_size=6))
    slots = draw(st.permutations([*range(num_experts), *copies]))
    return Placement(
        num_experts,
        draw(st.integers(1, 5)),
        tuple(slots),
        holes=draw(st.booleans()),
        shared_slots=draw(st.integers(0, 2)),
    )


@given(placements(), st.data())
def test_the_map_is_a_partition_and_the_device_agrees(placement: Placement, data: Any) -> None:
    homes: dict[tuple[int, int], int] = {}
    for physical in range(placement.num_physical_slots):
        try:
            homes[placement.home(physical)] = physical
        except IndexError:
            assert placement.holes
    every = {(r, s) for r in range(placement.ep_size) for s in range(placement.num_local_slots(r))}
    assert set(homes) == every
    if placement.holes:
        assert placement.num_physical_slots % placement.ep_size == 0
    else:
        assert len(homes) == placement.num_physical_slots
    routed = [
        homes[(r, s)]
        for r in range(placement.ep_size)
        for s in range(placement.num_local_experts(r))
    ]
    shared = [i for r in range(placement.ep_size) for i in placement.shared_ids(r)]
    assert sorted(routed + shared) == sorted(homes.values())
    assert [placement.slot_experts[i] for i in range(len(routed))] == [
        next(e for e, ids in enumerate(placement.replicas()) if physical in ids)
        for physical in routed
    ]

    ids = data.draw(
        st.lists(st.tuples(*[st.integers(-1, placement.num_experts - 1)] * 3), max_size=4)
    )
    rank, together = data.draw(st.integers(0, placement.ep_size - 1)), data.draw(st.booleans())
    slot_map = SlotMap(placement, "cpu", rank, replicated=together)
    logical = torch.tensor(ids, dtype=torch.int64).view(-1, 3)
    weights = torch.full(logical.shape, 0.25, dtype=torch.float64)
    mapped = slot_map.physical(Routing(logical, weights))
    where_rank, where_slot = slot_map.homes(mapped)
    assert mapped.id_space is IdSpace.PHYSICAL
    for token, row in enumerate(ids):
        owner = token % placement.ep_size if together else rank
        begins = 0 if together else rank
        expected = [-1 if e < 0 else placement.physical_id(e, token, begins) for e in row]
        expected += placement.shared_ids(owner)
        ids_there, weights_there = mapped.ids_and_weights()
        assert ids_there[token].tolist() == expected
        assert weights_there[token].tolist() == [0.25] * 3 + [1.0] * placement.shared_slots
        found = zip(where_rank[token].tolist(), where_slot[token].tolist(), strict=True)
        assert list(found) == [placement.home(p) if p >= 0 else (-1, -1) for p in expected]


def test_ids_are_mapped_once() -> None:
    """sglang#25285: a map applied twice sends tokens to the wrong experts."""
    slot_map = SlotMap(Placement(4, 2, REPLICATED), "cpu")
    once = slot_map.physical(Routing(torch.tensor([[3]]), torch.ones(1, 1)))
    with pytest.raises(MoEError, match="physical and not logical"):
        slot_map.physical(once)
    with pytest.raises(MoEError, match="these are logical"):
        slot_map.homes(Routing(torch.tensor([[3]]), torch.ones(1, 1)))


def test_simulated_load_is_even() -> None:
    """sglang#37741: 8 tokens of 8 choices over 16 ranks left every other rank idle."""
    placement = Placement(256, 16)
    ids = placement.balanced_ids(8, 8)
    loads = [0] * 16
    for row in ids:
        assert len(set(row)) == 8
        for expert in row:
            loads[placement.home(expert)[0]] += 1
    assert loads == [4] * 16
    assert Placement(3, 2).balanced_ids(2, 3) == [[0, 2, 1], [0, 2, 1]]
    assert Placement(3, 2).balanced_ids(0, 3) == []


def test_first_layers_are_hash_routed_and_nextn_never() -> None:
    assert [router_kind(i, 3) for i in range(5)] == ["hash"] * 3 + ["topk"] * 2
    assert router_kind(0, 3, is_nextn=True) == "topk"  # counts its layers from 0 again

    def layer(kind: str) -> MoELayer:
        router = RouterConfig(kind=kind, vocab_size=5 if kind == "hash" else None)
        return MoELayer(MoEConfig(num_experts=4, top_k=2, router=router, **SCALED))

    x = torch.ones(2, 4, dtype=torch.float64)
    assert layer(router_kind(0, 3, is_nextn=True))(x, input_ids=None).shape == (2, 4)
    with pytest.raises(InputError, match="input_ids"):
        layer(router_kind(0, 3))(x, input_ids=None)


def test_replicas_have_equal_values() -> None:
    config = MoEConfig(num_experts=4, top_k=2, bias=True, **SCALED)
    placement = Placement(4, 1, (2, 0, 1, 3, 0))
    torch.manual_seed(0)
    plain = Experts(config, inference=True)
    torch.manual_seed(0)
    replicated = Experts(config, placement=placement, inference=True)
    assert replicated.w13.shape == (5, 4, 4)
    for name in ("w13", "w2"):
        ours, theirs = getattr(replicated, name), getattr(plain, name)
        assert torch.equal(ours, theirs[[2, 0, 1, 3, 0]])
    full = [torch.randn(4, *t.shape[1:], dtype=torch.float64) for t in plain.parameters()]
    replicated.load_full_weights(*full)
    for ours, theirs in zip(replicated.parameters(), full, strict=True):
        assert torch.equal(ours, theirs[[2, 0, 1, 3, 0]])
    ids = torch.tensor([[0, 3], [0, 1], [-1, 2]])
    x, weights = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    plain.load_full_weights(*full)
    torch.testing.assert_close(replicated(x, ids, weights), plain(x, ids, weights))


def test_a_placement_must_fit_its_layer() -> None:
    config = MoEConfig(num_experts=4, top_k=2, **SCALED)
    with pytest.raises(ConfigError) as error:
        MoELayer(config, placement=Placement(5, 2, (0, 1, 2, 3, 4, 4), shared_slots=1))
    told = {f.field: f.message for f in error.value.faults}
    assert told["placement.num_experts"] == "the layer has 4"
    assert told["placement.ep_size"] == "the layer has 1"
    assert "the config, which says 0" in told["placement.shared_slots"]
    assert "inference=True" in told["placement.slot_experts"]
    MoELayer(config, placement=Placement(4, 1, (0, 1, 2, 3, 3)), inference=True)


def test_what_is_described_has_three_words() -> None:
    config = MoEConfig(
        num_experts=4, top_k=2, num_shared_experts=1, shared_placement="slots", **SCALED
    )
    placement = Placement(4, 1, (0, 1, 2, 3, 3))
    layer = MoELayer(config, placement=placement, inference=True)
    described = layer.describe()
    assert json.loads(json.dumps(described)) == described
    words = ("num_experts", "num_physical_slots", "num_local_slots", "routing_width")
    assert [described[word] for word in words] == [4, 6, 6, 3]
    request = layer.resolution.request  # what parts are asked whether they can
    assert (request.num_experts, request.top_k) == (5, 3)


# On several ranks.

CASE_12 = [[2], [3], [0], [5], [2], [7]]  # vllm-gaudi#1796


def scaled_on_ranks(
    spec: str,
    ep_size: int,
    tp_size: int,
    rows: str,
    num_experts: int,
    ids: list[list[int]],
    placement: Placement | None,
) -> tuple[list[list[float]], int]:
    """Rows of ones through the scaled identities; also how many (token, slot) were computed."""
    config = MoEConfig(num_experts=num_experts, top_k=len(ids[0]), **SCALED)
    parallel = ParallelConfig(ep_size=ep_size, tp_size=tp_size, rows=rows)
    experts = Experts(config, parallel, spec, placement=placement, inference=True)
    experts.load_full_weights(*scaled_weights(num_experts))
    x, chosen = torch.ones(len(ids), 4, dtype=torch.float64), torch.tensor(ids)
    record, handle = experts.dispatch(x, chosen, torch.ones(chosen.shape))
    computed = int(record.tokens_per_expert.sum())  # pyright: ignore
    return experts.combine(experts.run(record), handle).tolist(), computed


@pytest.mark.parametrize(
    "placement",
    [
        Placement(8, 4),
        Placement(8, 4, (7, 6, 5, 4, 3, 2, 1, 0)),
        Placement(8, 4, (*range(8), 2, 2)),
    ],
    ids=["contiguous", "reversed", "replicated"],
)
@pytest.mark.parametrize("mode", ["all_to_all", "replicated"])
def test_every_rank_gets_the_right_experts(placement: Placement, mode: str) -> None:
    spec = f"nccl[mode={mode}]+torch"
    results = ranks(4).run(scaled_on_ranks, spec, 4, 1, "distinct", 8, CASE_12, placement)
    for rows, _ in results:
        assert rows == [[factor] * 4 for factor in (3, 4, 1, 6, 3, 8)]
    assert sum(computed for _, computed in results) == 4 * 6


@pytest.mark.parametrize("rows", ["distinct", "replicated"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_one_replica_of_all_computes_a_slot(rows: str, tp_size: int) -> None:
    """sglang#32962: ranks that hold the same token and pick different replicas sum it twice."""
    ids = [[0, 1], [0, 0], [3, 0], [-1, 0], [2, 3]]
    spec, placement = "nccl[mode=replicated]+torch", Placement(4, 2, REPLICATED)
    results = ranks(2 * tp_size).run(scaled_on_ranks, spec, 2, tp_size, rows, 4, ids, placement)
    for got, _ in results:  # sums of e + 1
        assert got == [[factor] * 4 for factor in (3, 2, 5, 1, 7)]
    copies = tp_size * (2 if rows == "distinct" else 1)
    assert sum(computed for _, computed in results) == copies * 9


class DividingTransport(AllToAllTransport):
    """Finds a rank as kernels do that need equally many ids on each."""

    def homes(self, routing: Routing) -> tuple[Tensor, Tensor]:
        ids, _ = routing.ids_and_weights()
        each = self.context.request.num_experts // self.context.request.ep_size
        return torch.where(ids < 0, -1, ids // each), torch.where(ids < 0, -1, ids % each)


DIVIDING = {
    "name": "dividing",
    "api": "1.0",
    "parts": [
        {
            "role": "transport",
            "target": f"{__name__}:DividingTransport",
            "offer": {
                "dtype": ["float64"],
                "ep_size": {"min": 1},
                "autograd": True,
                "dispatch_dtype": ["float64"],
                "combine_dtype": ["float64"],
            },
            "gives": ["rank_grouped"],
            "takes": ["slot_list"],
            "pays": ["slot_sum", "rank_sum", "tp_sum"],
            "may_pay": ["weight"],
        }
    ],
}


def on_a_dividing_kernel(placement: Placement | None) -> list[list[float]] | str:
    register_backend(DIVIDING)
    try:
        ids = [[0], [1], [2], [3], [4]]
        return scaled_on_ranks("dividing+torch", 2, 1, "distinct", 5, ids, placement)[0]
    except ConfigError as error:
        return str(error)
    finally:
        unregister_backend("dividing")


def test_holes_serve_a_kernel_that_divides() -> None:
    for text in ranks(2).run(on_a_dividing_kernel, None):
        assert "num_experts=5 over ep_size=2 leaves 1 over" in text
    for rows in ranks(2).run(on_a_dividing_kernel, Placement(5, 2, holes=True)):
        assert rows == [[factor] * 4 for factor in (1, 2, 3, 4, 5)]


def adjusted(shared_placement: str, placement: Placement | None) -> str:
    """The kernel cuts no experts: under policy adjust ep = 1, tp = 2 becomes ep = 2, tp = 1."""
    shared = {"num_shared_experts": 1, "shared_placement": shared_placement}
    config = MoEConfig(num_experts=4, top_k=2, **shared, **SCALED)
    parallel = ParallelConfig(tp_size=2)
    register_backend(DIVIDING)
    try:
        layer = MoELayer(config, parallel, "dividing+torch", policy="adjust", placement=placement)
        return str(layer.experts.placement.ep_size)
    except ConfigError as error:
        return str(error)
    finally:
        unregister_backend("dividing")


def test_slots_keep_the_widths_they_are_placed_for() -> None:
    assert ranks(2).run(adjusted, "apart", None) == ["2", "2"]
    for how in (("slots", None), ("apart", Placement(4, 1, (1, 0, 2, 3)))):
        for text in ranks(2).run(adjusted, *how):
            assert "policy='adjust': could change the widths" in text
            assert "set ep_size=2, tp_size=1" in text


def build_with(placements: list[Placement]) -> str:
    import torch.distributed as dist

    config = MoEConfig(num_experts=4, top_k=2, **SCALED)
    try:
        MoELayer(config, ParallelConfig(ep_size=2), placement=placements[dist.get_rank()])
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_the_placement() -> None:
    texts = ranks(2).run(build_with, [Placement(4, 2), Placement(4, 2, (1, 0, 2, 3))])
    assert all("placement=" in t and "ranks [0]" in t and "ranks [1]" in t for t in texts)
    assert ranks(2).run(build_with, [Placement(4, 2, (1, 0, 2, 3))] * 2) == ["", ""]


def test_the_trace_stays_logical() -> None:
    config = MoEConfig(num_experts=4, top_k=2, **SCALED)
    layer = MoELayer(config, placement=Placement(4, 1, (3, 3, 2, 1, 0)), inference=True)
    routing = Routing(torch.tensor([[3, 0], [3, 1]]), torch.ones(2, 2))
    with trace() as seen, torch.no_grad():
        layer(torch.ones(2, 4, dtype=torch.float64), routing=routing)
    assert seen.rows_per_expert == [1, 1, 0, 2]


def test_parts_are_told_of_the_slots_here() -> None:
    context = BuildContext(Request(), "float32", "cpu", 4, 4, 0)
    assert context.placement is None
    config = MoEConfig(num_experts=4, top_k=2, **SCALED)
    layer = MoELayer(config, placement=Placement(4, 1, (3, 3, 2, 1, 0)), inference=True)
    told = layer.experts.pipeline.runner.context
    assert (told.num_experts, told.num_local_experts, told.first_local_expert) == (4, 5, 0)
    assert told.request.num_experts == 5

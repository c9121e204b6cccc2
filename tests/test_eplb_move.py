"""Experts that move: the next step is that of a model that didn't, on every rank."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_core import (
    Activation,
    ConfigError,
    Experts,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RouterConfig,
    Routing,
    trace,
)
from moe_core.balance import Moved, PlacementPlan, move_experts, plan_placement
from moe_core.balance.move import routes
from moe_core.conformance.pool import ranks
from moe_core.placement import Placement
from moe_core.training import expert_state, sync_expert_gradients

H, I, E = 12, 8, 8  # noqa: E741
CONFIG = MoEConfig(
    hidden_size=H,
    intermediate_size=I,
    num_experts=E,
    top_k=2,
    router=RouterConfig(scoring_func="sigmoid", renormalize=True),
    num_shared_experts=1,
    bias=True,
    dtype="float64",
)


def shuffled(num_experts: int, ep_size: int, seed: int = 0) -> Placement:
    order = list(range(num_experts))
    random.Random(seed).shuffle(order)
    return Placement(num_experts, ep_size, tuple(order))


def whole(experts: Experts) -> dict[str, Tensor]:
    """This rank's weights by (parameter, logical expert)."""
    own = experts.placement.experts_of(experts.groups.ep_rank)
    return {
        f"{name}.{expert}": parameter.detach()[slot].clone()
        for name, parameter in experts.named_parameters()
        for slot, expert in enumerate(own)
    }


def train(
    config: MoEConfig,
    parallel: ParallelConfig,
    kind: str,
    target: Placement | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Four steps; with ``target`` the experts move after the second one."""
    torch.manual_seed(0)
    layer = MoELayer(config, parallel)
    with torch.no_grad():
        for _, bias in sorted(layer.experts.named_parameters()):
            if bias.ndim == 2:  # biases that differ by expert, alike on the ranks that hold it
                for slot, e in enumerate(layer.experts.placement.experts_of(place(layer))):
                    bias[slot] = 0.1 * (e + 1)
    make: Any = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.02),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    }[kind]
    optimizer = make(layer.parameters())
    groups, losses, report = layer.experts.groups, [], None
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + groups.dp_rank * 10 + groups.ep_rank)
        x = torch.randn(5 + groups.ep_rank, H, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        loss = (layer(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        sync_expert_gradients(layer)
        for parameter in (*layer.router.parameters(), *dense(layer)):
            dist.all_reduce(parameter.grad)
        if target is not None and step == 1:
            pending = options.get("pending", False)
            if not pending:
                optimizer.step()
            (report,) = PlacementPlan([target]).apply(layer, optimizer, **options.get("limit", {}))
            if pending:
                optimizer.step()  # with the gradients that have moved along
        else:
            optimizer.step()
        losses.append(loss.item())
    state = {
        f"{name}.{key}.{e}": value[slot].clone()
        for name, parameter in layer.experts.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if value.ndim == parameter.ndim
        for slot, e in enumerate(layer.experts.placement.experts_of(place(layer)))
    }
    return {
        "losses": losses,
        "experts": whole(layer.experts),
        "rest": [p.detach().clone() for p in (*layer.router.parameters(), *dense(layer))],
        "state": state,
        "tp_rank": groups.tp_rank,
        "report": report,
        "steps": {float(s["step"]) for s in optimizer.state.values() if "step" in s},
    }


def place(layer: MoELayer) -> int:
    return layer.experts.groups.ep_rank


def dense(layer: MoELayer) -> list[Any]:
    return [] if layer.shared_experts is None else list(layer.shared_experts.parameters())


def by_expert(results: list[dict[str, Any]], what: str) -> dict[str, Tensor]:
    """Of all ranks, each (tensor, expert, tp rank) once; those that hold it twice hold the same."""
    found: dict[str, Tensor] = {}
    for result in results:
        for name, value in result[what].items():
            key = f"{name}.tp{result['tp_rank']}"
            torch.testing.assert_close(found.setdefault(key, value), value, rtol=0, atol=0)
    return found


def check_same(moved: list[dict[str, Any]], stayed: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(moved, stayed, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-12)
        assert ours["steps"] == theirs["steps"]
        torch.testing.assert_close(ours["rest"], theirs["rest"], rtol=1e-11, atol=1e-13)
    for what in ("experts", "state"):
        ours, theirs = by_expert(moved, what), by_expert(stayed, what)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(("ep", "tp", "dp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_training_goes_on_as_if_nothing_had_moved(ep: int, tp: int, dp: int, kind: str) -> None:
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    pool, target = ranks(parallel.world_size), shuffled(E, ep)
    stayed = pool.run(train, CONFIG, parallel, kind, None, {})
    moved = pool.run(train, CONFIG, parallel, kind, target, {})
    check_same(moved, stayed)
    assert any(r["report"].received > 0 for r in moved)
    # what was counted on is really elsewhere
    assert moved[0]["experts"].keys() != stayed[0]["experts"].keys()


def test_pending_gradients_shared_slots_and_uneven_ranks_move_too() -> None:
    """7 experts, 4 and 3 of them; a slot of each rank is the shared expert's and stays; slices of
    one row."""
    config = replace(CONFIG, num_experts=7, bias=False, shared_placement="slots")
    parallel, pool = ParallelConfig(ep_size=2), ranks(2)
    target = Placement(7, 2, (6, 4, 2, 0, 1, 5, 3))
    stayed = pool.run(train, config, parallel, "adam", None, {})
    options = {"pending": True, "limit": {"staging_bytes": 1}}
    moved = pool.run(train, config, parallel, "adam", target, options)
    check_same(moved, stayed)
    # two experts change places with two: four rows of H or I float64 are the least to be staged
    assert [r["report"].received for r in moved] == [2, 2]
    assert all(4 * H * 8 <= r["report"].staging_bytes <= 8 * H * 8 for r in moved)


SIZES = {
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_experts": 4,
    "top_k": 2,
    "activation": Activation(name="identity", gated=False),
    "dtype": "float64",
}
EXPERT_BYTES = 2 * 4 * 6 * 8  # w13 [6, 4] and w2 [4, 6] in float64
SPREAD = (0, 1, 2, 3, 0, 1)  # four experts in six slots, three on each of two ranks


def numbered(placement: Placement | None, inference: bool, spec: str | None = None) -> Experts:
    """Expert e has e + 1 everywhere."""
    parallel = ParallelConfig(ep_size=dist.get_world_size())
    experts = Experts(MoEConfig(**SIZES), parallel, spec, placement=placement, inference=inference)
    with torch.no_grad():
        for parameter in experts.parameters():
            for slot, e in enumerate(experts.placement.experts_of(experts.groups.ep_rank)):
                parameter[slot] = e + 1
    return experts


def numbers(experts: Experts) -> list[list[float]]:
    """Per parameter what its slots hold, each of which is one number."""
    return [[float(slot.unique().item()) for slot in p] for p in experts.parameters()]


def move_numbered(
    before: Placement, targets: list[Placement], staging_bytes: int
) -> list[tuple[list[list[float]], Moved, list[int]]]:
    experts = numbered(before, inference=True)
    wire: list[int] = []
    send = dist.all_to_all_single

    def watched(out: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        wire.append(sent.numel())
        return send(out, sent, *args, **kwargs)

    dist.all_to_all_single = watched
    try:
        found = []
        for target in targets:
            wire.clear()
            (moved,) = move_experts(experts, [target], staging_bytes=staging_bytes)
            found.append((numbers(experts), moved, [sum(wire), len(wire)]))
        return found
    finally:
        dist.all_to_all_single = send


@pytest.mark.parametrize("staging_bytes", [1, 200, 1 << 20])
def test_an_expert_crosses_the_wire_once_per_rank(staging_bytes: int) -> None:
    targets = [
        Placement(4, 2, (0, 2, 1, 3, 0, 3)),  # rank 1 has 3 already: within the ranks
        Placement(4, 2, (3, 2, 3, 1, 1, 0)),  # 3 and 1 change places, each for two slots
        Placement(4, 2, (2, 3, 3, 1, 0, 1)),  # within the ranks
    ]
    by_rank = ranks(2).run(move_numbered, Placement(4, 2, SPREAD), targets, staging_bytes)
    for rank, moves in enumerate(by_rank):
        for target, (held, moved, wire), sent in zip(targets, moves, [0, 1, 0], strict=True):
            want = [float(e + 1) for e in target.experts_of(rank)]
            assert held == [want, want]
            assert moved.received == sent
            assert moved.sent_bytes == wire[0] == sent * EXPERT_BYTES
            # three rows (sent, received, copied), of at most 6 float64
            assert moved.staging_bytes <= max(staging_bytes, 3 * 6 * 8)
        # slices of [slots, n, 4] and [slots, n, 6], n = 6 and 4 in all; at a time 200 // (3 * 32)
        # and 200 // (3 * 48) for 200 bytes
        calls = [wire[1] for _, _, wire in moves]
        assert calls == [0, {1: 6 + 4, 200: 3 + 4, 1 << 20: 1 + 1}[staging_bytes], 0]


def test_the_least_busy_rank_sends() -> None:
    # experts 0 and 1 lie on ranks 0 and 1; rank 2 wants both: one comes from each
    before, after = Placement(4, 3, (0, 1, 1, 0, 2, 3)), Placement(4, 3, (2, 3, 1, 0, 0, 1))
    route = routes(before, after)
    assert route[2].receive == [1, 1, 0]
    assert route[0].receive == [0, 0, 2]
    assert [len(r.stay) for r in route] == [0, 0, 0]


def refused(
    case: str,
) -> tuple[str, bool]:
    """The error on this rank, and whether its weights are as before."""
    rank = dist.get_rank()
    experts = numbered(None, inference=False)
    for parameter in experts.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer: Any = torch.optim.Adam(experts.parameters())
    target, model = Placement(4, 2, (3, 2, 1, 0)), experts
    options: dict[str, Any] = {}
    if case == "other plan":
        target = Placement(4, 2, ((3, 2, 1, 0), (2, 3, 0, 1))[rank])
    elif case == "replicas":
        target = Placement(4, 2, SPREAD)
    elif case == "experts":
        target = Placement(5, 3)
    elif case == "layers":
        model = torch.nn.ModuleList([experts, torch.nn.Linear(1, 1), numbered(None, False)])
    elif case == "no layer":
        model = torch.nn.Linear(1, 1)
    elif case == "other optimizer":
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    elif case == "state" and rank == 1:
        optimizer.state[experts.w2]["odd"] = torch.zeros(3, 5)
    elif case == "unstepped":
        if rank == 0:
            optimizer.step()
    elif case == "nested" and rank == 1:
        optimizer.state[experts.w2]["history"] = [{"old": torch.zeros_like(experts.w2)}]
    elif case == "staging":
        options["staging_bytes"] = 1e6
    elif case == "no placement":
        target = {"num_experts": 4}
    elif case == "shared":
        other = numbered(None, inference=False)
        other.w2 = experts.w2
        model = torch.nn.ModuleList([experts, other])
    elif case == "steps":
        for _ in range(1 + rank):
            optimizer.step()
    elif case == "memory" and rank == 1:
        torch.empty, kept = None, torch.empty  # pyright: ignore[reportAttributeAccessIssue]
    before = [p.detach().clone() for p in experts.parameters()]
    try:
        targets = [target, Placement(4, 2, (0, 2, 1, 3))] if case == "shared" else [target]
        PlacementPlan(targets).apply(model, optimizer, **options)
    except ConfigError as error:
        text = str(error)
    except TypeError as error:  # only the rank that had no memory raises its own
        text = f"own {error}"
    else:
        text = ""
    finally:
        if case == "memory" and rank == 1:
            torch.empty = kept  # pyright: ignore[reportPossiblyUnboundVariable]
    same = all(torch.equal(a, b) for a, b in zip(before, experts.parameters(), strict=True))
    return text, same and experts.placement.is_identity


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("other plan", ["placement=", "[3, 2, 1, 0]", "ranks [0]", "[2, 3, 0, 1]", "ranks [1]"]),
        ("replicas", ["layer 0.placement.slot_experts", "gradients of replicas"]),
        ("experts", ["layer 0.placement.num_experts=5", "layer 0.placement.ep_size=3"]),
        ("layers", ["placements=1", "one for each of the 2 expert layers"]),
        ("no layer", ["has no layer with experts"]),
        ("other optimizer", ["trains none of this layer's weights"]),
        ("state", ["rank 1", "w2.odd", "(3, 5)"]),
        ("nested", ["rank 1", "w2.history='list': tensors within optimizer state don't move"]),
        ("staging", ["staging_bytes=1000000.0: must be an integer"]),
        ("no placement", ["placements='PlacementPlan': must be a list of Placement"]),
        ("shared", ["layer 1.w2='shared': is layer 0's too"]),
        ("unstepped", ["w13.exp_avg", "ranks [0]", "ranks [1]"]),
        ("steps", ["w13.step", "1.0 on ranks [0]", "2.0 on ranks [1]"]),
        ("memory", ["rank 1", "NoneType"]),
    ],
)
def test_what_cannot_be_moved_stays_on_all_ranks(case: str, said: list[str]) -> None:
    for text, same in ranks(2).run(refused, case):
        assert same
        for words in said:
            assert words in text


def test_more_slots_than_the_layer_has_are_refused() -> None:
    experts = Experts(
        MoEConfig(**SIZES), placement=Placement(4, 1, (0, 1, 2, 3, 3)), inference=True
    )
    with pytest.raises(ConfigError, match="num_routed_slots=6: must stay 5"):
        move_experts(experts, [Placement(4, 1, (0, 1, 2, 3, 3, 2))])
    plain = Experts(MoEConfig(**SIZES))
    with pytest.raises(ConfigError, match="on one rank there is nothing to balance"):
        move_experts(plain, [Placement(4, 1, (1, 0, 2, 3))])
    with pytest.raises(ConfigError, match="there are no weights to move yet"):
        move_experts(Experts(MoEConfig(**SIZES), device="meta"), [Placement(4)])
    (moved,) = move_experts(plain, plan_placement([1, 1, 1, 1], 4, 1))
    assert moved == Moved(0, 0, 0)


def test_state_with_a_row_per_slot_moves() -> None:
    """Adafactor keeps a mean per row and per column of each expert's matrix."""
    torch.manual_seed(0)
    experts = Experts(
        MoEConfig(**SIZES | {"num_experts": 5}), placement=Placement(5, 1, (4, 3, 2, 1, 0))
    )
    for parameter in experts.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.Adafactor(experts.parameters(), lr=0.1)
    optimizer.step()
    before = copy.deepcopy({n: optimizer.state[p] for n, p in experts.named_parameters()})
    order = [1, 3, 0, 2, 4]  # experts; they lay in slots 4 - e
    plan = PlacementPlan([Placement(5, 1, tuple(order))])
    plan.apply(experts, optimizer)
    for name, parameter in experts.named_parameters():
        for key in ("row_var", "col_var"):
            was = before[name][key]
            assert was.shape[0] == 5
            assert was.numel() < parameter.numel()
            assert torch.equal(optimizer.state[parameter][key], was[[4 - e for e in order]])


def serve(rows: str, mode: str, placements: list[Placement]) -> list[tuple[Tensor, int, bool]]:
    """The output, how many (token, slot) were computed here, and whether the maps are the ones
    that were there, after each move."""
    parallel = ParallelConfig(ep_size=2, rows=rows)
    torch.manual_seed(5)
    experts = Experts(
        MoEConfig(**SIZES | {"w13_layout": "up_gate", "activation": Activation()}),
        parallel,
        f"nccl[mode={mode}]+torch",
        placement=placements[0],
        inference=True,
    )
    experts.prepare_weights()
    generator = torch.Generator().manual_seed(7 if rows == "replicated" else dist.get_rank())
    x = torch.randn(9, 4, dtype=torch.float64, generator=generator)
    ids = torch.randint(-1, 4, (9, 2), generator=generator)
    weights = torch.rand(9, 2, dtype=torch.float64, generator=generator)
    map_, held = experts.pipeline.slot_map, experts._prepared
    tables = [map_._replicas, map_._first_replica, map_._num_replicas]
    assert held is not None
    addresses = [t.data_ptr() for t in (*tables, held[1].w13, held[1].w2)]
    found = []
    with torch.no_grad():
        for placement in placements:
            if placement is not placements[0]:
                PlacementPlan([placement]).apply(experts)
            record, handle = experts.dispatch(x, ids, weights)
            computed = int(record.tokens_per_expert.sum())  # pyright: ignore
            out = experts.combine(experts.run(record), handle)
            prepared = experts._prepared
            assert prepared is not None
            now = [map_._replicas, map_._first_replica, map_._num_replicas]
            same = addresses == [t.data_ptr() for t in (*now, prepared[1].w13, prepared[1].w2)]
            found.append((out, computed, same and experts.pipeline.slot_map is map_))
            assert experts.describe()["num_local_slots"] == 3
    found.append((ids, int((ids >= 0).sum()), True))
    return found


@pytest.mark.parametrize(
    ("rows", "mode"),
    [("distinct", "all_to_all"), ("distinct", "replicated"), ("replicated", "replicated")],
)
def test_replicas_serve_and_each_slot_is_computed_once(rows: str, mode: str) -> None:
    """Case 49: sglang#32962 (ranks picked different replicas of a token they all had, and its
    result was summed twice), #25285 (mapped twice), #27635 (not mapped on CPUs)."""
    plan = [Placement(4, 2, slots) for slots in (SPREAD, (3, 3, 0, 3, 2, 1), (1, 2, 0, 0, 3, 0))]
    by_rank = ranks(2).run(serve, rows, mode, plan)
    tokens = sum(results[-1][1] for results in by_rank) // (2 if rows == "replicated" else 1)
    for results in by_rank:
        for out, _, in_place in results[:-1]:
            torch.testing.assert_close(out, results[0][0], rtol=1e-12, atol=1e-14)
            assert in_place
    for step in range(len(plan)):
        assert sum(results[step][1] for results in by_rank) == tokens
    if rows == "replicated":
        assert torch.equal(by_rank[0][1][0], by_rank[1][1][0])


def move_compiled() -> tuple[int, bool, bool]:
    """Compilations, and whether outputs match those of the layer itself before and after."""
    torch._dynamo.reset()
    experts = numbered(Placement(4, 2, SPREAD), inference=True, spec="nccl[mode=replicated]+torch")
    compilations = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        compilations.append(graph)
        return graph

    map_ = experts.pipeline.slot_map

    @torch.compile(backend=count, fullgraph=True)
    def physical(ids: Tensor, weights: Tensor) -> Tensor:
        mapped = map_.physical(Routing(ids, weights)).topk_ids
        assert mapped is not None
        return mapped

    ids, weights = torch.tensor([[0, 1], [3, -1], [1, 0]]), torch.ones(3, 2)
    checks = []
    for slots in (SPREAD, (3, 3, 0, 3, 2, 1)):
        if slots is not SPREAD:
            PlacementPlan([Placement(4, 2, slots)]).apply(experts)
        want = map_.physical(Routing(ids, weights)).topk_ids
        checks.append(torch.equal(physical(ids, weights), want))
    return len(compilations), *checks


def test_compiled_code_follows_without_being_compiled_again() -> None:
    assert ranks(2).run(move_compiled) == [(1, True, True)] * 2


def move_model() -> list[Any]:
    torch.manual_seed(0)
    config, parallel = replace(CONFIG, num_shared_experts=0), ParallelConfig(ep_size=2)
    model = torch.nn.Sequential(MoELayer(config, parallel), MoELayer(config, parallel))
    x = torch.randn(6, H, dtype=torch.float64)
    before = model(x)
    plan = PlacementPlan([Placement(E, 2, (7, 6, 5, 4, 3, 2, 1, 0)), shuffled(E, 2)])
    moved = plan.apply(model)
    with trace() as seen:
        after = model(x)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-14)
    for i, placement in enumerate(plan):  # a checkpoint names the experts that are here now
        own = placement.experts_of(dist.get_rank())
        found = [name for name in expert_state(model) if name.startswith(f"{i}.experts.w13.")]
        assert found == [f"{i}.experts.w13.{e}" for e in own]
    model.float()  # parts are chosen anew, for the placement of now
    torch.testing.assert_close(model(x.float()), before.float(), rtol=1e-4, atol=1e-5)
    return [m.received for m in moved] + [len(seen.calls)]


def move_shared() -> list[Any]:
    """Layers of one w13, and biases and w2 of their own."""
    torch.manual_seed(0)
    config = replace(CONFIG, num_shared_experts=0)
    layers = [MoELayer(config, ParallelConfig(ep_size=2)) for _ in range(2)]
    model, (first, second) = torch.nn.Sequential(*layers), (layer.experts for layer in layers)
    second.w13 = first.w13
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(6, H, dtype=torch.float64)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    want = model(x).detach()
    moved = PlacementPlan([shuffled(E, 2)] * 2).apply(model, optimizer)
    torch.testing.assert_close(model(x).detach(), want, rtol=1e-12, atol=1e-14)
    return [first.w13 is second.w13, moved[0].sent_bytes - moved[1].sent_bytes, moved[0].received]


def test_what_layers_share_moves_once() -> None:
    for shared, more, received in ranks(2).run(move_shared):
        assert shared
        # w13 [2I, H] in float64, its gradient and Adam's two moments
        assert more == received * 4 * 2 * I * H * 8 > 0


def test_a_plan_moves_all_layers_of_a_model() -> None:
    results = ranks(2).run(move_model)
    assert [r[0] for r in results] == [4, 4]
    assert results[0][2] == 2

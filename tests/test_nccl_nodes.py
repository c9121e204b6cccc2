"""Node-aware exchange: the numbers of one process, and each (token, node) crosses once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_core import (
    Activation,
    ConfigError,
    Experts,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RouterConfig,
    Routing,
    environment,
    resolve,
    trace,
)
from moe_core.conformance.pool import ranks
from moe_core.contracts import IdSpace
from moe_core.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = MoEConfig(
    hidden_size=12,
    intermediate_size=8,
    num_experts=7,
    top_k=3,
    router=RouterConfig(scoring_func="sqrtsoftplus", renormalize=True, routed_scaling_factor=1.5),
    activation=Activation(limit=2.0),
    num_shared_experts=1,
    bias=True,
    dtype="float64",
)
SPEC = "nccl[mode=hierarchical]+torch"
# (ep, tp, dp), ranks per node: two nodes of two, of a tp pair each, of one replica each; one node;
# a node per rank. Of four ranks, with the ep groups on them: 2 x 2, 2 x 1, 1 x 2, 1 x 4, 4 x 1.
PLACES = [
    ((4, 1, 1), 2),
    ((2, 2, 1), 2),
    ((2, 1, 2), 2),
    ((1, 2, 2), 2),
    ((4, 1, 1), 4),
    ((4, 1, 1), 1),
    ((2, 1, 1), 1),
]
# Ranks 1 and 2 have some, else rows would come in the order of their sources by chance.
TOKENS = {1: [5], 2: [5, 3], 4: [0, 5, 1, 4]}


def on_nodes(per_node: int, task: Callable[..., Any], *args: Any) -> Any:
    """``task`` on a rank that believes to share its node with so many in all."""
    with mock.patch.dict(os.environ, {"MOE_RANKS_PER_NODE": str(per_node)}):
        return task(*args)


def batch(sizes: list[int], seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 12, dtype=torch.float64, generator=generator) for n in sizes]


def build(config: MoEConfig, parallel: ParallelConfig, spec: str) -> MoELayer:
    """The same layer everywhere; biases that differ by expert."""
    torch.manual_seed(0)
    layer = MoELayer(config, parallel, spec)
    generator = torch.Generator().manual_seed(1)
    shapes = [(7, 16, 12), (7, 12, 8), (7, 16), (7, 12)]
    full = [torch.randn(s, generator=generator, dtype=torch.float64) / 4 for s in shapes]
    layer.experts.load_full_weights(*full)
    return layer


def step(config: MoEConfig, parallel: ParallelConfig, spec: str) -> dict[str, Any]:
    layer = build(config, parallel, spec)
    groups = layer.experts.groups
    part = groups.dp_rank * parallel.ep_size + groups.ep_rank
    x = batch(TOKENS[parallel.ep_size * parallel.dp_size])[part].requires_grad_()
    for _ in range(2):
        x.grad = None
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        "grads": {n: p.grad for n, p in layer.named_parameters()},
        "place": (groups.dp_rank, groups.ep_rank, groups.tp_rank),
        "parts": layer.describe()["parts"],
    }


@pytest.mark.parametrize("combine", ["per_rank", "per_slot"])
@pytest.mark.parametrize(("widths", "per_node"), PLACES)
def test_every_rank_has_the_numbers_of_one_process(
    widths: tuple[int, int, int], per_node: int, combine: str
) -> None:
    ep, tp, dp = widths
    config = replace(CONFIG, combine=combine)
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    whole = build(config, ParallelConfig(), "reference")
    parts = [part.requires_grad_() for part in batch(TOKENS[ep * dp])]
    ys = [whole(part) for part in parts]
    sum(y.square().sum() for y in ys).backward()  # pyright: ignore
    want = {n: p.grad for n, p in whole.named_parameters()}
    placement, total = Placement(7, ep), dict[str, torch.Tensor]()
    for got in ranks(parallel.world_size).run(on_nodes, per_node, step, config, parallel, SPEC):
        dp_rank, ep_rank, tp_rank = got["place"]
        assert got["parts"]["transport"] == "nccl[mode=hierarchical].transport"
        close(got["y"], ys[dp_rank * ep + ep_rank].detach())
        close(got["x"], parts[dp_rank * ep + ep_rank].grad)
        for name, grad in got["grads"].items():
            assert grad is not None, name
            key = f"{name} {ep_rank} {tp_rank}" if name.startswith("experts.") else name
            if tp_rank == 0 or name.startswith("experts."):
                total[key] = total.get(key, 0) + grad
    for key, grad in total.items():
        name, *place = key.split()
        right = want[name]
        assert right is not None
        if place:
            ep_rank, tp_rank = map(int, place)
            first, count = placement.first_expert(ep_rank), placement.num_local_experts(ep_rank)
            right = right[first : first + count]
            if name == "experts.w2":
                right = right.chunk(tp, -1)[tp_rank]
            elif name != "experts.w2_bias":  # gate and up are cut apart
                halves = right.chunk(2, 1)
                right = torch.cat([half.chunk(tp, 1)[tp_rank] for half in halves], 1)
        close(grad, right)


def close(a: torch.Tensor, b: torch.Tensor | None) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# -------------------------------------------------------------------------------------- the bytes


def sent_on_rank(config: MoEConfig, parallel: ParallelConfig, spec: str) -> dict[str, Any]:
    """Forward and backward with every kind of row: no tokens on a rank, duplicates, -1."""
    experts = Experts(config, parallel, spec)
    rank = experts.groups.rank
    tokens = (0, 9, 4, 7)[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(-1, 7, (tokens, 3), generator=generator)
    x = torch.randn(tokens, 12, generator=generator).to(experts.dtype).requires_grad_()
    with trace() as seen:
        y = experts(x, ids, torch.ones(tokens, 3, dtype=torch.float64))
    transport: Any = experts.pipeline.transport
    forward = {kind: list(sent) for kind, sent in transport.ep.bytes_sent.items()}
    y.sum().backward()
    (call,) = seen.calls
    return {
        "ids": ids.tolist(),
        "forward": forward,
        "all": transport.ep.bytes_sent,
        "traced": {k: call.inter_node_bytes(2, k) for k in ("dispatch", "combine")},
    }


@pytest.mark.parametrize("combine", ["per_rank", "per_slot"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_each_token_crosses_to_a_node_once(dtype: str, combine: str) -> None:
    config = replace(CONFIG, dtype=dtype, combine=combine, bias=False)
    parallel = ParallelConfig(ep_size=4)
    row = 12 * {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    wide = 12 * max(4, row // 12)  # sums come home in float32 at least
    flat = ranks(4).run(on_nodes, 2, sent_on_rank, config, parallel, "nccl[mode=all_to_all]+torch")
    got = ranks(4).run(on_nodes, 2, sent_on_rank, config, parallel, SPEC)
    placement, fewer = Placement(7, 4), 0
    homes = [[[placement.home(e)[0] for e in ids if e >= 0] for ids in part["ids"]] for part in got]
    for rank, part in enumerate(got):
        others = [r for r in range(4) if r // 2 != rank // 2]
        # of this rank's tokens, and of those that come from over there
        nodes = sum(any(r in others for r in home) for home in homes[rank])
        ranks_there = sum(len({*home} & {*others}) for home in homes[rank])
        slots_there = sum(r in others for home in homes[rank] for r in home)
        twin = (rank + 2) % 4
        back = sum(any(r // 2 == rank // 2 for r in home) for home in homes[twin])
        slots_back = sum(r // 2 == rank // 2 for home in homes[twin] for r in home)

        def crossing(sent: dict[str, list[int]], kind: str, here: list[int] = others) -> int:
            return sum(sent.get(kind, [0] * 4)[r] for r in here)

        assert crossing(part["forward"], "dispatch") == nodes * row == part["traced"]["dispatch"]
        assert crossing(flat[rank]["forward"], "dispatch") == ranks_there * row
        fewer += ranks_there - nodes
        come_home = slots_back * row if combine == "per_slot" else back * wide
        assert crossing(part["forward"], "combine") == come_home == part["traced"]["combine"]
        # backward: out along the combine, home along the dispatch, in sums
        out = slots_there * row if combine == "per_slot" else nodes * wide
        assert crossing(part["all"], "combine.backward") == out
        assert crossing(part["all"], "dispatch.backward") == back * wide
        for kind in ("dispatch", "combine", "dispatch.backward", "combine.backward"):
            away = next(r for r in others if r != twin)
            assert part["all"].get(kind, [0] * 4)[away] == 0  # only the counterpart is spoken to
        meta = 8 if dtype == "float64" else 4
        assert crossing(part["forward"], "dispatch.weights") == nodes * 3 * meta
        assert crossing(part["forward"], "dispatch.ids") == nodes * 3 * 4
        # rows and slots for each of two ranks, rows for their node, a fault flag
        assert crossing(part["forward"], "counts") == 6 * 8
    assert fewer > 0


# ------------------------------------------------------------------------------- equal to the rest


def exact_routing(
    config: MoEConfig, parallel: ParallelConfig, spec: str, slots: tuple[int, ...], pattern: str
) -> tuple[torch.Tensor, Any, Any]:
    placement = Placement(7, parallel.ep_size, slots)
    inference = placement.has_replicas
    torch.manual_seed(0)
    experts = Experts(config, parallel, spec, placement=placement, inference=inference)
    rank = experts.groups.ep_rank
    tokens = 0 if pattern == "nobody" else (0, 9, 4, 7)[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(-1, 7, (tokens, 3), generator=generator)
    ids = {"any": ids, "same": ids * 0 + 6, "none": ids * 0 - 1, "nobody": ids}[pattern]
    x = torch.randn(tokens, 12, generator=generator).to(experts.dtype)
    topk = torch.rand(tokens, 3, generator=generator)
    if inference:
        return experts(x, ids, topk), None, None
    x.requires_grad_()
    topk.requires_grad_()
    y = experts(x, ids, topk)
    y.float().square().sum().backward()
    return y.detach(), (x.grad, topk.grad), experts.w13.grad


ORDERS = [(), (6, 5, 4, 3, 2, 1, 0), (0, 1, 2, 3, 4, 5, 6, 0, 6)]
"""As they are; the other way round; two experts with a replica on another node."""


@pytest.mark.parametrize("pattern", ["any", "same", "none", "nobody"])
@pytest.mark.parametrize("slots", ORDERS, ids=["plain", "turned", "replicas"])
def test_per_slot_has_the_bits_of_the_flat_mode(slots: tuple[int, ...], pattern: str) -> None:
    """The same rows reach each expert in the same order, so random floats agree to the bit."""
    config = replace(CONFIG, dtype="float32", combine="per_slot", bias=False)
    parallel = ParallelConfig(ep_size=4)
    args = (exact_routing, config, parallel)
    flat = ranks(4).run(on_nodes, 2, *args, "nccl[mode=all_to_all]+torch", slots, pattern)
    for per_node in (2, 1, 4):
        got = ranks(4).run(on_nodes, per_node, *args, SPEC, slots, pattern)
        for (y, grads, w13), (want, right, same) in zip(got, flat, strict=True):
            assert torch.equal(y, want)
            if right is None:
                continue
            assert torch.equal(grads[1], right[1])  # of the weights
            assert torch.equal(w13, same)


@pytest.mark.parametrize("combine", ["per_rank", "per_slot"])
@pytest.mark.parametrize("slots", ORDERS, ids=["plain", "turned", "replicas"])
def test_float64_agrees_with_the_flat_mode(slots: tuple[int, ...], combine: str) -> None:
    """Sums in another order: of slots (per_rank), and of gradients of rows."""
    config = replace(CONFIG, bias=False, combine=combine)
    args = (exact_routing, config, ParallelConfig(ep_size=4))
    flat = ranks(4).run(on_nodes, 2, *args, "nccl[mode=all_to_all]+torch", slots, "any")
    for got, want in zip(ranks(4).run(on_nodes, 2, *args, SPEC, slots, "any"), flat, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def gradients_of_weights() -> None:
    """Whatever a runner makes of a weight that isn't its own, a slot's gradient comes from one."""
    experts = Experts(replace(CONFIG, bias=False), ParallelConfig(ep_size=4), SPEC)
    generator = torch.Generator().manual_seed(experts.groups.ep_rank)
    ids = torch.randint(-1, 7, (6, 3), generator=generator)
    topk = torch.rand(6, 3, generator=generator, dtype=torch.float64).requires_grad_()
    routing = Routing(ids, topk, id_space=IdSpace.PHYSICAL)
    transport: Any = experts.pipeline.transport
    record, _ = transport.dispatch(torch.ones(6, 12, dtype=torch.float64), routing)
    record.topk_weights.sum().backward()
    assert topk.grad is not None
    assert torch.equal(topk.grad, (ids >= 0).double())


def test_a_weights_gradient_comes_from_its_own_expert() -> None:
    ranks(4).run(on_nodes, 2, gradients_of_weights)


TERMS = torch.tensor([256.0, 1.0, 1.0, 1.0])
"""Together 259, which bfloat16 rounds to 260. In nodes of two: 257 and 2; bfloat16 rounds 257 to
256, and 258 stays."""


def sums_of_terms(combine_dtype: str) -> tuple[list[float], list[float]]:
    """An expert to a rank, each with a term: what a token gets, and what its gradient is."""
    config = MoEConfig(
        hidden_size=8, intermediate_size=8, num_experts=4, top_k=4, dtype="bfloat16",
        combine_dtype=combine_dtype, activation=Activation(name="relu2", gated=False),
    )  # fmt: skip
    experts = Experts(config, ParallelConfig(ep_size=4), SPEC)
    w13, w2 = torch.zeros(4, 8, 8), torch.zeros(4, 8, 8)
    w13[:, :, 0] = 1  # relu(x)^2 is .25 at x = .5, and its derivative 1
    w2[:, 0, 0] = TERMS
    experts.load_full_weights(w13, w2)
    x = torch.full((3, 8), 0.5, dtype=torch.bfloat16, requires_grad=True)
    y = experts(x, torch.arange(4).expand(3, 4), torch.ones(3, 4))
    y.sum().backward()
    assert x.grad is not None
    return (4 * y[:, 0]).tolist(), x.grad[:, 0].tolist()


@pytest.mark.parametrize(("combine_dtype", "want"), [("float32", 260.0), ("bfloat16", 258.0)])
def test_sums_are_rounded_where_it_is_said(combine_dtype: str, want: float) -> None:
    for y, grad in ranks(4).run(on_nodes, 2, sums_of_terms, combine_dtype):
        assert y == grad == [want] * 3


# ----------------------------------------------------------------------------------- in step


def faulty_step(fault: str) -> list[str]:
    """Rank 2 brings something bad, twice; then all do a good step, with cross-checks on."""
    with mock.patch.dict(os.environ, {"MOE_DEBUG_COLLECTIVES": "1"}):
        layer = build(CONFIG, ParallelConfig(ep_size=4), SPEC)
    rank, texts = layer.experts.groups.ep_rank, []
    good = batch([4, 0, 3, 2])[rank]
    for _ in range(2):
        try:
            if rank != 2:
                layer(good)
            elif fault == "shape":
                layer(good[:, :5])
            else:
                layer.experts(good, torch.full((3, 3), 99), torch.ones(3, 3))
        except InputError as error:
            texts.append(str(error))
    y = layer(good.requires_grad_())
    y.sum().backward()
    return texts


@pytest.mark.parametrize(("fault", "words"), [("shape", "must have shape"), ("ids", "not in")])
def test_one_ranks_fault_raises_on_all_in_the_same_step(fault: str, words: str) -> None:
    for per_node in (2, 4, 1):
        for texts in ranks(4).run(on_nodes, per_node, faulty_step, fault, limit=60):
            assert len(texts) == 2
            assert all("rank 2: " in text and words in text for text in texts)


# ------------------------------------------------------------------------------------ the choice


def test_a_rule_chooses_it_where_there_are_nodes_to_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(ep: int, spec: str = "nccl") -> tuple[str, list[str]]:
        found = resolve(CONFIG, ParallelConfig(ep_size=ep), spec)
        return found.parts["transport"].part.mode, [p.rule for p in found.preferences]

    flat, once = ("all_to_all", []), ("hierarchical", ["once-per-node"])
    assert chosen(4) == flat
    for per_node, want in ((1, flat), (2, once), (3, flat), (4, flat), (8, flat)):
        monkeypatch.setenv("MOE_RANKS_PER_NODE", str(per_node))
        assert chosen(4) == want
    monkeypatch.setenv("MOE_RANKS_PER_NODE", "2")
    assert chosen(4, "auto") == once
    assert chosen(2) == flat
    assert chosen(4, "nccl[mode=all_to_all]+torch") == flat
    refused = resolve(CONFIG, ParallelConfig(ep_size=3), SPEC)
    (reason,) = (r for r in refused.refusals if r.axis == "nodes-unfit")
    assert "set ep_size=2 or 4" in reason.fix
    monkeypatch.setenv("MOE_RANKS_PER_NODE", "two")
    with pytest.raises(ConfigError, match="MOE_RANKS_PER_NODE='two': must be an integer above 0"):
        resolve(CONFIG)


@pytest.mark.parametrize(
    ("world", "nodes", "local", "rank", "node", "local_rank", "said"),
    [
        (8, 2, 4, 5, 1, 1, 4),
        (6, 2, 4, 1, 0, 1, None),  # 4 + 2
        (6, 2, 2, 5, 1, 1, None),
        (6, 3, 2, 2, 1, 1, None),  # 1 + 2 + 3: the second node's ranks begin at 1
        (4, 1, 4, 3, 0, 3, 4),
    ],
)
def test_what_torchrun_says(
    world: int, nodes: int, local: int, rank: int, node: int, local_rank: int, said: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    names = ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "GROUP_RANK")
    for name, value in zip(names, (world, nodes, local, rank, node), strict=True):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MOE_RANKS_PER_NODE", raising=False)
    assert environment.ranks_per_node() is None  # not torchrun
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert environment.ranks_per_node() == said
    monkeypatch.setenv("MOE_RANKS_PER_NODE", "3")
    assert environment.ranks_per_node() == 3


def disagreeing() -> str:
    per_node = "2" if dist.get_rank() else "4"
    named = mock.patch.dict(os.environ, {"MOE_RANKS_PER_NODE": per_node})
    with named, pytest.raises(ConfigError) as error:
        MoELayer(CONFIG, ParallelConfig(ep_size=4), "nccl+torch")
    return str(error.value)


def test_ranks_that_differ_about_nodes_build_nothing() -> None:
    for text in ranks(4).run(disagreeing):
        assert "request.ranks_per_node" in text
        assert "4 on ranks [0]; 2 on ranks [1, 2, 3]" in text


def on_meshes() -> list[tuple[int | None, str]]:
    from torch.distributed.device_mesh import init_device_mesh

    seen = []
    for names, shape in ((("dp", "ep"), (1, 4)), (("ep", "dp"), (2, 2)), (("dp", "ep"), (2, 2))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        sizes = dict(zip(names, shape, strict=True))
        parallel = ParallelConfig(ep_size=sizes["ep"], dp_size=sizes["dp"])
        layer = MoELayer(CONFIG, parallel, "nccl+torch", mesh=mesh)
        found = layer.resolution
        seen.append((found.request.ranks_per_node, found.parts["transport"].part.mode))
    return seen


def test_a_mesh_in_another_order_has_smaller_blocks() -> None:
    """Ranks 0 2 | 1 3 in the order of the widths: neighbours lie on different nodes."""
    for seen in ranks(4).run(on_nodes, 2, on_meshes):
        assert seen == [(2, "hierarchical"), (1, "all_to_all"), (2, "all_to_all")]


@pytest.mark.slow
@pytest.mark.parametrize("per_node", ["1", "2"])
def test_conformance_over_nodes(per_node: str) -> None:
    env = os.environ | {"MOE_RANKS_PER_NODE": per_node}
    command = [sys.executable, "-m", "moe_core", "conformance", "nccl[mode=hierarchical]"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "conforms (" in done.stdout

"""Expert parallelism over gloo: the numbers of one process, on every rank."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_nccl
from moe_core import (
    Activation,
    ConfigError,
    HandleError,
    InputError,
    MoEConfig,
    MoEError,
    MoELayer,
    ParallelConfig,
    RouterConfig,
    Routing,
    trace,
)
from moe_core.conformance.pool import ranks
from moe_core.contracts import IdSpace
from moe_core.placement import Placement
from moe_core.registry import register_backend
from moe_nccl.channel import Channel, wait

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
WIDTHS = [(2, 1, 1), (1, 2, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
TOKENS = {1: [5], 2: [5, 3], 4: [5, 0, 1, 4]}


def batch(sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 12, dtype=torch.float64, generator=generator) for n in sizes]


def build(config: MoEConfig, parallel: ParallelConfig, backend: str) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(config, parallel, backend)
    with torch.no_grad():
        torch.manual_seed(1)
        # biases that differ by expert, the same whole ones on all ranks
        if config.bias:
            w13_bias = torch.randn(config.num_experts, config.w13_rows)
            w2_bias = torch.randn(config.num_experts, config.hidden_size)
            experts = layer.experts
            first = experts.placement.first_expert(experts.groups.ep_rank)
            count = experts.w13.shape[0]
            experts.w13_bias.copy_(experts._cut_w13(w13_bias[first : first + count], 1))  # pyright: ignore
            experts.w2_bias.copy_(w2_bias[first : first + count])  # pyright: ignore
    return layer


def run_rank(config: MoEConfig, parallel: ParallelConfig, backend: str) -> dict[str, Any]:
    """One step, twice in a row; gradients as one rank has them."""
    layer = build(config, parallel, backend)
    groups = layer.experts.groups
    sizes = TOKENS[parallel.ep_size * parallel.dp_size]
    x = batch(sizes)[groups.dp_rank * parallel.ep_size + groups.ep_rank].requires_grad_()
    for _ in range(2):
        x.grad = None
        layer.zero_grad()
        with trace() as seen:
            y = layer(x)
        y.square().sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        "grads": {n: p.grad for n, p in layer.named_parameters()},
        "payload": seen.calls[0].payload_bytes,
        "combine": seen.calls[0].combine_bytes,
        "place": (groups.dp_rank, groups.ep_rank, groups.tp_rank),
        "ids": layer.router(x).topk_ids,
    }


def single(config: MoEConfig, sizes: list[int], backend: str = "reference") -> dict[str, Any]:
    layer = build(config, ParallelConfig(), backend)
    parts = [part.requires_grad_() for part in batch(sizes)]
    ys = [layer(part) for part in parts]
    sum(y.square().sum() for y in ys).backward()  # pyright: ignore
    return {
        "y": [y.detach() for y in ys],
        "x": [part.grad for part in parts],
        "grads": {n: p.grad for n, p in layer.named_parameters()},
        "layer": layer,
    }


@pytest.mark.parametrize("combine", ["per_rank", "per_slot"])
@pytest.mark.parametrize("mode", ["all_to_all", "replicated"])
@pytest.mark.parametrize(("ep", "tp", "dp"), WIDTHS)
def test_every_rank_has_the_numbers_of_one_process(
    ep: int, tp: int, dp: int, mode: str, combine: str
) -> None:
    config = replace(CONFIG, combine=combine)
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    spec = f"nccl[mode={mode}]+torch"
    sizes = TOKENS[ep * dp]
    want = single(config, sizes)
    results = ranks(parallel.world_size).run(run_rank, config, parallel, spec)
    placement = Placement(7, ep)
    cut = want["layer"].experts
    summed: dict[str, torch.Tensor] = {}
    for got in results:
        dp_rank, ep_rank, tp_rank = got["place"]
        part = dp_rank * ep + ep_rank
        close(got["y"], want["y"][part])
        close(got["x"], want["x"][part])
        for name, grad in got["grads"].items():
            assert grad is not None, name
            if name.startswith("experts.") or tp_rank > 0:
                continue
            summed[name] = summed.get(name, 0) + grad
    for name, grad in summed.items():  # router and shared expert: the sum over distinct tokens
        close(grad, want["grads"][name])
    for name in ("w13", "w2", "w13_bias", "w2_bias"):
        whole = want["grads"][f"experts.{name}"]
        for ep_rank in range(ep):
            first = placement.first_expert(ep_rank)
            mine = whole[first : first + placement.num_local_experts(ep_rank)]
            for tp_rank in range(tp):
                cut.groups = replace(cut.groups, tp_rank=tp_rank)
                cut.parallel = ParallelConfig(tp_size=tp)
                piece = mine
                if name.startswith("w13"):
                    piece = cut._cut_w13(mine, 1)
                elif name == "w2":
                    piece = cut._cut_w2(mine)
                # each dp replica saw its own tokens only
                total = sum(
                    got["grads"][f"experts.{name}"]
                    for got in results
                    if got["place"][1:] == (ep_rank, tp_rank)
                )
                close(total, piece)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_per_slot_is_bit_equal_at_every_width_and_mode(dtype: str) -> None:
    """Rows from a loop over experts depend on the other rows only through their number; with one
    row per product they don't. Integers make them exact whatever the order of sums inside."""
    config = replace(
        CONFIG, dtype=dtype, combine="per_slot", bias=False, num_shared_experts=0,
        activation=Activation(name="relu", gated=False),
        router=replace(CONFIG.router, routed_scaling_factor=1.0),
    )  # fmt: skip
    want = ranks(1).run(exact_on_rank, config, ParallelConfig(), "torch")[0]
    for ep, mode in ((2, "all_to_all"), (4, "all_to_all"), (2, "replicated"), (4, "replicated")):
        spec = f"nccl[mode={mode}]+torch"
        for got in ranks(ep).run(exact_on_rank, config, ParallelConfig(ep_size=ep), spec):
            for part, y in got.items():
                assert torch.equal(y, want[part]), (mode, ep, part)


def exact_on_rank(
    config: MoEConfig, parallel: ParallelConfig, spec: str
) -> dict[int, torch.Tensor]:
    """Small integers: every expert row is exact in float16, so only the combine can differ."""
    layer = MoELayer(config, parallel, spec)
    generator = torch.Generator().manual_seed(5)
    full = [
        torch.randint(-1, 2, shape, generator=generator).float()
        for shape in ((7, 8, 12), (7, 12, 8))
    ]
    layer.experts.load_full_weights(full[0], full[1])
    torch.manual_seed(2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(7, 12))  # pyright: ignore
    ep_rank, size = layer.experts.groups.ep_rank, parallel.ep_size
    parts = [torch.randint(-2, 3, (n, 12), generator=generator).float() for n in (6, 3, 0, 4)]
    mine = range(ep_rank, 4, size)
    return {part: layer(parts[part].to(layer.experts.dtype)).detach() for part in mine}


@pytest.mark.parametrize(("dtype", "wire"), [("bfloat16", 2), ("float32", 4), ("float64", 8)])
@pytest.mark.parametrize("ep", [2, 4])
def test_payload_is_one_row_per_token_and_remote_rank(ep: int, dtype: str, wire: int) -> None:
    for combine in ("per_rank", "per_slot"):
        config = replace(CONFIG, dtype=dtype, combine=combine, bias=False)
        results = ranks(ep).run(traffic_on_rank, config, ParallelConfig(ep_size=ep))
        placement = Placement(7, ep)
        for src, got in enumerate(results):
            home = [[placement.home(e)[0] for e in row if e >= 0] for row in got["ids"]]
            for dst in range(ep):
                rows = sum(dst in row for row in home) if dst != src else 0
                slots = sum(row.count(dst) for row in home) if dst != src else 0
                assert got["payload"][src][dst] == rows * 12 * wire
                back = results[dst]["combine"][dst][src]
                # sums come home in float32 (float64), one per pair; slot rows as they are
                assert back == (
                    rows * 12 * max(4, wire) if combine == "per_rank" else slots * 12 * wire
                )
                weight = 8 if dtype == "float64" else 4
                assert got["meta"][src][dst] == rows * 3 * (weight + 4) + (24 if dst != src else 0)


def traffic_on_rank(config: MoEConfig, parallel: ParallelConfig) -> dict[str, Any]:
    layer = build(config, parallel, "nccl+torch")
    rank = layer.experts.groups.ep_rank
    x = batch([9, 0, 4, 7])[rank].to(layer.experts.dtype)
    with trace() as seen:
        _, routing = layer(x, return_routing=True)
    (call,) = seen.calls
    assert call.collectives == ["counts", "dispatch", "dispatch.1", "dispatch.2", "combine"]
    return {
        "payload": call.payload_bytes,
        "combine": call.combine_bytes,
        "meta": call.meta_bytes,
        "ids": routing.topk_ids.tolist(),
    }


def dtypes_on_rank(config: MoEConfig, parallel: ParallelConfig) -> Any:
    layer = build(config, parallel, "nccl+torch")
    x = batch([9, 5])[layer.experts.groups.ep_rank].to(layer.experts.dtype)
    with trace() as seen:
        y = layer(x)
    return y.detach(), seen.calls[0].payload_bytes, seen.calls[0].combine_bytes


def test_wire_dtypes_are_fields_and_change_bytes_and_numbers() -> None:
    plain = replace(CONFIG, dtype="float32", bias=False)
    parallel = ParallelConfig(ep_size=2)
    full = ranks(2).run(dtypes_on_rank, plain, parallel)
    half = ranks(2).run(
        dtypes_on_rank,
        replace(plain, dispatch_dtype="bfloat16", combine_dtype="bfloat16"),
        parallel,
    )
    for rank in range(2):
        peer = 1 - rank
        assert half[rank][1][rank][peer] * 2 == full[rank][1][rank][peer] > 0
        assert half[rank][2][rank][peer] * 2 == full[rank][2][rank][peer] > 0
        assert not torch.equal(half[rank][0], full[rank][0])
        # two roundings to 8 bits: of rows on their way out, of sums on their way home
        torch.testing.assert_close(half[rank][0], full[rank][0], rtol=0.05, atol=0.05)


def rows_everywhere(config: MoEConfig, parallel: ParallelConfig) -> Any:
    layer = build(config, parallel, "nccl[mode=replicated]+torch")
    x = batch([6])[0].requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    grads = {n: p.grad for n, p in layer.named_parameters()}
    return y.detach(), x.grad, grads, layer.experts.groups.ep_rank


@pytest.mark.parametrize("combine", ["per_rank", "per_slot"])
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_replicated_rows_stay_replicated(ep: int, tp: int, combine: str) -> None:
    """All ranks bring the same tokens, keep the same bits, and each gradient is the whole one."""
    config = replace(CONFIG, combine=combine)
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, rows="replicated")
    want = single(config, [6])
    results = ranks(parallel.world_size).run(rows_everywhere, config, parallel)
    placement = Placement(7, ep)
    for y, x_grad, grads, ep_rank in results:
        assert torch.equal(y, results[0][0])
        close(y, want["y"][0])
        close(x_grad, want["x"][0])
        close(grads["router.weight"], want["grads"]["router.weight"])
        first, count = placement.first_expert(ep_rank), placement.num_local_experts(ep_rank)
        whole = want["grads"]["experts.w2_bias"]
        close(grads["experts.w2_bias"], whole[first : first + count])


def uneven_replicas(config: MoEConfig, parallel: ParallelConfig) -> str:
    layer = build(config, parallel, "nccl[mode=replicated]+torch")
    with pytest.raises(InputError) as error:
        layer(batch([2, 3])[layer.experts.groups.ep_rank])
    return str(error.value)


def test_replicated_rows_that_differ_in_number_are_refused_everywhere() -> None:
    for text in ranks(2).run(uneven_replicas, CONFIG, ParallelConfig(ep_size=2, rows="replicated")):
        assert "rank 0: 2 tokens" in text
        assert "rank 1: 3 tokens" in text


def faulty_step(config: MoEConfig, parallel: ParallelConfig, spec: str, fault: str) -> list[str]:
    """Rank 1 brings something bad; then all do a good step."""
    layer = build(config, parallel, spec)
    rank = layer.experts.groups.ep_rank
    good, texts = batch([4, 4, 4, 4])[rank], []
    for _ in range(2):
        try:
            if rank != 1:
                layer(good)
            elif fault == "shape":
                layer(good[:, :5])
            elif fault == "ids":
                layer(good, routing=Routing(torch.full((4, 3), 99), torch.ones(4, 3)))
            elif fault == "tokens":
                layer(batch([50])[0])
            elif fault == "router":
                layer.router.weight.data = layer.router.weight.data[:, :5]  # pyright: ignore
                try:
                    layer(good)
                finally:
                    layer.router.weight.data = torch.zeros(7, 12).double()  # pyright: ignore
        except (InputError, RuntimeError) as error:
            texts.append(str(error))
    assert layer(good).shape == good.shape  # nobody is out of step
    return texts


@pytest.mark.parametrize("mode", ["all_to_all", "replicated"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [("shape", "hidden_states must have shape"), ("ids", "topk_ids are not in"), ("router", "")],
)
def test_one_ranks_fault_raises_on_all_in_the_same_step(mode: str, fault: str, words: str) -> None:
    spec = f"nccl[mode={mode}]+torch"
    for texts in ranks(4).run(
        faulty_step, CONFIG, ParallelConfig(ep_size=4), spec, fault, limit=30
    ):
        assert len(texts) == 2
        assert all("rank 1: " in text and words in text for text in texts)


def idle_steps(config: MoEConfig, parallel: ParallelConfig, spec: str) -> list[int]:
    """Six steps of which a rank often has no token; also one step with none anywhere (case 7)."""
    layer = build(config, parallel, spec)
    rank = layer.experts.groups.ep_rank
    steps = ([3, 0, 5, 0, 0, 1, 0], [0, 2, 0, 0, 4, 0, 0])[rank]
    counts = []
    for tokens in steps:
        layer.zero_grad()
        x = batch([tokens])[0].requires_grad_()
        y = layer(x)
        assert y.shape == (tokens, 12)
        y.sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all()
        counts.append(layer.experts.pipeline.transport.ep.collectives.total())  # pyright: ignore
    return counts


@pytest.mark.parametrize("mode", ["all_to_all", "replicated"])
def test_idle_ranks_keep_step(mode: str) -> None:
    spec = f"nccl[mode={mode}]+torch"
    for combine in ("per_rank", "per_slot"):
        config = replace(CONFIG, combine=combine)
        one, other = ranks(2).run(idle_steps, config, ParallelConfig(ep_size=2), spec, limit=30)
        assert one == other
        assert one[0] > 0
        assert len({b - a for a, b in itertools.pairwise(one)}) == 1  # the same every step


def in_flight(config: MoEConfig, parallel: ParallelConfig) -> None:
    layer = build(config, parallel, "nccl+torch")
    experts, rank = layer.experts, layer.experts.groups.ep_rank
    xs = [batch([n])[0] for n in ((5, 2), (0, 3))[rank]]
    routed = [layer.router(x).ids_and_weights() for x in xs]
    want = [experts(x, *r) for x, r in zip(xs, routed, strict=True)]
    (first, a), (second, b) = (experts.dispatch(x, *r) for x, r in zip(xs, routed, strict=True))
    second, first = experts.run(second), experts.run(first)
    assert torch.equal(experts.combine(second, b), want[1])
    assert torch.equal(experts.combine(first, a), want[0])
    with pytest.raises(HandleError):
        experts.combine(first, a)
    # begin and finish apart: both dispatches are on the wire at once
    transport: Any = experts.pipeline.transport
    begun = [
        transport.dispatch_begin(x, Routing(*r, id_space=IdSpace.PHYSICAL))
        for x, r in zip(xs, routed, strict=True)
    ]
    slots = [pending.finish()[0].num_slots for pending in begun]
    assert slots == [len(r.row_weights) for r in (first, second)]  # pyright: ignore


def test_two_micro_batches_in_flight() -> None:
    ranks(2).run(in_flight, CONFIG, ParallelConfig(ep_size=2))


def width_one(config: MoEConfig) -> int:
    layer = build(config, ParallelConfig(), "nccl+torch")
    y = layer(batch([5])[0].requires_grad_())
    y.sum().backward()
    with trace() as seen:
        again = layer(batch([5])[0])
    close(again, y)
    close(y, build(config, ParallelConfig(), "reference")(batch([5])[0]))
    assert seen.collectives == []
    assert seen.payload_bytes == [[0]]
    return layer.experts.groups.ep_rank


def test_width_one_is_the_local_path_without_collectives() -> None:
    """No process group is needed, and where there is one it isn't used: one rank calls alone."""
    assert width_one(CONFIG) == 0
    assert not dist.is_initialized()
    ranks(2).run(only_rank_zero, CONFIG, limit=20)


def only_rank_zero(config: MoEConfig) -> None:
    if dist.get_rank() == 0:
        width_one(config)


def hundred_layers(config: MoEConfig, parallel: ParallelConfig) -> int:
    before = len(dist.distributed_c10d._world.pg_map)  # pyright: ignore
    first = MoELayer(config, parallel, "nccl+torch")
    made = len(dist.distributed_c10d._world.pg_map)  # pyright: ignore
    for _ in range(99):
        layer = MoELayer(config, parallel, "nccl+torch")
        assert layer.experts.groups is first.experts.groups
    assert len(dist.distributed_c10d._world.pg_map) == made  # pyright: ignore
    return made - before


def test_a_hundred_layers_make_no_new_group() -> None:
    ranks(4).run(hundred_layers, CONFIG, ParallelConfig(ep_size=2, dp_size=2))


def with_mesh(config: MoEConfig) -> tuple[int, int, int]:
    """A mesh of the caller's own, dimensions in another order and only the last two ranks used."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    layer = MoELayer(config, ParallelConfig(ep_size=2, dp_size=2), "nccl+torch", mesh=mesh)
    with pytest.raises(ConfigError, match="must have 4 ranks along 'ep'"):
        MoELayer(config, ParallelConfig(ep_size=4), "nccl+torch", mesh=mesh)
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    other = MoELayer(config, ParallelConfig(ep_size=2, dp_size=2), "nccl+torch", mesh=turned)
    assert other.experts.groups.ep_rank == dist.get_rank() // 2
    pair = mesh["ep"]
    alone = MoELayer(config, ParallelConfig(ep_size=2), "nccl+torch", mesh=pair)
    assert alone.experts.groups.ranks == ((0, 1), (2, 3))[dist.get_rank() // 2]
    x = batch([4, 2, 3, 1])[dist.get_rank()]
    alone.load_state_dict(layer.state_dict())
    close(alone(x), layer(x))
    groups = layer.experts.groups
    return groups.dp_rank, groups.ep_rank, alone.experts.groups.rank


def test_groups_from_a_device_mesh() -> None:
    places = ranks(4).run(with_mesh, CONFIG)
    assert places == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]


def wrong_splits() -> str:
    channel = Channel(dist.group.WORLD, (0, 1))
    channel._debug = True
    rank = dist.get_rank()
    other = [1 - (peer == rank) for peer in (0, 1)]
    (got,), works = channel.exchange("good", [torch.full((1, 2), rank)], other, other)
    wait(works)
    assert got.tolist() == [[1 - rank] * 2]
    send = [[0, 2], [0, 0]][rank]
    receive = [[0, 0], [1, 0]][rank]  # rank 1 expects one row and gets two
    with pytest.raises(MoEError) as error:
        channel.exchange("bad", [torch.zeros(sum(send), 3)], send, receive)
    if rank == 0:
        channel.collectives["extra"] += 1
    with pytest.raises(MoEError, match="collective"):
        channel.all_reduce("late", torch.zeros(1))
    return str(error.value)


def test_the_debug_flag_cross_checks_splits_and_counts() -> None:
    for text in ranks(2).run(wrong_splits, limit=20):
        assert "rank 0 sends 2 rows to rank 1, which expects 1" in text


def global_ids(config: MoEConfig, parallel: ParallelConfig) -> Any:
    """Scaled identities: expert e returns (e + 1) * x; ids are global (case 12)."""
    layer = MoELayer(config, parallel, "nccl+torch")
    eye = torch.eye(4, dtype=torch.float64)
    scaled = eye * torch.arange(1, 9, dtype=torch.float64)[:, None, None]
    layer.experts.load_full_weights(eye.expand(8, 4, 4), scaled)
    ids = torch.tensor([[2], [3], [0], [5], [2], [7]])
    x = torch.arange(24, dtype=torch.float64).view(6, 4) + dist.get_rank()
    y = layer.experts(x, ids, torch.ones(6, 1))
    assert torch.equal(y, x * torch.tensor([[3], [4], [1], [6], [3], [8]]))
    none = layer.experts(x, torch.full((6, 1), -1), torch.full((6, 1), float("nan")))
    assert torch.equal(none, torch.zeros_like(x))


def test_ids_are_global_on_every_rank() -> None:
    config = MoEConfig(
        hidden_size=4, intermediate_size=4, num_experts=8, top_k=1, dtype="float64",
        activation=Activation(name="identity", gated=False),
    )  # fmt: skip
    for ep in (2, 4):
        ranks(ep).run(global_ids, config, ParallelConfig(ep_size=ep))


def bias_once(config: MoEConfig, parallel: ParallelConfig) -> None:
    """w2 = 0 and b2 = 1: every element is the sum of the weights, at any TP (case 23)."""
    layer = MoELayer(config, parallel, "nccl+torch")
    with torch.no_grad():
        layer.experts.w2.zero_()
        layer.experts.w2_bias.fill_(1)  # pyright: ignore
    y = layer.experts(
        torch.ones(2, 12).double(),
        torch.tensor([[0, 6, -1]] * 2),
        torch.tensor([[0.25, 0.5, 9]] * 2),
    )
    assert torch.equal(y, torch.full((2, 12), 0.75).double())


def test_the_down_bias_is_added_once() -> None:
    for ep, tp in ((1, 2), (2, 1), (2, 2)):
        parallel = ParallelConfig(ep_size=ep, tp_size=tp)
        ranks(ep * tp).run(bias_once, CONFIG, parallel)


def adjusted(config: MoEConfig) -> dict[str, Any]:
    """A transport that spans all ranks (SGLang's kind): tp = 1 is all it has."""
    manifest = moe_nccl.BACKEND
    part = manifest["parts"][0]
    span = part | {"offer": part["offer"] | {"tp_size": [1]}}
    register_backend(manifest | {"name": "span", "parts": [span]}, replace=True)
    with pytest.raises(ConfigError, match="tp_size"):
        MoELayer(config, ParallelConfig(tp_size=2), "span+torch")
    layer = build_adjusted(config)
    x = batch([4, 3])[dist.get_rank()]
    return {"y": layer(x).detach(), "described": layer.describe()}


def build_adjusted(config: MoEConfig) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(config, ParallelConfig(tp_size=2), "span+torch", policy="adjust")


def test_policy_adjust_widens_ep_and_says_so() -> None:
    config = replace(CONFIG, bias=False, num_experts=8)
    want = single(config, [4, 3])
    for rank, got in enumerate(ranks(2).run(adjusted, config)):
        described = got["described"]
        assert (described["widths"]["ep_size"], described["widths"]["tp_size"]) == (2, 1)
        assert described["place"]["ep_rank"] == rank
        close(got["y"], want["y"][rank])

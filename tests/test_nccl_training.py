"""Training over ranks: DDP, FSDP2, clipping, checkpointing, checkpoints at another width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe_core import (
    Activation,
    Experts,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RouterConfig,
)
from moe_core.conformance.pool import ranks
from moe_core.placement import Placement
from moe_core.training import (
    clip_grad_norm_,
    expert_parameter_names,
    expert_state,
    gradient_divisor,
    sync_expert_gradients,
)

CONFIG = MoEConfig(
    hidden_size=8,
    intermediate_size=4,
    num_experts=6,
    top_k=2,
    router=RouterConfig(scoring_func="sigmoid", renormalize=True),
    activation=Activation(limit=2.0),
    num_shared_experts=1,
    dtype="float64",
)
ORDER = (3, 0, 6, 1, 5, 2, 4)  # of 7 experts, uneven over 2 and over 4 ranks
UNEVEN = replace(CONFIG, num_experts=7, num_shared_experts=2)
APART = replace(UNEVEN, bias=True, w13_layout="up_gate")
SLOTS = replace(UNEVEN, shared_placement="slots")
CUT = replace(APART, shared_intermediate_size=6, shared_gate=True, shared_tp=True)
WIDTHS = [(2, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 1, 2)]


class Model(nn.Module):
    """A projection, a MoE layer, a projection: parameters of both kinds."""

    def __init__(
        self,
        parallel: ParallelConfig,
        backend: str,
        config: MoEConfig = CONFIG,
        order: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        placement = Placement(config.num_experts, parallel.ep_size, order)
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.moe = MoELayer(config, parallel, backend, placement=placement)
        self.last = nn.Linear(8, 3, dtype=torch.float64)
        if config.bias:
            experts = self.moe.experts
            own = list(placement.experts_of(experts.groups.ep_rank))
            w13_bias, w2_bias = torch.randn(config.num_experts, 16).split(8, 1)
            with torch.no_grad():
                experts.w13_bias.copy_(experts._cut_w13(w13_bias[own], 1))  # pyright: ignore
                experts.w2_bias.copy_(w2_bias[own])  # pyright: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.moe(x))


def data(part: int) -> torch.Tensor:
    return torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(part))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def single(parts: int, config: MoEConfig = CONFIG) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One process, shared experts apart, the mean of the parts' losses."""
    model = Model(ParallelConfig(), "torch", replace(config, shared_placement="apart"))
    (sum(loss_of(model(data(p))) for p in range(parts)) / parts).backward()  # pyright: ignore
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {n: p.grad for n, p in model.named_parameters()}, norm  # pyright: ignore


def ddp_step(
    parallel: ParallelConfig, config: MoEConfig = CONFIG, order: tuple[int, ...] = ()
) -> dict[str, Any]:
    replicated = parallel.rows == "replicated"
    spec = "nccl[mode=replicated]+torch" if replicated else "nccl+torch"
    model = Model(parallel, spec, config, order)
    groups = model.moe.experts.groups
    names = expert_parameter_names(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    part = groups.dp_rank if replicated else groups.dp_rank * parallel.ep_size + groups.ep_rank
    for _ in range(2):  # twice in a row: nothing may be left over
        wrapped.zero_grad()
        loss_of(wrapped(data(part))).backward()
        sync_expert_gradients(model)
    norm = clip_grad_norm_(model, 0.5)
    return {
        "grads": {n: p.grad for n, p in model.named_parameters()},
        "norm": norm,
        "place": (groups.ep_rank, groups.tp_rank),
        "names": names,
    }


@pytest.mark.parametrize(("ep", "tp", "dp"), WIDTHS)
def test_ddp_gradients_and_norm_are_those_of_one_process(ep: int, tp: int, dp: int) -> None:
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    want, want_norm = single(ep * dp)
    placement = Placement(6, ep)
    for got in ranks(parallel.world_size).run(ddp_step, parallel):
        assert set(got["names"]) == {"moe.experts.w13", "moe.experts.w2"}
        torch.testing.assert_close(got["norm"], want_norm, rtol=1e-10, atol=0)
        ep_rank, tp_rank = got["place"]
        first, count = placement.first_expert(ep_rank), placement.num_local_experts(ep_rank)
        for name, grad in got["grads"].items():
            whole = want[name]
            if "experts.w" in name and "shared" not in name:
                whole = whole[first : first + count]
                if name.endswith("w2"):
                    whole = whole.chunk(tp, 2)[tp_rank]
                else:
                    gate, up = whole.chunk(2, 1)
                    whole = torch.cat([gate.chunk(tp, 1)[tp_rank], up.chunk(tp, 1)[tp_rank]], 1)
            torch.testing.assert_close(grad, whole, rtol=1e-10, atol=1e-12)


def share(whole: torch.Tensor, tp: int, tp_rank: int, dim: int, blocks: int) -> torch.Tensor:
    """A tp rank's share of each of ``blocks`` blocks of equal size along a dimension."""
    return torch.cat([b.chunk(tp, dim)[tp_rank] for b in whole.chunk(blocks, dim)], dim)


@pytest.mark.parametrize("config", [APART, SLOTS, CUT], ids=["apart", "slots", "cut"])
@pytest.mark.parametrize(
    ("ep", "tp", "dp", "rows"),
    [
        (4, 1, 1, "distinct"),
        (2, 2, 1, "distinct"),
        (2, 1, 2, "distinct"),
        (1, 2, 2, "distinct"),
        (2, 2, 1, "replicated"),
    ],
)
def test_shared_experts_uneven_ones_biases_and_a_placement_change_nothing(
    ep: int, tp: int, dp: int, rows: str, config: MoEConfig
) -> None:
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp, rows=rows)
    want, want_norm = single(dp if rows == "replicated" else ep * dp, config)
    shared = {n: want[f"moe.shared_experts.{n}"] for n in ("w13", "w2")}
    # [2, S, W, H] -> one [2W, H] after the other, and [H, S, W] -> [S, H, W]
    as_slots = {
        "w13": shared["w13"].unflatten(0, (2, 2, -1)).transpose(0, 1).flatten(1, 2),
        "w2": shared["w2"].unflatten(1, (2, -1)).transpose(0, 1),
    }
    experts_of = {
        1: [ORDER],
        2: [ORDER[:4], ORDER[4:]],
        4: [ORDER[:2], ORDER[2:4], ORDER[4:6], ORDER[6:]],
    }
    own = {f"moe.experts.{n}" for n in ("w13", "w2", "w13_bias", "w2_bias")}
    own = own if config.bias else {"moe.experts.w13", "moe.experts.w2"}
    if config.shared_tp and tp > 1:
        own |= {"moe.shared_experts.w13", "moe.shared_experts.w2"}
    for got in ranks(parallel.world_size).run(ddp_step, parallel, config, ORDER):
        assert set(got["names"]) == own
        torch.testing.assert_close(got["norm"], want_norm, rtol=1e-10, atol=0)
        ep_rank, tp_rank = got["place"]
        for name, grad in got["grads"].items():
            whole, last = want[name], name.split(".")[-1]
            if name.startswith("moe.experts."):
                whole = whole[list(experts_of[ep][ep_rank])]
                if config.shared_slots:
                    whole = torch.cat([whole, as_slots[last]])
                if last == "w2":
                    whole = share(whole, tp, tp_rank, 2, 1)
                elif last != "w2_bias":
                    whole = share(whole, tp, tp_rank, 1, 2)
            elif config.shared_tp and last == "w2" and tp > 1:
                whole = share(whole, tp, tp_rank, 1, 2)  # each of the 2 shared experts
            elif config.shared_tp and last == "w13" and tp > 1:
                whole = share(whole, tp, tp_rank, 0, 4)  # gate and up of each
            torch.testing.assert_close(grad, whole, rtol=1e-10, atol=1e-12)


def test_the_divisor() -> None:
    assert gradient_divisor(ParallelConfig(ep_size=4, dp_size=2, tp_size=8)) == 8
    assert gradient_divisor(ParallelConfig(ep_size=4, dp_size=2, rows="replicated")) == 2


def fsdp_step(parallel: ParallelConfig) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(
        "cpu", (parallel.dp_size, parallel.ep_size), mesh_dim_names=("dp", "ep")
    )
    torch.manual_seed(0)
    model = Model(parallel, "nccl+torch")
    groups = model.moe.experts.groups
    part = groups.dp_rank * parallel.ep_size + groups.ep_rank
    fully_shard(model.moe.experts, mesh=mesh["dp"])
    model.moe.experts.set_gradient_divide_factor(float(gradient_divisor(parallel)))  # pyright: ignore
    fully_shard(model, mesh=init_device_mesh("cpu", (parallel.world_size,)))
    for _ in range(2):
        model.zero_grad()
        loss_of(model(data(part))).backward()
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # pyright: ignore
    return {"grads": grads, "ep_rank": groups.ep_rank}


def test_fsdp2_shards_experts_over_dp_and_everything_else_over_all() -> None:
    parallel = ParallelConfig(ep_size=2, dp_size=2)
    want, _ = single(4)
    unclipped = Model(ParallelConfig(), "torch")
    (sum(loss_of(unclipped(data(p))) for p in range(4)) / 4).backward()  # pyright: ignore
    want = {n: p.grad for n, p in unclipped.named_parameters()}
    placement = Placement(6, 2)
    for got in ranks(4).run(fsdp_step, parallel, limit=90):
        first = placement.first_expert(got["ep_rank"])
        for name, grad in got["grads"].items():
            whole = want[name]
            assert whole is not None
            if "experts.w" in name and "shared" not in name:
                whole = whole[first : first + grad.shape[0]]
            torch.testing.assert_close(grad, whole, rtol=1e-10, atol=1e-12)


def checkpointed(parallel: ParallelConfig, reentrant: bool) -> None:
    model = Model(parallel, "nccl+torch")
    x = data(dist.get_rank()).requires_grad_()
    loss_of(model(x)).backward()
    want = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    loss_of(checkpoint(model, x, use_reentrant=reentrant)).backward()  # pyright: ignore
    for got, expected in zip([x.grad, *(p.grad for p in model.parameters())], want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    ranks(2).run(checkpointed, ParallelConfig(ep_size=2), reentrant)


def save_at(parallel: ParallelConfig, folder: str) -> None:
    from torch.distributed import checkpoint as dcp

    model = MoELayer(CONFIG, parallel, "nccl+torch")
    generator = torch.Generator().manual_seed(4)
    model.experts.load_full_weights(
        torch.randn(6, 8, 8, generator=generator), torch.randn(6, 8, 4, generator=generator)
    )
    dcp.save(expert_state(model), checkpoint_id=folder)  # pyright: ignore


def load_at(parallel: ParallelConfig, folder: str) -> None:
    from torch.distributed import checkpoint as dcp

    model = MoELayer(CONFIG, parallel, "nccl+torch")
    dcp.load(expert_state(model), checkpoint_id=folder)  # pyright: ignore
    generator = torch.Generator().manual_seed(4)
    w13 = torch.randn(6, 8, 8, generator=generator).double()
    w2 = torch.randn(6, 8, 4, generator=generator).double()
    first = model.experts.placement.first_expert(model.experts.groups.ep_rank)
    count = model.experts.w13.shape[0]
    assert torch.equal(model.experts.w13, w13[first : first + count])
    assert torch.equal(model.experts.w2, w2[first : first + count])


def test_checkpoints_reload_at_another_width(tmp_path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks(4).run(save_at, ParallelConfig(ep_size=4), folder)
    for ep in (2, 4, 1):
        ranks(ep).run(load_at, ParallelConfig(ep_size=ep), folder)


def expert_tensors(model: Model) -> dict[str, torch.Tensor]:
    state = model.moe.state_dict()
    return {n: t for n, t in state.items() if "experts.w" in n}


def save_model(config: MoEConfig, parallel: ParallelConfig, order: Any, folder: str) -> list[str]:
    from torch.distributed import checkpoint as dcp

    state = expert_state(Model(parallel, "nccl+torch", config, order))
    dcp.save(state, checkpoint_id=folder)  # pyright: ignore
    return sorted(state)


def load_model(config: MoEConfig, parallel: ParallelConfig, order: Any, folder: str) -> None:
    """Experts drawn from another seed become those of the saved one's, at these widths."""
    from torch.distributed import checkpoint as dcp

    wanted = expert_tensors(Model(parallel, "nccl+torch", config, order))
    model = Model(parallel, "nccl+torch", config, order, seed=1)
    assert not any(torch.equal(t, wanted[n]) for n, t in expert_tensors(model).items())
    dcp.load(expert_state(model), checkpoint_id=folder)  # pyright: ignore
    for name, tensor in expert_tensors(model).items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(
    ("config", "then", "tp"),
    [
        (SLOTS, SLOTS, 1),
        (APART, SLOTS, 1),
        (CUT, CUT, 2),
        (SLOTS, replace(SLOTS, shared_placement="apart", shared_tp=True), 2),
    ],
    ids=["slots", "apart to slots", "cut", "slots to cut"],
)
def test_checkpoints_name_logical_experts(config: Any, then: Any, tp: int, tmp_path: Any) -> None:
    folder = str(tmp_path / "checkpoint")
    then = replace(then, bias=config.bias and then.bias, w13_layout=config.w13_layout)
    names = ranks(2 * tp).run(
        save_model, config, ParallelConfig(ep_size=2, tp_size=tp), ORDER, folder
    )
    cut = ".tp0" if tp > 1 else ""
    weights = [n for n in names[0] if ".experts.w2." in n and "bias" not in n]
    assert weights == [f"moe.experts.w2.{e}{cut}" for e in sorted(ORDER[:4])]
    assert [n for n in names[-1] if ".shared_experts.w13." in n] == [
        f"moe.shared_experts.w13.{i}" + (".tp1" if tp > 1 else "") for i in range(2)
    ]
    ranks(tp).run(load_model, then, ParallelConfig(tp_size=tp), (), folder)
    if tp == 1:
        ranks(4).run(load_model, then, ParallelConfig(ep_size=4), ORDER[::-1], folder)


def test_two_replicas_on_a_rank_would_share_a_name() -> None:
    placement = Placement(6, 1, (0, 1, 2, 3, 4, 5, 2))
    layer = MoELayer(CONFIG, backend="torch", inference=True, placement=placement)
    with pytest.raises(InputError, match=r"two slots of this rank hold experts\.w13\.2,"):
        expert_state(layer)
    assert expert_parameter_names(layer) == []


FIRST = torch.tensor([0, -1, -1, -1])
# 256 + 1 + 1 + 1 is 259, which bfloat16 rounds to 260; added one by one in bfloat16 it is 256.
TERMS = torch.tensor([256.0, 1.0, 1.0, 1.0])
PLAIN = MoEConfig(
    hidden_size=8,
    intermediate_size=8,
    num_experts=4,
    top_k=4,
    activation=Activation(name="relu2", gated=False),
    combine_dtype="float32",
    dtype="bfloat16",
)


def input_gradient(parallel: ParallelConfig, mode: str) -> torch.Tensor:
    """All of the input is 0.5, where relu(x)^2 has the derivative 1; only feature 0 counts."""
    experts = Experts(PLAIN, parallel, f"nccl[mode={mode}]+torch")
    w13, w2 = torch.zeros(4, 8, 8), torch.zeros(4, 8, 8)
    w13[:, :, 0] = 1
    if parallel.tp_size == 1:  # a term per expert, each expert on a rank of its own
        w2[:, 0, 0] = TERMS
    else:  # a term per tp rank, the large one on another rank for each expert
        for expert in range(4):
            w2[expert, 0, ::2] = TERMS.roll(expert)
    experts.load_full_weights(w13, w2)
    x = torch.full((16, 8), 0.5, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(4).expand(16, 4)
    weights = torch.eye(4).repeat(4, 1) if parallel.tp_size > 1 else torch.ones(16, 4)
    experts(x, ids, weights).sum().backward()
    assert x.grad is not None
    return x.grad[:, 0]


@pytest.mark.parametrize("mode", ["all_to_all", "replicated"])
@pytest.mark.parametrize(("ep", "tp"), [(4, 1), (1, 4)])
def test_gradients_of_an_input_are_rounded_once(ep: int, tp: int, mode: str) -> None:
    for got in ranks(4).run(input_gradient, ParallelConfig(ep_size=ep, tp_size=tp), mode):
        assert got.tolist() == [260.0] * 16


def weight_gradients(parallel: ParallelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank r brings 16 in feature r and 1 elsewhere, so that w2 gets 256 + 1 + 1 + 1."""
    config = replace(PLAIN, num_shared_experts=1, shared_placement="slots")
    layer = MoELayer(
        config,
        parallel,
        "nccl+torch",
        router=lambda x, _: (FIRST.expand(len(x), 4), x[:, :4] * 0 + 1),
    )
    eye = torch.eye(8)
    layer.experts.load_full_weights(eye.expand(4, 8, 8), eye.expand(4, 8, 8))
    layer.load_shared_weights(eye, eye)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    x[0, dist.get_rank()] = 16
    layer(x).sum().backward()
    sync_expert_gradients(layer)
    grad = layer.experts.w2.grad
    assert grad is not None
    return grad[0, 0, :4], grad[-1, 0, :4]


def test_gradients_of_weights_are_rounded_once() -> None:
    for _, shared in ranks(4).run(weight_gradients, ParallelConfig(ep_size=4)):
        assert (shared * 4).tolist() == [260.0] * 4  # over ep, in the backward
    for routed, shared in ranks(4).run(weight_gradients, ParallelConfig(dp_size=4)):
        assert routed.tolist() == shared.tolist() == [65.0] * 4  # 259 / 4 = 64.75


def losses(parallel: ParallelConfig, steps: int) -> list[float]:
    """SGD on fixed data; the mean loss over the parts each rank has."""
    model = Model(parallel, "nccl+torch" if parallel.world_size > 1 else "torch")
    world = parallel.ep_size * parallel.dp_size
    groups = model.moe.experts.groups
    mine = range(groups.dp_rank * parallel.ep_size + groups.ep_rank, 4, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dense = [p for n, p in model.named_parameters() if n not in expert_parameter_names(model)]
    history: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(loss_of(model(data(p))) for p in mine) / len(mine)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        shown = loss.detach().clone()
        if parallel.world_size > 1:
            sync_expert_gradients(model)
            for parameter in dense:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(parallel.world_size)  # pyright: ignore
            dist.all_reduce(shown)
            shown /= parallel.world_size
        optimizer.step()
        history.append(float(shown))
    return history


def test_fifty_steps_follow_the_single_process() -> None:
    want = torch.tensor(losses(ParallelConfig(), 50), dtype=torch.float64)
    assert want[-1] < 0.9 * want[0]
    for ep, tp, dp in ((2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 1)):
        parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
        for got in ranks(parallel.world_size).run(losses, parallel, 50, limit=120):
            torch.testing.assert_close(
                torch.tensor(got, dtype=torch.float64), want, rtol=1e-9, atol=1e-9
            )


def custom_router(config: MoEConfig, parallel: ParallelConfig) -> torch.Tensor:
    def route(x: torch.Tensor, input_ids: torch.Tensor | None) -> Any:
        ids = (x[:, :2] * 100).long().abs() % 6
        return ids, torch.softmax(x[:, 2:4], -1)

    layer = MoELayer(config, parallel, "nccl+torch", router=route)
    generator = torch.Generator().manual_seed(4)
    layer.experts.load_full_weights(
        torch.randn(6, 8, 8, generator=generator), torch.randn(6, 8, 4, generator=generator)
    )
    return layer(data(0)).detach()


def test_a_routing_function_of_the_users_own_at_tp_2() -> None:
    config = replace(CONFIG, num_shared_experts=0)
    (want,) = ranks(1).run(custom_router, config, ParallelConfig())
    for y in ranks(2).run(custom_router, config, ParallelConfig(tp_size=2)):
        torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)

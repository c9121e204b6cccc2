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

from moe_core import Activation, MoEConfig, MoELayer, ParallelConfig, RouterConfig
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
WIDTHS = [(2, 1, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1), (1, 1, 2)]


class Model(nn.Module):
    """A projection, a MoE layer, a projection: parameters of both kinds."""

    def __init__(self, parallel: ParallelConfig, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.moe = MoELayer(CONFIG, parallel, backend)
        self.last = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.moe(x))


def data(part: int) -> torch.Tensor:
    return torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(part))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def single(parts: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One process, the mean of the parts' losses."""
    model = Model(ParallelConfig(), "torch")
    (sum(loss_of(model(data(p))) for p in range(parts)) / parts).backward()  # pyright: ignore
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {n: p.grad for n, p in model.named_parameters()}, norm  # pyright: ignore


def ddp_step(parallel: ParallelConfig, clip: bool) -> dict[str, Any]:
    model = Model(parallel, "nccl+torch")
    groups = model.moe.experts.groups
    names = expert_parameter_names(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    part = groups.dp_rank * parallel.ep_size + groups.ep_rank
    for _ in range(2):  # twice in a row: nothing may be left over
        wrapped.zero_grad()
        loss_of(wrapped(data(part))).backward()
        sync_expert_gradients(model)
    norm = clip_grad_norm_(model, 0.5) if clip else None
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
    for got in ranks(parallel.world_size).run(ddp_step, parallel, True):
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

"""Expert parallelism over gloo: the numbers of one process, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_core import Activation, MoEConfig, MoELayer, ParallelConfig, RouterConfig, trace
from moe_core.conformance.pool import ranks

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
    placement = want["layer"].experts.placement.__class__(7, ep)
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
                piece = {
                    "w13": lambda: cut._cut_w13(mine, 1),
                    "w13_bias": lambda: cut._cut_w13(mine, 1),
                    "w2": lambda: cut._cut_w2(mine),
                    "w2_bias": lambda: mine,
                }[name]()
                # each dp replica saw its own tokens only
                total = sum(
                    got["grads"][f"experts.{name}"]
                    for got in results
                    if got["place"][1:] == (ep_rank, tp_rank)
                )
                close(total, piece)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_debug() -> None:
    assert dist.is_available()

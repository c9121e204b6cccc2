"""Parameters, operations and bytes: against the modules themselves, counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

from moe_core import Activation, MoEConfig, MoELayer, ParallelConfig, RouterConfig, Routing
from moe_core.conformance.pool import ranks
from moe_core.placement import Placement
from moe_core.sizes import ModelSizes, layer_sizes, rank_sizes

SMALL = MoEConfig(hidden_size=12, intermediate_size=8, num_experts=5, top_k=2)
CONFIGS = [
    SMALL,
    replace(SMALL, bias=True, dtype="bfloat16", activation=Activation(gated=False)),
    replace(
        SMALL,
        dtype="float16",
        num_shared_experts=2,
        shared_intermediate_size=6,
        shared_gate=True,
        router=RouterConfig(correction_bias=True),
    ),
    replace(SMALL, num_shared_experts=2, shared_placement="slots", dtype="bfloat16"),
    replace(SMALL, router=RouterConfig(kind="hash", vocab_size=7), dtype="float64"),
]


def test_mixtral_8x7b() -> None:
    """46.7 B and 12.9 B (mistral.ai/news/mixtral-of-experts), the dense part named; the oracle is
    transformers' model, made on the meta device."""
    moe = MoEConfig(
        hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2, dtype="bfloat16"
    )
    dense = {
        "embedding": 32000 * 4096,
        "attention": 32 * (2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128),
        "norms": 32 * 2 * 4096 + 4096,
        "lm_head": 4096 * 32000,
    }
    sizes = ModelSizes((layer_sizes(moe),) * 32, dense)
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(vocab_size=32000))
    counted = {name: p.numel() for name, p in model.named_parameters()}
    assert sizes.total == sum(counted.values())
    experts = sum(n for name, n in counted.items() if ".experts." in name)
    assert sizes.active == sizes.total - experts * 6 // 8
    assert f"{sizes.total / 1e9:.1f} {sizes.active / 1e9:.1f}" == "46.7 12.9"
    attention = sum(n for name, n in counted.items() if ".self_attn." in name)
    assert dense["attention"] == attention
    # eight ranks of one expert each, in bfloat16 with a float32 router: 3 * 4096 * 14336 * 2 bytes
    rank = rank_sizes(moe, ParallelConfig(ep_size=8), ep_rank=7)
    assert rank.bytes_by_dtype == {"bfloat16": 352321536, "float32": 8 * 4096 * 4}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_layer_is_as_large_as_it_says(config: MoEConfig) -> None:
    layer = MoELayer(config)
    sizes, here = layer_sizes(config), rank_sizes(config)
    count = sum(p.numel() for p in layer.parameters())
    assert sizes.total == here.parameters == count
    assert here.bytes_by_dtype == bytes_of(layer)
    assert here.bytes == sum(bytes_of(layer).values())
    described = layer.describe()
    one = sum(p[0].numel() for p in layer.experts.parameters())
    active = count - (config.num_experts - config.top_k) * one
    assert described["parameters"] == {"total": count, "active": active, "local": count}
    assert described["weight_bytes"] == bytes_of(layer)


@pytest.mark.parametrize("config", CONFIGS)
def test_operations_are_those_that_torch_counts(config: MoEConfig) -> None:
    layer, dtype = MoELayer(config, backend="reference"), getattr(torch, config.dtype)
    x, ids = torch.randn(7, 12, dtype=dtype), torch.arange(7)
    layer.router.weight.requires_grad_(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x, ids)
    assert counter.get_total_flops() == 7 * layer_sizes(config).flops_per_token


def test_a_router_of_the_callers_is_not_counted() -> None:
    def everyone(x: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(x), 2, dtype=torch.int64), torch.ones(len(x), 2)

    layer = MoELayer(SMALL, router=everyone)
    count = sum(p.numel() for p in layer.parameters())
    assert (
        layer.describe()["parameters"]["total"] == layer_sizes(SMALL, router=False).total == count
    )
    assert layer.describe()["weight_bytes"] == {"float32": 4 * count}
    assert isinstance(layer.router(torch.ones(1, 12)), Routing)


def bytes_of(layer: MoELayer) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in layer.state_dict().values():
        name = str(tensor.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + tensor.numel() * tensor.element_size()
    return found


def counted_on_rank(
    config: MoEConfig, parallel: ParallelConfig, placement: Placement | None
) -> tuple[int, dict[str, int], dict[str, int], dict[str, Any]]:
    layer = MoELayer(config, parallel, placement=placement, inference=placement is not None)
    experts = layer.experts
    here = rank_sizes(config, parallel, experts.placement, experts.groups.ep_rank)
    assert sum(p.numel() for p in layer.parameters()) == here.parameters
    return here.parameters, here.bytes_by_dtype, bytes_of(layer), layer.describe()


@pytest.mark.parametrize(
    ("parallel", "placement"),
    [
        (ParallelConfig(ep_size=2), None),
        (ParallelConfig(tp_size=2), None),
        (ParallelConfig(ep_size=2), Placement(5, 2, (0, 1, 2, 3, 4, 4, 4))),
    ],
)
def test_each_rank_is_as_large_as_it_says(
    parallel: ParallelConfig, placement: Placement | None
) -> None:
    configs = [*CONFIGS, replace(CONFIGS[2], shared_tp=True)]
    for config in configs:
        results = ranks(2).run(counted_on_rank, config, parallel, placement)
        for parameters, said, real, described in results:
            assert said == real
            assert described["parameters"]["local"] == parameters
            assert described["parameters"]["total"] == layer_sizes(config).total

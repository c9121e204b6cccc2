"""What is this backend's own; `moe-core conformance example` checks the rest."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from moe_core import Activation, ConfigError, Experts, HandleError, MoEConfig, moe_forward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

IDENTITY = Activation(name="identity", gated=False)


def call(ids: list[list[int]], dtype: torch.dtype, **given: Any) -> torch.Tensor:
    """Experts that multiply by 1, 2, 3, ..., rows of ones and weights of one, unless given."""
    scale = torch.arange(1, 4, dtype=dtype).view(3, 1, 1)
    tensors: dict[str, Any] = {
        "hidden_states": torch.ones(len(ids), 4, dtype=dtype),
        "topk_ids": torch.tensor(ids),
        "topk_weights": torch.ones(len(ids), len(ids[0])),
        "w13": torch.eye(4, dtype=dtype).repeat(3, 1, 1),
        "w2": torch.eye(4, dtype=dtype) * scale,
    }
    return moe_forward(**(tensors | given), activation=IDENTITY, backend="example")


def test_slots_are_weighted_and_summed():
    weights = torch.tensor([[0.5, 2.0], [4.0, 100.0], [100.0, 100.0]])
    out = call([[0, 2], [1, -1], [-1, -1]], torch.float32, topk_weights=weights)
    # 0.5 * 1 + 2 * 3, 4 * 2, nothing
    assert out.tolist() == [[6.5] * 4, [8.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_many_tokens_are_added_up_exactly(dtype: torch.dtype):
    # 2999 ones: a sum in bfloat16 would stop at 256, one in float16 at 2048
    w2 = torch.eye(4, dtype=dtype).repeat(3, 1, 1).requires_grad_()
    call([[1]] * 2999, dtype, w2=w2).sum().backward()
    assert w2.grad is not None
    assert torch.equal(w2.grad[1], torch.full((4, 4), 2999.0).to(dtype))
    assert not w2.grad[[0, 2]].any()  # idle experts: zeros


def config(top_k: int = 1, **fields: Any) -> MoEConfig:
    return MoEConfig(hidden_size=64, intermediate_size=48, num_experts=3, top_k=top_k, **fields)


def test_a_handle_is_used_once():
    layer = Experts(config(), backend="example")
    rows, ids = torch.ones(2, 64), torch.tensor([[0], [2]])
    record, handle = layer.dispatch(rows, ids, torch.ones(2, 1))
    result = layer.run(record)
    assert layer.combine(result, handle).shape == (2, 64)
    with pytest.raises(HandleError, match="already combined"):
        layer.combine(result, handle)


def test_what_it_does_not_offer_is_refused():
    with pytest.raises(ConfigError, match=r"example.runner \| weight_on_input: wanted yes"):
        Experts(config(apply_router_weight_on_input=True), backend="example")


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
            tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
            return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}

        given = storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for key, storage in storages(out).items():
            if key not in given and key not in self.alive:
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("gated", [True, False])
def test_workspace_is_a_bound(dtype: str, gated: bool):
    act = Activation(gated=gated, limit=0.5)
    layer = Experts(config(top_k=2, activation=act, dtype=dtype), backend="example")
    rows = torch.ones(16, 64, dtype=layer.dtype)
    record, _ = layer.dispatch(rows, torch.tensor([[0, 1]] * 16), torch.ones(16, 2))
    assert layer.pipeline.runner is not None
    bound = layer.pipeline.runner.workspace_bytes(16, 2)
    with torch.no_grad(), Peak() as peak:
        layer.run(record)
    assert bound / 2 <= peak.peak <= bound

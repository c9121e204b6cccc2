"""What is looked at before a layer runs: shapes and dtypes always, values where that is free."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core import environment
from moe_core.activation import sum_dtype
from moe_core.contracts import INVALID
from moe_core.errors import InputError


def check_routing(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """int64 ids and float32/64 weights, both ``[T, K]``. Raises ``InputError`` with all faults."""
    shape = (hidden_states.shape[0], top_k)
    faults: list[str] = []
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tuple(tensor.shape) != shape:
            faults.append(f"{name} must have shape {shape} ([T, top_k]), not {tuple(tensor.shape)}")
        if tensor.device != hidden_states.device:
            faults.append(f"{name} is on {tensor.device}, hidden_states on {hidden_states.device}")
    kind = topk_ids.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        faults.append(f"topk_ids must be int32 or int64, not {topk_ids.dtype}")
    if not topk_weights.dtype.is_floating_point:
        faults.append(f"topk_weights must be a float dtype, not {topk_weights.dtype}")
    if faults:
        raise InputError("; ".join(faults))
    ids = topk_ids.to(torch.int64)
    if values_are_checked(ids) and ids.numel():
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < INVALID or high >= num_experts:
            bad = ((ids < INVALID) | (ids >= num_experts)).nonzero()
            token, slot = bad[0].tolist()
            raise InputError(
                f"{len(bad)} of {ids.numel()} topk_ids are not in [0, {num_experts}) or -1; the "
                f"first is {int(ids[token, slot])} at token {token}, slot {slot}"
            )
    return ids, topk_weights.to(sum_dtype(hidden_states.dtype))


def values_are_checked(ids: Tensor) -> bool:
    """On CPUs and with ``MOE_VALIDATE=1``; never inside a compiled graph (it would break it)."""
    if torch.compiler.is_compiling():
        return False
    return ids.device.type == "cpu" or environment.validate()


def check_hidden(hidden_states: Tensor, hidden_size: int, weights: Tensor) -> Tensor:
    """``[..., H]``, on the device and in the dtype of ``weights`` (under autocast any float dtype
    is cast to it). Raises ``InputError``."""
    dtype = weights.dtype
    if not isinstance(hidden_states, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"hidden_states must be a tensor, not a {type(hidden_states).__name__}")
    if hidden_states.ndim < 1 or hidden_states.shape[-1] != hidden_size:
        raise InputError(
            f"hidden_states must have shape [..., {hidden_size}], not {tuple(hidden_states.shape)}"
        )
    if hidden_states.device != weights.device:
        raise InputError(
            f"hidden_states are on {hidden_states.device}, the layer on {weights.device}"
        )
    if hidden_states.dtype == dtype:
        return hidden_states
    if torch.is_autocast_enabled(hidden_states.device.type) and hidden_states.is_floating_point():
        return hidden_states.to(dtype)
    raise InputError(
        f"hidden_states must be {dtype} (the layer's dtype), not {hidden_states.dtype}"
    )

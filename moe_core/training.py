"""What a training loop has to know of experts that live on some ranks only.

With ``rows="distinct"`` an expert's gradient after ``backward`` is the sum over its ep group's
tokens of each rank's own loss. If the loss to train on is the mean of the ranks' losses (what DDP
and FSDP assume), that sum over ep and dp has to be divided by ``gradient_divisor`` = dp * ep; tp
ranks hold the same tokens and don't count. With ``rows="replicated"`` all ep ranks have the same
loss and each expert's gradient is whole: the divisor is dp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_core.activation import sum_dtype
from moe_core.collectives import sum_over
from moe_core.errors import InputError
from moe_core.held import gradient_divisor, held_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

__all__ = [
    "clip_grad_norm_",
    "expert_parameter_names",
    "expert_state",
    "gradient_divisor",
    "sync_expert_gradients",
]


def expert_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that differ between ranks: what DDP has to leave alone.

    Those of ``Experts`` that span ranks, and of shared experts cut over tp.
    ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)``, called
    before the model is wrapped, is torch's way to say so.
    """
    return [held.name for held in held_parameters(model) if not held.is_dense]


def sync_expert_gradients(model: nn.Module) -> None:
    """Makes the gradients of ``expert_parameter_names`` those of the mean loss. Collective.

    Routed experts and shared slots are summed over dp, shared experts cut over tp over dp and ep,
    in float32 (float64), and divided (``gradient_divisor``). Call once per step, after the (last)
    backward and before clipping.
    """
    for held in held_parameters(model):
        parameter = held.parameter
        if held.is_dense or not parameter.requires_grad:
            continue
        if parameter.grad is None:  # every rank takes part
            parameter.grad = torch.zeros_like(parameter)
        total = sum_over(parameter.grad.to(sum_dtype(parameter.grad.dtype)), held.sum_over)
        parameter.grad.copy_(total.div_(held.divisor))


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_`` (2-norm), each parameter counted once. Collective.

    Squares are summed over the groups that cut a parameter; what ranks hold alike (shared slots
    over ep, say) is counted once. Returns the norm before clipping, float64, equal on all ranks.
    Every expert layer of the model must span the same ranks.
    """
    spread = [held for held in held_parameters(model) if not held.is_dense]
    own = {id(held.parameter) for held in spread}
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for parameter in model.parameters():
        if id(parameter) not in own and parameter.grad is not None:
            total = total + _squares(parameter.grad)
    by_cut: dict[tuple[ProcessGroup, ...], Tensor] = {}  # in the same order on all ranks
    for held in spread:
        grad = held.parameter.grad
        for part in held.parts:
            mine = total.new_zeros(()) if grad is None else _squares(grad[part.rows])
            by_cut[part.cut] = by_cut.get(part.cut, 0) + mine
    for groups, mine in by_cut.items():
        total = total + sum_over(mine, groups)
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm


def _squares(grad: Tensor) -> Tensor:
    return grad.double().square().sum()


def expert_state(model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's view of the expert parameters: one entry per expert, under its own number.

    ``"layers.0.experts.w13.5"`` is logical expert 5's ``w13``, ``"layers.0.shared_experts.w13.0"``
    the first shared expert's, apart or a slot; ``".tp1"`` follows what tp cuts, tp rank 1's share.
    Each is a view of the parameter. Saved and loaded with ``torch.distributed.checkpoint``, it can
    be read at any ep width and placement: each rank asks for the experts it holds. ``tp_size`` has
    to stay. A shared gate and the router are like the model's other parameters and not in here.
    Raises ``InputError`` for two replicas of an expert on one rank.
    """
    state: dict[str, Tensor] = {}
    for held in held_parameters(model):
        for part in held.parts:
            views = part.views(held.parameter.detach()[part.rows]) if part.names else ()
            for name, view in zip(part.names, views, strict=True):
                if name in state:
                    raise InputError(
                        f"two slots of this rank hold {name}, and a checkpoint would fill one of "
                        "them: place an expert's replicas on different ranks"
                    )
                state[name] = view
    return state

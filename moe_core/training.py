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
import torch.distributed as dist

from moe_core.experts import Experts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from moe_core.config import ParallelConfig


def gradient_divisor(parallel: ParallelConfig) -> int:
    """By what the sum over dp of an expert's gradients is divided to get the mean loss's."""
    replicated = parallel.rows == "replicated"
    return parallel.dp_size * (1 if replicated else parallel.ep_size)


def spanning_experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """The ``Experts`` of a model that span ranks, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.is_distributed:
            yield name, module


def expert_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that differ between ranks: what DDP has to leave alone.

    ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)``, called
    before the model is wrapped, is torch's way to say so.
    """
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, experts in spanning_experts(model)
        for name, _ in experts.named_parameters()
    ]


def sync_expert_gradients(model: nn.Module) -> None:
    """Sum the experts' gradients over dp and divide by ``gradient_divisor``. Collective.

    Call once per step, after the (last) backward and before clipping.
    """
    for _, experts in spanning_experts(model):
        divisor = gradient_divisor(experts.parallel)
        for parameter in experts.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # every rank takes part
                parameter.grad = torch.zeros_like(parameter)
            if experts.groups.dp is not None:
                dist.all_reduce(parameter.grad, group=experts.groups.dp)
            parameter.grad.div_(divisor)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_`` (2-norm), each expert counted once. Collective.

    Squares of expert gradients are summed over ep, those of parameters cut by tp over tp too; what
    all ranks hold alike is counted once. Returns the norm before clipping, equal on all ranks.
    Every expert layer of the model must span the same ranks.
    """
    experts = [module for _, module in spanning_experts(model)]
    own = {id(p) for module in experts for p in module.parameters()}
    shared = [p.grad for p in model.parameters() if id(p) not in own and p.grad is not None]
    total = _squares(shared, model)
    for module in experts:
        cut = [
            p.grad for n, p in module.named_parameters() if n != "w2_bias" and p.grad is not None
        ]
        bias = module.w2_bias.grad if module.w2_bias is not None else None
        mine = _squares(cut, model)
        if module.groups.tp is not None:
            dist.all_reduce(mine, group=module.groups.tp)
        mine = mine + _squares([bias] if bias is not None else [], model)
        if module.groups.ep is not None:
            dist.all_reduce(mine, group=module.groups.ep)
        total = total + mine
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def _squares(grads: list[Tensor], model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        total = total + grad.double().square().sum()
    return total


def expert_state(model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's view of the expert parameters: one entry per expert, under its own number.

    ``"layers.0.experts.w13.5"`` is expert 5's ``w13`` (of this tp rank), a view of the parameter.
    Saved and loaded with ``torch.distributed.checkpoint``, it can be read at any ep width: each
    rank asks for the experts it holds. ``tp_size`` has to stay.
    """
    state: dict[str, Tensor] = {}
    for prefix, experts in _all_experts(model):
        first = experts.placement.first_expert(experts.groups.ep_rank)
        cut = f".tp{experts.groups.tp_rank}" if experts.parallel.tp_size > 1 else ""
        for name, parameter in experts.named_parameters():
            for i, expert in enumerate(parameter.detach()):
                state[f"{prefix}{name}.{first + i}{cut}"] = expert
    return state


def _all_experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield (f"{name}." if name else ""), module

"""What a rank's expert parameters are parts of: said once, for gradients, norms and checkpoints."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from moe_core.experts import Experts
from moe_core.shared_experts import SharedExperts, each_expert, has_halves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from moe_core.config import ParallelConfig


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter, for instance those of the routed experts.

    ``cut``: the groups over which the ranks hold different values; over all others they hold
    copies. ``names``: of each expert here, in a checkpoint; ``views``: the rows → a view for each.
    """

    rows: slice
    cut: tuple[ProcessGroup, ...]
    names: tuple[str, ...]
    views: Callable[[Tensor], Iterable[Tensor]]


@dataclass(frozen=True)
class Held:
    """A parameter of experts, ``name`` being its name in the model.

    ``is_dense``: it is like any other parameter of the model, for DDP or FSDP to care for. If not,
    its gradient after a backward is still to be summed over ``sum_over`` and divided by ``divisor``
    to be that of the mean of the ranks' losses.
    """

    name: str
    parameter: nn.Parameter
    parts: tuple[Part, ...]
    is_dense: bool
    sum_over: tuple[ProcessGroup, ...]
    divisor: int


def held_parameters(model: nn.Module) -> Iterator[Held]:
    """Of all experts in a model, in the order of its modules. Two replicas share a name."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, Experts):
            yield from _of_experts(prefix, module)
        elif isinstance(module, SharedExperts):
            yield from _of_shared(prefix, module)


def gradient_divisor(parallel: ParallelConfig) -> int:
    """By what the sum over dp of an expert's gradients is divided to get the mean loss's."""
    replicated = parallel.rows == "replicated"
    return parallel.dp_size * (1 if replicated else parallel.ep_size)


def _of_experts(prefix: str, experts: Experts) -> Iterator[Held]:
    """Routed experts: cut over ep, and over tp but for ``w2_bias``. Shared slots, the last rows:
    copies over ep, whose gradients a backward has summed over ep already."""
    groups, placement = experts.groups, experts.placement
    own = placement.experts_of(groups.ep_rank)
    shared_prefix = prefix.removesuffix("experts.") + "shared_experts."
    for name, parameter in experts.named_parameters():
        tp = () if name == "w2_bias" else _there(groups.tp)
        # by the width: on the meta device there's no group yet
        is_cut = experts.parallel.tp_size > 1 and name != "w2_bias"
        suffix = f".tp{groups.tp_rank}" if is_cut else ""
        names = tuple(f"{prefix}{name}.{expert}{suffix}" for expert in own)
        parts = [Part(slice(len(own)), (*_there(groups.ep), *tp), names, iter)]
        if placement.shared_slots:
            slots = range(placement.shared_slots)
            names = tuple(f"{shared_prefix}{name}.{i}{suffix}" for i in slots)
            blocks = name == "w13" and has_halves(experts.config)
            parts.append(Part(slice(len(own), None), tp, names, _in_blocks if blocks else iter))
        yield Held(
            name=prefix + name,
            parameter=parameter,
            parts=tuple(parts),
            is_dense=not experts.is_distributed,
            sum_over=_there(groups.dp),
            divisor=gradient_divisor(experts.parallel),
        )


def _of_shared(prefix: str, shared: SharedExperts) -> Iterator[Held]:
    """Shared experts apart: with ``shared_tp`` their two matrices are cut over tp. The gate, and
    without ``shared_tp`` all, is on every rank."""
    groups, is_cut = shared.groups, shared.tp_size > 1
    suffix = f".tp{groups.tp_rank}" if is_cut else ""
    over = (*_there(groups.dp), *_there(groups.ep))
    for name, parameter in shared.named_parameters():
        mine = is_cut and name != "gate"
        count = 0 if name == "gate" else shared.config.num_shared_experts
        names = tuple(f"{prefix}{name}.{i}{suffix}" for i in range(count))
        views = functools.partial(each_expert, shared.config, name)
        part = Part(slice(None), _there(groups.tp) if mine else (), names, views)
        yield Held(
            name=prefix + name,
            parameter=parameter,
            parts=(part,),
            is_dense=not mine,
            sum_over=over,
            divisor=math.prod(dist.get_world_size(group) for group in over),
        )


def _in_blocks(slots: Tensor) -> Iterable[Tensor]:
    """``[S, 2W, H]`` → ``[2, W, H]`` each, as ``each_expert`` has them."""
    return iter(slots.unflatten(1, (2, -1)))


def _there(group: ProcessGroup | None) -> tuple[ProcessGroup, ...]:
    return () if group is None else (group,)

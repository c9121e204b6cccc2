"""How many tokens each expert gets, counted on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_core.collectives import sum_over
from moe_core.errors import ConfigError, Fault
from moe_core.experts import Experts

if TYPE_CHECKING:
    from torch import nn


def layers_of(model: nn.Module) -> list[Experts]:
    """The expert layers of a model, in the order of its modules: the layers that counts and plans
    speak of. Raises ``ConfigError`` for none."""
    found = [module for module in model.modules() if isinstance(module, Experts)]
    if not found:
        raise ConfigError([Fault("model", type(model).__name__, "has no layer with experts")])
    return found


def record_load(model: nn.Module, on: bool = True) -> None:
    """Begin to count, from 0, what each expert computes (``RoutingCounts.expert_load``), or stop.

    Costs a few small kernels per forward, and no host sync. Every (token, expert) that goes to the
    experts counts, in training and out of it, and once where a recompute repeats it; padding,
    masked tokens, -1 and what a capacity dropped don't. Raises ``ConfigError`` for a layer whose
    kernel routes by itself: its choices are never seen.
    """
    layers = layers_of(model)
    faults = [
        Fault(f"layer {i}", e.resolution.name, "its kernel routes, so nobody sees what it chooses")
        for i, e in enumerate(layers)
        if on and not e.resolution.request.routing_ids
    ]
    if faults:
        raise ConfigError(faults)
    for experts in layers:
        experts.counts.record_load(on)


def expert_load(model: nn.Module, *, keep: float = 1.0) -> list[list[int]]:
    """``[layers][E]``: tokens per logical expert since ``record_load``, equal on all ranks.

    Summed over all ranks' tokens: collective, and the only host sync. The counters are then
    multiplied by ``keep`` and rounded down: 1 leaves them, 0 begins a new window, 0.5 lets old
    tokens count half as much each time. Raises ``ConfigError`` for a layer that doesn't count.
    """
    layers = layers_of(model)
    faults: list[Fault] = []
    if not isinstance(keep, int | float) or not 0 <= keep <= 1:
        faults.append(Fault("keep", keep, "is the share that stays: from 0 to 1"))
    totals: list[torch.Tensor] = []
    for i, experts in enumerate(layers):
        load = experts.counts.expert_load
        if load is None:
            faults.append(Fault(f"layer {i}", "not counted", "call record_load(model) first"))
        elif not faults:
            totals.append(sum_over(load, experts.token_groups))
    if faults:
        raise ConfigError(faults)
    if keep < 1:
        for experts in layers:
            load = experts.counts.expert_load
            assert load is not None
            load.copy_(load.double().mul(keep).long())
    gathered = torch.cat([total.to(totals[0].device) for total in totals])
    values = iter(gathered.tolist())  # the host waits here, once
    return [[next(values) for _ in range(len(total))] for total in totals]

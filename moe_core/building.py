"""From a config to what a layer is made of. Collective where the layer spans ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_core import environment
from moe_core.agreement import agree, statement
from moe_core.errors import ConfigError, Fault, MoEError
from moe_core.groups import LOCAL, Groups, group_faults, make_groups, members, place
from moe_core.resolution import Resolution, resolve

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from moe_core.config import MoEConfig, ParallelConfig


@dataclass(frozen=True)
class Plan:
    """What was chosen, and this rank's place in it."""

    resolution: Resolution
    groups: Groups


def plan_layer(
    config: MoEConfig,
    parallel: ParallelConfig,
    backend: str | None,
    device: torch.device,
    *,
    mesh: DeviceMesh | None = None,
    max_tokens_per_rank: int | None = None,
    policy: str = "strict",
    **wants: Any,
) -> Plan:
    """Resolve, agree with the other ranks, make the groups.

    On the meta device nothing is communicated. Raises ``ConfigError`` with every fault and every
    refusal; where the layer spans ranks, on all of them, naming who refused or differs.
    """
    error: MoEError | None = None
    resolution: Resolution | None = None
    try:
        resolution = resolve_or_raise(
            config,
            parallel,
            backend,
            device,
            mesh=mesh,
            max_tokens_per_rank=max_tokens_per_rank,
            policy=policy,
            **wants,
        )
        parallel = resolution.parallel  # policy "adjust" may have changed the widths
    except MoEError as raised:
        error = raised
    alone = parallel.world_size == 1 or not (dist.is_available() and dist.is_initialized())
    if not alone and device.type != "meta":
        ranks = members(mesh)
        extra = {"max_tokens_per_rank": max_tokens_per_rank, "widths": parallel.to_dict()}
        agree(ranks, ranks.index(dist.get_rank()), statement(resolution, error, extra))
    if error is not None:
        raise error
    assert resolution is not None
    if alone:
        return Plan(resolution, LOCAL)
    if device.type == "meta":
        return Plan(resolution, place(parallel, mesh))
    return Plan(resolution, make_groups(parallel, mesh, device.type))


def resolve_or_raise(
    config: MoEConfig,
    parallel: ParallelConfig,
    backend: str | None,
    device: torch.device,
    *,
    mesh: DeviceMesh | None = None,
    max_tokens_per_rank: int | None = None,
    **wants: Any,
) -> Resolution:
    """A resolution that is ok. Raises ``ConfigError`` with every fault and every refusal."""
    faults = environment.check_environment()
    if device.type == "cuda" and not torch.cuda.is_available():
        faults.append(Fault("device", str(device), "this machine or torch build has no CUDA"))
    if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
        faults.append(Fault("max_tokens_per_rank", max_tokens_per_rank, "must be at least 1"))
        max_tokens_per_rank = None
    # A layer built on the meta device is one for the CPU until it is moved.
    kind = "cpu" if device.type == "meta" else device.type
    resolution = resolve(
        config,
        parallel,
        backend,
        device=kind,
        max_tokens_per_rank=max_tokens_per_rank,
        **wants,
    )
    faults += group_faults(resolution.parallel if resolution.ok else parallel, mesh)
    if faults or not resolution.ok:
        raise ConfigError(faults, None if resolution.ok else resolution)
    return resolution

"""From a config to what a layer is made of. Collective where the layer spans ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_core import environment
from moe_core.agreement import agree, statement
from moe_core.errors import ConfigError, Fault
from moe_core.groups import (
    LOCAL,
    Groups,
    group_faults,
    make_groups,
    members,
    place,
    ranks_per_node,
)
from moe_core.placement import Placement
from moe_core.resolution import Resolution, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from moe_core.config import MoEConfig, ParallelConfig


@dataclass(frozen=True)
class Plan:
    """What was chosen, and this rank's place in it."""

    resolution: Resolution
    groups: Groups
    placement: Placement


def plan_layer(
    config: MoEConfig,
    parallel: ParallelConfig,
    backend: str | None,
    device: torch.device,
    *,
    mesh: DeviceMesh | None = None,
    max_tokens_per_rank: int | None = None,
    policy: str = "strict",
    placement: Placement | None = None,
    shared_slots: int = 0,
    **wants: Any,
) -> Plan:
    """Resolve, agree with the other ranks, make the groups.

    On the meta device nothing is communicated. Raises ``ConfigError`` with every fault and every
    refusal; where the layer spans ranks, on all of them, naming who refused or differs.
    ``placement`` None: contiguous. ``shared_slots``: per rank, added to it.
    """
    asked = placement or Placement(config.num_experts, parallel.ep_size)
    faults = placement_faults(asked, config, parallel, shared_slots, wants)
    faults += _sum_faults(config, parallel)
    if policy == "adjust" and (placement is not None or shared_slots):
        message = (
            "could change the widths, and these slots are placed for the widths asked for: set "
            "policy=strict, which says what widths to ask for"
        )
        faults.append(Fault("policy", policy, message))
        policy = "strict"  # so that it is said here
    error: Exception | None = None
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
            faults=faults,
            num_routed_ids=replace(asked, shared_slots=0).num_physical_slots,
            ranks_per_node=ranks_per_node(mesh),
            **wants,
        )
        parallel = resolution.parallel  # policy "adjust" may have changed the widths
    except Exception as raised:  # whatever it is, the other ranks have to hear of it
        error = raised
    alone = parallel.world_size == 1 or not (dist.is_available() and dist.is_initialized())
    if not alone and device.type != "meta":
        ranks = members(mesh)
        extra = {
            "max_tokens_per_rank": max_tokens_per_rank,
            "widths": parallel.to_dict(),
            "placement": asked.to_dict(),
            "MOE_DEBUG_COLLECTIVES": os.environ.get("MOE_DEBUG_COLLECTIVES", "0"),
            # the request has only what parts are chosen by; a limit or a factor differs here
            **{f"config.{k}": v for k, v in config.to_dict().items() if k != "backend"},
        }
        agree(ranks, ranks.index(dist.get_rank()), statement(resolution, error, extra))
    if error is not None:
        raise error
    assert resolution is not None
    if placement is None:
        placement = Placement(config.num_experts, parallel.ep_size)
    placement = replace(placement, shared_slots=shared_slots)
    if alone:
        return Plan(resolution, LOCAL, placement)
    if device.type == "meta":
        return Plan(resolution, place(parallel, mesh), placement)
    return Plan(resolution, make_groups(parallel, mesh, device.type), placement)


def resolve_or_raise(
    config: MoEConfig,
    parallel: ParallelConfig,
    backend: str | None,
    device: torch.device,
    *,
    mesh: DeviceMesh | None = None,
    max_tokens_per_rank: int | None = None,
    faults: Sequence[Fault] = (),
    **wants: Any,
) -> Resolution:
    """A resolution that is ok. Raises ``ConfigError`` with every fault and every refusal."""
    faults = [*faults, *environment.check_environment()]
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


def placement_faults(
    placement: Placement,
    config: MoEConfig,
    parallel: ParallelConfig,
    shared_slots: int,
    wants: dict[str, Any],
) -> list[Fault]:
    """What keeps a placement (and how shared experts lie) from serving this layer."""
    faults: list[Fault] = []
    for name, wanted in (("num_experts", config.num_experts), ("ep_size", parallel.ep_size)):
        value = getattr(placement, name)
        if value != wanted:
            faults.append(Fault(f"placement.{name}", value, f"the layer has {wanted}"))
    if placement.shared_slots not in (0, shared_slots):
        message = f"comes from the config, which says {shared_slots}: leave it at 0"
        faults.append(Fault("placement.shared_slots", placement.shared_slots, message))
    if placement.has_replicas and wants.get("autograd", True):
        extra = placement.num_routed_slots - placement.num_experts
        message = (
            "gradients of replicas aren't summed, so they would drift apart: build the layer with "
            "inference=True, or give every expert one slot"
        )
        faults.append(Fault("placement.slot_experts", f"{extra} more than experts", message))
    plain = placement.is_identity and not shared_slots
    if not plain and not wants.get("routing_ids", True):
        message = "a kernel that routes by itself knows one contiguous slot per expert"
        faults.append(Fault("placement", placement.to_dict(), message))
    if config.shared_tp and config.shared_width % parallel.tp_size:
        message = f"cuts each shared expert's width of {config.shared_width}: must divide it"
        faults.append(Fault("tp_size", parallel.tp_size, f"shared_tp {message}"))
    return faults


def _sum_faults(config: MoEConfig, parallel: ParallelConfig) -> list[Fault]:
    """What can't be left in parts for the caller to sum."""
    faults: list[Fault] = []
    if parallel.final_sum == "layer" or parallel.copies == 1:
        return faults
    if config.num_shared_experts and not config.shared_slots:
        message = (
            f"the caller sums over {parallel.copies} ranks (final_sum=caller) and would count what "
            "stands beside the routed experts once per rank: set shared_placement=slots, or run "
            "SharedExperts on the caller's own rows"
        )
        faults.append(Fault("num_shared_experts", config.num_shared_experts, message))
    if config.combine == "per_slot" and parallel.rows == "replicated":
        message = (
            "sums in slot order what lies on all ranks of an ep group, which a caller that sums "
            "parts (final_sum=caller) can't: set combine=per_rank"
        )
        faults.append(Fault("combine", config.combine, message))
    return faults

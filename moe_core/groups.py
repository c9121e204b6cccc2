"""The process groups of a layer, made once per (default group, widths) and shared by all layers.

``world = dp * ep * tp`` and ``rank = (dp_rank * ep + ep_rank) * tp + tp_rank``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_core import environment
from moe_core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from moe_core.config import ParallelConfig

DIMS = ("dp", "ep", "tp")


@dataclass(frozen=True)
class Groups:
    """This rank's place. ``dp``/``ep``/``tp`` are None where that width is 1: nothing to say.

    ``ranks``: global ranks of all members, in ``rank`` order.
    """

    ranks: tuple[int, ...] = (0,)
    dp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    dp_rank: int = 0
    ep_rank: int = 0
    tp_rank: int = 0

    @property
    def rank(self) -> int:
        """This process's place in ``ranks``."""
        return 0 if len(self.ranks) == 1 else self.ranks.index(dist.get_rank())


LOCAL = Groups()

# The default group itself is kept and compared: after destroy_process_group and a new
# init_process_group, groups of the old one must not be found.
_made: dict[tuple[Any, ...], tuple[ProcessGroup, Groups]] = {}


def group_faults(parallel: ParallelConfig, mesh: DeviceMesh | None) -> list[Fault]:
    """What is wrong with the widths here and now; nothing is communicated."""
    widths = {name: getattr(parallel, f"{name}_size") for name in DIMS}
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        sizes = {name: mesh.size(i) for i, name in enumerate(names)}
        faults = [
            Fault("mesh", dict(sizes), f"has another dimension {name!r}: pass mesh[{DIMS}] of it")
            for name, size in sizes.items()
            if name not in DIMS and size > 1
        ]
        return faults + [
            Fault("mesh", dict(sizes), f"must have {width} ranks along {name!r}")
            for name, width in widths.items()
            if sizes.get(name, 1) != width
        ]
    if parallel.world_size == 1:
        return []
    asked = " * ".join(f"{name}={width}" for name, width in widths.items())
    if not dist.is_available() or not dist.is_initialized():
        message = "needs torch.distributed.init_process_group first (start it with torchrun)"
        return [Fault("parallel", asked, message)]
    world = dist.get_world_size()
    if world != parallel.world_size:
        message = f"must come to the {world} ranks there are, or pass a mesh"
        return [Fault("parallel", asked, message)]
    return []


def members(mesh: DeviceMesh | None) -> tuple[int, ...]:
    """Global ranks that build a layer together, in the order of its widths."""
    if mesh is None:
        return tuple(range(dist.get_world_size()))
    names = mesh.mesh_dim_names or ()
    known = [names.index(name) for name in DIMS if name in names]
    rest = [i for i in range(len(names)) if i not in known]
    return tuple(int(r) for r in mesh.mesh.permute(*rest, *known).flatten().tolist())


def ranks_per_node(mesh: DeviceMesh | None) -> int | None:
    """How many neighbours among the members share a node, for sure; None = nobody says.

    In a mesh of some ranks, or in another order, these are blocks smaller than a node.
    """
    size = environment.ranks_per_node()
    if size is None or mesh is None:
        return size
    runs = itertools.groupby(rank // size for rank in members(mesh))
    return math.gcd(*(len(list(run)) for _, run in runs))


def make_groups(parallel: ParallelConfig, mesh: DeviceMesh | None, device: str) -> Groups:
    """Collective the first time for given widths, free afterwards.

    Raises ``ConfigError`` with ``group_faults``.
    """
    faults = group_faults(parallel, mesh)
    if faults:
        raise ConfigError(faults)
    if parallel.world_size == 1:
        return LOCAL
    default = cast("ProcessGroup", dist.group.WORLD)
    ranks = members(mesh)
    key = (ranks, parallel.dp_size, parallel.ep_size, parallel.tp_size, device)
    known = _made.get(key)
    if known is None or known[0] is not default:
        mesh = mesh if mesh is not None else _new_mesh(parallel, device)
        known = _made[key] = (default, _from_mesh(mesh, ranks))
    return known[1]


def place(parallel: ParallelConfig, mesh: DeviceMesh | None) -> Groups:
    """This rank's place without any group: what a layer on the meta device needs."""
    ranks = members(mesh)
    rest, tp_rank = divmod(ranks.index(dist.get_rank()), parallel.tp_size)
    dp_rank, ep_rank = divmod(rest, parallel.ep_size)
    return Groups(ranks, dp_rank=dp_rank, ep_rank=ep_rank, tp_rank=tp_rank)


def _new_mesh(parallel: ParallelConfig, device: str) -> DeviceMesh:
    shape = (parallel.dp_size, parallel.ep_size, parallel.tp_size)
    return init_device_mesh(torch.device(device).type, shape, mesh_dim_names=DIMS)


def _from_mesh(mesh: DeviceMesh, ranks: tuple[int, ...]) -> Groups:
    groups: dict[str, Any] = {"ranks": ranks}
    for i, name in enumerate(mesh.mesh_dim_names or ()):
        if mesh.size(i) > 1 and name in DIMS:
            groups[name] = mesh.get_group(name)
            groups[f"{name}_rank"] = mesh.get_local_rank(name)
    return Groups(**groups)

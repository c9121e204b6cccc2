"""Who scores: this process, several processes that ``run --nproc`` starts, or torchrun's ranks.

Experts are spread over the ranks (ep = all of them) and each rank takes every N-th batch of
windows. In the last step some ranks have no batch: they take part with no tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from moe_core.config import ParallelConfig
from moe_core.conformance.pool import RankPool
from moe_core.demo import model as demo
from moe_core.errors import InputError, MoEError
from moe_core.tracing import trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moe_core.demo.model import ByteLM, Window
    from moe_core.resolution import Resolution
    from moe_core.tracing import LayerCall


@dataclass
class Scored:
    """One rank's step: bits per new byte, and the traced calls, one per layer."""

    bits: Tensor
    calls: list[LayerCall]


@dataclass(frozen=True)
class Load:
    """How each rank loads the model."""

    path: str | None
    backend: str | None
    dtype: str | None
    device: str


class Team:
    """One process. ``backend``: what was chosen, as JSON data."""

    size = 1

    def __init__(self, load: Load) -> None:
        self.model = _load(load, 1)
        self.backend = describe(self.model.moes[0].resolution)

    def score(self, groups: Sequence[Sequence[Window]]) -> list[Scored] | None:
        """``groups[r]`` is rank r's batch. None on ranks that report to another one."""
        return [_step(self.model, groups, 0)]

    def whole(self) -> ByteLM:
        """The model with all experts in this process, for inference."""
        return self.model

    def close(self) -> None:
        pass


class PoolTeam(Team):
    """``size`` processes on this machine."""

    def __init__(self, size: int, load: Load) -> None:
        self._whole = demo.load(load.path, backend="reference", dtype=load.dtype)
        self.size = size
        most = self._whole.config.num_experts
        if size > most:
            raise InputError(
                f"--nproc {size}: the model has {most} experts, so at most {most} ranks"
            )
        self._pool = RankPool(size)
        self.backend = _first_good(self._pool.run(_load_here, load, size, limit=600))[0]

    def score(self, groups: Sequence[Sequence[Window]]) -> list[Scored] | None:
        return _first_good(self._pool.run(_step_here, groups, limit=600))

    def whole(self) -> ByteLM:
        return self._whole

    def close(self) -> None:
        self._pool.close()


class TorchrunTeam(Team):
    """The ranks that torchrun started; rank 0 reports."""

    def __init__(self, load: Load) -> None:
        self._whole = demo.load(load.path, backend="reference", dtype=load.dtype)
        dist.init_process_group("nccl" if load.device.startswith("cuda") else "gloo")
        self.size = dist.get_world_size()
        self.model = _load(load, self.size)
        self.backend = describe(self.model.moes[0].resolution)

    def score(self, groups: Sequence[Sequence[Window]]) -> list[Scored] | None:
        mine = _step(self.model, groups, dist.get_rank())
        everyone: list[Any] | None = [None] * self.size if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyone)
        return everyone

    def whole(self) -> ByteLM:
        return self._whole

    def close(self) -> None:
        dist.destroy_process_group()


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def describe(resolution: Resolution) -> dict[str, Any]:
    """Of what was chosen, what ``run`` shows; JSON data."""
    return {
        "name": resolution.name,
        "spec": resolution.spec,
        "source": resolution.source,
        "parts": {role: part.label for role, part in resolution.parts.items()},
        "fingerprint": resolution.fingerprint,
    }


def _load(load: Load, size: int) -> ByteLM:
    return demo.load(
        load.path,
        backend=load.backend,
        dtype=load.dtype,
        device=load.device,
        parallel=ParallelConfig(ep_size=size),
    )


def _step(model: ByteLM, groups: Sequence[Sequence[Window]], rank: int) -> Scored:
    with trace() as seen:
        bits = demo.score(model, groups[rank] if rank < len(groups) else ())
    return Scored(bits, seen.calls)


_here: list[ByteLM] = []


def _first_good(answers: list[Any]) -> list[Any]:
    """The answers of all ranks; raises what the first faulty one was told (all are told alike)."""
    for answer in answers:
        if isinstance(answer, MoEError):
            raise answer
    return answers


def _load_here(load: Load, size: int) -> dict[str, Any] | MoEError:
    try:
        _here[:] = [_load(load, size)]
    except MoEError as error:
        return error
    return describe(_here[0].moes[0].resolution)


def _step_here(groups: Sequence[Sequence[Window]]) -> Scored | MoEError:
    try:
        return _step(_here[0], groups, dist.get_rank())
    except MoEError as error:
        return error

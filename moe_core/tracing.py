"""What went where: ``with trace() as t: layer(x)``.

Nothing is recorded, copied or synchronised outside the context; inside it each stage is timed
(on CUDA after a synchronise) and the tensors that cross the seams are kept by reference.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moe_core.contracts import Routing
    from moe_core.experts import Experts


@dataclass
class LayerCall:
    """One call of one layer.

    ``stages``: stage → seconds. ``rows_per_expert``: this rank's choices per logical expert.
    ``traffic``: kind of exchange → bytes ``[src][dst]`` sent to other ranks (what stays is not
    sent; a rank knows its own row of it). ``collectives``: names, in order.
    ``hidden_states [T, H]``, ``routing``, ``output [T, H]``. ``has_own_tokens``: no rank before
    this one has the same.
    ``slot_rows`` int64 ``[T, K]``: row of each (token, slot) in the expert buffer, -1 for none;
    ``expert_rows [T, K, H]``: what the experts returned for it. Both None for a path that doesn't
    show them.
    """

    name: str
    num_experts: int
    world_size: int = 1
    rank: int = 0
    ep_size: int = 1
    has_own_tokens: bool = True
    stages: dict[str, float] = field(default_factory=dict[str, float])
    traffic: dict[str, list[list[int]]] = field(default_factory=dict[str, list[list[int]]])
    collectives: list[str] = field(default_factory=list[str])
    hidden_states: Tensor | None = None
    routing: Routing | None = None
    slot_rows: Tensor | None = None
    expert_rows: Tensor | None = None
    output: Tensor | None = None

    def add_traffic(self, kind: str, src: int, dst: int, num_bytes: int) -> None:
        if kind not in self.traffic:
            self.traffic[kind] = zeros(self.world_size)
        self.traffic[kind][src][dst] += num_bytes

    @property
    def payload_bytes(self) -> list[list[int]]:
        """Token rows on their way to the experts: ``[src][dst]``."""
        return self.traffic.get("dispatch", zeros(self.world_size))

    @property
    def combine_bytes(self) -> list[list[int]]:
        """Result rows on their way home."""
        return self.traffic.get("combine", zeros(self.world_size))

    @property
    def meta_bytes(self) -> list[list[int]]:
        """Everything else: counts, ids, weights."""
        rest = (m for kind, m in self.traffic.items() if kind not in ("dispatch", "combine"))
        return add_matrices(self.world_size, rest)

    def inter_node_bytes(self, ranks_per_node: int, kind: str = "dispatch") -> int:
        """What was sent to other nodes in one kind of exchange, so many ranks sharing a node."""
        return sum(
            sent
            for src, row in enumerate(self.traffic.get(kind, ()))
            for dst, sent in enumerate(row)
            if src // ranks_per_node != dst // ranks_per_node
        )

    @property
    def rows_per_expert(self) -> list[int]:
        if self.routing is None or self.routing.topk_ids is None:
            return [0] * self.num_experts
        ids = self.routing.topk_ids
        return torch.bincount(ids[ids >= 0].flatten(), minlength=self.num_experts).tolist()


def zeros(world_size: int) -> list[list[int]]:
    return [[0] * world_size for _ in range(world_size)]


def add_matrices(world_size: int, matrices: Iterable[list[list[int]]]) -> list[list[int]]:
    total = zeros(world_size)
    for matrix in matrices:
        for src, row in enumerate(matrix):
            for dst, value in enumerate(row):
                total[src][dst] += value
    return total


class Trace:
    """The calls made inside ``trace()``, in order, and their sums."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self._open: list[LayerCall] = []

    @property
    def rows_per_expert(self) -> list[int]:
        """Summed over the calls, expert by expert."""
        total = [0] * max((c.num_experts for c in self.calls), default=0)
        for call in self.calls:
            for expert, rows in enumerate(call.rows_per_expert):
                total[expert] += rows
        return total

    @property
    def payload_bytes(self) -> list[list[int]]:
        """Summed over the calls; ``[src][dst]``."""
        world = max((c.world_size for c in self.calls), default=1)
        return add_matrices(world, (c.payload_bytes for c in self.calls))

    @property
    def collectives(self) -> list[str]:
        return [name for call in self.calls for name in call.collectives]

    def save_routing(self, path: str | Path, group: ProcessGroup | None = None) -> None:
        """What every call's tokens chose, on all ranks, for ``moe-core simulate --routing``; see
        ``moe_core.traffic.save_routing``. Collective where there is a process group."""
        from moe_core.traffic import save_routing

        save_routing(self.calls, path, group)

    @contextmanager
    def call(self, record: LayerCall) -> Iterator[None]:
        self.calls.append(record)
        self._open.append(record)
        try:
            yield
        finally:
            self._open.pop()


_active: ContextVar[Trace | None] = ContextVar("moe_core_trace", default=None)


@contextmanager
def trace() -> Iterator[Trace]:
    """Record every layer call inside. Compiled graphs are not recorded."""
    tracer = Trace()
    token = _active.set(tracer)
    try:
        yield tracer
    finally:
        _active.reset(token)


def current() -> LayerCall | None:
    """The layer call being traced, or None."""
    if torch.compiler.is_compiling():
        return None
    tracer = _active.get()
    return tracer._open[-1] if tracer is not None and tracer._open else None


def layer_call(name: str, experts: Experts) -> AbstractContextManager[None]:
    """Opens a call unless one is open already (``Experts`` inside a ``MoELayer``)."""
    if torch.compiler.is_compiling() or current() is not None:
        return nullcontext()
    tracer, parallel, groups = _active.get(), experts.parallel, experts.groups
    if tracer is None:
        return nullcontext()
    return tracer.call(
        LayerCall(
            name=name,
            num_experts=experts.config.num_experts,
            world_size=parallel.world_size,
            rank=groups.rank,
            ep_size=parallel.ep_size,
            has_own_tokens=groups.tp_rank == 0
            and (groups.ep_rank == 0 or parallel.rows == "distinct"),
        )
    )


def stage(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """A profiler range ``moe_core.<name>``; timed as well where a trace is on."""
    if torch.compiler.is_compiling():
        return nullcontext()
    call = current()
    if call is None:
        return torch.profiler.record_function(f"moe_core.{name}")
    return _timed(call, name, device)


@contextmanager
def _timed(call: LayerCall, name: str, device: torch.device) -> Iterator[None]:
    start = _now(device)
    with torch.profiler.record_function(f"moe_core.{name}"):
        yield
    call.stages[name] = call.stages.get(name, 0.0) + _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

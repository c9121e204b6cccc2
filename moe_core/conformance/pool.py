"""A pool of ranks that tests reuse: processes with a gloo group, started once per world size.

Starting processes for each test would cost more than the tests. A task is a module-level function;
every rank runs it and the results come back in rank order. A failure on one rank or a time limit
passed kills the pool (the others may hang in a collective) and raises ``AssertionError`` with the
first failing rank's traceback and the last line of the others'; the next task starts a new pool.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

Result = TypeVar("Result")

GRACE = 2.0
"""Seconds that the other ranks get to report after one has failed."""
METHOD = "spawn"
"""How ranks are started. ``forkserver`` imports torch once for all of them, and they see the
environment of the first start; a process that has done nothing yet may ``fork`` them itself."""


class RankPool:
    """``world_size`` processes on this machine, each with the default process group set up."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.processes: list[BaseProcess] = []
        self._pipes: list[Any] = []

    def run(self, task: Callable[..., Result], *args: Any, limit: float = 60.0) -> list[Result]:
        """``task(*args)`` on every rank → the results by rank."""
        self.start()
        for connection in self._pipes:
            connection.send((task, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + limit
        while len(results) + len(errors) < self.world_size:
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in {*results, *errors}}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in cast("list[Any]", ready):
                rank = waiting[pipe]
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good, value = False, "the process died"
                (results if good else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE)
        if len(results) == self.world_size:
            return [results[r] for r in range(self.world_size)]
        silent = sorted(set(range(self.world_size)) - {*results, *errors})
        self.close()
        first = min(errors, default=-1)  # the others' tracebacks are mostly the same
        lines = [
            f"--- rank {rank}\n{text if rank == first else text.strip().splitlines()[-1]}"
            for rank, text in sorted(errors.items())
        ]
        if silent:
            lines.append(
                f"--- ranks {silent} did not finish ({limit:g} s, {GRACE:g} s after a fault)"
            )
        raise AssertionError("\n".join(lines))

    def start(self) -> None:
        """Starts the processes, where there are none."""
        if self.processes:
            return
        context = multiprocessing.get_context(METHOD)
        context.set_forkserver_preload(["moe_core.conformance.on_ranks"])
        store = tempfile.NamedTemporaryFile(prefix="moe_core_ranks_", delete=False)  # noqa: SIM115
        store.close()
        os.unlink(store.name)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker, args=(rank, self.world_size, store.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self._pipes:
            connection.close()
        self.processes, self._pipes = [], []


def _worker(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, task(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


_pools: dict[int, RankPool] = {}


def ranks(world_size: int) -> RankPool:
    """The shared pool of that size."""
    if world_size not in _pools:
        _pools[world_size] = RankPool(world_size)
        atexit.register(_pools[world_size].close)
    return _pools[world_size]

"""Before the first collective: a rank that differs, refuses or stays away is named on all ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_core.agreement
from moe_core import ConfigError, MoEConfig, MoEError, MoELayer, ParallelConfig
from moe_core.agreement import disagreements
from moe_core.conformance.pool import ranks

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_experts": 4, "top_k": 2}


def test_every_rank_and_field_that_differs_is_named() -> None:
    same = {"request.dtype": "float32", "torch": "2.13.0"}
    assert disagreements((0, 1), [same, dict(same)]) == []
    assert disagreements((0, 1), [{"refused": "x"}, {"refused": "x"}]) == []
    assert len(disagreements((0, 1), [{"refused": "x"}, {"refused": "y"}])) == 2
    faults = disagreements(
        (0, 1, 2, 7),
        [
            same,
            same | {"torch": "2.12.0"},
            {"refused": "no experts"},
            same | {"request.dtype": "x"},
        ],
    )
    assert [(f.field, f.value) for f in faults] == [
        ("rank 2", "refused"),
        ("request.dtype", "differs between ranks"),
        ("torch", "differs between ranks"),
    ]
    assert '"2.12.0" on ranks [1]' in faults[2].message


def build(odd: dict[str, Any], spec: str | None, wide: dict[str, int]) -> str:
    """Rank 1 builds something else (or with another environment); what each rank is told."""
    mine = odd if dist.get_rank() == 1 else {}
    config = MoEConfig(**SIZES | mine.get("config", {}))
    backend = mine.get("backend", spec)
    parallel = ParallelConfig(**wide)
    os.environ.update(mine.get("environ", {}))
    version, changed = moe_core.agreement.__version__, mine.get("version")
    moe_core.agreement.__version__ = changed or version
    try:
        with pytest.raises(MoEError) as error:
            MoELayer(config, parallel, backend, max_tokens_per_rank=mine.get("limit"))
    finally:
        moe_core.agreement.__version__ = version
        for name in mine.get("environ", {}):
            del os.environ[name]
    assert isinstance(error.value, ConfigError)
    MoELayer(MoEConfig(**SIZES), parallel, "nccl+torch")  # and the ranks are in step again
    return str(error.value)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"config": {"hidden_size": 16}}, ["request.hidden_size", "16 on ranks [1]"]),
        ({"config": {"dtype": "bfloat16"}}, ["request.dtype", '"bfloat16" on ranks [1]']),
        ({"backend": "nccl+reference"}, ["part.runner", "reference.runner"]),
        ({"backend": "nccl[mode=replicated]+torch"}, ["part.transport", "replicated"]),
        ({"backend": "absent"}, ["rank 1", "no backend named 'absent'"]),
        ({"config": {"quant": "fp8"}}, ["rank 1", "quant: wanted fp8"]),
        ({"environ": {"MOE_BACKENDS": "x"}}, ["rank 1", "MOE_BACKEND"]),
        ({"version": "0.0.1"}, ["moe_core", '"0.0.1" on ranks [1]']),
        ({"config": {"capacity_factor": 0.5}}, ["config.capacity_factor", "0.5 on ranks [1]"]),
        ({"config": {"num_shared_experts": 1}}, ["config.num_shared_experts"]),
        ({"environ": {"MOE_BUILD_TIMEOUT": "abc"}}, ["rank 1", "MOE_BUILD_TIMEOUT"]),
        ({"environ": {"MOE_DEBUG_COLLECTIVES": "1"}}, ["MOE_DEBUG_COLLECTIVES"]),
        ({"limit": 5}, ["max_tokens_per_rank", "5 on ranks [1]"]),
    ],
)
def test_one_rank_with_another_idea_stops_all(odd: dict[str, Any], words: list[str]) -> None:
    for text in ranks(4).run(build, odd, "nccl+torch", {"ep_size": 4}, limit=30):
        for word in words:
            assert word in text


def stay_away() -> tuple[str, float]:
    if dist.get_rank() == 1:
        time.sleep(2)  # this one builds a local layer only, and no other
        MoELayer(MoEConfig(**SIZES))
        return "", 0.0
    os.environ["MOE_BUILD_TIMEOUT"] = "1"
    start = time.monotonic()
    with pytest.raises(ConfigError) as error:
        MoELayer(MoEConfig(**SIZES), ParallelConfig(ep_size=2), "nccl+torch")
    del os.environ["MOE_BUILD_TIMEOUT"]
    return str(error.value), time.monotonic() - start


def test_a_rank_that_builds_nothing_is_named_after_the_time_limit() -> None:
    text, seconds = ranks(2).run(stay_away, limit=30)[0]
    assert "rank 1" in text
    assert "MOE_BUILD_TIMEOUT" in text
    assert seconds < 10
    ranks(2).close()  # rank 1 still owes the store its word for that layer


def die_in_the_middle(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 3),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=300),
    )
    layer = MoELayer(MoEConfig(**SIZES), ParallelConfig(ep_size=3), "nccl+torch")
    x = torch.randn(4, 8)
    layer(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(3):
            layer(x)
    except Exception as error:
        results.put((rank, type(error).__name__, time.monotonic() - start))
    results.close()
    results.join_thread()
    os._exit(0)  # the group can't be torn down in good order any more


def test_a_killed_rank_gives_its_peers_an_error_at_once(tmp_path) -> None:
    """gloo: the peers' next exchange raises within seconds, whatever the group's time limit."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [
        context.Process(target=die_in_the_middle, args=(rank, str(tmp_path / "store"), results))
        for rank in range(3)
    ]
    for child in children:
        child.start()
    try:
        told = {r: (name, s) for r, name, s in (results.get(timeout=60) for _ in range(2))}
    finally:
        for child in children:
            child.kill()
            child.join()
    assert set(told) == {0, 2}
    assert all(seconds < 20 for _, seconds in told.values())

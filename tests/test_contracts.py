"""Errors, handles, pending results, placement: the small contracts."""

from __future__ import annotations

import pickle

import pytest
import torch

import moe_core
from moe_core import (
    BackendConflictError,
    BackendLoadError,
    BackendVersionError,
    ConfigError,
    Fault,
    Handle,
    HandleError,
    InputError,
    MoEConfig,
    MoEError,
    UnknownBackendError,
    resolve,
)
from moe_core.contracts import ExchangePlan, Pending
from moe_core.placement import Placement

ERRORS = [
    UnknownBackendError("tritom", ["triton", "torch"], None),
    BackendLoadError("x", "x-dist", "x:BACKEND", "AssertionError: no"),
    BackendConflictError("x", ["a", "b"]),
    BackendVersionError("x", "x-dist", "2.0", "1.0"),
    ConfigError([Fault("top_k", 5, "at most num_experts=4")]),
    InputError("hidden_states must be float32"),
    HandleError("used twice"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_pickle_with_their_data(error: MoEError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_config_error_keeps_its_resolution_when_pickled() -> None:
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2, quant="fp8")
    resolution = resolve(config)
    assert not resolution.ok
    again = pickle.loads(pickle.dumps(ConfigError(resolution)))
    assert again.resolution == resolution
    assert again.resolution.fingerprint == resolution.fingerprint


def test_errors_say_what_to_do() -> None:
    unknown, _, conflict, newer, *_ = map(str, ERRORS)
    assert "did you mean 'triton'?" in unknown
    assert "a:x or b:x" in conflict
    assert "upgrade moe-core" in newer
    assert "upgrade x-dist" in str(BackendVersionError("x", "x-dist", "0.9", "1.0"))


def test_python_error_families() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(UnknownBackendError, LookupError)
    assert issubclass(BackendLoadError, ImportError)


def plan() -> ExchangePlan:
    return ExchangePlan(1, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def test_a_handle_is_used_once_and_only_by_its_owner() -> None:
    owner, stranger = object(), object()
    handle = Handle(plan(), owner)
    with pytest.raises(HandleError, match="made by"):
        handle.consume(stranger)
    assert handle.consume(owner) is handle.plan
    with pytest.raises(HandleError, match="already combined"):
        handle.consume(owner)


def test_a_pending_result_is_reachable_once_and_only_by_finish() -> None:
    begun: list[int] = []
    pending = Pending(lambda: begun.append(1) or "result")
    assert begun == []
    assert pending.finish() == "result"
    with pytest.raises(HandleError, match="already called"):
        pending.finish()


@pytest.mark.parametrize(
    ("num_experts", "ep_size", "counts"),
    [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (5, 4, [2, 1, 1, 1]), (2, 3, [1, 1, 0])],
)
def test_the_first_ranks_hold_one_expert_more(
    num_experts: int, ep_size: int, counts: list[int]
) -> None:
    placement = Placement(num_experts, ep_size)
    assert [placement.num_local_experts(r) for r in range(ep_size)] == counts
    homes = [(r, s) for r, count in enumerate(counts) for s in range(count)]
    assert [placement.home(e) for e in range(num_experts)] == homes
    assert [placement.first_expert(r) for r in range(ep_size)] == [
        sum(counts[:r]) for r in range(ep_size)
    ]
    for expert in (-1, num_experts):
        with pytest.raises(IndexError):
            placement.home(expert)


def test_every_public_name_exists() -> None:
    for name in moe_core.__all__:
        assert getattr(moe_core, name) is not None
    assert callable(moe_core.trace)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = moe_core.nonsense

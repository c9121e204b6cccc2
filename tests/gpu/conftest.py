"""The triton backend on a real GPU. Skipped, unread, where there is none.

``pytest -m gpu`` runs these in a development environment; ``tests/gpu/pytest.ini`` says how on a
machine that has a checkout only. ``benchmarks/gpu_suite.py`` runs them first of all.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
REASON = ""
if not torch.cuda.is_available():
    REASON = "needs a CUDA device"
elif importlib.util.find_spec("triton") is None:
    REASON = "needs triton: pip install 'moe-core[triton]'"
elif os.environ.get("TRITON_INTERPRET") == "1":
    REASON = "needs a process without TRITON_INTERPRET"
else:
    sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks")]
    from suite.machine import use_checkout  # pyright: ignore[reportMissingImports]

    use_checkout()


class Skipped(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Skipped | None:
    return Skipped.from_parent(parent, path=module_path) if REASON else None


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh(device: torch.device) -> Iterator[None]:
    """The same numbers in every run, and no memory of the test before."""
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()

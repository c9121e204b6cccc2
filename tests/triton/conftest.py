"""Kernels in Triton's interpreter, which Triton switches on when it is imported.

``TRITON_INTERPRET=1 pytest tests/triton`` (or ``make test``) runs these; elsewhere they are skipped
unread, as their kernels could only run on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from pathlib import Path

REASON = ""
if importlib.util.find_spec("triton") is None:
    REASON = "needs triton: pip install 'moe-core[triton]'"
elif os.environ.get("TRITON_INTERPRET") != "1":
    REASON = "needs TRITON_INTERPRET=1, set before Python starts (make test does it)"


class Skipped(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Skipped | None:
    return Skipped.from_parent(parent, path=module_path) if REASON else None

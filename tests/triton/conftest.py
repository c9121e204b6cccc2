"""Kernels in Triton's interpreter, which Triton switches on when it is imported.

``TRITON_INTERPRET=1 pytest tests/triton`` (or ``make test``) runs these; elsewhere they are skipped
unread, as their kernels could only run on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))  # for grouped_rows
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


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Leaves out what the interpreter does over and over: it patches ``triton.language`` anew for
    every call of a device function, and looks for overflows in every sum of integers."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        seen = [m for m in (language, language.core) if m in _modules(fn.__globals__)]
        pristine = any(language.core.is_builtin(module.load) for module in seen)
        return patch(fn) if pristine else interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    look_for_overflows(False)


def _modules(names: dict[str, Any]) -> list[ModuleType]:
    return [value for value in names.values() if isinstance(value, ModuleType)]


def look_for_overflows(look: bool) -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", look)


@pytest.fixture
def overflows_found(quick_interpreter: None) -> Iterator[None]:
    """The test fails where 32-bit arithmetic on offsets overflows."""
    look_for_overflows(True)
    yield
    look_for_overflows(False)

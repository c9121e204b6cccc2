"""How pytest is called for the suites: nothing around it can change what is tested."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SUITE = Path(__file__).resolve().parent / "suite"


def arguments(
    profiles: Iterable[str], *, backend: str, device: str = "cpu", ranks: str = "1,2,4"
) -> list[str]:
    """For ``pytest.main`` or ``python -m pytest``."""
    return [
        *("-c", os.devnull, "--rootdir", str(SUITE)),
        *("-p", "no:cacheprovider", "-p", "moe_core.conformance.plugin"),
        *("-q", "--no-header", "--tb=short"),
        *(str(SUITE / f"test_{profile}.py") for profile in profiles),
        *("--moe-backend", backend, "--moe-device", device, "--moe-ranks", ranks),
    ]

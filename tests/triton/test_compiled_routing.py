"""The kernels that route, sort and sum, compiled for chips that aren't here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def compiled(target: str, *names: str) -> list[dict[str, Any]]:
    """In a child that doesn't interpret."""
    script = Path(__file__).parent / "compile_routing.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script, target, *names],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found: list[dict[str, Any]]) -> None:
    kernels = [one for one in found if "spills" in one]
    variants = {(one["case"], one["kernel"]): one["variants"] for one in found if "variants" in one}
    assert len(kernels) >= 8
    assert [k for k in kernels if k["spills"]] == []
    assert [k for k in kernels if k["fused"]] == []  # bits don't depend on what a compiler fuses
    aligned = [k for k in kernels if k["case"] in ("deepseek-v3", "sum 7168", "sum 2880 float32")]
    assert aligned
    assert [k for k in aligned if not k["wide"]] == []
    # sums have a form for [R, H] and one for [N, K, H]; nothing depends on T
    for (case, kernel), number in variants.items():
        assert number == (2 if kernel.startswith("sum_rows") else 1), (case, kernel)


def test_no_spills_on_hopper_wide_loads_and_one_variant_for_all_t() -> None:
    check(compiled("sm_90", "deepseek-v3", "sort", "sum 7168"))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_no_spills_anywhere(target: str) -> None:
    check(compiled(target))

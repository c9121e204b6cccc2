"""What the triton backend ships, compiled for chips that aren't here, and read from the binaries.

In child processes: this one may be one that interprets kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton: pip install 'moe-core[triton]'", allow_module_level=True)

from moe_triton import configs
from moe_triton.aot import CASES, TARGETS, Compiled, faults, table
from moe_triton.aot_binary import Binary

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
GOOD = Compiled(
    target="sm_90",
    case="silu/64",
    kernel="up_kernel",
    itemsize=2,
    config={"m": 64, "n": 64, "k": 64, "warps": 4, "stages": 4},
    binary=Binary(128, 0, 96 * 1024, {"wgmma": 8}, {"tma": 4, "16": 8, "narrow": 2}),
)


def child(*argv: str, limit: float = 280, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *argv],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def compiled(*argv: str, limit: float = 280) -> dict[str, Any]:
    done = child("-m", "moe_triton.aot", "--json", *argv, limit=limit)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


def restored(kernel: Mapping[str, Any]) -> Compiled:
    return Compiled(**{**kernel, "binary": Binary(**kernel["binary"])})


def test_forward_on_hopper():
    report = compiled("--target", "sm_90", "--case", "silu/64", "--forward")
    assert report["faults"] == []
    kernels = {k["kernel"]: restored(k) for k in report["kernels"]}
    assert set(kernels) == {"up_kernel", "down_kernel"}
    up, down = kernels["up_kernel"], kernels["down_kernel"]
    assert up.binary.matrix.keys() == {"wgmma"}
    assert up.binary.loads["tma"]  # weights
    assert up.binary.loads["16"]  # rows, gathered
    assert down.binary.loads["tma"]
    assert 32 <= up.binary.registers <= 255
    chosen = configs.TABLE["up", "sm90", 2, 64]
    assert (up.config["m"], up.config["n"]) == (chosen.block_m, chosen.block_n)
    assert up.binary.shared <= TARGETS["sm_90"].shared_limit


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"binary": replace(GOOD.binary, spills=8)}, ["8 bytes of spilled registers"]),
        ({"binary": replace(GOOD.binary, shared=228 * 1024)}, ["of shared memory"]),
        ({"binary": replace(GOOD.binary, matrix={"mma": 8})}, ["no wgmma but {'mma': 8}"]),
        ({"binary": replace(GOOD.binary, matrix={})}, ["no wgmma but no matrix instruction"]),
        ({"binary": replace(GOOD.binary, loads={"narrow": 9})}, ["no load of 16 bytes"]),
        ({"case": "silu/odd", "binary": replace(GOOD.binary, loads={"narrow": 9})}, []),
        ({"target": "sm_100"}, ["no tcgen05"]),
        ({"target": "sm_86", "binary": replace(GOOD.binary, shared=2**17)}, ["shared", "no mma"]),
        ({"config": {**GOOD.config, "m": 32}}, ["no mma"]),
        ({"itemsize": 4, "binary": replace(GOOD.binary, matrix={}, loads={})}, []),
        ({"kernel": "sum_rows_kernel", "binary": replace(GOOD.binary, matrix={})}, []),
    ],
)
def test_faults(change: dict[str, Any], said: list[str]):
    found = faults(replace(GOOD, **change))
    assert len(found) == len(said)
    for fault, part in zip(found, said, strict=True):
        assert part in fault


CROWDED = """
import sys, torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moe_triton.aot_binary import read_binary

@triton.jit
def crowded(x, out):
    at = tl.arange(0, 64)
    a = tl.load(x + at[:, None] * 64 + at[None, :])
    wide = tl.dot(a, tl.trans(a)) + tl.dot(a, a)
    tl.store(out + at[:, None] * 64 + at[None, :], wide)

source = ASTSource(crowded, {"x": "*bf16", "out": "*fp32"}, attrs={(0,): [["tt.divisibility", 16]]})
options = {"num_warps": 4, "maxnreg": int(sys.argv[1]), "enable_fp_fusion": True}
print(read_binary(triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)))
"""


def test_reads_spills(tmp_path: Path):
    script = tmp_path / "crowded.py"
    script.write_text(CROWDED)
    found: dict[int, Binary] = {}
    for registers in (255, 40):
        done = child(str(script), str(registers))
        assert done.returncode == 0, done.stderr[-2000:]
        found[registers] = eval(done.stdout, {"Binary": Binary})
    assert found[255].spills == 0
    assert found[40].spills > 0
    assert found[40].registers <= 40 < found[255].registers
    for binary in found.values():
        # 64 x 64 x 64 in instructions of 16 x 8 x 16 over 4 warps, twice
        assert binary.matrix == {"mma": 2 * 64 * 64 * 64 // (16 * 8 * 16) // 4}
        assert binary.loads["16"] == 64 * 64 * 2 // (128 * 16)


def test_refuses_the_interpreter():
    done = child("-m", "moe_triton.aot", TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET=1 is set" in done.stderr


def test_every_shipped_configuration_is_among_the_cases():
    heights = {(case.itemsize, case.height) for case in CASES if case.backward}
    families = {target.chip.family for target in TARGETS.values()}
    for kernel, family, itemsize, bucket in configs.TABLE:
        assert kernel in configs.KERNELS
        assert family in families
        assert (itemsize, bucket or configs.BUCKETS[0]) in heights
    narrow = {(c.itemsize, c.height) for c in CASES if c.inner < configs.SHORT}
    assert {(itemsize, bucket) for _, _, itemsize, bucket in configs.SHORT_SUMS} <= narrow


def shown(target: str) -> str:
    """The part of the page about a target."""
    text = PAGE.read_text(encoding="utf-8")
    return text.split(f"<!-- {target} -->\n", 1)[1].split("\n<!-- end -->", 1)[0]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", TARGETS)
def test_all_that_is_shipped(target: str):
    report = compiled("--target", target, limit=1400)
    assert report["faults"] == []
    found = [restored(kernel) for kernel in report["kernels"]]
    for (kernel, family, itemsize, height), config in configs.TABLE.items():
        if family == TARGETS[target].chip.family and itemsize == 2 and height:
            made = [
                c for c in found if c.kernel == f"{kernel}_kernel" and c.case.endswith(f"/{height}")
            ]
            # what shared memory is too small for is made smaller
            assert any(c.config["m"] <= config.block_m for c in made), (kernel, height)
    assert table([c for c in found if c.needs_tiles]) == shown(target)

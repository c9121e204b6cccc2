"""What a compiled kernel is made of: registers, spills, shared memory, instructions.

Read from the machine code with the ``cuobjdump`` that Triton's package carries, and from AMD's
assembly text. No device is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

MATRIX = {"HGMMA": "wgmma", "UTCHMMA": "tcgen05", "UTCOMMA": "tcgen05", "HMMA": "mma"}
"""First part of an opcode in NVIDIA's machine code → the PTX instruction it comes from."""


@dataclass(frozen=True)
class Binary:
    """``spills``: bytes per thread in local memory (AMD: registers). ``shared``: bytes a program
    asks for. ``matrix``: matrix instructions by kind (``wgmma``, ``tcgen05``, ``mma``, ``mfma``).
    ``loads``: instructions that read global memory, by how: ``tma`` (a tile), ``16`` (bytes per
    thread, straight to shared memory or not), ``narrow``."""

    registers: int
    spills: int
    shared: int
    matrix: dict[str, int]
    loads: dict[str, int]


def read_binary(compiled: Any) -> Binary:
    """Of what ``triton.compile`` returns."""
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        return _read_cubin(compiled.asm["cubin"], shared)
    return _read_amd(compiled.asm["amdgcn"], shared)


def _read_cubin(cubin: bytes, shared: int) -> Binary:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("--dump-sass", file.name)
    numbers = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    opcodes = Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", sass, re.M)
    )
    matrix: Counter[str] = Counter()
    loads: Counter[str] = Counter()
    touched = 0
    for opcode, count in opcodes.items():
        first = opcode.split(".")[0]
        if first in MATRIX:
            matrix[MATRIX[first]] += count
        elif first == "UTMALDG":
            loads["tma"] += count
        elif first in ("LDG", "LDGSTS"):
            loads["16" if ".128" in opcode else "narrow"] += count
        elif first in ("LDL", "STL"):
            touched += count
    spills = max(numbers["STACK"], numbers["LOCAL"]) if touched else 0
    return Binary(numbers["REG"], spills, shared, dict(matrix), dict(loads))


def _read_amd(text: str, shared: int) -> Binary:
    def number(name: str) -> int:
        found = re.search(rf"^\s*\.{name}:\s+(\d+)", text, re.M)
        return int(found[1]) if found else 0

    loads: Counter[str] = Counter()
    for width in re.findall(r"^\s+(?:global|buffer)_load_(\w+)", text, re.M):
        loads["16" if width.startswith(("dwordx4", "lds_dwordx4", "b128")) else "narrow"] += 1
    mfma = len(re.findall(r"^\s+v_mfma_", text, re.M))
    return Binary(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
        shared=max(shared, number("group_segment_fixed_size")),
        matrix={"mfma": mfma} if mfma else {},
        loads=dict(loads),
    )


def _cuobjdump(*args: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, *args], capture_output=True, text=True, check=True)
    return done.stdout

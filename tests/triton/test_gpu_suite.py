"""Every path of the GPU suite's cells, in Triton's interpreter at tiny sizes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_suite.py"


def check(out: Path, only: str, number: int, limit: float) -> None:
    command = [sys.executable, str(SUITE), "--cpu-check", "--out", str(out), "--only", only]
    done = subprocess.run(
        [*command, "--budget", str(limit)],
        capture_output=True,
        text=True,
        timeout=limit + 20,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["note"] for row in rows if row["metric"] == "failed"] == []
    cells = {row["cell"] for row in rows if row["metric"] == "experts hit"}
    assert len(cells) == number
    for cell in cells:
        timed = {r["contender"] for r in rows if (r["cell"], r["metric"]) == (cell, "time")}
        assert timed == {"triton", "grouped_mm", "loop"}
        errors = [float(r["p50"]) for r in rows if (r["cell"], r["metric"]) == (cell, "error")]
        assert len(errors) == 3
        assert max(errors) < 1
        left_out = {r["contender"] for r in rows if (r["cell"], r["metric"]) == (cell, "left out")}
        assert left_out == {"vllm", "scattermoe", "sonic-moe"}
    assert (out / "ratios.png").exists()
    assert "Tried on a CPU" in (out / "report.txt").read_text()


def test_a_decode_step(tmp_path: Path):
    pytest.importorskip("matplotlib")
    check(tmp_path, "gpt-oss.*/T1/forward", 1, 120)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_shape_decodes_and_trains(tmp_path: Path):
    pytest.importorskip("matplotlib")
    check(tmp_path, "/T(16/forward|256/train)", 10, 800)

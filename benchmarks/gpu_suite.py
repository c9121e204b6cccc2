"""Tests on a GPU, then at most 60 cells beside other kernels: ``python benchmarks/gpu_suite.py``.

One command of at most ``--budget`` seconds (480). What it finds goes to ``--out`` as it is found;
the same command goes on where the last one stopped. It needs a checkout, torch, triton, pytest and
matplotlib, and no network or installation.

Results: ``results.csv`` (a row per contender, cell and metric: median, 20th and 80th percentile),
``report.txt`` (the table that is also printed), ``ratios.png``, ``tests.log``.

Every contender's numbers are compared with float64 before it is timed. Contenders take turns in one
process. Decode steps (T <= 64, forward) are timed as replays of a CUDA graph on a cold L2 cache;
all else on a stream that is kept busy until the call is queued.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from suite import predict, results  # noqa: E402
from suite.machine import ROOT  # noqa: E402
from suite.shapes import CELLS, SHAPES  # noqa: E402

BUDGET_S = 480.0
TESTS_S, SILENCE_S, CLOSING_S = 170.0, 75.0, 12.0
"""What the tests may take, what a contender may (compilation included), and the report."""
SIGN = "@suite "


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name matches")
    parser.add_argument("--no-tests", action="store_true", help="cells only")
    parser.add_argument("--no-cells", action="store_true", help="tests only")
    parser.add_argument(
        "--cpu-check",
        action="store_true",
        help="try every code path on a CPU at tiny sizes; needs TRITON_INTERPRET=1",
    )
    parser.add_argument("--report", action="store_true", help="of what is there; measure nothing")
    parser.add_argument("--predict", action="store_true", help="print what cells should take")
    parser.add_argument("--list", action="store_true", help="print the cells and the shapes")
    args = parser.parse_args(argv)
    if args.predict:
        print(prediction())
        return 0
    if args.list:
        print("\n".join(cell.name for cell in CELLS))
        print("\n".join(f"{shape.name}: {shape.source}" for shape in SHAPES.values()))
        return 0
    return Suite(args).run()


class Suite:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begun = args, time.monotonic()
        args.out.mkdir(parents=True, exist_ok=True)
        self.table = results.Table(args.out / "results.csv")
        self.versions: dict[str, str] = {}
        # what ended a process before would end this one
        failed = (row for row in self.table.rows if row["metric"] == "failed")
        self.skip = [(row["cell"], row["contender"]) for row in failed]

    @property
    def left(self) -> float:
        return self.args.budget - CLOSING_S - (time.monotonic() - self.begun)

    def run(self) -> int:
        """0: all cells are done and the tests passed, 1: some aren't or didn't."""
        if not self.args.report:
            if not self.args.no_tests and not self.args.cpu_check:
                self.run_tests()
            if not self.args.no_cells:
                self.run_cells()
        text = results.report(self.table)
        (self.args.out / "report.txt").write_text(text + "\n", encoding="utf-8")
        if results.ratios(self.table):
            results.picture(self.table, self.args.out / "ratios.png")
        print(text)
        return 0 if not self.wanted() and self.tests_passed() else 1

    def wanted(self) -> list[str]:
        """Cells that aren't done."""
        done = self.table.finished
        return [
            cell.name
            for cell in CELLS
            if cell.name not in done and re.search(self.args.only, cell.name)
        ]

    def tests_passed(self) -> bool:
        told = [row for row in self.table.rows if row["metric"] == "tests"]
        return not told or told[-1]["p50"] == "0"

    def run_tests(self) -> None:
        if any(row["metric"] == "tests" for row in self.table.rows) and self.tests_passed():
            print("tests: passed before", flush=True)
            return
        log = self.args.out / "tests.log"
        command = [
            *(sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", "."),
            *("-m", "gpu", "-v", "--maxfail=8", "tests/gpu"),
        ]
        limit = max(min(TESTS_S, self.left), 1)
        print(f"tests: up to {limit:.0f} s", flush=True)
        late = ""
        with log.open("w", encoding="utf-8") as out:
            try:
                subprocess.run(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                late = f"not done after {limit:.0f} s; "
        note = late + outcome(log.read_text(encoding="utf-8"))
        wrong = not re.fullmatch(r"[1-9]\d* passed(, \d+ skipped)?", note)
        row = {
            "contender": "suite",
            "metric": "tests",
            "unit": "wrong",
            "p50": float(wrong),
            "note": note,
        }
        self.table.add("tests", [row], self.versions)
        print(f"tests: {note} ({log})", flush=True)

    def run_cells(self) -> None:
        """One process after the other, until all is done or time is up."""
        while (names := self.wanted()) and self.left > 20:
            process = Worker(
                {
                    "cells": names,
                    "skip": [*self.skip],
                    "on_cpu": self.args.cpu_check,
                    "seconds": self.left,
                }
            )
            last = self.listen(process)
            if last is None:
                return
            # it ended or hung in the middle of something: do without that
            cell, contender, why = last
            print(f"{cell}: {contender}: {why}", flush=True)
            failed = {"contender": contender, "metric": "failed", "unit": "", "note": why}
            self.table.add(cell, [failed], self.versions)
            if contender == "timing" or (cell, contender) in self.skip:
                # nobody in particular: give the cell up, and say so
                given_up = {"contender": "suite", "metric": "experts hit", "p50": 0.0, "note": why}
                self.table.add(cell, [given_up], self.versions)
            self.skip.append((cell, contender))

    def listen(self, worker: Worker) -> tuple[str, str, str] | None:
        """None when it is done or time is up; else cell, contender and what happened."""
        cell, contender = "machine", "worker"
        while True:
            silence = SILENCE_S if not self.args.cpu_check else 300.0
            event = worker.next(min(silence, max(self.left, 0.1)))
            if event is None:
                ended = worker.stop()
                if self.left <= 0:
                    return None
                why = (
                    f"ended ({ended})" if ended is not None else f"hung: silent for {silence:.0f} s"
                )
                if cell == "machine":
                    raise SystemExit(f"the measuring process {why}:\n{worker.tail()}")
                return cell, contender, f"{why}: {worker.tail()[-300:]}".replace("\n", "; ")
            match event.pop("event"):
                case "versions":
                    self.versions = event
                case "begin":
                    cell, contender = event["cell"], event["contender"]
                case "rows":
                    self.table.add(event["cell"], event["rows"], self.versions)
                    self.tell(event["cell"])
                case _:  # late, done
                    worker.stop()
                    return None

    def tell(self, cell: str) -> None:
        times = self.table.times(cell)
        text = ", ".join(f"{who} {seconds * 1e6:.1f} us" for who, seconds in times.items())
        print(f"[{time.monotonic() - self.begun:5.0f} s] {cell}: {text}", flush=True)


class Worker:
    """``suite.worker`` in a process, with its lines as they come."""

    code = (
        "import sys; from suite.machine import use_checkout; use_checkout(); "
        "from suite.worker import main; main(sys.argv[1:])"
    )

    def __init__(self, asked: dict[str, Any]) -> None:
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.code, json.dumps(asked)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.others: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line)
        self.lines.put(None)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next event; None where none comes in time or the process has ended."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0))
            except queue.Empty:
                return None
            if line is None:
                return None
            if line.startswith(SIGN):
                return json.loads(line.removeprefix(SIGN))
            self.others.append(line)

    def stop(self) -> int | None:
        """Its exit code, None if it had to be killed."""
        code: int | None = None
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join(timeout=2)
        return code

    def tail(self) -> str:
        return "".join(self.others[-30:])


def outcome(log: str) -> str:
    """Of what ``pytest -v`` wrote, ended or not: ``12 passed, 1 skipped``, or what is wrong."""
    found = re.findall(r"^\S+::(.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", log, re.MULTILINE)
    wrong = [name for name, state in found if state in ("FAILED", "ERROR")]
    passed, skipped = (sum(state == s for _, s in found) for state in ("PASSED", "SKIPPED"))
    text = f"{passed} passed" + (f", {skipped} skipped" if skipped else "")
    return f"{len(wrong)} failed: {', '.join(wrong)}; {text}" if wrong else text


def prediction() -> str:
    return f"{predict.table()}\n\n{predict.goals_met()}"


if __name__ == "__main__":
    sys.exit(main())

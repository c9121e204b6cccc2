"""The example over two network namespaces: what crosses the cable; nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("two_hosts")


class Run:
    """The example in a process of its own, and the namespaces that carry its number."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "two_hosts.py", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=EXAMPLES, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True
        )

    def end(self, limit: float) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=limit)
        return self.process.returncode, out, err

    def namespaces(self) -> list[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
        return [name for name in names if name.startswith(f"moe-{self.process.pid}-")]


@pytest.fixture
def run(example: Any) -> Any:
    reason = example.why_not()
    if reason:
        pytest.skip(reason)
    made: list[Run] = []

    def start(*arguments: str) -> Run:
        made.append(Run(*arguments))
        return made[-1]

    yield start
    for one in made:  # whatever went wrong above
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
        for name in one.namespaces():
            shown = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in shown.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
def test_a_token_crosses_the_cable_once(run: Any) -> None:
    code, out, err = run("--json", "--limit", "150").end(320)
    assert code == 0, err
    flat, once = json.loads(out)
    assert flat["parts"] == "nccl[mode=all_to_all].transport"
    assert once["parts"] == "nccl[mode=hierarchical].transport"  # nobody named it: a rule did
    for found in (flat, once):
        assert found["nodes"] == [0, 1]
        assert found["error"] < 1e-10
        # The kernel counts frames: more than the rows and ids in them. With both directions'
        # headers and an answer to each (66 bytes of Ethernet, IPv4 and TCP with timestamps per 1448
        # at the least), and 256 KiB for all that torchrun, store and gloo say besides.
        assert found["counted"] < found["cable"]
        assert found["cable"] < found["counted"] * (1 + 2 * 66 / 1448) + 2**18
    assert once["rows"] == once["bound"] == flat["bound"]
    assert all(flat["rows"][kind] > bound > 0 for kind, bound in flat["bound"].items())
    assert once["cable"] < flat["cable"]


@pytest.mark.slow
def test_nothing_stays_behind(run: Any) -> None:
    """After a mode that doesn't end in time, and after a signal in the middle of it."""
    late = run("--modes", "all_to_all", "--limit", "1")
    code, _, err = late.end(60)
    assert code == 1
    assert "mode all_to_all failed within 1 s" in err
    assert late.namespaces() == []

    ended = run("--modes", "all_to_all")
    for _ in range(200):
        if len(ended.namespaces()) == 2:
            break
        time.sleep(0.1)
    assert len(ended.namespaces()) == 2
    ended.process.send_signal(signal.SIGTERM)
    code, _, err = ended.end(60)
    assert code == 143, err
    assert ended.namespaces() == []


def test_where_it_can_not_run_it_says_so(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["two_hosts.py"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert example.main() == 2
    assert capsys.readouterr().err == "two_hosts: making network namespaces needs root\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "apt-get install iproute2" in example.why_not()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert example.why_not() == "network namespaces are Linux's"

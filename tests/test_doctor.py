"""``moe-core doctor``: the machine, the variables, exit codes, and that nothing outlives it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_core import cli, environment, registry
from moe_core.cli import main
from moe_core.probe import Outcome, probe_backend

ROOT = Path(__file__).resolve().parents[1]
PART = {"role": "runner", "target": "json:loads", "takes": ["indexed"], "gives": ["indexed"]}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    registry.refresh()


def install(path: Path, dist: str, name: str, code: str, group: str = registry.GROUP) -> None:
    """Version 1 of a distribution with one backend, from the module ``NAME_module``."""
    (path / f"{name}_module.py").write_text(code)
    info = path / f"{dist}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}_module:BACKEND\n")
    importlib.invalidate_caches()
    registry.refresh()


def manifest(name: str) -> str:
    data = {"name": name, "api": "1.0", "parts": [PART]}
    return f"BACKEND = {data!r}\n"


RUN = """
import sys
from moe_core.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "numpy", "safetensors", "triton", "moe_torch"} & set(sys.modules)
print(sorted(heavy), file=sys.stderr)
raise SystemExit(code)
"""


def test_the_machine_and_a_shipped_backend():
    env = {k: v for k, v in os.environ.items() if not k.startswith("MOE_")}
    env["MOE_VALIDATE"] = "1"
    command = [sys.executable, "-c", RUN, "doctor", "--json", "torch"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (cli.OK, "[]\n")  # this process imported nothing
    report = json.loads(done.stdout)
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["cuda"] == torch.version.cuda
    assert ("cuda" in report["torch"]["devices"]) == torch.cuda.is_available()
    assert report["torch"]["gloo"] == dist.is_gloo_available()
    assert (report["torch"]["nccl"] is not None) == dist.is_nccl_available()
    assert report["machine"]["python"] == sys.version.split()[0]
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert report["variables"] == {"MOE_VALIDATE": "1"}
    (backend,) = report["backends"]
    assert (backend["name"], backend["status"]) == ("torch", "ok")
    runners = [p for p in backend["parts"] if p["role"] == "runner"]
    assert [(p["target"], p["status"]) for p in runners] == [("moe_torch.runner:TorchRunner", "ok")]


def test_without_torch(site: Path):
    install(site, "plugin", "mine", manifest("mine"))
    libraries = [p for p in sys.path if "site-packages" not in p and p not in ("", str(site))]
    paths = [str(site), str(ROOT), *libraries]
    script = f"import sys; sys.path[:] = {paths!r}\n" + RUN
    command = [sys.executable, "-S", "-c", script, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (cli.NO, "[]\n")
    missing = "needs torch, and torch is not installed: pip install 'torch'"
    lines = done.stdout.splitlines()
    assert f"torch      refused: {missing}" in lines
    assert "mine       plugin 1  refused" in lines
    assert f"  runner refused: {missing}" in lines
    assert "backends: 1 refused" in lines


@pytest.fixture
def known_torch(monkeypatch: pytest.MonkeyPatch):
    answer = {
        "version": "9.9+rocm7",
        "cuda": None,
        "hip": "7.1",
        "devices": ["cpu", "cuda"],
        "device_names": ["A", "B", "A"],
        "gloo": False,
        "nccl": "2.27.5",
        "cpu_capability": "AVX2",
    }
    monkeypatch.setattr("moe_core.cli.doctor.probe_torch", lambda *_: (Outcome("ok"), answer))


def test_what_people_read(site: Path, known_torch: None, capsys: pytest.CaptureFixture[str]):
    install(site, "theirs", "bad", "x = 1\nraise RuntimeError('two\\nlines')")
    install(site, "mine", "good", manifest("good"))
    assert main(["doctor", "good", "theirs:bad"]) == cli.BROKEN
    out = capsys.readouterr().out
    torch_line = "9.9+rocm7, built with ROCm 7.1, runs on 2 x A, 1 x B; gloo no, NCCL 2.27.5"
    assert f"\ntorch      {torch_line}; CPU kernels AVX2\n" in out
    *_, block = out.partition("\n\n")
    assert block.splitlines() == [
        "bad        theirs 1  raises",
        "  manifest: RuntimeError: two",
        "    lines",
        f"    at {site / 'bad_module.py'}, line 2: raise RuntimeError('two\\nlines')",
        "    upgrade theirs, or uninstall it: pip uninstall theirs",
        "good       mine 1  ok  runner",
        "",
        "backends: 1 ok, 1 raises",
    ]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome("refused", "no torch"), cli.NO),
        (Outcome("raises", "ImportError: libfoo", "torch/a.py, line 1"), cli.BROKEN),
    ],
)
def test_a_torch_that_cannot_be_used(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: Outcome,
    code: int,
):
    install(site, "mine", "good", manifest("good"))
    monkeypatch.setattr("moe_core.cli.doctor.probe_torch", lambda *_: (outcome, {}))
    assert main(["doctor", "good"]) == code
    out = capsys.readouterr().out
    assert f"torch      {outcome.status}: {outcome.reason}\n" in out
    assert outcome.where in out


def test_variables(
    site: Path,
    known_torch: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def faults(code: int = cli.USAGE) -> dict[str, str]:
        assert main(["doctor", "--json", "good"]) == code
        report = json.loads(capsys.readouterr().out)
        assert {b["status"] for b in report["backends"]} == {"ok"}  # it goes on nevertheless
        return {f["field"]: f["message"] for f in report["faults"]}

    install(site, "mine", "good", manifest("good"))
    assert faults(cli.OK) == {}
    monkeypatch.setenv("MOE_BAKEND", "torch")
    monkeypatch.setenv("MOE_BACKEND", "torhc")
    monkeypatch.setenv("MOE_VALIDATE", "yes")
    found = faults()
    assert "did you mean 'MOE_BACKEND'?" in found.pop("MOE_BAKEND")
    assert found == {
        "MOE_BACKEND": "no backend named 'torhc' (did you mean 'torch'?)",
        "MOE_VALIDATE": "must be 0 or 1",
    }
    monkeypatch.setenv("MOE_PLUGINS", "good,goof")
    assert faults()["MOE_PLUGINS"].endswith("(did you mean 'good'?)")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["torhc"], "did you mean 'torch'?"),
        (["nobody:torch"], "no backend named 'nobody:torch'"),
        (["--timeout", "0"], "0 is not a number of seconds above 0"),
        (["--timeout", "nan"], "nan is not a number of seconds above 0"),
        (["--timeout", "soon"], "invalid"),
    ],
)
def test_bad_input(site: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str):
    assert main(["doctor", *words]) == cli.USAGE
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # dead, and nobody has asked how it went
            return True
        time.sleep(0.05)
    return False


def claim(name: str) -> Any:
    (found,) = registry.installed(name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_outlives_it(site: Path):
    pid_of = f"open({str(site / 'pid')!r}, 'w').write(str(%s))\n"
    # It inherits both pipes; whoever waits for their ends waits for it.
    start = "import subprocess\nchild = subprocess.Popen(['sleep', '300'])\n" + pid_of % "child.pid"
    install(site, "one", "leaves_one", start + manifest("leaves_one"))
    probe = probe_backend(claim("leaves_one"), None, 60, threading.Event())
    assert [p.outcome.status for p in probe.parts] == ["ok"]
    assert is_gone(int((site / "pid").read_text()))
    (site / "pid").unlink()

    # Interrupted: the child ends with the one who asked.
    waits = "import os, time\n" + pid_of % "os.getpid()" + "time.sleep(300)\n"
    install(site, "two", "waits", waits)
    stop = threading.Event()

    def interrupt() -> None:
        while not (site / "pid").exists() or not (site / "pid").read_text():
            time.sleep(0.05)
        stop.set()

    waiter = threading.Thread(target=interrupt)
    waiter.start()
    probe = probe_backend(claim("waits"), None, 200, stop)
    waiter.join()
    assert (probe.manifest.status, probe.manifest.reason) == ("hangs", "interrupted")
    assert is_gone(int((site / "pid").read_text()))


def test_installed_loads_nothing(site: Path):
    log = site / "log"
    install(site, "spy", "spy", f"open({str(log)!r}, 'w')\n" + manifest("spy"))
    names = {i.name: i for i in registry.installed()}
    assert names["spy"].distribution == "spy"
    assert names["torch"].version == metadata.version("moe-core")
    assert not log.exists()

"""Plugins as they are met: real distributions that crash, hang and quarrel, in real processes."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import moe_core
import moe_torch
from moe_core import cli, environment, registry
from moe_core.cli import main
from moe_core.probe import Outcome

LIMIT_S = 2.0  # for a step that imports nothing heavy


def part(target: str, **more: Any) -> dict[str, Any]:
    layouts = {"takes": ["token_major"], "gives": ["token_major"]}
    return {"role": "runner", "target": target, **layouts, **more}


def manifest(name: str, *parts: dict[str, Any], **more: Any) -> str:
    data = {"name": name, "api": "1.0", "parts": parts or [part("json:loads")], **more}
    return f"BACKEND = {data!r}\n"


def install(path: Path, dist: str, **modules: str) -> None:
    """Version 1 of a distribution: per keyword a module ``NAME_of_DIST`` and its entry point."""
    lines = ["[moe_core.backends]"]
    for name, code in modules.items():
        module = f"{name}_of_{dist}"
        lines.append(f"{name} = {module}:BACKEND")
        (path / f"{module}.py").write_text(code)
    info = path / f"{dist}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()
    registry.refresh()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    # Asking torch takes seconds, and is what test_doctor.py is about.
    answer = Outcome("ok"), {"devices": ["cpu"]}
    monkeypatch.setattr("moe_core.cli.doctor.probe_torch", lambda limit, stop: answer)
    yield tmp_path
    registry.refresh()
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


ABORT = "import os\nos.abort()\n"
SEGFAULT = "import ctypes\nctypes.string_at(0)\n"
HANG = """\
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print('dialling')
while True: time.sleep(60)
"""


def diagnose(capsys: pytest.CaptureFixture[str], *names: str, code: int) -> dict[str, Any]:
    got = main(["doctor", "--json", "--timeout", str(LIMIT_S), *names])
    report = json.loads(capsys.readouterr().out)
    assert (got, report["exit_code"]) == (code, code)
    return {f"{b['distribution']}:{b['name']}": b for b in report["backends"]}


def test_plugins_that_crash_or_hang(site: Path, capsys: pytest.CaptureFixture[str]):
    for name, code in (("abort", ABORT), ("segfault", SEGFAULT), ("hang", HANG)):
        (site / f"late_{name}.py").write_text(code)
    parts = [part(f"late_{n}:X") for n in ("abort", "hang")] + [part("json:loads")]
    install(site, "bad", abort=ABORT, segfault=SEGFAULT, hang=HANG, leave="import os\nos._exit(7)")
    install(site, "late", some=manifest("some", *parts), good=manifest("good"))
    names = ("abort", "segfault", "hang", "leave", "some", "good")
    found = diagnose(capsys, *names, code=cli.BROKEN)
    assert list(found) == [
        *("bad:abort", "late:good", "bad:hang", "bad:leave", "bad:segfault", "late:some")
    ]
    assert {name: b["status"] for name, b in found.items()} == {
        "bad:abort": "dies",
        "late:good": "ok",
        "bad:hang": "hangs",
        "bad:leave": "dies",
        "bad:segfault": "dies",
        "late:some": "dies",
    }
    reasons = {name: b["reason"] for name, b in found.items()}
    assert reasons["bad:abort"] == "the process died of SIGABRT: Aborted"
    assert reasons["bad:segfault"] == "the process died of SIGSEGV: Segmentation fault"
    assert reasons["bad:leave"] == "the process ended with exit code 7"
    assert reasons["bad:hang"] == "no end after 2 s, killed"
    assert found["bad:abort"]["where"].endswith("abort_of_bad.py, line 2: os.abort()")
    assert found["bad:hang"]["where"].endswith("hang_of_bad.py, line 4: while True: time.sleep(60)")
    assert found["bad:hang"]["output"].startswith("dialling")
    # Each part has a fate of its own, and the manifest is fine.
    assert reasons["late:some"] == ""
    assert [p["status"] for p in found["late:some"]["parts"]] == ["dies", "hangs", "ok"]


def test_plugins_that_raise(site: Path, capsys: pytest.CaptureFixture[str]):
    (site / "late_assert.py").write_text("x = 1\nassert x == 2, 'NCCL differs'\n")
    (site / "no_class.py").write_text("Runner = 3\n")
    targets = ("late_assert:X", "no_class:Y", "no_class:Runner", "no_such_module.x:Y")
    install(
        site,
        "bad",
        syntax="def f(:\n",
        exits="raise SystemExit('bye')",
        faulty=manifest("faulty", part("x:Y", tkes=[])),
        parts=manifest("parts", *map(part, targets)),
        check=manifest("check", part("json:loads", check="late_assert:check")),
    )
    install(site, "old", b=manifest("b", api="0.9"))
    install(site, "newer", b2=manifest("b2", api="1.7", parts={"new": "shape"}))
    names = ("syntax", "exits", "faulty", "parts", "check", "old:b", "b2")
    found = diagnose(capsys, *names, code=cli.BROKEN)
    statuses = {name: b["status"] for name, b in found.items()}
    assert statuses.pop("old:b") == statuses.pop("newer:b2") == "version"
    assert set(statuses.values()) == {"raises"}
    assert found["old:b"]["reason"].endswith("API 0.9, this moe-core has 1.0: upgrade old")
    assert found["newer:b2"]["reason"].endswith("API 1.7, this moe-core has 1.0: upgrade moe-core")
    assert found["bad:syntax"]["reason"].startswith("SyntaxError: ")
    assert found["bad:exits"]["reason"] == "SystemExit: bye"
    assert "did you mean 'takes'?" in found["bad:faulty"]["reason"]
    assert "pip uninstall bad" in found["bad:exits"]["fix"]
    parts = found["bad:parts"]["parts"]
    assert [p["reason"] for p in parts] == [
        "AssertionError: NCCL differs",
        "AttributeError: module 'no_class' has no attribute 'Y'",
        "TypeError: no_class:Runner is not callable",
        "ModuleNotFoundError: No module named 'no_such_module'",
    ]
    assert parts[0]["where"].endswith("late_assert.py, line 2: assert x == 2, 'NCCL differs'")
    assert "Traceback" in parts[0]["output"]
    assert parts[3]["missing"] == "no_such_module"
    assert "install what has the module 'no_such_module'" in parts[3]["fix"]
    assert found["bad:check"]["parts"][0]["reason"] == "AssertionError: NCCL differs"


def test_refused_claimed_twice_and_left_out(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    absent = part("not_imported:X", needs=["no_such_dep>=3"])
    elsewhere = part("not_imported:X", offer={"device": ["cuda_of_another_world"]})
    install(site, "here", needs=manifest("needs", absent, elsewhere, part("json:loads")))
    install(site, "one", x=manifest("x"))
    install(site, "two", x=manifest("x"), reference=manifest("reference"))
    missing = "needs no_such_dep>=3, and no_such_dep is not installed: pip install 'no_such_dep>=3'"
    found = diagnose(capsys, "needs", code=cli.NO)["here:needs"]
    assert found["status"] == "refused"
    assert [p["status"] for p in found["parts"]] == ["refused", "refused", "ok"]
    assert found["parts"][0]["reason"] == missing
    assert found["parts"][1]["reason"].startswith("runs on cuda_of_another_world, and this machine")

    found = diagnose(capsys, "x", "needs", code=cli.USAGE)
    assert [b["status"] for b in found.values()] == ["refused", "conflict", "conflict"]
    assert found["two:x"]["fix"].startswith("write two:x, ")
    assert {p["status"] for p in found["two:x"]["parts"]} == {"ok"}  # dist:name works
    # A shipped name has no privilege: both are named, and each can be had.
    shadow = diagnose(capsys, "two:reference", code=cli.USAGE)["two:reference"]
    assert shadow["fix"].startswith("write two:reference, ")

    log = site / "log"
    install(site, "spy", spy=f"open({str(log)!r}, 'w')\n" + manifest("spy"))
    monkeypatch.setenv("MOE_PLUGINS", "needs,x")
    found = diagnose(capsys, "spy", "two:reference", code=cli.OK)
    assert {b["status"] for b in found.values()} == {"not allowed"}
    assert found["spy:spy"]["fix"] == "add spy to MOE_PLUGINS to allow it"
    assert not log.exists()
    monkeypatch.delenv("MOE_PLUGINS")
    diagnose(capsys, "spy", code=cli.OK)
    assert log.exists()


def seen() -> list[tuple[str, ...]]:
    return [(i.name, i.distribution, i.status, i.reason) for i in registry.list_backends()]


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # by Python 3.12, of threads
def test_children_see_the_same_however_they_start(site: Path, method: str):
    install(site, "one", x=manifest("x"), bad="raise ImportError('no')")
    install(site, "two", x=manifest("x"), torch=manifest("torch"), new=manifest("new", api="9.0"))
    here = seen()
    kinds = {"x": "conflict", "torch": "conflict", "bad": "broken", "new": "version"}
    assert {name: status for name, _, status, _ in here if name in kinds} == kinds
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(seen).get(timeout=60) == here


PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "moe-{name}"
version = "4.2"
[project.entry-points."moe_core.backends"]
{name} = "moe_{name}:BACKEND"
[tool.hatch.build.targets.wheel]
packages = ["src/moe_{name}"]
"""


@pytest.fixture(scope="module")
def environment_with_plugins(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A new environment's Python, with one plugin from a wheel and one in an editable install;
    torch, moe-core and the build backend are borrowed from this one. And the plugins' folder."""
    pytest.importorskip("hatchling")
    pytest.importorskip("editables")
    folder = tmp_path_factory.mktemp("plugins")
    for name in ("wheel", "editable"):
        package = folder / name / "src" / f"moe_{name}"
        package.mkdir(parents=True)
        (folder / name / "pyproject.toml").write_text(PYPROJECT.format(name=name))
        code = manifest(name, part(f"moe_{name}.runner:Runner"), summary="first")
        (package / "__init__.py").write_text(code)
        (package / "runner.py").write_text("class Runner: pass\n")
    env, here = folder / "env", sysconfig.get_path("purelib")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    scripts = sysconfig.get_path("scripts", "venv", {"base": str(env)})
    python = str(Path(scripts) / Path(sys.executable).name)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    # A .pth file in a borrowed folder isn't read: name what an editable moe-core adds, too.
    ours = [Path(p).parent for m in (moe_core, moe_torch) for p in m.__path__]
    lines = dict.fromkeys(map(str, [here, *ours]))
    (Path(site.stdout.strip()) / "borrowed.pth").write_text("\n".join(lines))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps"]
    pip += ["--no-index", "--no-build-isolation", str(folder / "wheel")]
    subprocess.run([*pip, "-e", str(folder / "editable")], check=True, timeout=100)
    return python, folder


def test_wheel_and_editable(environment_with_plugins: tuple[str, Path]):
    python, folder = environment_with_plugins
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MOE_", "PYTHON"))}

    def command(*words: str) -> Any:
        done = subprocess.run(
            [python, "-m", "moe_core", *words, "--json"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def listed() -> dict[str, Any]:
        return {b["name"]: b for b in command("list")}

    found = listed()
    assert found["torch"]["status"] == "available"
    for name in ("wheel", "editable"):
        about = {k: found[name][k] for k in ("distribution", "version", "status", "summary")}
        wanted = {"distribution": f"moe-{name}", "version": "4.2"}
        assert about == {**wanted, "status": "available", "summary": "first"}
        source = folder / name / "src" / f"moe_{name}" / "__init__.py"
        source.write_text(source.read_text().replace("first", "second"))
    after = listed()
    assert after["wheel"]["summary"] == "first"
    assert after["editable"]["summary"] == "second"
    checked = command("doctor", "wheel", "editable")["backends"]
    assert [(b["name"], b["status"]) for b in checked] == [("editable", "ok"), ("wheel", "ok")]
    assert [p["status"] for b in checked for p in b["parts"]] == ["ok", "ok"]

"""Discovery with real dist-infos: a bad plugin hinders nobody, and every failure has a sentence."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from moe_core import environment, registry
from moe_core.errors import (
    BackendConflictError,
    BackendLoadError,
    BackendVersionError,
    ConfigError,
    MoEError,
    UnknownBackendError,
)
from moe_core.manifest import Backend, Part

ROOT = Path(__file__).resolve().parents[1]
GROUP = "moe_core.backends.of_these_tests"  # what else is installed can't disturb them
PART = {"role": "runner", "target": "x:Y", "takes": ["token_major"], "gives": ["token_major"]}


def manifest(name: str, **changes: Any) -> str:
    data = {"name": name, "api": "1.0", "summary": f"{name}!", "parts": [PART], **changes}
    return f"BACKEND = {data!r}\n"


def install(path: Path, dist: str, version: str, **modules: str) -> None:
    """A distribution with a backend ``NAME`` from a module ``NAME_of_dist`` per keyword."""
    lines = [f"[{GROUP}]"]
    for name, code in modules.items():
        module = f"{name}_of_{dist}".replace("-", "_")
        lines.append(f"{name} = {module}:BACKEND")
        (path / f"{module}.py").write_text(code)
    info = path / f"{dist.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()
    registry.refresh()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder first on ``sys.path``, with a moe-core that ships the one backend ``torch``."""
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "GROUP", GROUP)
    install(tmp_path, "moe-core", "0.1.0", torch=manifest("torch"))
    yield tmp_path
    registry.refresh()
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def statuses() -> dict[str, str]:
    return {f"{i.distribution}:{i.name}": i.status for i in registry.list_backends()}


def test_a_good_one(site: Path):
    install(site, "my-plugin", "2.3", good=manifest("good"), other="raise RuntimeError")
    found = registry.get("good")
    assert (found.distribution, found.version) == ("my-plugin", "2.3")
    assert found.target == "good_of_my_plugin:BACKEND"
    assert found.backend.parts[0].takes == ("token_major",)
    assert "other_of_my_plugin" not in sys.modules
    assert "torch_of_moe_core" not in sys.modules  # get loads what was asked for and nothing else
    info = next(i for i in registry.list_backends() if i.name == "good")
    assert (info.status, info.summary, info.roles) == ("available", "good!", ("runner",))
    assert registry.all_names() == ("good", "other", "torch")


BROKEN = {
    "import": ("import no_such_module", "No module named 'no_such_module'"),
    "assert": ("assert False, 'NCCL differs'", "AssertionError: NCCL differs"),
    "exit": ("raise SystemExit('bye')", "SystemExit: bye"),
    "panic": ("class Panic(BaseException): pass\nraise Panic('boom')", "Panic: boom"),
    "absent": ("", "has no attribute 'BACKEND'"),
    "type": ("BACKEND = 5", "manifest='int': must be a mapping"),
    "name": (manifest("nome"), "name='nome': its entry point is called 'bad'"),
    "needs": (manifest("bad", parts=[{**PART, "needs": ["x~=1"]}]), "needs='x~=1': must look like"),
    "build": (manifest("bad", parts=[{**PART, "options": 3}]), "parts[0].options"),
    "faults": (
        manifest("bad", part=[], parts=[{**PART, "role": "runer"}]),
        "part=[]: unknown key (did you mean 'parts'?); parts[0].role='runer': must be one of",
    ),
}


@pytest.mark.parametrize(("code", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_one_is_contained(site: Path, code: str, says: str):
    install(site, "their-plugin", "1", bad=code, good=manifest("good"))
    for _ in range(2):  # the second time from memory
        with pytest.raises(BackendLoadError) as caught:
            registry.get("bad")
        error = caught.value
        head = "backend 'bad' of their-plugin can't be loaded from 'bad_of_their_plugin:BACKEND': "
        assert str(error).startswith(head)
        assert says in str(error)
        assert error.__cause__ is not None
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    info = next(i for i in registry.list_backends() if i.name == "bad")
    assert (info.status, info.reason) == ("broken", str(error))
    assert "Traceback" in info.traceback
    assert registry.get("good").backend.name == "good"
    assert statuses()["their-plugin:good"] == "available"


IN_CODE = "from moe_core import Backend\nBACKEND = Backend(name='b', api='1.9', parts=())\n"


@pytest.mark.parametrize(
    ("code", "wanted", "fix"),
    [
        (manifest("b", api="0.9"), "0.9", "upgrade old-or-new"),
        (manifest("b", api="2.0"), "2.0", "upgrade moe-core"),
        (manifest("b", api="1.1", parts={"new": "shape"}, new_key=1), "1.1", "upgrade moe-core"),
        (manifest("b", api=None), "None", "upgrade"),
        (IN_CODE, "1.9", "upgrade moe-core"),
    ],
    ids=["old", "new", "unknown keys", "none", "in code"],
)
def test_another_api_gets_a_sentence(site: Path, code: str, wanted: str, fix: str):
    install(site, "old-or-new", "1", b=code)
    with pytest.raises(BackendVersionError) as caught:
        registry.get("b")
    assert (caught.value.wanted, caught.value.distribution) == (wanted, "old-or-new")
    assert fix in str(caught.value)
    assert statuses()["old-or-new:b"] == "version"


def test_a_name_that_two_claim(site: Path):
    install(site, "two", "2", x=manifest("x", summary="of two"))
    install(site, "one", "1", x=manifest("x", summary="of one"))
    install(site, "evil", "1", torch=manifest("torch", summary="of evil"))
    for name, both in (("x", ("one", "two")), ("torch", ("evil", "moe-core"))):
        with pytest.raises(BackendConflictError) as caught:
            registry.get(name)
        assert caught.value.distributions == both
    assert registry.get("x", "two").backend.summary == "of two"
    assert registry.get("torch", "Moe_Core").backend.summary == "torch!"
    assert statuses() == {
        "evil:torch": "conflict",
        "moe-core:torch": "conflict",
        "one:x": "conflict",
        "two:x": "conflict",
    }
    with pytest.raises(UnknownBackendError, match=r"no backend named 'on:x' .*'one:x'"):
        registry.get("x", "on")


def test_left_overs_are_folded(site: Path):
    install(site, "twice", "1", x=manifest("x"))
    left_over = site / "left_over"
    left_over.mkdir()
    sys.path.append(str(left_over))  # undone with the fixture's own entry
    install(left_over, "Twice", "0.9", x=manifest("x"))
    points = site / "twice-1.dist-info" / "entry_points.txt"
    points.write_text(points.read_text() + "\nx = x_of_twice:BACKEND\ny = a:B\ny = c:D\n")
    registry.refresh()
    assert registry.get("x").version == "1"
    with pytest.raises(BackendLoadError, match="'a:B and c:D': one distribution names two things"):
        registry.get("y")


def test_entry_points_that_cannot_be_parsed(site: Path, caplog: pytest.LogCaptureFixture):
    install(site, "aaa", "1", x=manifest("x"))
    (site / "aaa-1.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nno sign\n")
    install(site, "good", "1", good=manifest("good"))
    assert registry.all_names() == ("good", "torch")
    assert "aaa-1.dist-info can't be read" in caplog.text


def test_allow_list(site: Path, monkeypatch: pytest.MonkeyPatch):
    install(site, "p", "1", a=manifest("a"), b=manifest("b"), c="raise RuntimeError")
    install(site, "evil", "1", torch="raise RuntimeError")
    monkeypatch.setenv("MOE_PLUGINS", "a, b")
    assert list(statuses()) == ["p:a", "p:b", "moe-core:torch"]
    with pytest.raises(
        UnknownBackendError, match=r"'c'; to get it: add it to .* MOE_PLUGINS='a, b'"
    ):
        registry.get("c")
    monkeypatch.setenv("MOE_PLUGINS", "")
    assert registry.all_names() == ("torch",)
    monkeypatch.setenv("MOE_PLUGINS", "a,torhc,nope")
    with pytest.raises(ConfigError) as caught:
        registry.all_names()
    assert [(f.field, f.value) for f in caught.value.faults] == [
        ("MOE_PLUGINS", "torhc"),
        ("MOE_PLUGINS", "nope"),
    ]
    assert "did you mean 'torch'?" in str(caught.value)


def test_strict(site: Path, monkeypatch: pytest.MonkeyPatch):
    install(site, "p", "1", a="raise RuntimeError", b=manifest("b", api="2.0"), c=manifest("c"))
    assert len(registry.list_backends()) == 4
    monkeypatch.setenv("MOE_STRICT_PLUGINS", "1")
    for _ in range(2):
        with pytest.raises(BackendLoadError, match="'a' of p") as caught:
            registry.list_backends()
        (note,) = caught.value.__notes__
        assert note.startswith("backend 'b' of p is written for")
    assert registry.get("c").backend.name == "c"


def test_in_process(site: Path):
    part = Part(role="runner", target="x:Y", takes=("token_major",), gives=("token_major",))
    mine = Backend(name="mine", parts=(part,))
    registry.register_backend(mine)
    try:
        assert registry.get("mine").backend is mine
        assert registry.get("mine", "in-process").distribution == "in-process"
        assert statuses() == {"in-process:mine": "available", "moe-core:torch": "available"}
        with pytest.raises(BackendConflictError):
            registry.register_backend(mine)
    finally:
        registry.unregister_backend("mine")
    with pytest.raises(UnknownBackendError):
        registry.unregister_backend("mine")
    other = {"name": "torch", "api": "1.0", "parts": [PART]}
    with pytest.raises(BackendConflictError) as caught:
        registry.register_backend(other)
    assert caught.value.distributions == ("moe-core", "in-process")
    registry.register_backend(other, replace=True)
    try:
        assert registry.get("torch").distribution == "in-process"
        assert registry.get("torch", "moe-core").backend.summary == "torch!"
    finally:
        registry.unregister_backend("torch")
    assert registry.get("torch").distribution == "moe-core"


@pytest.mark.parametrize("bad", [5, {"name": "auto", "api": "1.0", "parts": [PART]}])
def test_register_checks(site: Path, bad: Any):
    with pytest.raises(ConfigError):
        registry.register_backend(bad)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torhc", "no backend named 'torhc' (did you mean 'torch'?). Installed: torch"),
        ("triton", "to get it: install a later version of moe-core"),
        ("reference", "to get it: install moe-core itself"),
    ],
)
def test_unknown_names(site: Path, name: str, says: str):
    with pytest.raises(UnknownBackendError) as caught:
        registry.get(name)
    assert says in str(caught.value)


CHILDREN = """
import os, subprocess, sys
from moe_core import registry

def show():
    registry.GROUP = "moe_core.backends.of_these_tests"
    for _ in range(2):
        infos = registry.list_backends()
    return repr([(i.name, i.distribution, i.status, i.reason) for i in infos])

if __name__ == "__main__":
    print(os.getpid(), show(), flush=True)
    if sys.argv[1:] != ["child"]:
        registry.register_backend(registry.get("old", "q2").backend, replace=True)
        child = os.fork()
        if child == 0:
            assert registry.get("old").distribution == "in-process"
            registry.unregister_backend("old")
            print(os.getpid(), show(), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_forked_and_spawned_children_see_the_same(site: Path):
    log = site / "log"
    say = f"import os\nprint(os.getpid(), __name__, file=open({str(log)!r}, 'a'))\n"
    install(site, "p", "1", good=say + manifest("good"), bad=say + "raise ImportError('no')")
    install(site, "q", "1", good=say + manifest("good"), old=say + manifest("old", api="0.1"))
    install(site, "q2", "1", old=manifest("old"))
    script = site / "children.py"
    script.write_text(CHILDREN)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    pids, shown = zip(*(line.split(" ", 1) for line in done.stdout.splitlines()), strict=True)
    assert len(set(pids)) == 3
    assert len(set(shown)) == 1
    assert shown[0].count("'conflict'") == 3
    assert "ImportError: no" in shown[0]
    loads = log.read_text().splitlines()
    assert len(loads) == len(set(loads))  # each once per process
    for pid in pids:  # a forked child has the good modules already
        assert f"{pid} bad_of_p" in loads


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import moe_core", "moe_core"),
        ("from moe_core import list_backends; list_backends()", "moe_core.registry"),
        (
            "from moe_core import resolve, MoEConfig as C\n"
            "resolve(C(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1))",
            "moe_core.resolution",
        ),
    ],
    ids=["import", "list", "resolve"],
)
def test_nothing_heavy_is_imported(code: str, loaded: str):
    code += "\nimport sys; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    modules = set(done.stdout.split())
    assert loaded in modules, done.stderr
    assert not modules & {"torch", "numpy", "triton", "safetensors"}


def dependency(site: Path, dist: str, module: str, version: str) -> None:
    (site / f"{module}.py").write_text("raise AssertionError('a look-up imported it')")
    info = site / f"{dist}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(module)
    importlib.invalidate_caches()


def test_requirements(site: Path, monkeypatch: pytest.MonkeyPatch):
    dependency(site, "dep_x", "dep_x", "3.10.0rc1+cu128")
    dependency(site, "published_as", "dep_y", "1.2")
    for met in (
        "dep_x",
        "dep-x>=3.9",
        "dep_x==3.10",
        "dep_x>=3.10.0,<3.11",
        "dep_y>1.1",
        "dep_y!=2",
    ):
        assert environment.requirement_fault(met) is None, met
    for unmet in ("dep_x>=3.11", "dep_x<3.10", "dep_x>3.10", "dep_x>=3,!=3.10", "dep_x<=3.9"):
        assert environment.requirement_fault(unmet) == (
            f"needs {unmet}, and dep_x 3.10.0rc1+cu128 is installed: pip install -U '{unmet}'"
        )
    assert "dep_y 1.2 is installed" in str(environment.requirement_fault("dep_y<1"))
    (site / "dep_folder").mkdir()
    missing = "needs {0}>=1, and {0} is not installed: pip install '{0}>=1'"
    for name in ("no_such_dep", "dep_folder"):
        assert environment.requirement_fault(f"{name}>=1") == missing.format(name)
    monkeypatch.setitem(sys.modules, "dep_x", None)
    assert environment.requirement_fault("dep_x>=1") == missing.format("dep_x")
    monkeypatch.setitem(sys.modules, "dep_z", types.ModuleType("dep_z"))
    assert environment.requirement_fault("dep_z") is None
    assert "the version of dep_z can't be told" in str(environment.requirement_fault("dep_z>=1"))
    with pytest.raises(ConfigError, match=r"needs='dep_x~=3': must look like"):
        environment.requirement_fault("dep_x~=3")


def test_environment(site: Path, monkeypatch: pytest.MonkeyPatch):
    assert environment.check_environment() == []
    assert environment.backend() is None
    monkeypatch.setenv("MOE_VALIDATE", "1")
    assert environment.validate()
    monkeypatch.setenv("MOE_VALIDATE", "yes")
    monkeypatch.setenv("MOE_STRICT_PLUGINS", "2")
    monkeypatch.setenv("MOE_BACKEND", "a+b+c")
    monkeypatch.setenv("MOE_BACKENDS", "torch")
    faults = {f.field: f for f in environment.check_environment()}
    assert list(faults) == ["MOE_BACKENDS", "MOE_STRICT_PLUGINS", "MOE_VALIDATE", "MOE_BACKEND"]
    assert faults["MOE_VALIDATE"].message == "must be 0 or 1"
    assert "did you mean 'MOE_BACKEND'?" in faults["MOE_BACKENDS"].message
    with pytest.raises(MoEError, match="MOE_VALIDATE='yes': must be 0 or 1"):
        environment.validate()

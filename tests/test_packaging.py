"""What an installed moe-core promises: a light import, its entry points, typed packages."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import moe_core
from moe_core.manifest import GROUP, Backend

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
PACKAGES = [
    ROOT / path for path in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
]
BACKENDS = [package for package in PACKAGES if package.parent.name == "backends"]
HEAVY = {"torch", "numpy", "safetensors", "triton", "transformers", "pytest"}


def modules_after(code: str) -> set[str]:
    """What a new interpreter has in ``sys.modules`` after ``code``, less what it starts with."""
    script = (
        "import sys; before = set(sys.modules)\n"
        f"{code}\n"
        "import json; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("MOE_")}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, f"{code}\n{result.stderr}"
    return set(json.loads(result.stdout.splitlines()[-1]))


def module_names(package: Path) -> list[str]:
    """Importable names of all modules of a package; ``__main__`` runs when imported, so not it."""
    names: list[str] = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_import_is_light():
    modules = modules_after("import moe_core")
    assert not modules & HEAVY
    assert {name for name in modules if name.startswith("moe_core")} == {"moe_core"}
    # importlib and typing need some; a real dependency would bring hundreds
    assert len(modules) < 60, sorted(modules)


def test_names_resolve_and_choosing_needs_no_torch():
    assert set(moe_core.__all__) <= set(dir(moe_core))
    for name in moe_core.__all__:
        assert getattr(moe_core, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = moe_core.no_such_name

    modules = modules_after(
        "import moe_core\n"
        "config = moe_core.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)\n"
        "moe_core.list_backends()\n"
        "moe_core.resolve(config, moe_core.ParallelConfig(), 'auto')"
    )
    assert not modules & HEAVY


def test_decision_layer_imports_no_torch():
    strict = [ROOT / path for path in PYPROJECT["tool"]["pyright"]["strict"]]
    assert all(path.exists() for path in strict)
    first_data_path = strict.index(ROOT / "moe_core/contracts.py")
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in strict[:first_data_path]]
    assert not modules_after(f"import {', '.join(names)}") & HEAVY


def test_version_agrees():
    assert moe_core.__version__ == PROJECT["version"] == metadata.version("moe-core")


def test_packages_are_typed():
    on_disk = {p.parent for p in (ROOT / "backends").glob("*/__init__.py")} | {ROOT / "moe_core"}
    assert on_disk == set(PACKAGES), "pyproject.toml names the packages of the wheel"
    assert [p.name for p in PACKAGES if not (p / "py.typed").is_file()] == []


def test_shipped_backends_use_the_public_group():
    declared = PROJECT["entry-points"][GROUP]
    installed = {
        e.name: e for e in metadata.distribution("moe-core").entry_points.select(group=GROUP)
    }
    assert {name: e.value for name, e in installed.items()} == declared
    for name, entry_point in installed.items():
        assert Backend.from_dict(entry_point.load(), "moe-core").name == name


def test_reading_manifests_imports_no_torch():
    targets = PROJECT["entry-points"][GROUP].values()
    assert not modules_after("import " + ", ".join(t.partition(":")[0] for t in targets)) & HEAVY


def test_nothing_loads_into_other_peoples_pytest():
    groups = {e.group for e in metadata.distribution("moe-core").entry_points}
    assert groups == {"console_scripts", GROUP}


def test_core_and_backends_keep_their_distance():
    names = {package.name for package in BACKENDS}
    for path in (ROOT / "moe_core").rglob("*.py"):
        tops = {name.partition(".")[0] for name in imports(path)}
        assert not tops & names, f"{path} imports a backend"
    for package in BACKENDS:
        for path in package.rglob("*.py"):
            for name in imports(path):
                top, *rest = name.split(".")
                assert top not in names - {package.name}, f"{path} imports another backend"
                private = top == "moe_core" and any(part.startswith("_") for part in rest)
                assert not private, f"{path} imports {name}"


def test_every_module_imports():
    names = [name for package in PACKAGES for name in module_names(package)]
    assert len(names) > len(PACKAGES)
    modules_after("\n".join(f"import {name}" for name in names))


def test_extras_have_pinned_versions():
    def canonical(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonical(line.partition("==")[0]) for line in lines if "==" in line}
    wanted = [*PROJECT["dependencies"], *PYPROJECT["build-system"]["requires"]]
    for extra in PROJECT["optional-dependencies"].values():
        wanted += extra
    names = {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}  # pyright: ignore[reportOptionalSubscript]
    assert names - {"moe-core"} <= pins


def project_files() -> list[Path]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: other files may lie here")
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def test_nothing_of_one_machine_is_in_the_tree():
    # Put together here, so that this file does not hold them.
    roots = "|".join(("work", "root", "home", "Users", "mnt"))
    hosts = "|".join(("pypi", "pythonhosted", "anaconda", "npmjs"))
    patterns = {
        "an absolute path": re.compile(rf"(?<![\w.~*}}/-])/(?:{roots})/\w"),
        "a package registry": re.compile(rf"\b(?:{hosts})\.(?:org|com)\b|download\.py{'torch'}\."),
    }
    faults: list[str] = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights, pictures
        for number, line in enumerate(text.splitlines(), 1):
            faults += [
                f"{path.relative_to(ROOT)}:{number}: {what}"
                for what, pattern in patterns.items()
                if pattern.search(line)
            ]
    assert not faults

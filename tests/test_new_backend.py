"""The example plugin, and ``moe-core new-backend``, which writes others like it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moe_core import __version__, cli
from moe_core.cli.new_backend import FILES, render
from moe_core.manifest import GROUP

if TYPE_CHECKING:
    from conftest import Newcomer

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "plugins" / "moe-example"
SOURCES = sorted((PLUGIN / "src" / "moe_example").glob("*.py"))


def test_a_whole_backend_in_under_100_lines():
    lines = [line for path in SOURCES for line in path.read_text("utf-8").splitlines()]
    assert 50 < len(lines) < 100
    assert {path.name for path in SOURCES} == {"__init__.py", "backend.py"}


def test_the_plugin_uses_what_is_public():
    for path in (*SOURCES, *(PLUGIN / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top, *rest = name.split(".")
                assert top not in {"moe_torch", "moe_nccl", "moe_triton"}, f"{path}: {name}"
                private = top == "moe_core" and any(part.startswith("_") for part in rest)
                assert not private, f"{path}: {name}"


def test_the_template_is_the_whole_plugin():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: other files may lie here")
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=PLUGIN, capture_output=True, text=True, check=True
    )
    assert sorted(FILES) == sorted(filter(None, listed.stdout.split("\0")))


def test_names_are_replaced_everywhere():
    files = render("my_moe", "Acme.Moe-2")
    assert [path for path in files if path.startswith("src")] == [
        "src/acme_moe_2/__init__.py",
        "src/acme_moe_2/backend.py",
        "src/acme_moe_2/py.typed",
    ]
    assert not [path for path, text in files.items() if "example" in (path + text).lower()]
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "Acme.Moe-2"
    assert project["entry-points"] == {GROUP: {"my_moe": "acme_moe_2:BACKEND"}}
    assert "moe-core conformance my_moe\n" in files[".github/workflows/ci.yml"]
    # a name that holds the word is put in once
    example = render("examples", "moe-examples")["pyproject.toml"]
    assert 'examples = "moe_examples:BACKEND"' in example
    # under its own names the template is what it was
    same = render("example", "moe-example")
    assert same == {path: (PLUGIN / path).read_text("utf-8") for path in FILES}


def test_the_plugin_depends_on_this_version():
    dependencies = tomllib.loads((PLUGIN / "pyproject.toml").read_text("utf-8"))["project"]
    major, minor, _ = __version__.split(".")
    wanted = f"moe-core>={major}.{minor},<{major}.{int(minor) + 1}"
    assert wanted in dependencies["dependencies"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["3d"], ["name='3d': must be a Python identifier"]),
        (["class"], ["name='class': must be a Python identifier"]),
        (["two words"], ["name='two words'"]),
        (["tail_"], ["no _ at the end"]),
        (["auto"], ["name='auto': has a meaning of its own"]),
        (["torch"], ["name='torch': is a backend of moe-core: choose another"]),
        (["example"], ["name='example': is a backend of moe-example"]),
        (["deepep"], ["name='deepep': is a backend of moe-core"]),  # some day
        (["mine", "--distribution=moe_core"], [f"{__version__} is installed already"]),
        (["mine", "--distribution=json"], ["its package json would hide"]),
        (["mine", "--distribution=-x-"], ["distribution='-x-': must be a letter, then"]),
        (["mine", "--path=full"], ["path='full': is there already and nothing is overwritten"]),
        (["mine", "--path=full/file"], ["path='full/file': is there already"]),
        (["mine", "--path=full/file/new"], ["path='full/file/new': can't be written"]),
        (
            ["auto", "--distribution=pytest", "--path=full"],
            ["name='auto'", "distribution='pytest'", "path='full'"],
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else None,
)
def test_bad_names_are_refused(
    words: list[str],
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").write_text("kept")
    assert cli.main(["new-backend", *words]) == cli.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert all(text in err for text in says), err
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["full", "full/file"]
    assert Path("full/file").read_text() == "kept"


def test_an_empty_folder_is_filled(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "with blank"
    folder.mkdir()
    assert cli.main(["new-backend", "mine", "--path", str(folder)]) == cli.OK
    written = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert written == set(render("mine", "moe-mine"))
    assert f"  pip install -e '{folder}[test]'\n" in capsys.readouterr().out


def test_the_command_needs_no_torch(tmp_path: Path):
    code = (
        "import sys; from moe_core.cli import main; assert main(['new-backend', 'mine']) == 0; "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_project_passes_at_once(newcomer: Newcomer):
    made = newcomer.run("moe-core new-backend my_moe")
    assert made.returncode == 0, made.stdout
    install, tests, conformance = [
        line.strip() for line in made.stdout.splitlines() if line.startswith("  ")
    ]
    done = newcomer.run(install)
    assert done.returncode == 0, done.stdout
    listed = newcomer.run("moe-core list").stdout
    (line,) = [line.split() for line in listed.splitlines() if line.startswith("my_moe")]
    assert line[:5] == ["my_moe", "moe-my-moe", "0.1.0", "available", "transport,runner"]
    done = newcomer.run(tests)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    done = newcomer.run(conformance)
    assert done.returncode == 0, done.stdout
    assert "my_moe: conforms (core " in done.stdout

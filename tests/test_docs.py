"""Runs what the documentation shows.

Every fenced block of README.md, CONTRIBUTING.md, docs/ and examples/ says what it is:

``python``
    runs; the blocks of one page share a namespace, in one process per page.
``bash``
    runs in one shell per block, from the repository root, and stops at the first failure.
``console``
    ``$ command`` lines followed by the output they give, both streams; ``...`` stands for any
    text. A command that must fail shows it: ``$ command; echo "exit $?"``.
Others (``text``, ``json``, ...)
    are shown only.

A page that says ``<!-- in order -->`` is one story: its ``bash`` and ``console`` blocks run one
after the other, in an empty folder and with an environment of its own, as a newcomer has them.

A line that starts with ``make`` is tried as ``make -n``: the target has to exist. A block that
cannot run here, such as an installation, has ``<!-- not-run: reason -->`` right above it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moe_core import environment

if TYPE_CHECKING:
    from conftest import Newcomer

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
IN_ORDER = [page for page in PAGES if "<!-- in order -->" in page.read_text(encoding="utf-8")]
RUN = ("python", "bash", "console")
SHOWN = ("ebnf", "json", "text", "toml")
TIME_LIMIT_S = 200


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of the first line inside, from 1
    language: str
    lines: tuple[str, ...]
    not_run: str | None  # the marker's reason

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    marker: str | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if found := re.fullmatch(r"\s*<!-- not-run:\s*(.*?)\s*-->\s*", line):
            marker = found[1]
            assert marker, f"{page.name}:{number}: not-run needs a reason"
        elif found := re.fullmatch(r"( *)(`{3,})(.*)", line):
            indent, fence, language = found.groups()
            start = number
            while number < len(lines) and lines[number].strip() != fence:
                number += 1
            assert number < len(lines), f"{page.name}:{start}: the block is never closed"
            body = tuple(text.removeprefix(indent) for text in lines[start:number])
            blocks.append(Block(page, start + 1, language.strip(), body, marker))
            marker = None
            number += 1
        elif line.strip():
            assert marker is None, f"{page.name}:{number}: not-run stands above no block"
    return blocks


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def clean_environment() -> dict[str, str]:
    """The caller's, with this interpreter first and without what would steer a command."""
    steering = ("MOE_", "MAKE", "MFLAGS", "PYTEST_", "BACKEND", "TEXT", "ARGS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["NO_COLOR"] = "1"
    env["COLUMNS"] = "100"
    return env


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        timeout=TIME_LIMIT_S,
        check=False,
    )


def runnable(language: str) -> list[Block]:
    """Those that stand for themselves."""
    blocks = [block for block in BLOCKS if block.language == language and block.not_run is None]
    return [b for b in blocks if b.language == "python" or b.page not in IN_ORDER]


def cases(language: str) -> list[Any]:
    """One test per block; those of the pages under docs/ start many processes and count as slow."""
    return [
        pytest.param(b, id=b.where, marks=[pytest.mark.slow] if b.page.parent != ROOT else [])
        for b in runnable(language)
    ]


def dry_make(line: str) -> str:
    return re.sub(r"^(\s*)make\b", r"\1make -n", line)


def matches(expected: str, actual: str) -> bool:
    """Whether the texts agree, trailing blanks aside; ``...`` stands for anything."""

    def tidy(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())

    pattern = ".*?".join(re.escape(part) for part in tidy(expected).split("..."))
    return re.fullmatch(pattern, tidy(actual), re.DOTALL) is not None


def test_every_block_says_what_it_is():
    known = (*RUN, *SHOWN)
    unknown = [f"{b.where} {b.language!r}" for b in BLOCKS if b.language not in known]
    assert not unknown, f"expected one of {', '.join(known)}"


PYTHON_PAGES = sorted({block.page for block in runnable("python")})


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python(page: Path, tmp_path: Path):
    # Blocks keep their line numbers, so that a traceback points into the page.
    source: list[str] = []
    for block in runnable("python"):
        if block.page == page:
            source += [""] * (block.line - 1 - len(source))
            source += block.lines
    script = tmp_path / f"{page.name}.py"
    script.write_text("\n".join(source) + "\n", encoding="utf-8")
    result = run([sys.executable, "-W", "error", str(script)], cwd=tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("block", cases("bash"))
def test_bash(block: Block):
    script = "\n".join(dry_make(line) for line in block.lines)
    result = run([bash(), "-euo", "pipefail", "-c", script], cwd=ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("block", cases("console"))
def test_console(block: Block):
    for command, output in commands(block):
        result = run([bash(), "-uo", "pipefail", "-c", dry_make(command)], cwd=ROOT)
        check(block, command, output, result)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("page", IN_ORDER, ids=lambda p: str(p.relative_to(ROOT)))
def test_in_order(page: Path, newcomer: Newcomer):
    for block in BLOCKS:
        if block.page != page or block.not_run is not None:
            continue
        if block.language == "bash":
            result = newcomer.run("\n".join(block.lines))
            assert result.returncode == 0, f"{block.where}\n{result.stdout}"
        elif block.language == "console":
            for command, output in commands(block):
                check(block, command, output, newcomer.run(f"set +e; {command}"))


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Of a console block, each with the lines that it is shown to print."""
    found: list[tuple[str, list[str]]] = []
    for line in block.lines:
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif found and not found[-1][1] and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0] + "\n" + line, [])
        else:
            assert found, f"{block.where}: expected a line '$ command'"
            found[-1][1].append(line)
    return found


def check(
    block: Block, command: str, output: list[str], result: subprocess.CompletedProcess[str]
) -> None:
    assert result.returncode == 0, f"{block.where}: {command}\n{result.stdout}"
    if not command.startswith("make"):
        assert matches("\n".join(output), result.stdout), (
            f"{block.where}: {command}\n--- shown\n"
            + "\n".join(output)
            + f"\n--- got\n{result.stdout}"
        )


def bash() -> str:
    path = shutil.which("bash")
    if path is None:
        pytest.skip("no bash")
    return path


def heading_anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"[`*]|\[(.*?)\]\(.*?\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(page: Path):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^ *(`{3,}).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    dead: list[str] = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            dead.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(heading_anchor, headings):
                dead.append(target)
    assert not dead


def test_env_page_lists_every_variable():
    page = (ROOT / "docs/env.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(MOE_\w+)`", page, re.MULTILINE)) == set(environment.VARIABLES)

"""One thread per process: these tests are many small ones, and their numbers are compared."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With TRITON_INTERPRET=1 only the tests of the kernels: ``make test`` runs both kinds."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    kernels = Path(__file__).parent / "triton"
    others = [item for item in items if kernels not in item.path.parents]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if kernels in item.path.parents]


@dataclass(frozen=True)
class Newcomer:
    """An empty folder, and an environment of its own that borrows this one's packages: what is
    installed there is seen by nobody else. Nothing is downloaded."""

    folder: Path
    env: dict[str, str]

    def run(self, command: str, limit: float = 280) -> subprocess.CompletedProcess[str]:
        """A line for bash; both streams come back as ``stdout``."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            timeout=limit,
            check=False,
        )


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    if shutil.which("bash") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("needs bash and pip")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    where = {"base": str(venv), "platbase": str(venv)}
    site, scripts = (Path(sysconfig.get_path(p, vars=where)) for p in ("purelib", "scripts"))
    # addsitedir also reads that folder's .pth files, where the editable installs are
    borrowed = sysconfig.get_path("purelib")
    (site / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
    offline = "--no-index --no-build-isolation --disable-pip-version-check"
    for name, call in {
        "pip": f'pip "$@" {offline}',
        "pytest": 'pytest "$@"',
        "moe-core": 'moe_core "$@"',
    }.items():
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec "{scripts}/python" -m {call}\n')
        script.chmod(0o755)
    steering = ("MOE_", "PYTEST_", "PIP_", "PYTHON")
    env = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    env["PATH"] = os.pathsep.join([str(scripts), env.get("PATH", "")])
    env["NO_COLOR"], env["COLUMNS"] = "1", "100"
    folder = tmp_path / "empty"
    folder.mkdir()
    return Newcomer(folder, env)

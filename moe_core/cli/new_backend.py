"""``moe-core new-backend``: writes a project with a backend that works, to change into your own.

The template is the plugin ``plugins/moe-example`` with its names replaced; the wheel has a copy.
"""

from __future__ import annotations

import re
import shlex
from importlib import metadata, util
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core import registry
from moe_core.cli import COMMANDS, OK
from moe_core.errors import ConfigError, Fault
from moe_core.spec import AUTO

if TYPE_CHECKING:
    import argparse

FILES = (
    ".github/workflows/ci.yml",
    ".gitignore",
    "README.md",
    "pyproject.toml",
    "src/moe_example/__init__.py",
    "src/moe_example/backend.py",
    "src/moe_example/py.typed",
    "tests/test_backend.py",
)
"""What the template consists of; pyproject.toml puts the same files into the wheel."""

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")
_DISTRIBUTION = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("new-backend", help=COMMANDS["new-backend"], description=__doc__)
    parser.add_argument("name", metavar="NAME", help="what users will write as backend=")
    parser.add_argument("--path", metavar="DIR", help="the folder to make (default: ./DIST)")
    parser.add_argument(
        "--distribution", metavar="DIST", help="what pip will install (default: moe-NAME)"
    )


def run(args: argparse.Namespace) -> int:
    name: str = args.name
    distribution = args.distribution or "moe-" + name.lower().replace("_", "-")
    folder = Path(args.path or distribution)
    faults = name_faults(name) + distribution_faults(distribution, given=bool(args.distribution))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        message = "is there already and nothing is overwritten: name another folder with --path"
        faults.append(Fault("path", str(folder), message))
    if faults:
        raise ConfigError(faults)
    files = render(name, distribution)
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError([Fault("path", str(folder), f"can't be written: {error}")]) from error
    where = str(folder) if folder.is_absolute() else f"./{folder}"
    print(f"{folder}: {len(files)} files, backend {name!r} of distribution {distribution!r}. Next:")
    print(f"  pip install -e {shlex.quote(where + '[test]')}")
    print(f"  python -m pytest {shlex.quote(str(folder))}")
    print(f"  moe-core conformance {name}")
    return OK


def render(name: str, distribution: str) -> dict[str, str]:
    """The project as path → text."""
    words = {
        "moe-example": distribution,
        "moe_example": package_of(distribution),
        "example": name,
    }

    def replaced(text: str) -> str:
        return re.sub("|".join(words), lambda found: words[found[0]], text)

    template = _template()
    return {replaced(f): replaced((template / f).read_text(encoding="utf-8")) for f in FILES}


def package_of(distribution: str) -> str:
    return re.sub(r"[-_.]+", "_", distribution).lower()


def _template() -> Path:
    core = Path(__file__).resolve().parents[1]
    shipped = core / "templates" / "backend"
    return shipped if shipped.is_dir() else core.parent / "plugins" / "moe-example"


def name_faults(name: str) -> list[Fault]:
    if not _NAME.fullmatch(name) or iskeyword(name):
        rule = "must be a Python identifier: a letter, then letters, digits and _, no _ at the end"
        return [Fault("name", name, rule)]
    if name == AUTO:
        return [Fault("name", name, "has a meaning of its own in a spec: choose another one")]
    owners = [b.distribution for b in registry.installed() if b.name == name]
    if not owners and name in registry.KNOWN_BACKENDS:
        owners = [registry.CORE]
    if owners:
        return [Fault("name", name, f"is a backend of {', '.join(owners)}: choose another one")]
    return []


def distribution_faults(distribution: str, *, given: bool) -> list[Fault]:
    """``given``: by the caller, and not made from a name (whose own faults are told then)."""
    package = package_of(distribution)
    if not _DISTRIBUTION.fullmatch(distribution) or iskeyword(package):
        rule = "must be a letter, then letters, digits and . _ -, a letter or digit at the end"
        return [Fault("distribution", distribution, rule)] if given else []
    other = "choose another one with --distribution"
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        pass
    else:
        return [Fault("distribution", distribution, f"{version} is installed already: {other}")]
    spec = util.find_spec(package)
    if spec is not None and spec.origin is not None:  # without one it is just some folder
        message = f"its package {package} would hide {spec.origin}: {other}"
        return [Fault("distribution", distribution, message)]
    return []

"""What the environment says: the ``MOE_*`` variables, and which packages are installed.

Variables are read when they are used, never at import, and read strictly. Packages are looked up
without importing them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne

from moe_core.errors import ConfigError, Fault, nearest
from moe_core.spec import parse_spec

PREFIX = "MOE_"
VARIABLES = {
    "MOE_BACKEND": "a backend spec, used where neither the argument nor the config names one",
    "MOE_PLUGINS": "names of the backends to allow besides the shipped ones, by commas",
    "MOE_STRICT_PLUGINS": "1: a backend that can't be loaded is an error when backends are listed",
    "MOE_BUILD_TIMEOUT": "seconds that ranks wait for each other when a layer is built (300)",
    "MOE_DEBUG_COLLECTIVES": "1: ranks compare number, kind and sizes before each exchange",
    "MOE_RANKS_PER_NODE": "how many neighbouring ranks share a node (what torchrun says)",
    "MOE_TRITON_CONFIGS": "a file of moe-core bench --tune: launch settings of the triton backend",
    "MOE_VALIDATE": "1: look for expert ids out of range on every device, not only on CPUs",
}


def backend() -> str | None:
    """``MOE_BACKEND``, or None where it is unset or empty."""
    return os.environ.get("MOE_BACKEND") or None


def plugins() -> tuple[str, ...] | None:
    """``MOE_PLUGINS``: None where it is unset (all are allowed), empty = the shipped ones only."""
    text = os.environ.get("MOE_PLUGINS")
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def strict_plugins() -> bool:
    return _flag("MOE_STRICT_PLUGINS")


def validate() -> bool:
    return _flag("MOE_VALIDATE")


def debug_collectives() -> bool:
    return _flag("MOE_DEBUG_COLLECTIVES")


def build_timeout() -> float:
    text = os.environ.get("MOE_BUILD_TIMEOUT") or "300"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError([Fault("MOE_BUILD_TIMEOUT", text, "must be a number of seconds above 0")])
    return seconds


_LAUNCHED = (
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "RANK",
    "GROUP_RANK",
    "LOCAL_RANK",
)


def ranks_per_node() -> int | None:
    """How many neighbouring ranks share a node: ``MOE_RANKS_PER_NODE``, else what torchrun says
    where it started equally many on each; None = nobody says."""
    text = os.environ.get("MOE_RANKS_PER_NODE")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError([Fault("MOE_RANKS_PER_NODE", text, "must be an integer above 0")])
        return int(text)
    values = [os.environ.get(name, "") for name in _LAUNCHED]
    if not all(value.isdecimal() for value in values):
        return None
    world, nodes, local, rank, node, local_rank = map(int, values)
    even = local > 0 and world == nodes * local and rank == node * local + local_rank
    return local if even else None


def _flag(name: str) -> bool:
    text = os.environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ConfigError([Fault(name, text, "must be 0 or 1")])
    return text == "1"


def unknown_variables() -> dict[str, str]:
    """Set ``MOE_*`` variables that mean nothing here → what is known, nearest first."""
    names = sorted(n for n in os.environ if n.startswith(PREFIX) and n not in VARIABLES)
    listed = ", ".join(VARIABLES)
    return {n: f"no such variable{nearest(n, VARIABLES)}; unset it. Known: {listed}" for n in names}


def check_environment() -> list[Fault]:
    """Everything that is wrong with the ``MOE_*`` variables; empty where all is well."""
    faults = [Fault(n, os.environ[n], message) for n, message in unknown_variables().items()]
    spec = backend()
    checks = (strict_plugins, validate, debug_collectives, build_timeout, ranks_per_node)
    for check in (*checks, lambda: spec and parse_spec(spec, "MOE_BACKEND")):
        try:
            check()
        except ConfigError as error:
            faults += error.faults
    return faults


_VERSION = r"([<>=!]=|[<>])\s*(\d+(?:\.\d+)*)"
_REQUIREMENT = re.compile(rf"\s*([A-Za-z0-9][\w.-]*)\s*((?:{_VERSION}(?:\s*,\s*{_VERSION})*)?)\s*")
_COMPARE = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}


def parse_requirement(req: str) -> tuple[str, list[tuple[str, str]]]:
    """``"triton>=3.3,<4"`` → ``("triton", [(">=", "3.3"), ("<", "4")])``.

    The name is what is imported, with - read as _. Raises ``ConfigError`` for anything else.
    """
    found = _REQUIREMENT.fullmatch(req)
    if found is None:
        raise ConfigError([Fault("needs", req, "must look like 'triton>=3.3' or 'triton>=3.3,<4'")])
    return found[1], re.findall(_VERSION, found[2])


def requirement_fault(req: str) -> str | None:
    """None where ``req`` is met, else a sentence: package, version found and wanted, what to do.

    Nothing is imported. Versions are compared by their release numbers: 3.3.0rc1 and 3.3.0+cu128
    count as 3.3.0.
    """
    name, wanted = parse_requirement(req)
    module = name.replace("-", "_")
    found = _installed_version(name, module)
    if not _importable(module, has_metadata=found is not None):
        return f"needs {req}, and {name} is not installed: pip install '{req}'"
    if wanted and found is None:
        return f"needs {req}, and the version of {name} can't be told: pip install '{req}'"
    for sign, version in wanted:
        if not _COMPARE[sign](_release(found or ""), _release(version)):
            return f"needs {req}, and {name} {found} is installed: pip install -U '{req}'"
    return None


def _importable(module: str, *, has_metadata: bool) -> bool:
    try:
        spec = importlib.util.find_spec(module)  # None for sys.modules[module] = None
    except ValueError:  # it is in sys.modules, without a spec
        return True
    # A folder that happens to have the name is a namespace package, without an origin.
    return spec is not None and (spec.origin is not None or has_metadata)


def _installed_version(name: str, module: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    # The distribution has another name; finding it reads all metadata, hence last.
    for distribution in metadata.packages_distributions().get(module, ()):
        return metadata.version(distribution)
    return None


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(n) for n in numbers[0].split(".")] if numbers else []
    while parts and parts[-1] == 0:  # 3.3 is 3.3.0
        parts.pop()
    return tuple(parts)

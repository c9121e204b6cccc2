"""Block sizes that were measured for a shape, from a file, ahead of ``configs``' table.

``moe-core bench --tune FILE`` writes such a file; the variable ``MOE_TRITON_CONFIGS`` names the one
that is read. Nothing is measured here, and never in a forward.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core.errors import ConfigError, Fault
from moe_triton import configs
from moe_triton.configs import Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moe_triton.runtime import Chip

VARIABLE = "MOE_TRITON_CONFIGS"
FORMAT = 1


@dataclass(frozen=True)
class Ask:
    """What a configuration is chosen by, and what ``configs`` chooses. ``key`` names it in files:
    kernel, family of chips, bytes per element, bucket, columns x terms of a sum (0 for ``outer``,
    whose sums are as long as there are rows), and what else ``configs.choose`` looks at."""

    key: str
    kernel: str
    chip: Chip
    itemsize: int
    halves: int
    n: int
    k: int
    shipped: Config


_trying: list[Mapping[str, Config]] = []
_listeners: list[list[Ask]] = []


def choose(
    kernel: str,
    chip: Chip,
    *,
    itemsize: int,
    rows_per_expert: float,
    n: int,
    k: int,
    halves: int = 1,
    aligned: bool = True,
    plain: bool = True,
    batch_invariant: bool = False,
) -> Config:
    """As ``configs.choose``; what is being tried, or stands in the file, goes first."""
    shipped = configs.choose(
        kernel,
        chip,
        itemsize=itemsize,
        rows_per_expert=rows_per_expert,
        n=n,
        k=k,
        halves=halves,
        aligned=aligned,
        plain=plain,
        batch_invariant=batch_invariant,
    )
    path = os.environ.get(VARIABLE)
    if not path and not _trying and not _listeners:
        return shipped
    height = configs.bucket(rows_per_expert)
    if batch_invariant:
        height = configs.INVARIANT_BUCKET
    terms = 0 if kernel == "outer" else k
    special = ("" if aligned else "/unaligned") + ("" if plain else "/full")
    key = f"{kernel}/{chip.family}/{itemsize}/{height}/{n}x{terms}{special}"
    for listener in _listeners:
        listener.append(Ask(key, kernel, chip, itemsize, halves, n, k, shipped))
    for known in (*reversed(_trying), read(path) if path else {}):
        if key in known:
            return configs.fit(kernel, known[key], chip, itemsize, halves, n, k)
    return shipped


@contextmanager
def trying(chosen: Mapping[str, Config]) -> Iterator[None]:
    """While this is open, ``chosen`` goes before everything else. For tuning."""
    _trying.append(chosen)
    try:
        yield
    finally:
        _trying.pop()


@contextmanager
def listening() -> Iterator[list[Ask]]:
    """What is asked for while this is open, in order."""
    heard: list[Ask] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners[:] = [one for one in _listeners if one is not heard]


def check_file() -> None:
    """Raises ``ConfigError`` where the variable names a file that can't be used."""
    if path := os.environ.get(VARIABLE):
        read(path)


@lru_cache(maxsize=8)
def read(path: str) -> dict[str, Config]:
    """Once per path. Raises ``ConfigError`` with every fault."""
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"can't be read ({error}): moe-core bench --tune writes such a file"
        raise ConfigError([Fault(VARIABLE, path, message)]) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        message = f"is no file of format {FORMAT}: write it anew with moe-core bench --tune"
        raise ConfigError([Fault(VARIABLE, path, message)])
    known = {field.name for field in fields(Config)}
    found: dict[str, Config] = {}
    faults: list[Fault] = []
    for key, values in data.get("configs", {}).items():
        wrong = not isinstance(values, dict) or set(values) - known
        if wrong or not all(_positive(value) for value in values.values()):
            message = (
                f"{key}: must have whole numbers above 0 for some of {', '.join(sorted(known))}"
            )
            faults.append(Fault(VARIABLE, path, message))
            continue
        try:
            found[key] = Config(**values)
        except TypeError:
            faults.append(
                Fault(
                    VARIABLE,
                    path,
                    f"{key}: needs block_m, block_n, block_k, num_warps and num_stages",
                )
            )
    if faults:
        raise ConfigError(faults)
    return found


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def write(path: str, chosen: Mapping[str, Config], about: Mapping[str, str]) -> None:
    """Adds to a file: entries of other shapes stay. ``about``: where it was measured."""
    before = {
        key: asdict(config) for key, config in (read(path) if Path(path).exists() else {}).items()
    }
    after = {**before, **{key: asdict(config) for key, config in chosen.items()}}
    data = {"format": FORMAT, "about": dict(about), "configs": dict(sorted(after.items()))}
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    read.cache_clear()

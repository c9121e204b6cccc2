"""Before the first collective: do all ranks want the same layer, and can all have it?

Every rank puts what it resolved (or why it can't) into the process group's store and reads the
others'. No collective is used, so that a rank that never comes is named after a time limit
instead of hanging the others for good.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import distributed_c10d

from moe_core import __version__, environment
from moe_core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from moe_core.resolution import Resolution

_rounds: Counter[tuple[int, ...]] = Counter()
_round_store: list[Any] = [None]


def statement(
    resolution: Resolution | None, error: Exception | None, extra: dict[str, Any]
) -> dict[str, Any]:
    """What one rank tells the others; flat, JSON."""
    if error is not None or resolution is None:
        return {"refused": str(error)}
    parts = {
        f"part.{role}": f"{c.distribution} {c.version} {c.label} {dict(c.options)}"
        for role, c in resolution.parts.items()
    }
    request = {f"request.{k}": v for k, v in resolution.request.to_dict().items()}
    versions = {"moe_core": __version__, "torch": torch.__version__}
    return versions | request | parts | {"fingerprint": resolution.fingerprint} | extra


def agree(
    ranks: tuple[int, ...],
    rank: int,
    mine: dict[str, Any],
    *,
    absent: str = "built no layer with these ranks",
    duty: str = "build the same layers in the same order, with the same widths",
) -> None:
    """Collective over ``ranks`` (global), ``rank`` being this process's place among them.

    Raises ``ConfigError`` on every rank if one refused, differs in a field, or doesn't come within
    ``MOE_BUILD_TIMEOUT`` seconds; the faults name ranks and fields. ``absent``, ``duty``: what is
    said of a rank that didn't come.
    """
    store, number = _store_of(ranks)
    try:
        limit = environment.build_timeout()
    except ConfigError:  # it is among this rank's reasons to refuse; the others wait for those
        limit = 300.0
    store.set(f"{number}/{rank}", json.dumps(mine, default=str))
    keys = [f"{number}/{i}" for i in range(len(ranks))]
    try:
        store.wait(keys, timedelta(seconds=limit))
    except RuntimeError as error:
        missing = [ranks[i] for i, key in enumerate(keys) if not store.check([key])]
        message = f"{absent} within {limit:g} s (MOE_BUILD_TIMEOUT): every rank must {duty}"
        raise ConfigError([Fault(f"rank {r}", "absent", message) for r in missing]) from error
    said = [json.loads(store.get(key)) for key in keys]
    faults = disagreements(ranks, said)
    if faults:
        raise ConfigError(faults)


def disagreements(ranks: tuple[int, ...], said: list[dict[str, Any]]) -> list[Fault]:
    """One fault per rank that refused and per field that differs.

    None where all refuse alike: each rank has the reason, and better words for it.
    """
    if len({words.get("refused") for words in said}) == 1 and "refused" in said[0]:
        return []
    faults = [
        Fault(f"rank {r}", "refused", words["refused"])
        for r, words in zip(ranks, said, strict=True)
        if "refused" in words
    ]
    able = [(r, words) for r, words in zip(ranks, said, strict=True) if "refused" not in words]
    fields = list(dict.fromkeys(key for _, words in able for key in words if key != "fingerprint"))
    for field in fields:
        values: dict[str, list[int]] = {}
        for r, words in able:
            values.setdefault(json.dumps(words.get(field)), []).append(r)
        if len(values) > 1:
            listed = "; ".join(f"{value} on ranks {rs}" for value, rs in values.items())
            faults.append(Fault(field, "differs between ranks", listed))
    return faults


def _store_of(ranks: tuple[int, ...]) -> tuple[Any, int]:
    # torch has no public way to the default group's store; init_process_group always makes one
    c10d = cast("Any", distributed_c10d)
    store = c10d._get_default_store()
    if _round_store[0] is not store:
        _rounds.clear()
        _round_store[0] = store
    number = _rounds[ranks]
    _rounds[ranks] += 1
    who = ",".join(map(str, ranks))
    return c10d.PrefixStore(f"moe_core/{who}", store), number

"""What there is to try for a call: ``moe-core bench --tune`` measures it.

The candidates are neighbours of the shipped configuration: every block size, warp count, number of
stages and of programs at half and twice as much, alone and the blocks in pairs, as far as shared
memory allows. Each kernel is tried for itself, the others as they are best so far.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
import triton

from moe_triton import configs, tuned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from moe_triton.configs import Config
    from moe_triton.tuned import Ask

RANGES = {
    "block_m": (16, 256),
    "block_n": (16, 256),
    "block_k": (16, 128),
    "num_warps": (1, 8),
    "num_stages": (1, 6),
    "per_sm": (1, 4),
}
MOST_ELEMENTS = 256 * 128
"""Of a tile of results: more don't fit into registers."""


def candidates(ask: Ask) -> list[Config]:
    """The shipped configuration first, then its neighbours."""
    base = ask.shipped
    changes: list[dict[str, int]] = []
    for m, n in product((0.5, 1, 2), repeat=2):
        changes.append({"block_m": int(base.block_m * m), "block_n": int(base.block_n * n)})
    for name, factor in product(("block_k", "num_warps", "per_sm"), (0.5, 2)):
        changes.append({name: int(getattr(base, name) * factor)})
    changes += [{"num_stages": base.num_stages + step} for step in (-1, 1)]
    found = [base]
    for change in changes:
        if not all(RANGES[k][0] <= v <= RANGES[k][1] for k, v in change.items()):
            continue
        made = replace(base, **change)
        fitted = configs.fit(ask.kernel, made, ask.chip, ask.itemsize, ask.halves, ask.n, ask.k)
        # what had to be made smaller is another candidate already
        if fitted == made and made.block_m * made.block_n <= MOST_ELEMENTS and made not in found:
            found.append(made)
    return found


class Tuner:
    """Of one call: ``space`` names what can be chosen, each with its candidates as JSON."""

    def __init__(self, call: Callable[[], object]) -> None:
        with tuned.listening() as heard:
            call()
        self._configs = {ask.key: candidates(ask) for ask in heard}
        self.space = {key: [asdict(c) for c in found] for key, found in self._configs.items()}

    @contextmanager
    def using(self, chosen: Mapping[str, int]) -> Iterator[None]:
        """Candidates by number; what isn't named is as shipped."""
        with tuned.trying({key: self._configs[key][number] for key, number in chosen.items()}):
            yield

    def write(self, path: str, chosen: Mapping[str, int]) -> None:
        """Into the file that ``MOE_TRITON_CONFIGS`` is to name; other entries of it stay."""
        cuda = torch.cuda.is_available()
        about = {
            "device": torch.cuda.get_device_name() if cuda else "interpreter",
            "triton": triton.__version__,
        }
        picked = {key: self._configs[key][number] for key, number in chosen.items()}
        tuned.write(path, picked, about)

"""Routing that nobody recorded: drawn token by token, the same for the same seed and rank.

Shapes: T tokens of one rank, K choices per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.placement import Placement

KINDS = ("uniform", "zipf", "hot", "balanced")
HELP = "uniform, zipf:S (S from 0), hot or balanced"
OFFERS, ROUNDS = 4, 4  # how often a new choice is looked for before every expert gets a number
BLOCK = 4096  # tokens for which that happens at once


@dataclass(frozen=True)
class Draw:
    """How tokens choose. A token's K experts differ.

    ``uniform``: any expert is as likely. ``zipf``: the expert of popularity r (from 1) weighs
    r**-exponent, and choices are drawn one after the other without returning them; which expert has
    which popularity is drawn once from the seed. ``hot``: every token's first choice is expert 0,
    the others are uniform. ``balanced``: round robin over the ranks of an even placement
    (``Placement.balanced_ids``), each rank going on where the one before it stopped, so that the
    loads differ by one choice at most.
    """

    kind: str = "uniform"
    exponent: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Draw:
        """``"uniform"``, ``"zipf:1.2"``, ``"hot"``, ``"balanced"``. Raises ``InputError``."""
        kind, colon, number = text.partition(":")
        try:
            exponent = float(number) if kind == "zipf" else 0.0
            good = kind in KINDS and bool(colon) == (kind == "zipf") and 0 <= exponent < 100
        except ValueError:
            good, exponent = False, 0.0
        if not good:
            raise InputError(f"routing {text!r} can't be drawn: it is one of {HELP}")
        return cls(kind, exponent, seed)

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind

    def sampler(self, placement: Placement, top_k: int) -> Sampler:
        return Sampler(self, placement, top_k)


class Sampler:
    """A draw for one layer; what all ranks have in common is made once."""

    def __init__(self, draw: Draw, placement: Placement, top_k: int) -> None:
        self.draw, self.num_experts, self.top_k = draw, placement.num_experts, top_k
        self._order = torch.tensor(placement.balanced_ids(self.num_experts, 1)).flatten()
        ranks = torch.arange(1, self.num_experts + 1, dtype=torch.float64)
        dealt = torch.randperm(self.num_experts, generator=self._generator(-1))
        self._logits = (-draw.exponent * ranks.log())[dealt]

    def _generator(self, source: int) -> torch.Generator:
        # torch keeps 32 bits of a seed
        return torch.Generator().manual_seed((self.draw.seed * 1_000_003 + source) % 2**32)

    def ids(self, source: int, num_tokens: int, tokens_before: int) -> Tensor:
        """int64 ``[T, K]``, distinct within a token. ``tokens_before``: of the ranks before."""
        shape, width = (num_tokens, self.top_k), self.num_experts
        if self.draw.kind == "balanced":
            place = torch.arange(num_tokens * self.top_k) + tokens_before * self.top_k
            return self._order[place % width].view(shape)
        generator = self._generator(source)
        if self.draw.kind == "hot":
            first = torch.zeros(num_tokens, 1, dtype=torch.int64)
            if self.top_k == 1:
                return first
            rest = _distinct(self._logits[1:], num_tokens, self.top_k - 1, generator)
            return torch.cat([first, rest + 1], 1)
        return _distinct(self._logits, num_tokens, self.top_k, generator)


def _distinct(logits: Tensor, num_tokens: int, top_k: int, generator: torch.Generator) -> Tensor:
    """``[T, K]`` ids drawn one after the other, each with probability softmax(logits) over those
    that the token doesn't have yet: drawn from all, and again until it is a new one."""
    cdf = logits.softmax(0).cumsum(0)
    is_flat = bool((logits == logits[0]).all())

    def pick(*shape: int) -> Tensor:
        if is_flat:
            return torch.randint(len(logits), shape, generator=generator)
        found = torch.searchsorted(cdf, torch.rand(shape, dtype=cdf.dtype, generator=generator))
        return found.clamp_(max=len(logits) - 1)

    ids = pick(top_k, num_tokens)
    for slot in range(1, top_k):
        tokens = (ids[:slot] == ids[slot]).any(0).nonzero().squeeze(1)
        for _ in range(ROUNDS):
            if not len(tokens):
                break
            offers = pick(OFFERS, len(tokens))
            is_new = (offers[:, None] != ids[:slot, tokens]).all(1)
            first = offers.gather(0, is_new.to(torch.int8).argmax(0)[None])[0]
            found = is_new.any(0)
            ids[slot, tokens[found]] = first[found]
            tokens = tokens[~found]
        for some in tokens.split(BLOCK) if len(tokens) else ():
            ids[:, some] = _finish(logits, ids[:slot, some], top_k, generator)
    return ids.t().contiguous()


def _finish(logits: Tensor, chosen: Tensor, top_k: int, generator: torch.Generator) -> Tensor:
    """``chosen [k, n]`` → ``[K, n]``: the choices that are missing, however unlikely a new one is.
    The largest of logits with Gumbel noise come in the order of drawing without returning."""
    noise = torch.empty(chosen.shape[1], len(logits), dtype=logits.dtype)
    keys = logits - noise.exponential_(generator=generator).log()
    order = torch.arange(len(chosen), 0, -1, dtype=logits.dtype) * 1e9  # far above any other key
    return keys.scatter(1, chosen.t(), order.expand(chosen.shape[1], -1)).topk(top_k).indices.t()

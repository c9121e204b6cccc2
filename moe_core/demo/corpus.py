"""English text that every CPython ships, cut in two, and an order-2 model of bytes to beat.

The text is ``pydoc_data.topics``: what ``help("if")`` and the like print, from Python's language
reference. Topics repeat one another a lot, so a paragraph is left out if eight words of it in a row
were there before, and those of the held-out topics are never in the training text.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from moe_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping


def _held_out(topic: str) -> bool:
    """About one topic in nine; by the name alone, so that it is the same in every Python."""
    return hashlib.sha256(topic.encode()).digest()[0] % 9 == 0


@cache
def corpus() -> tuple[bytes, bytes]:
    """``(training text, held-out text)`` as UTF-8. Raises ``InputError`` where Python lacks it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            "this Python lacks the module pydoc_data, which holds the text to train on: "
            "install the full standard library (on Debian, libpython3-stdlib)"
        ) from error
    held_out, runs = _distinct(topics, held_out=True, known=set())
    train, _ = _distinct(topics, held_out=False, known=runs)
    return train, held_out


def _distinct(
    topics: Mapping[str, str], *, held_out: bool, known: set[tuple[str, ...]]
) -> tuple[bytes, set[tuple[str, ...]]]:
    """The paragraphs of one part that share no run of eight words with another or ``known``."""
    runs = set(known)
    texts: list[str] = []
    for topic in sorted(topics):
        if _held_out(topic) != held_out:
            continue
        for paragraph in topics[topic].strip().split("\n\n"):
            words = re.findall(r"\w+", paragraph)
            own = {tuple(words[i : i + 8]) for i in range(max(1, len(words) - 7))}
            table = "+--" in paragraph  # drawn with dashes and blanks: no English
            if words and not table and runs.isdisjoint(own):
                runs |= own
                texts.append(paragraph.strip("\n"))
    return "\n\n".join(texts).encode(), runs


class Order2:
    """A byte from the two before it: interpolated Witten-Bell, down to the uniform distribution.

    ``P_n(b | c) = (count(c, b) + k·d(c)·P_{n-1}(b | c')) / (count(c) + k·d(c))`` where ``c`` are
    the n bytes before, ``c'`` all but the first of them, ``d(c)`` how many different bytes
    followed ``c`` (Witten and Bell 1991, method C, for k = 1). ``k`` is tuned on the last tenth of
    the training text.
    """

    def __init__(self, train: bytes) -> None:
        tenth = len(train) // 10
        self.k = 1.0
        if tenth:
            self._count(train[:-tenth])
            self.k = min(
                (0.5, 1.0, 2.0, 4.0, 8.0, 16.0), key=lambda k: self._bits(train[-tenth:], k)
            )
        self._count(train)

    def _count(self, text: bytes) -> None:
        self.counts: Counter[bytes] = Counter()
        for size in (1, 2, 3):
            self.counts.update(text[i : i + size] for i in range(len(text) - size + 1))
        self.total: Counter[bytes] = Counter()
        self.different: Counter[bytes] = Counter()
        for gram, count in self.counts.items():
            self.total[gram[:-1]] += count
            self.different[gram[:-1]] += 1

    def probability(self, context: bytes, byte: int, k: float | None = None) -> float:
        """Of ``byte`` after ``context`` (its last two bytes count)."""
        k = self.k if k is None else k
        result = 1 / 256
        for n in range(min(2, len(context)) + 1):
            before = context[len(context) - n :]
            extra = k * self.different[before]
            if extra:
                count = self.counts[before + bytes([byte])]
                result = (count + extra * result) / (self.total[before] + extra)
        return result

    def _bits(self, text: bytes, k: float) -> float:
        grams = Counter((text[max(0, i - 2) : i], text[i]) for i in range(len(text)))
        return -sum(n * math.log2(self.probability(c, b, k)) for (c, b), n in grams.items())

    def bits_per_byte(self, text: bytes) -> float:
        """Of a text of at least one byte, in bits."""
        return self._bits(text, self.k) / len(text)

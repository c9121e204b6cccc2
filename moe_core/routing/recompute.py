"""Activation checkpointing: what a recompute must not do again, or must do alike."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from moe_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


P = ParamSpec("P")
Result = TypeVar("Result")


def in_backward() -> bool:
    """Whether this thread runs a backward pass: a forward that runs now is a recompute.

    True in both variants of ``torch.utils.checkpoint`` (which asks the same).
    """
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]


def replay_routing(function: Callable[P, Result]) -> Callable[P, Result]:
    """``function`` for one ``checkpoint`` call: its recompute takes the experts of its forward.

    A recomputed logit may differ in its last bits and choose another expert, which changes shapes
    and gradients. With ``checkpoint(replay_routing(block), x, use_reentrant=...)`` every
    ``MoELayer`` in ``block`` keeps its ids ``[T, K]``; the recompute takes them, and weighs them
    by its own logits, so that the router has its gradient.

    Wrap anew for each call of ``checkpoint``. Raises ``InputError`` where that was forgotten, where
    the recompute calls other layers than the forward, and where no layer was seen: one inside
    ``torch.compile`` isn't.
    """
    tape = _Tape()

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        with tape.playing():
            return function(*args, **kwargs)

    return run


class _Tape:
    """The choices of one forward, in the order of the layers' calls."""

    def __init__(self) -> None:
        self.choices: list[Tensor] = []
        self.position: int | None = None  # None: recording

    @contextmanager
    def playing(self) -> Iterator[None]:
        if self.choices and not in_backward():
            raise InputError(
                "this function has a forward's routing already: call replay_routing anew for each "
                "call of checkpoint"
            )
        self.position = 0 if self.choices else None
        token = _tapes.set((*_tapes.get(), self))
        try:
            yield
        finally:
            _tapes.reset(token)
        if not self.choices:
            raise InputError(
                "replay_routing saw no MoELayer choose (one inside torch.compile can't be seen): "
                "checkpoint this function without it"
            )

    def through(self, ids: Tensor) -> Tensor:
        if self.position is None:
            self.choices.append(ids)
            return ids
        if self.position >= len(self.choices) or self.choices[self.position].shape != ids.shape:
            raise InputError(
                "the recompute of a checkpointed function calls other layers, or with other "
                "tokens, than its forward did: the saved routing doesn't fit"
            )
        self.position += 1
        return self.choices[self.position - 1]


_tapes: ContextVar[tuple[_Tape, ...]] = ContextVar("moe_core_routing_tapes", default=())


def through_tapes(choice: Tensor | None, routed: Tensor | None) -> Tensor | None:
    """The choice ``[T, K]`` that a layer's router is to weigh instead of what it ``routed``.

    None: no other one. Under a tape there always is one, in the forward too: both runs have to do
    the same operations, since a checkpoint compares what they save.
    """
    if routed is None or torch.compiler.is_compiling():  # None: the kernel routes
        return choice
    for tape in _tapes.get():  # the outer first
        choice = tape.through(routed if choice is None else choice)
    return choice

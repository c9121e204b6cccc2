"""The five roles. A backend implements some of them; ``docs/design.md`` says how they compose.

A part is built with ``Part(context)`` where ``context`` is a ``BuildContext``. It keeps nothing
between dispatch and combine on itself: that is what the handle is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic

from torch import nn

from moe_core.contracts import BuildContext, PlanT
from moe_core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import ExpertWeights, Handle, Pending, Routing
    from moe_core.layouts import Record
    from moe_core.traffic.flow import Flow, Sent


class Router(nn.Module, ABC):
    """``hidden_states [T, H]`` (+ ``input_ids [T]``) → ``Routing`` with logical ids."""

    routing_ids: bool = True
    """False for a router that returns logits only, for kernels that choose by themselves."""

    @abstractmethod
    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Routing:
        """``input_ids`` int64 ``[T]``, ``token_mask`` bool ``[T]`` (True = a real token)."""

    def reweight(self, routing: Routing, topk_ids: Tensor) -> Routing:
        """What ``forward`` returned, with the choice ``topk_ids [T, K]`` in place of its own and
        this router's weights for it: how a saved choice is replayed while the router learns."""
        raise InputError(
            f"{type(self).__name__} has no reweight(routing, topk_ids): to replay a choice it has "
            "to say what the chosen experts weigh"
        )


class Dispatcher(ABC, Generic[PlanT]):
    """Brings each token's row to where its experts' weights are."""

    max_in_flight: int | None = None
    """How many dispatches may be open at once; None = any number."""
    payload: str = "pairs"
    """What rows a dispatch sends to other ranks, which the trace's bytes have to show: ``"pairs"``
    (one per token and rank that needs it), ``"nodes"`` (one per token and node, to the rank with
    the sender's place there, which sends it on to the others), ``"slots"`` (one per token and slot)
    or ``"all"`` (every row to every rank, padded to the largest T at most)."""

    @abstractmethod
    def dispatch_begin(
        self, hidden_states: Tensor, routing: Routing
    ) -> Pending[tuple[Record, Handle[PlanT]]]:
        """``hidden_states`` ``[T, H]``, any T from 0; ``routing`` with physical ids (one rank:
        local ones). Begin order is the same on all ranks."""

    def dispatch(self, hidden_states: Tensor, routing: Routing) -> tuple[Record, Handle[PlanT]]:
        return self.dispatch_begin(hidden_states, routing).finish()


class Combiner(ABC, Generic[PlanT]):
    """Brings results home and pays what is still owed; uses the handle up."""

    @abstractmethod
    def combine_begin(self, record: Record, handle: Handle[PlanT]) -> Pending[Tensor]:
        """→ ``[T, H]`` in the rows' dtype. Raises ``HandleError`` for a used or foreign handle."""

    def combine(self, record: Record, handle: Handle[PlanT]) -> Tensor:
        return self.combine_begin(record, handle).finish()


class Transport(Dispatcher[PlanT], Combiner[PlanT]):
    """A Dispatcher and its Combiner, which share a kind of handle and therefore come as one."""

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def report_fault(self, message: str) -> None:
        """This rank can't dispatch. A transport whose other ranks would wait for it takes part in
        the step's first exchange, only to say so, and raises ``InputError`` on all of them."""

    @classmethod
    def traffic(cls, flow: Flow) -> Sent:
        """What a forward sends for this routing, in bytes (``moe_core.traffic``); nothing is built
        for it. The default knows the rows, by ``payload``. A transport that also sends ids, weights
        or counts, or sums over ranks, says so here and can be simulated to the byte."""
        return flow.sent(cls.payload)


class ExpertRunner(ABC):
    """Computes ``W2·(act(W1·x) ⊙ W3·x)`` for each row with its expert's weights."""

    batch_invariant: bool = False
    """True where a row's result has the same bits whatever other rows are there."""

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    @abstractmethod
    def run(self, record: Record, weights: ExpertWeights) -> Record:
        """The layout agreed when the layer was built in, the one agreed out. Never writes to
        ``record``'s tensors. Idle experts get zero gradients, not None."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """An inference copy in the kernel's own format; the default needs none."""
        return weights

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        """Scratch for ``num_tokens`` rows with ``top_k`` slots each, worst case, in bytes."""
        return 0


class FusedPath(ABC):
    """Dispatch, experts and combine in one call."""

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    @abstractmethod
    def forward(self, hidden_states: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
        """``[T, H]`` → ``[T, H]``, every debt paid."""

    def report_fault(self, message: str) -> None:  # noqa: B027  (nothing to do on one rank)
        """As a transport's: where other ranks would wait for this one, tell them and raise."""

    @classmethod
    def traffic(cls, flow: Flow) -> Sent:
        """As a transport's; one over several ranks has to say it to be simulated."""
        return flow.sent("none")

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        return weights

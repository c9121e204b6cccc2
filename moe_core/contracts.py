"""What crosses a seam: routing, handles, plans, weights. Tensors that carry what they are.

Shapes: T tokens on this rank, K choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

from moe_core.errors import HandleError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moe_core.config import Activation
    from moe_core.groups import Groups
    from moe_core.manifest import Request
    from moe_core.placement import Placement

INVALID = -1
"""The one invalid id. A slot is invalid iff its id is -1: its weight is ignored, its gradient 0."""


class IdSpace(StrEnum):
    """What an expert id counts: experts of the model, physical slots, or slots of this rank."""

    LOGICAL = "logical"
    PHYSICAL = "physical"
    LOCAL = "local"


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to, and with what weight.

    ``topk_ids`` int64 ``[T, K]``, -1 = no expert; ``topk_weights`` float32 (float64 if the layer
    is) ``[T, K]``, ``routed_scaling_factor`` folded in, 0 where the id is -1; ``router_logits``
    ``[T, E]`` in the weights' dtype, where a router made them. ``topk_ids`` and ``topk_weights``
    are None together: the kernel routes by itself from the logits, which only runners that offer
    ``routing_ids=False`` take; ids without weights are a choice that a layer's router is to weigh
    (``choice()``). ``scores`` ``[T, E]``: unbiased scores, for losses.
    ``token_mask`` bool ``[T]``: True = a real token, None = all are.
    ``chosen_ids`` int64 ``[T, K]``: what was chosen before a capacity dropped some; None: the same.
    """

    topk_ids: Tensor | None
    topk_weights: Tensor | None
    router_logits: Tensor | None = None
    scores: Tensor | None = None
    token_mask: Tensor | None = None
    id_space: IdSpace = IdSpace.LOGICAL
    chosen_ids: Tensor | None = None

    @property
    def has_ids(self) -> bool:
        return self.topk_ids is not None

    def choice(self) -> Routing:
        """The chosen ids alone. Given back to a layer, its router weighs them anew and learns."""
        ids = self.topk_ids if self.chosen_ids is None else self.chosen_ids
        return Routing(ids, None, id_space=self.id_space)

    def detach(self) -> Routing:
        """The same numbers without their graph. Given back to a layer, its router rests."""
        made = {
            name: None if tensor is None else tensor.detach()
            for name, tensor in (
                ("topk_weights", self.topk_weights),
                ("router_logits", self.router_logits),
                ("scores", self.scores),
            )
        }
        return replace(self, **made)

    def ids_and_weights(self) -> tuple[Tensor, Tensor]:
        """Both, for parts that need them. Raises ``InputError`` if the kernel is to route."""
        if self.topk_ids is None or self.topk_weights is None:
            raise InputError(
                "this routing holds no ids: it is for kernels that route by themselves"
            )
        return self.topk_ids, self.topk_weights


@dataclass(frozen=True)
class ExpertWeights:
    """The local experts' weights, in the canonical form that is also the state_dict.

    ``w13`` ``[E_local, 2I/tp, H]`` (``[E_local, I/tp, H]`` without a gate) with gate and up as
    ``w13_layout`` says; ``w2`` ``[E_local, H, I/tp]``; ``w13_bias`` ``[E_local, 2I/tp]`` and
    ``w2_bias`` ``[E_local, H]`` or None.
    """

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    w13_layout: str
    activation: Activation

    @property
    def num_local_experts(self) -> int:
        return self.w13.shape[0]


@dataclass(frozen=True)
class ExchangePlan:
    """What a combine needs to undo a dispatch: immutable tensors and ints, nothing else.

    Autograd saves it: the backward of a dispatch is a combine over the same plan, and the reverse.
    Transports subclass it with what they need. ``topk_ids``/``topk_weights`` are the source rank's,
    ``num_tokens`` its T.
    """

    num_tokens: int
    topk_ids: Tensor
    topk_weights: Tensor


PlanT = TypeVar("PlanT", bound=ExchangePlan)
ResultT = TypeVar("ResultT")


class Handle(Generic[PlanT]):
    """A ticket from one dispatch to its combine: single use, and only for its own transport."""

    __slots__ = ("_owner", "_plan", "_used")

    def __init__(self, plan: PlanT, owner: object) -> None:
        self._plan = plan
        self._owner = owner
        self._used = False

    @property
    def plan(self) -> PlanT:
        """The plan, to look at; looking doesn't use the handle up."""
        return self._plan

    def consume(self, owner: object) -> PlanT:
        """The plan, once. Raises ``HandleError`` for a second use or for another transport's."""
        if self._owner is not owner:
            raise HandleError(
                f"this handle was made by a {type(self._owner).__name__} and given to another "
                f"{type(owner).__name__}: combine with the transport that dispatched"
            )
        if self._used:
            raise HandleError("this handle was already combined: dispatch again to get a new one")
        self._used = True
        return self._plan


class Pending(Generic[ResultT]):
    """Something begun. ``finish()`` yields the result, once; it can't be reached before."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], ResultT]) -> None:
        self._finish: Callable[[], ResultT] | None = finish

    @classmethod
    def ready(cls, result: ResultT) -> Pending[ResultT]:
        return cls(lambda: result)

    def finish(self) -> ResultT:
        if self._finish is None:
            raise HandleError("finish() was already called on this pending result")
        finish, self._finish = self._finish, None
        return finish()


@dataclass(frozen=True)
class BuildContext:
    """What a part is told when it is built.

    ``request``: what the layer asked for. ``dtype``: torch dtype name; ``device``: torch device
    string. ``groups``: process groups and this rank's place in them
    (None: all is local). ``num_experts``: logical ones. ``num_local_experts``: slots of this rank
    that have weights (replicas and shared slots too), ``first_local_expert``: the physical id of
    the first. ``placement``: where all the others are (None: one slot per expert, contiguous).
    ``takes``/``gives``: the layouts agreed with its neighbours. ``pays``: the debts that this part
    was assigned. ``options``: from the spec (``NAME[key=value]``), defaults filled in.
    """

    request: Request
    dtype: str
    device: str
    num_experts: int
    num_local_experts: int
    first_local_expert: int
    groups: Groups | None = None
    placement: Placement | None = None
    takes: str = ""
    gives: str = ""
    pays: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict[str, str])

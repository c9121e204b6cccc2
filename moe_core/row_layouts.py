"""Rows between attention and MoE: from the ranks that attend to them to the ranks that route them.

Attention and MoE cut the same ranks differently, so the rows that one rank has on either side may
differ. A ``RowLayout`` says which ranks hold which rows in attention; a ``ParallelConfig`` says it
for the MoE; a ``RowExchange`` carries rows from one to the other and back, without padding::

    exchange = RowExchange(RowLayout(dp_size=2, tp_size=2), ParallelConfig(ep_size=4))
    there = exchange.to_moe(hidden_states, input_ids, token_mask)
    out = exchange.from_moe(moe(there.hidden_states, there.input_ids, there.token_mask),
                            there.handle)

Which of its cases applies is decided from the widths when it is built and never from a batch. (The
cases are those of SGLang 0.5.23, models/deepseek_common/moe_transport.py.)

Every row has one *owner*: the ranks that hold the same rows in attention own equal shares of them
(as ``tensor_split`` cuts). Ranks that hold the same rows in the MoE hold all that they own
together. So each row is routed by one such group of ranks, whatever the widths, and moving either
way is: owners send to those who need a row and don't have it.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core import environment, tracing
from moe_core.agreement import agree
from moe_core.config import FINAL_SUMS, Faults, ParallelConfig
from moe_core.errors import ConfigError, Fault, HandleError, InputError
from moe_core.groups import group_faults, members
from moe_core.row_layouts_moves import Moved, Mover, Owned, closure, lacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

_SIZE_FIELDS = ("fault", "rows", "has_ids", "hidden_size", "dtype", "grad")
_NO_GRAD, _NO_NEED, _NEEDS_GRAD = range(3)
"""What a rank says of ``grad``: it records nothing, could take part, needs a gradient."""
_CASES = {
    (False, False): "same",
    (True, False): "gather",
    (False, True): "split",
    (True, True): "regroup",
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Which ranks hold which rows outside the MoE.

    ``world = dp * cp * tp`` and ``rank = (dp_rank * cp + cp_rank) * tp + tp_rank``. Rows differ
    over dp (data-parallel attention) and cp (context parallel: a part of each sequence), and are
    equal within tp, unless ``sequence_parallel`` says that they are spread there too. Numbers of
    rows may differ, 0 included. Raises ``ConfigError``.
    """

    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        faults = Faults()
        for name in ("dp_size", "cp_size", "tp_size"):
            faults.integer(name, getattr(self, name))
        faults.flag("sequence_parallel", self.sequence_parallel)
        faults.settle()

    @property
    def world_size(self) -> int:
        return self.dp_size * self.cp_size * self.tp_size

    @property
    def copies(self) -> int:
        """How many ranks hold the same rows."""
        return 1 if self.sequence_parallel else self.tp_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class MoERows(NamedTuple):
    """What ``to_moe`` returns. ``hidden_states [N, H]``, ``input_ids`` int64 ``[N]`` or None,
    ``token_mask``: None, as padding was left behind (where nothing moves, what was given).
    ``handle`` is for ``from_moe``."""

    hidden_states: Tensor
    input_ids: Tensor | None
    token_mask: Tensor | None
    handle: RowHandle


@dataclass(frozen=True)
class _Step:
    """``owned[i]``: rows that rank i of the exchange owns. ``real``: places of the caller's real
    rows, None = all are. ``num_rows``: those handed to the MoE."""

    shape: torch.Size
    owned: Owned
    real: Tensor | None
    num_rows: int
    dtype: torch.dtype
    device: torch.device

    def fault_of(self, rows: Any) -> str | None:
        """What is wrong with rows that come back."""
        if not isinstance(rows, Tensor):
            return f"a tensor must come back from the MoE, not a {type(rows).__name__}"
        shape = tuple(rows.shape)
        if shape != (self.num_rows, self.shape[-1]):
            return (
                f"{self.num_rows} rows of {self.shape[-1]} went to the MoE, and {shape} came back"
            )
        if rows.dtype not in _DTYPES or rows.device != self.device:
            came = f"{rows.dtype} on {rows.device}"
            return f"{self.dtype} on {self.device} went to the MoE, and {came} came back"
        return None

    def take(self, rows: Tensor) -> Tensor:
        """Of the caller's ``[T, H]`` the real ones."""
        return rows if self.real is None else rows[self.real]

    def put(self, rows: Tensor) -> Tensor:
        """The real ones, and zeros for padding."""
        if self.real is None:
            return rows
        places = rows.new_zeros(math.prod(self.shape[:-1]), rows.shape[1])
        return places.index_copy_(0, self.real, rows)


class RowHandle:
    """A ticket from ``to_moe`` to ``from_moe``: single use, and only for its own exchange."""

    __slots__ = ("_owner", "_step", "_used")

    def __init__(self, step: _Step, owner: RowExchange) -> None:
        self._step, self._owner, self._used = step, owner, False

    @property
    def num_rows(self) -> int:
        """Rows handed to the MoE on this rank."""
        return self._step.num_rows

    def consume(self, owner: RowExchange) -> _Step:
        """Raises ``HandleError`` for a second use or for another exchange's handle."""
        if self._owner is not owner:
            raise HandleError("this handle was made by another RowExchange: use that one's")
        if self._used:
            raise HandleError("the rows of this handle came home already: call to_moe again")
        self._used = True
        return self._step


class RowExchange:
    """Carries rows between a ``RowLayout`` and a MoE; one serves all layers of a model.

    ``parallel.final_sum`` says who sums over the ranks that hold the same rows in the MoE.
    ``"layer"``: the rows that come back are complete, equal on those ranks, and ``from_moe`` takes
    what is needed. ``"caller"``: each has a part, and ``from_moe`` sums (a reduce-scatter of
    unequal lengths) and rounds to the dtype of the rows that went. ``gradient_sum`` says the same
    of the gradients that come back through ``to_moe``: a ``MoELayer`` always sums those itself,
    ``"caller"`` is for what computes parts and communicates nothing.

    **Gradients.** Ranks that hold the same rows have the same loss and the same gradients of these
    rows. The loss to train on is the mean of the ranks' losses, as DDP, FSDP and
    ``moe_core.training`` take it. For that, gradients inside the MoE are scaled by
    ``copies / moe_copies``, and scaled back on the way out: there too, a rank's gradients are those
    of a loss of which the mean over the ranks is the whole.

    Building is collective over the ranks of ``mesh`` (the MoE's; default: all), in which attention
    counts ranks in ascending order. Raises ``ConfigError``, on all ranks, naming fields.

    ``case``: ``"same"`` (nothing moves and nothing is communicated), ``"gather"`` (rows of several
    attention groups come together), ``"split"`` (each rank takes its share of rows that several
    hold) or ``"regroup"`` (both). ``mover`` counts what is sent.
    """

    def __init__(
        self,
        layout: RowLayout,
        parallel: ParallelConfig | None = None,
        *,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
        gradient_sum: str = "layer",
    ) -> None:
        parallel = parallel or ParallelConfig()
        kinds = (("layout", layout, RowLayout), ("parallel", parallel, ParallelConfig))
        wrong = [
            Fault(name, type(given).__name__, f"must be a {kind.__name__}")
            for name, given, kind in kinds
            if not isinstance(given, kind)
        ]
        if wrong:
            raise ConfigError(wrong)
        self.layout, self.parallel = layout, parallel
        self.device = torch.device(device) if device is not None else torch.get_default_device()
        self.gradient_sum = gradient_sum
        ranks = self._agree(mesh)
        self.copies, self.moe_copies = layout.copies, self.parallel.copies
        attention = {rank: i // self.copies for i, rank in enumerate(sorted(ranks))}
        moe = {rank: i // self.moe_copies for i, rank in enumerate(ranks)}
        # Who meets in the MoE is here too, so that all of them hear of a fault.
        width = self.parallel.ep_size * self.parallel.tp_size
        meet = {rank: i // width for i, rank in enumerate(ranks)}
        own = ranks[0] if len(ranks) == 1 else dist.get_rank()
        scope = closure(own, [attention, moe, meet])
        here = sorted(scope)  # as process groups count
        self._attention = tuple(attention[rank] for rank in here)
        self._moe = tuple(moe[rank] for rank in here)
        sums = "caller" in (self.parallel.final_sum, self.gradient_sum)
        gathers, splits = lacks(self._attention, self._moe), lacks(self._moe, self._attention)
        self.case = _CASES[gathers, splits]
        self._moves = gathers or splits or (sums and self.moe_copies > 1)
        self.mover = Mover(here, own, with_group=self._moves)
        self._debug = environment.debug_collectives()

    def _agree(self, mesh: DeviceMesh | None) -> tuple[int, ...]:
        """Global ranks, in the order of the MoE's widths."""
        faults = Faults(group_faults(self.parallel, mesh))
        faults.choice("gradient_sum", self.gradient_sum, FINAL_SUMS)
        wide = (self.layout.world_size, self.parallel.world_size)
        if wide[0] != wide[1]:
            message = (
                f"dp * cp * tp = {wide[0]} ranks attend, and the MoE has dp * ep * tp = {wide[1]}: "
                "both must be the same ranks"
            )
            faults.add("layout", self.layout.to_dict(), message)
        error = ConfigError(tuple(faults)) if faults else None
        if max(wide) == 1 or not (dist.is_available() and dist.is_initialized()):
            if error is not None:
                raise error
            return (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,)
        ranks = members(mesh)
        mine: dict[str, Any] = {
            "row_layout": self.layout.to_dict(),
            "parallel": self.parallel.to_dict(),
            "gradient_sum": self.gradient_sum,
            "MOE_DEBUG_COLLECTIVES": os.environ.get("MOE_DEBUG_COLLECTIVES", "0"),
        }
        agree(ranks, ranks.index(dist.get_rank()), {"refused": str(error)} if error else mine)
        if error is not None:
            raise error
        return ranks

    def to_moe(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> MoERows:
        """This rank's rows ``[..., H]`` of attention → those that it has in the MoE ``[N, H]``.

        ``input_ids`` (integers) and ``token_mask`` (bool, True = a real token; None: all are) have
        the leading shape of ``hidden_states``. Padding is not sent, whatever it holds. The number
        of rows and any fault are exchanged once, which is the one host sync: a fault on one rank
        raises ``InputError`` on all that meet it here or in the MoE. Where one rank needs a
        gradient, all take part in its way back (and none may be under ``no_grad``). Where nothing
        moves nothing is looked at: tensors come back as they are, flattened to rows.
        """
        with tracing.stage("to_moe", self.device):
            if not self._moves:
                return self._unmoved(hidden_states, input_ids, token_mask)
            fault = _input_fault(hidden_states, input_ids, token_mask, self.device)
            shape, mine, real = torch.Size(()), [1] + [0] * (len(_SIZE_FIELDS) - 1), None
            grad = _NO_NEED if torch.is_grad_enabled() else _NO_GRAD
            if not fault:
                if grad and hidden_states.requires_grad:
                    grad = _NEEDS_GRAD
                shape = hidden_states.shape
                num_rows: Tensor | int = math.prod(shape[:-1])
                if token_mask is not None:
                    real = token_mask.reshape(-1)
                    num_rows = real.sum()
                has_ids = input_ids is not None
                dtype = _DTYPES.index(hidden_states.dtype)
                mine = [0, num_rows, has_ids, shape[-1], dtype, grad]
            table = self._exchange_sizes(mine, fault)
            rows = hidden_states.reshape(-1, shape[-1])
            ids = None if input_ids is None else input_ids.reshape(-1).to(torch.int64)
            counts = [row["rows"] for row in table]
            if real is not None:
                real = torch.nonzero_static(real, size=counts[self.mover.place]).squeeze(1)
                rows = rows[real]
                ids = None if ids is None else ids[real]
            if grad == _NO_NEED and any(row["grad"] == _NEEDS_GRAD for row in table):
                rows = rows.clone() if rows.is_inference() else rows
                rows = rows.detach().requires_grad_()
            owned = self.mover.shares(counts, self._attention)
            moved = self._to_moe(rows, owned)
            if _have_ids(table):
                ids = rows.new_zeros(0, dtype=torch.int64) if ids is None else ids
                ids = self._out("input_ids", owned, ids)
            else:
                ids = None
            step = _Step(shape, owned, real, moved.shape[0], moved.dtype, moved.device)
            return MoERows(moved, ids, None, RowHandle(step, self))

    def from_moe(self, rows: Tensor, handle: RowHandle) -> Tensor:
        """What the MoE returned for ``to_moe``'s rows, ``[N, H]`` → ``[..., H]`` as they came.

        In the dtype of the rows that went (parts are summed first); padding gets zeros. Uses the
        handle up (``HandleError`` for a used or foreign one). Raises ``InputError`` for another
        shape or device or no float dtype; with ``MOE_DEBUG_COLLECTIVES=1`` on all ranks, and for
        dtypes that differ between them, at the price of an exchange.
        """
        with tracing.stage("from_moe", self.device):
            if not isinstance(handle, RowHandle):
                raise HandleError(
                    f"the handle is in what to_moe returned (.handle), not a "
                    f"{type(handle).__name__}"
                )
            step = handle.consume(self)
            fault = step.fault_of(rows)
            if self._moves and self._debug:
                self.mover.raise_together(fault, None if fault else str(rows.dtype))
            if fault:
                raise InputError(fault)
            sums = self._moves and self.parallel.final_sum == "caller"
            rows = rows if sums else rows.to(step.dtype)
            if self._moves:
                rows = self._from_moe(rows, step)
            return rows.to(step.dtype).view(step.shape)

    def _unmoved(
        self, hidden_states: Tensor, input_ids: Tensor | None, token_mask: Tensor | None
    ) -> MoERows:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, mask = (None if t is None else t.reshape(-1) for t in (input_ids, token_mask))
        step = _Step(hidden_states.shape, (), None, rows.shape[0], rows.dtype, rows.device)
        return MoERows(rows, ids, mask, RowHandle(step, self))

    def _to_moe(self, rows: Tensor, owned: Owned) -> Tensor:
        """Differentiable, as is ``_from_moe``. The way back of a copy is a copy the other way: the
        gradients of equal rows are equal, and each is the whole one. That of a sum is a copy too.
        """
        return self._moved(
            partial(self._out, "to_moe", owned),
            partial(self._home, "to_moe.backward", owned, self.gradient_sum),
            self.moe_copies / self.copies,
            rows,
        )

    def _from_moe(self, rows: Tensor, step: _Step) -> Tensor:
        """Padding is put in here and not by operators of its own: those would save a tensor, on
        ranks with padding only, and a checkpoint recomputes up to the last tensor that was saved.
        Ranks without padding would stop short of this exchange."""

        def forward(rows: Tensor) -> Tensor:
            home = self._home("from_moe", step.owned, self.parallel.final_sum, rows)
            return step.put(home)

        def backward(grad: Tensor) -> Tensor:
            return self._out("from_moe.backward", step.owned, step.take(grad))

        return self._moved(forward, backward, self.copies / self.moe_copies, rows)

    def _moved(
        self,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
        scale: float,
        rows: Tensor,
    ) -> Tensor:
        return cast("Tensor", Moved.apply(forward, backward, scale, rows))

    def _out(self, kind: str, owned: Owned, rows: Tensor) -> Tensor:
        return self.mover.copy(kind, rows, owned, self._attention, self._moe)

    def _home(self, kind: str, owned: Owned, who_sums: str, rows: Tensor) -> Tensor:
        move = self.mover.sum if who_sums == "caller" else self.mover.copy
        return move(kind, rows, owned, self._moe, self._attention)

    def _exchange_sizes(self, mine: list[Any], fault: str | None) -> list[dict[str, int]]:
        """What every rank says of its rows. Raises ``InputError`` on all for a fault of any."""
        table = [
            dict[str, int](zip(_SIZE_FIELDS, line, strict=True))
            for line in self.mover.exchange_sizes(mine, self.device)
        ]
        if any(row["fault"] for row in table):
            self.mover.raise_together(fault)
        faults = self._disagreements(table)
        if faults:  # all see the same table, so all find the same
            raise InputError("; ".join(faults))
        return table

    def _disagreements(self, table: list[dict[str, int]]) -> list[str]:
        faults: list[str] = []
        ranks = self.mover.ranks
        for group in dict.fromkeys(self._attention):
            places = [i for i, g in enumerate(self._attention) if g == group]
            brought = [table[i]["rows"] for i in places]
            if len(set(brought)) > 1:
                faults.append(
                    f"ranks {[ranks[i] for i in places]} hold the same rows "
                    f"(tp_size={self.layout.tp_size}), but they brought {brought}"
                )
        for name in ("hidden_size", "dtype"):
            values = [row[name] for row in table]
            if len(set(values)) > 1:
                shown = [str(_DTYPES[v]) if name == "dtype" else v for v in values]
                faults.append(f"the {name} of hidden_states differs: {shown} on ranks {[*ranks]}")
        grads = [row["grad"] for row in table]
        if _NEEDS_GRAD in grads and _NO_GRAD in grads:
            needs, off = ([r for r, g in zip(ranks, grads, strict=True) if g == which]
                          for which in (_NEEDS_GRAD, _NO_GRAD))  # fmt: skip
            faults.append(
                f"ranks {needs} need a gradient, and ranks {off} are under no_grad: all take part "
                "in its way back"
            )
        if _have_ids(table):
            without = [
                rank
                for rank, row in zip(ranks, table, strict=True)
                if row["rows"] and not row["has_ids"]
            ]
            if without:
                faults.append(f"input_ids are missing on ranks {without} and given on others")
        return faults


def _have_ids(table: list[dict[str, int]]) -> bool:
    """A rank without rows says nothing about ids, unless all are without."""
    with_rows = [row for row in table if row["rows"]]
    return any(row["has_ids"] for row in with_rows or table)


def _input_fault(
    hidden_states: Any, input_ids: Any, token_mask: Any, device: torch.device
) -> str | None:
    if not isinstance(hidden_states, Tensor) or hidden_states.ndim < 1:
        return f"hidden_states must be a tensor [..., H], not a {type(hidden_states).__name__}"
    if hidden_states.layout != torch.strided:
        return f"hidden_states must be dense, not {hidden_states.layout}"
    faults: list[str] = []
    if not hidden_states.shape[-1]:
        faults.append("hidden_states must have a last dimension of at least 1, not 0")
    if hidden_states.dtype not in _DTYPES:
        faults.append(f"hidden_states must be of a float dtype, not {hidden_states.dtype}")
    lead = tuple(hidden_states.shape[:-1])
    for name, tensor in (("input_ids", input_ids), ("token_mask", token_mask)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            faults.append(f"{name} must be a dense tensor, not a {kind}")
            continue
        if tuple(tensor.shape) != lead:
            faults.append(
                f"{name} must have shape {lead} like hidden_states without its last dimension, "
                f"not {tuple(tensor.shape)}"
            )
        if tensor.device != hidden_states.device:
            faults.append(f"{name} is on {tensor.device}, hidden_states on {hidden_states.device}")
        is_mask = name == "token_mask"
        integers = not (tensor.is_floating_point() or tensor.is_complex())
        if (tensor.dtype == torch.bool) != is_mask or not integers:
            wanted = "bool" if is_mask else "integers"
            faults.append(f"{name} must be {wanted}, not {tensor.dtype}")
    if hidden_states.device.type != device.type:
        faults.append(
            f"hidden_states are on {hidden_states.device}, the RowExchange was built for {device}"
        )
    return "; ".join(faults) or None

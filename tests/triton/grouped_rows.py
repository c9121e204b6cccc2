"""Rows of experts in each layout, and jobs over them, for the tests of the grouped products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core import Activation
from moe_core.convert import sort_slots
from moe_core.layouts import TokenMajor
from moe_triton import configs, launches, runtime
from moe_triton.configs import Config
from moe_triton.twins import Places

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

NAN = float("nan")
IDS = torch.tensor([[2, 0], [0, 2], [-1, 2], [4, 0], [-1, -1], [2, 2], [0, -1]] + [[2, 4]] * 9)
"""Of 5 experts 1 and 3 are idle, 2 has 14 rows and there are duplicates and empty slots."""
NUM_EXPERTS = 5
LAYOUTS = ("indexed", "expert_contiguous", "expert_masked")
SMALL = {kernel: Config(16, 16, 16, 1, 1, 2) for kernel in configs.KERNELS}
"""Blocks with which small sizes make several tiles, programs taking turns."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def use(
    monkeypatch: pytest.MonkeyPatch, table: dict[str, Config] = SMALL, *, tma: bool = False
) -> None:
    """These blocks, on a chip with or without tensor descriptors."""
    monkeypatch.setattr(configs, "INTERPRETED", table)
    chip = replace(runtime.CHIPS["interpreter"], has_tma=tma)
    monkeypatch.setattr(runtime, "chip", lambda device: chip)


@dataclass
class Rows:
    """What a layout says about rows: ``places`` for the twins, ``fields`` for a job."""

    places: Places
    num_positions: int
    slot_rows: Tensor | None
    rows_shape: tuple[int, ...]
    results_shape: tuple[int, ...]

    def filled(self, *width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """``[R, *width]``, NaN in the rows of nobody."""
        out = torch.full((self.num_positions, *width), NAN, dtype=dtype)
        out[self.mine] = normal(self.num_positions, *width, dtype=dtype, seed=seed)[self.mine]
        return out

    def by_slot(self, *width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """The same in the shape of results: rows are at their slots where there are some."""
        out = torch.full((self.num_positions, *width), NAN, dtype=dtype)
        slots = self.places.slots(self.mine)
        out[slots] = normal(self.num_positions, *width, dtype=dtype, seed=seed)[slots]
        return out.view(*self.results_shape, *width)

    @property
    def mine(self) -> Tensor:
        """int64: the positions of all experts."""
        return torch.cat([position for _, position in self.places.experts()])

    def inputs(self, hidden: int, dtype: torch.dtype) -> Tensor:
        """``x``: NaN in rows of nobody, or of tokens without a valid slot."""
        if self.slot_rows is None:
            return self.filled(hidden, dtype=dtype).view(*self.rows_shape, hidden)
        x = normal(*self.rows_shape, hidden, dtype=dtype)
        x[(self.slot_rows < 0).all(1)] = NAN
        return x


def rows_of(layout: str, ids: Tensor = IDS, num_experts: int = NUM_EXPERTS) -> Rows:
    """``ids [N, K]`` in a layout: contiguous with gaps of up to 3 rows, masked with spare ones."""
    record = TokenMajor(torch.empty(len(ids), 1), ids, torch.empty(ids.shape))
    order, slot_rows, starts = sort_slots(record, num_experts)
    counts, (tokens, top_k) = starts.diff(), ids.shape
    if layout == "indexed":
        places = Places(counts, starts, order.int(), top_k)
        slots = slot_rows.view_as(ids).int()
        return Rows(places, tokens * top_k, slots, (tokens,), (tokens, top_k))
    if layout == "expert_contiguous":
        aligned = (counts + 3) // 4 * 4
        starts = torch.cat([starts.new_zeros(1), aligned.cumsum(0).int()])
        size = int(starts[-1]) + 2
        return Rows(Places(counts, starts), size, None, (size,), (size,))
    capacity = int(counts.max()) + 1 if num_experts else 1
    shape = (num_experts, capacity)
    return Rows(Places(counts, capacity=capacity), shape[0] * capacity, None, shape, shape)


def job(
    rows: Rows,
    x: Tensor,
    w2: Tensor,
    weights: Tensor | None = None,
    activation: Activation | None = None,
    w13_layout: str = "gate_up",
    *,
    on_input: bool = False,
) -> launches.Job:
    act, places = activation or Activation(), rows.places
    how: tuple[Any, ...] = (act.name, act.gated, act.limit, act.limit_form == "after", act.alpha)
    return launches.make_job(
        x, None, w2, weights, places.sorted_token_ids, rows.slot_rows, places.tokens_per_expert,
        places.expert_starts, w13_layout, *how, on_input, False,
    )  # fmt: skip


def near(got: Tensor, want: Tensor, terms: Tensor, length: int) -> None:
    """``got`` within the roundings of sums of ``length`` float32 terms, whose magnitudes add up to
    ``terms``, and two of ``got``'s dtype. ``want`` and ``terms`` are float64."""
    half = torch.finfo(got.dtype).eps
    bound = terms * (length + 8) * 2**-23 + want.abs() * half + torch.finfo(got.dtype).tiny
    error = (got.double() - want).abs()
    assert (error <= bound).all(), f"off by {error.max():.2e}, {(error / bound).max():.2f} bounds"

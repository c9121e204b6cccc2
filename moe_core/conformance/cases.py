"""Calls with a known answer: experts whose numbers are exact, and an oracle of loops in float64.

Shapes: T tokens, K choices per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.config import Activation
from moe_core.conformance.bounds import fine
from moe_core.contracts import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

SILU = Activation()


@dataclass
class Case:
    """A call: ``x [T, H]``, ``ids [T, K]``, ``topk [T, K]`` weights and the experts' weights."""

    x: Tensor
    ids: Tensor
    topk: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    layout: str = "gate_up"
    activation: Activation = SILU
    on_input: bool = False

    @property
    def floats(self) -> dict[str, Tensor]:
        named = {n: getattr(self, n) for n in ("x", "topk", "w13", "w2", "b13", "b2")}
        return {n: t for n, t in named.items() if t is not None}

    @property
    def tensors(self) -> list[Tensor]:
        return [self.ids, *self.floats.values()]

    def to(self, device: str) -> Case:
        moved = self.mapped(lambda t: t.to(device))
        return replace(moved, ids=self.ids.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Case:
        return replace(self, **{n: change(t) for n, t in self.floats.items()})

    def weights(self, device: str) -> ExpertWeights:
        moved = self.to(device)
        biases = (moved.b13, moved.b2)
        return ExpertWeights(moved.w13, moved.w2, *biases, self.layout, self.activation)

    def tokens(self, start: int, end: int) -> Case:
        """The same experts, and tokens ``start`` up to ``end`` only."""
        part = slice(start, end)
        return replace(self, x=self.x[part], ids=self.ids[part], topk=self.topk[part])


def slots(ids: list[list[int]] | Tensor) -> Tensor:
    """int64 ``[T, K]``; K = 2 where there are no tokens to tell."""
    if isinstance(ids, list):
        return torch.tensor(ids, dtype=torch.int64).reshape(len(ids), len(ids[0]) if ids else 2)
    return ids


def random_case(
    ids: list[list[int]] | Tensor,
    dtype: str = "float64",
    *,
    sizes: tuple[int, int, int] = (4, 8, 16),
    bias: bool = False,
    activation: Activation = SILU,
    **fields: Any,
) -> Case:
    """``sizes`` = E, H, I. Values of order 1, seeded."""
    experts, hidden, inner = sizes
    torch_dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (values / shape[-1] ** 0.5 if len(shape) == 3 else values).to(torch_dtype)

    rows = inner * (2 if activation.gated else 1)
    ids = slots(ids)
    topk = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
    return Case(
        x=normal(len(ids), hidden),
        ids=ids,
        topk=topk if dtype == "float64" else topk.float(),
        w13=normal(experts, rows, hidden),
        w2=normal(experts, hidden, inner),
        b13=normal(experts, rows) if bias else None,
        b2=normal(experts, hidden) if bias else None,
        activation=activation,
        **fields,
    )


SURE = 64
"""A gate that is open in every dtype: silu(64) is 64 to the bit, float64 included."""


def exact_case(
    ids: Tensor, dtype: torch.dtype, sizes: tuple[int, int, int], holder: int = 0
) -> Case:
    """Expert e returns ``(e + 1) * x``, through silu, with every number exact in any dtype.

    ``ids [T, K]``; ``sizes`` = E, H, I, the last two at least 4. (Where I < H only the first I
    columns come back, ``identity_rows``.) A row says whose it is: 1, the holder + 1,
    the token's two digits to base 16, then small numbers. Weights are powers of two that differ by
    slot and token. (Past 8 experts the scales repeat, so that bfloat16 still holds them.) The gate
    is always open (``SURE``) and up is x / 64, so that an expert is the scaled identity with
    nothing but the activation that every runner has to offer.
    """
    (experts, hidden, inner), (tokens, top_k) = sizes, ids.shape
    token = torch.arange(tokens)
    x = ((7 * token[:, None] + 3 * torch.arange(hidden) + holder) % 5 - 2).double()
    x[:, :4] = torch.stack(
        [
            torch.ones(tokens),
            torch.full((tokens,), holder + 1.0),
            token // 16 + 1.0,
            token % 16 + 1.0,
        ],
        1,
    )
    w13 = torch.zeros(experts, 2 * inner, hidden, dtype=dtype)
    w13[:, :inner, 0] = SURE
    places = identity_places(hidden, inner)
    kept = torch.arange(len(places))
    w13[:, inner + places, kept] = 1 / SURE
    w2 = torch.zeros(experts, hidden, inner, dtype=dtype)
    w2[:, kept, places] = 1
    w2 *= scale_of(torch.arange(experts)).to(dtype)[:, None, None]
    power = (token[:, None] + 2 * torch.arange(top_k) + holder) % 3 - 1
    topk = torch.pow(2.0, power).to(fine(dtype))
    return Case(x=x.to(dtype), ids=ids, topk=topk, w13=w13, w2=w2)


def scale_of(ids: Tensor) -> Tensor:
    """By what the experts of ``exact_case`` multiply."""
    return ids % 8 + 1


def identity_places(hidden: int, inner: int) -> Tensor:
    """Which of the I values between the two products hold x: spread, so that no slice of them
    (tensor parallelism) has all."""
    return torch.arange(min(hidden, inner)) * max(inner // hidden, 1)


def identity_rows(case: Case) -> Tensor:
    """``[T, H]``: what an expert of ``exact_case`` scales."""
    return torch.where(torch.arange(case.x.shape[1]) < case.w2.shape[2], case.x, 0)


def exact_result(case: Case) -> Tensor:
    """``[T, H]``, what the experts of ``exact_case`` have to give, bit by bit."""
    factor = torch.where(case.ids >= 0, case.topk.double() * scale_of(case.ids), 0)
    factor = factor.sum(1, keepdim=True)
    return (identity_rows(case).double() * factor).to(case.x.dtype)


def oracle(case: Case) -> tuple[Tensor, Tensor]:
    """``[T, H]`` in float64, and ``[2, T, H]``: what relative errors of 1 could add up to, in the
    results of the steps and in the terms of their sums."""
    act, tokens, slots = case.activation, *case.ids.shape
    rows = torch.arange(case.w13.shape[1])
    if case.layout == "interleaved":
        gate_rows, up_rows = rows[0::2], rows[1::2]
    else:
        halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        gate_rows, up_rows = halves if case.layout == "gate_up" else halves[::-1]
    outs, masses = [], []
    case = case.mapped(lambda t: t.double())
    for t in range(tokens):
        out = case.x[t] * 0  # a part of the graph even if no slot is valid
        mass = torch.zeros(2, len(out), dtype=out.dtype)
        for k in range(slots):
            e, weight = int(case.ids[t, k]), case.topk[t, k]
            if e < 0:
                continue
            x = case.x[t] * weight if case.on_input else case.x[t]
            h, terms = case.w13[e] @ x, case.w13[e].abs() @ x.abs()
            # rounding a weighted input is an error in the terms
            m = torch.stack([terms if case.on_input else h.abs(), terms]).detach()
            if case.b13 is not None:
                h, m = h + case.b13[e], m + case.b13[e].abs()
            if act.gated:
                h, m = _gated(act, h[gate_rows], h[up_rows], m[:, gate_rows], m[:, up_rows])
            else:
                h, m = _limited(act, h), _slope(act, m)
            y, m = case.w2[e] @ h, m @ case.w2[e].abs().T
            if case.b2 is not None:
                y, m = y + case.b2[e], m + case.b2[e].abs()
            out = out + (y if case.on_input else y * weight)
            mass = mass + (m if case.on_input else m * weight.abs())
        outs.append(out)
        masses.append(mass)
    if not outs:
        return case.x * 1, torch.zeros(2, *case.x.shape)
    return torch.stack(outs), torch.stack(masses, 1).detach()


def _gated(act: Activation, g: Tensor, u: Tensor, mg: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    g = _limited(act, g)
    if act.limit is not None:
        u = torch.where(u > act.limit, act.limit, torch.where(u < -act.limit, -act.limit, u))
    if act.alpha is not None:
        u, mu = u + 1, mu + 1
    return g * u, _slope(act, mg) * mu


def _slope(act: Activation, m: Tensor) -> Tensor:
    """Slopes are at most 1.13 (gelu; silu 1.1), 2 |x| for ``relu2``; clamps lower them."""
    return 2 * m * m if act.name == "relu2" else 1.13 * m


def _limited(act: Activation, x: Tensor) -> Tensor:
    limit = math.inf if act.limit is None else act.limit
    if act.limit_form == "before":
        x = torch.where(x > limit, limit, x)
    match act.name:
        case "silu":
            x = x / (1 + torch.exp(-(act.alpha or 1) * x))
        case "gelu":
            x = x / 2 * (1 + torch.erf(x / math.sqrt(2)))
        case "gelu_tanh":
            x = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "relu":
            x = x * (x > 0)
        case "relu2":
            x = x * x * (x > 0)
    return torch.where(x > limit, limit, x) if act.limit_form == "after" else x


def sum_length(case: Case) -> int:
    """Terms of a forward's sums: over H, I, the slots, and of an activation."""
    return 2 * case.x.shape[1] + case.w2.shape[2] + case.ids.shape[1] + 16


def gradient_size(case: Case) -> int:
    """Terms that a gradient's sums may have."""
    return 8 * sum(case.w13.shape) + case.ids.numel()


def poison(device: str, tensors: Iterable[Tensor], rows: int = 1) -> None:
    """Fill blocks of likely sizes with NaN and free them: ``torch.empty`` hands them back."""
    blocks: list[Tensor] = []
    for t in tensors:
        if not t.is_floating_point():
            continue
        width = t.shape[-1] if t.ndim else 1
        counts = (rows, rows, max(t.shape[0], 1) if t.ndim else 1)
        blocks.append(torch.full_like(t, math.nan, device=device))
        blocks += [
            torch.full((count, width), math.nan, dtype=dtype, device=device)
            for dtype in {t.dtype, fine(t.dtype)}
            for count in counts
        ]
    blocks.clear()

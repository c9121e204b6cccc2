"""A cell's numbers, and what is right for them: float64, a few tokens and one expert at a time.

A token's result and the gradient of its row depend on that token alone, an expert's gradients on
that expert's rows alone. So a sample of tokens and one expert say exactly whether a kernel is
right, at a price that doesn't grow with the batch. Bounds are ``moe_core.conformance.bounds``'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from moe_core.conformance import bounds
from moe_core.contracts import ExpertWeights
from suite.shapes import TRAIN

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core import MoEConfig
    from suite.shapes import Cell, Shape

SAMPLE = 6
"""Tokens that are computed in float64."""
SLOPE = 1.13
"""No activation here is steeper, up to a clamp (``moe_core.conformance.cases``)."""


@dataclass
class Weights:
    """Of one shape, normal with a standard deviation of one over the root of the fan in. Layouts
    that other kernels want are made when asked for."""

    shape: Shape
    device: torch.device
    config: MoEConfig = field(init=False)
    own: ExpertWeights = field(init=False)

    def __post_init__(self) -> None:
        s, self.config = self.shape, self.shape.config()
        generator = torch.Generator(self.device).manual_seed(1)

        def draw(*shape: int, scale: float) -> Tensor:
            dtype = getattr(torch, s.dtype)
            drawn = torch.randn(shape, generator=generator, device=self.device, dtype=dtype)
            return drawn.mul_(scale)

        hidden, inner, count = s.hidden_size, s.intermediate_size, s.num_experts
        self.own = ExpertWeights(
            w13=draw(count, 2 * inner, hidden, scale=hidden**-0.5),
            w2=draw(count, hidden, inner, scale=inner**-0.5),
            w13_bias=draw(count, 2 * inner, scale=0.5) if s.bias else None,
            w2_bias=draw(count, hidden, scale=0.5) if s.bias else None,
            w13_layout=s.w13_layout,
            activation=self.config.activation,
        )
        self._laid: dict[str, Tensor] = {s.w13_layout: self.own.w13}

    def w13(self, layout: str) -> Tensor:
        """``[E, 2I, H]`` laid out as ``layout`` says."""
        if layout not in self._laid:
            gate, up = _split(self.own.w13, self.shape.w13_layout)
            if layout == "interleaved":
                made = torch.stack([gate, up], 2).flatten(1, 2)
            else:
                made = torch.cat([gate, up] if layout == "gate_up" else [up, gate], 1)
            self._laid[layout] = made
        return self._laid[layout]


@dataclass
class Problem:
    """``x [T, H]``, ``ids`` int64 ``[T, K]``, ``topk`` float32 ``[T, K]``, ``upstream [T, H]``."""

    cell: Cell
    weights: Weights
    x: Tensor = field(init=False)
    ids: Tensor = field(init=False)
    topk: Tensor = field(init=False)
    upstream: Tensor = field(init=False)

    def __post_init__(self) -> None:
        s, tokens, device = self.cell.shape, self.cell.tokens, self.weights.device
        generator = torch.Generator(device).manual_seed(2)

        def draw(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.x = draw(tokens, s.hidden_size, dtype=self.weights.own.w13.dtype)
        scores = draw(tokens, s.num_experts, dtype=torch.float32)
        values, self.ids = scores.topk(s.top_k, dim=1)
        self.topk = values.softmax(1)
        self.upstream = draw(tokens, s.hidden_size, dtype=self.x.dtype)

    @property
    def trains(self) -> bool:
        return self.cell.passes == TRAIN

    @cached_property
    def experts_hit(self) -> int:
        return int(self.ids.unique().numel())

    @cached_property
    def sample(self) -> Tensor:
        """Some tokens, the first and the last among them."""
        tokens = self.cell.tokens
        places = torch.linspace(0, tokens - 1, min(SAMPLE, tokens), device=self.ids.device)
        return places.round().long().unique()

    @cached_property
    def watched(self) -> int:
        """The expert with the fewest rows that has some: its gradients are compared."""
        counts = self.ids.flatten().bincount(minlength=self.cell.shape.num_experts)
        return int(counts.masked_fill(counts == 0, counts.max() + 1).argmin())

    @cached_property
    def _exact(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Of the sample: results, what ``bounds.forward`` calls masses, gradients."""
        x = self.x[self.sample].double().requires_grad_()
        topk = self.topk[self.sample].double().requires_grad_()
        ids = self.ids[self.sample]
        with torch.enable_grad():
            out, masses = torch.zeros_like(x), x.new_zeros(2, *x.shape)
            for expert in ids.unique().tolist():
                tokens, slots = (ids == expert).nonzero(as_tuple=True)
                y, mass = self._expert(x[tokens], _one(self.weights.own, expert))
                share = topk[tokens, slots, None]
                out = out.index_add(0, tokens, y * share)
                masses.index_add_(1, tokens, mass * share.detach())
            grads = {}
            if self.trains:
                up = self.upstream[self.sample].double()
                grads["x"], grads["topk"] = torch.autograd.grad(out, (x, topk), up)
        return out.detach(), masses, grads

    @cached_property
    def _exact_weights(self) -> dict[str, Tensor]:
        """Gradients of the watched expert's weights."""
        own = {
            name: tensor.double().requires_grad_()
            for name, tensor in _one(self.weights.own, self.watched).items()
        }
        tokens, slots = (self.ids == self.watched).nonzero(as_tuple=True)
        with torch.enable_grad():
            y, _ = self._expert(self.x[tokens].double(), own)
            y = y * self.topk[tokens, slots, None].double()
            up = self.upstream[tokens].double()
            grads = torch.autograd.grad(y, list(own.values()), up)
        return dict(zip(own, grads, strict=True))

    def _expert(self, x: Tensor, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """``[n, H]`` in float64 → results, and masses ``[2, n, H]``."""
        own = {name: tensor.double() for name, tensor in own.items()}
        act, layout = self.weights.config.activation, self.weights.own.w13_layout
        h = x @ own["w13"].T
        with torch.no_grad():
            terms = x.abs() @ own["w13"].abs().T
            mass = torch.stack([h.abs(), terms])
        if "b13" in own:
            h, mass = h + own["b13"], mass + own["b13"].abs().detach()
        gate, up = _split(h, layout, -1)
        mass_gate, mass_up = (m.detach() for m in _split(mass, layout, -1))
        if act.limit is not None:  # limit_form "before", the only one here
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        gate = gate * torch.sigmoid((act.alpha or 1.0) * gate)
        if act.alpha is not None:
            up, mass_up = up + 1, mass_up + 1
        y = (gate * up) @ own["w2"].T
        mass = (SLOPE * mass_gate * mass_up) @ own["w2"].detach().abs().T
        if "b2" in own:
            y, mass = y + own["b2"], mass + own["b2"].abs().detach()
        return y, mass

    def forward_error(self, out: Tensor) -> float:
        """The worst error of the sampled tokens over what rounding may do; at most 1 is right."""
        exact, masses, _ = self._exact
        s = self.cell.shape
        length = 2 * s.hidden_size + s.intermediate_size + s.top_k + 16
        bound = bounds.forward(masses, self.x.dtype, length)
        return _worst((out[self.sample].double() - exact).abs() / bound)

    def gradient_errors(self, grads: dict[str, Tensor]) -> dict[str, float]:
        """The same for the gradients of ``x``, ``topk``, ``w13``, ``w2``, ``b13`` and ``b2``."""
        wanted = {**self._exact[2], **self._exact_weights}
        s = self.cell.shape
        size = 8 * (s.num_experts + 2 * s.intermediate_size + s.hidden_size) + self.ids.numel()
        errors: dict[str, float] = {}
        for name, exact in wanted.items():
            part = self.sample if name in ("x", "topk") else self.watched
            bound = bounds.gradient(exact, self.x.dtype, size)
            errors[name] = _worst((grads[name][part].double() - exact).abs() / bound)
        return errors


def _one(weights: ExpertWeights, expert: int) -> dict[str, Tensor]:
    named = {
        "w13": weights.w13,
        "w2": weights.w2,
        "b13": weights.w13_bias,
        "b2": weights.w2_bias,
    }
    return {name: tensor[expert] for name, tensor in named.items() if tensor is not None}


def _split(h: Tensor, layout: str, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Gate and up."""
    if layout == "interleaved":
        gate, up = h.unflatten(dim, (-1, 2)).unbind(dim if dim < 0 else dim + 1)
        return gate, up
    first, second = h.chunk(2, dim)
    return (first, second) if layout == "gate_up" else (second, first)


def _worst(ratio: Tensor) -> float:
    """Infinite for NaN."""
    worst: Any = ratio.max().item() if ratio.numel() else 0.0
    return worst if worst == worst else float("inf")

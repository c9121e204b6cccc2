"""A call of the experts and what is right for it: moe-core's portable backend in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_core import Activation, moe_forward
from moe_core.conformance import bounds

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("x", "topk", "w13", "w2", "b13", "b2")


@dataclass
class Call:
    """``floats`` by the names in ``NAMES``; ``ids`` int64 ``[T, K]``."""

    ids: Tensor
    floats: dict[str, Tensor]
    layout: str
    activation: Activation

    def run(self, backend: str, floats: dict[str, Tensor] | None = None) -> Tensor:
        f = floats or self.floats
        return moe_forward(
            f["x"],
            self.ids,
            f["topk"],
            f["w13"],
            f["w2"],
            w13_bias=f.get("b13"),
            w2_bias=f.get("b2"),
            w13_layout=self.layout,
            activation=self.activation,
            backend=backend,
        )

    def both(self, backend: str, upstream: Tensor, dtype: torch.dtype | None = None):
        """Result, and gradients by name; ``dtype``: of everything, None = as it is."""
        floats = {
            name: (t if dtype is None else t.to(dtype)).detach().requires_grad_()
            for name, t in self.floats.items()
        }
        out = self.run(backend, floats)
        grads = torch.autograd.grad(out, list(floats.values()), upstream.to(out.dtype))
        return out.detach(), dict(zip(floats, grads, strict=True))

    @property
    def size(self) -> int:
        """Terms of the longest sum of a gradient, as ``moe_core.conformance.cases`` counts."""
        return 8 * sum(self.floats["w13"].shape) + self.ids.numel()


def make_call(
    tokens: int,
    sizes: tuple[int, int, int],
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    bias: bool = False,
    layout: str = "gate_up",
    invalid: float = 0.0,
    busy: int | None = None,
    **activation: Any,
) -> Call:
    """``sizes`` = E, H, I. ``invalid``: share of slots without an expert; ``busy``: how many
    experts may be chosen."""
    (experts, hidden, inner), act = sizes, Activation(**activation)
    rows = 2 * inner if act.gated else inner

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    floats = {
        "x": draw(tokens, hidden),
        "topk": torch.rand(tokens, top_k, device=device),
        "w13": draw(experts, rows, hidden) / hidden**0.5,
        "w2": draw(experts, hidden, inner) / inner**0.5,
    }
    if bias:
        floats["b13"], floats["b2"] = draw(experts, rows), draw(experts, hidden)
    scores = torch.rand(tokens, busy or experts, device=device)
    ids = scores.topk(min(top_k, scores.shape[1]), 1).indices
    if ids.shape[1] < top_k:
        ids = ids[:, :1].expand(-1, top_k)
    ids = ids.masked_fill(torch.rand(ids.shape, device=device) < invalid, -1)
    return Call(ids, floats, layout, act)


def check_close(actual: Tensor, exact: Tensor, dtype: torch.dtype, size: int, what: str) -> None:
    """Within what roundings to ``dtype`` and sums of ``size`` terms may do to ``exact``."""
    assert actual.shape == exact.shape
    if not exact.numel():
        return
    bound = bounds.gradient(exact, dtype, size)
    worst = (actual.double() - exact).abs().max().item()
    assert worst <= bound, f"{what}: off by {worst:g}, {bound:g} is explained by rounding"

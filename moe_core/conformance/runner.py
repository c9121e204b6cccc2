"""Contract tests of an expert runner, for the test suite of whoever writes one.

    class TestMine(RunnerConformance):
        backend = "mine"

Results are compared with loops over tokens and slots in float64, within a bound that follows from
the roundings a runner may make. What the backend doesn't offer must be refused when a layer is
built and is then skipped; what every runner has to offer (``Offer``'s defaults) can't be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from moe_core import Activation, ConfigError, Experts, MoEConfig, Request, moe_forward
from moe_core.config import ACTIVATIONS, DTYPES, LIMIT_FORMS, W13_LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SILU, IDENTITY = Activation(), Activation(name="identity", gated=False)
EVERY_ACTIVATION = [
    *(
        Activation(name=name, gated=gated, limit=0.5 if form else None, limit_form=form or "before")
        for name, gated, form in product(ACTIVATIONS, (True, False), (None, *LIMIT_FORMS))
    ),
    *(Activation(alpha=1.702, limit=limit) for limit in (None, 0.5)),
]


def label(act: object) -> str:
    """A short test id."""
    if not isinstance(act, Activation):
        return str(act)
    limit = f"{act.limit_form}{act.limit:g}" if act.limit else ""
    return "-".join([act.name, *["ungated"] * (not act.gated), *[limit] * bool(limit)]) + (
        "-alpha" if act.alpha else ""
    )


# E = 4; every pattern has tokens that share an expert, an idle expert or an empty slot.
PATTERNS: dict[str, list[list[int]]] = {
    "mixed": [[2, -1], [0, 2], [3, 0], [-1, -1], [2, 0]],
    "one valid slot": [[2, -1]],
    "none valid": [[-1, -1]] * 3,
    "duplicates": [[2, 2], [1, 1], [1, 2]],
    "all to one": [[0, 0]] * 9,
    "one big, then singles": [[0, 0]] * 9 + [[1, 2], [3, -1]],
    "all experts": [[3, 1, 0, 2], [0, 1, 2, 3]],
    "no tokens": [],
    "sizes 5 0 7 0": [[0]] * 5 + [[-1]] * 4 + [[2]] * 7,
}
NEEDS_DYNAMO = "ignore:.*should not be instantiated:DeprecationWarning"  # torch's own, tracing


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


def random_case(
    ids: list[list[int]],
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
    top_k = len(ids[0]) if ids else 2
    topk = torch.rand(len(ids), top_k, generator=generator, dtype=torch.float64)
    return Case(
        x=normal(len(ids), hidden),
        ids=torch.tensor(ids, dtype=torch.int64).reshape(len(ids), top_k),
        topk=topk if dtype == "float64" else topk.float(),
        w13=normal(experts, rows, hidden),
        w2=normal(experts, hidden, inner),
        b13=normal(experts, rows) if bias else None,
        b2=normal(experts, hidden) if bias else None,
        activation=activation,
        **fields,
    )


def scaled_identity(ids: list[list[int]], dtype: str) -> Case:
    """Expert e returns ``(e + 1) * x``; all numbers are exact in any dtype."""
    eye, top_k = torch.eye(8, dtype=getattr(torch, dtype)), len(ids[0]) if ids else 2
    scale = torch.arange(1, 5, dtype=eye.dtype).view(4, 1, 1)
    slots = torch.arange(len(ids) * top_k).view(len(ids), top_k)
    return Case(
        x=(torch.arange(len(ids) * 8) % 5 - 2).view(-1, 8).to(eye.dtype),
        ids=torch.tensor(ids, dtype=torch.int64).reshape(len(ids), top_k),
        topk=(slots % 3 + 1).to(torch.float64 if dtype == "float64" else torch.float32) / 2,
        w13=eye.repeat(4, 1, 1),
        w2=eye * scale,
        activation=IDENTITY,
    )


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


def tolerance(case: Case, mass: Tensor) -> Tensor:
    """Rows are rounded at most eight times (the input when weighted, gate, up, activation, second
    product, bias, weight, the sum over slots), half an epsilon each; the sums over H, I and K
    between them are in float32 or float64."""
    dtype = case.w13.dtype
    fine = torch.float64 if dtype == torch.float64 else torch.float32
    length = 2 * case.x.shape[1] + case.w2.shape[2] + case.ids.shape[1] + 16
    rounded = mass[0] * 4 * torch.finfo(dtype).eps + mass[1] * length * torch.finfo(fine).eps / 2
    return rounded + torch.finfo(dtype).smallest_normal


class RunnerConformance:
    """Subclass it and set ``backend`` to a spec; tests collect the subclass."""

    backend: ClassVar[str]
    device: ClassVar[str] = "cpu"
    autograd: ClassVar[bool] = True
    """False for a runner that is for inference only: no gradients are asked for."""
    refuses: ClassVar[frozenset[str] | None] = None
    """Axes that this backend is known to refuse: a refusal of any other one fails. None = any
    axis may be refused, except where the request asks for no more than every runner offers."""

    def experts(self, case: Case, **wants: Any) -> Experts:
        """A layer with the case's weights. Skips what the backend refuses (and may refuse)."""
        experts, hidden, inner = case.w2.shape
        config = MoEConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_experts=experts,
            top_k=case.ids.shape[1],
            activation=case.activation,
            w13_layout=case.layout,
            bias=case.b13 is not None,
            apply_router_weight_on_input=case.on_input,
            dtype=str(case.w13.dtype).removeprefix("torch."),
        )
        layer = self._or_skip(
            lambda: Experts(
                config,
                backend=self.backend,
                device=self.device,
                inference=not self.autograd,
                **wants,
            )
        )
        layer.load_full_weights(case.w13, case.w2, case.b13, case.b2)
        return layer

    def forward(self, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
        """``[T, H]`` and what it depends on, by the names of ``Case.floats``."""
        self.poison(case)
        if case.on_input:
            layer, used = self.experts(case), case.floats
            own = {"w13": layer.w13, "w2": layer.w2, "b13": layer.w13_bias, "b2": layer.w2_bias}
            used |= {n: t for n, t in own.items() if t is not None}
            return layer(case.x, case.ids, case.topk), used
        biases = {"w13_bias": case.b13, "w2_bias": case.b2}
        how = {"w13_layout": case.layout, "activation": case.activation, "backend": self.backend}
        given = (case.x, case.ids, case.topk, case.w13, case.w2)
        return self._or_skip(lambda: moe_forward(*given, **biases, **how)), case.floats

    def _or_skip(self, build: Callable[[], Any]) -> Any:
        try:
            return build()
        except ConfigError as error:
            self._explained(error)
            raise

    def _explained(self, error: ConfigError) -> None:
        """Skips if the refusals are ones that the backend may make, fails otherwise."""
        assert error.resolution is not None, str(error)
        name = self.backend.split("+")[-1].split("[")[0].split(":")[-1]
        refusals = error.resolution.refusals
        mine = [r for r in refusals if r.part.split(".")[0].split("[")[0] == name]
        assert mine, f"no refusal names {name}: {error}"
        request, plain = error.resolution.request, Request(device=self.device)
        for r in mine:
            extra = getattr(request, r.axis) != getattr(plain, r.axis) or r.axis == "autograd"
            assert extra if self.refuses is None else r.axis in self.refuses, str(r)
        pytest.skip(f"{self.backend} does not offer {'; '.join(str(r) for r in mine)}")

    def poison(self, case: Case) -> None:
        """Fill blocks of likely sizes with NaN and free them: ``torch.empty`` hands them back."""
        tokens, slots = len(case.ids), max(case.ids.numel(), 1)
        widths = (1, case.x.shape[1], case.w2.shape[2], case.w13.shape[1])
        blocks = [
            torch.full((count, width), math.nan, dtype=dtype, device=self.device)
            for dtype, width in product((case.w13.dtype, torch.float32), widths)
            for count in (slots, slots, tokens)
        ]
        blocks += [torch.full_like(t, math.nan) for t in case.floats.values()]
        blocks.clear()

    def check(self, case: Case) -> None:
        """Forward and backward against the oracle; nothing given is written to."""
        theirs = case.mapped(lambda t: t.double().requires_grad_())
        mine = case.to(self.device).mapped(lambda t: t.detach().requires_grad_(self.autograd))
        (out, used), (want, mass) = self.forward(mine), oracle(theirs)
        assert (out.shape, out.dtype) == (case.x.shape, case.x.dtype)
        error = (out.detach().double().cpu() - want.detach()).abs()
        assert (error <= tolerance(case, mass)).all(), f"off by {error.max():.2e}"
        for now, then in zip(mine.tensors, case.tensors, strict=True):
            assert torch.equal(now.cpu(), then), "an input was written to"
        if self.autograd:
            self._check_gradients(case, out, used, want, theirs)

    def _check_gradients(
        self, case: Case, out: Tensor, used: dict[str, Tensor], want: Tensor, theirs: Case
    ) -> None:
        """Relative to the largest element: a matrix product's error, and 16 roundings."""
        upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        self.poison(case)
        grads = torch.autograd.grad(out, list(used.values()), upstream.to(out))
        exact = torch.autograd.grad(
            want, list(theirs.floats.values()), upstream, allow_unused=True, materialize_grads=True
        )
        size = 8 * sum(case.w13.shape) + case.ids.numel()
        finest = 2.0**-52 if case.w13.dtype == torch.float64 else 2.0**-23
        limit = size * finest + 16 * torch.finfo(case.w13.dtype).eps
        idle = [e for e in range(len(case.w13)) if not (case.ids == e).any()]
        for name, grad, right in zip(used, grads, exact, strict=True):
            error, most = (
                (grad.double().cpu() - right).abs(),
                right.abs().max() if right.numel() else 0,
            )
            assert (error <= limit * most).all(), f"gradient of {name} off by {error.max():.2e}"
            if name not in ("x", "topk"):
                assert not grad[idle].any(), f"idle experts have a gradient in {name}"

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_routing_patterns(self, pattern: str, dtype: str) -> None:
        self.check(random_case(PATTERNS[pattern], dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_scaled_identity_is_exact(self, pattern: str, dtype: str) -> None:
        case = scaled_identity(PATTERNS[pattern], dtype)
        out, _ = self.forward(case.to(self.device))
        valid = case.ids >= 0
        factor = torch.where(valid, case.topk * (case.ids + 1), 0).sum(1, keepdim=True)
        assert torch.equal(out.cpu(), (case.x * factor).to(out.dtype))

    @pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=label)
    def test_activations(self, activation: Activation) -> None:
        self.check(random_case(PATTERNS["mixed"], "float32", activation=activation))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", W13_LAYOUTS)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("on_input", [False, True])
    def test_layouts_biases_and_weighting(
        self, layout: str, bias: bool, on_input: bool, dtype: str
    ) -> None:
        case = random_case(PATTERNS["mixed"], dtype, bias=bias, layout=layout, on_input=on_input)
        self.check(case)
        self.check(replace(case, ids=case.ids[:0], x=case.x[:0], topk=case.topk[:0]))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("sizes", [(4, 13, 7), (5, 1, 1), (4, 12, 20), (9, 40, 24)], ids=str)
    def test_sizes(self, sizes: tuple[int, int, int], dtype: str) -> None:
        self.check(random_case(PATTERNS["all experts"], dtype, sizes=sizes))

    def test_uninitialised_memory_twice(self) -> None:
        # pytorch/pytorch#172439, #193633, #154557: sizes 5 0 7 0 0 3 and 8 rows of nobody
        ids = [[0]] * 5 + [[-1]] * 8 + [[2]] * 7 + [[5]] * 3
        case = random_case(ids, "float32", sizes=(6, 16, 32))
        for _ in range(2):
            self.check(case)

    def test_nothing_of_an_invalid_slot_is_used(self) -> None:
        case = random_case(PATTERNS["mixed"], "float32").to(self.device)
        out, _ = self.forward(case)
        invalid = case.ids < 0
        bad = replace(case, topk=torch.where(invalid, math.nan, case.topk), x=case.x.clone())
        bad.x[invalid.all(1)] = math.nan
        bad.x.requires_grad_()
        bad.topk.requires_grad_()
        poisoned, _ = self.forward(bad)
        assert torch.equal(out, poisoned)
        poisoned.square().sum().backward()
        for tensor, rows in ((bad.x, invalid.all(1)), (bad.topk, invalid)):
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()
            assert not tensor.grad[rows].any()

    def test_strided_inputs_and_expanded_gradient(self) -> None:
        case = random_case(PATTERNS["mixed"], "float32")
        strided = case.mapped(lambda t: t.mT.contiguous().mT)
        strided.x = torch.stack([case.x, case.x], -1)[..., 0]
        strided.ids = case.ids.T.contiguous().T
        self.check(strided)
        grads: list[tuple[Tensor, ...]] = []
        for expanded in (True, False):
            call = case.to(self.device).mapped(lambda t: t.detach().requires_grad_())
            out, used = self.forward(call)
            one = torch.ones((), device=self.device)
            upstream = one.expand_as(out) if expanded else torch.ones_like(out)
            grads.append(torch.autograd.grad(out, list(used.values()), upstream))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    def _scalar(self, gate: float, up: float, **fields: Any) -> float:
        """One expert: the first input is 1, the only gate and up are as given."""
        case = random_case([[0]], "float32", sizes=(1, 4, 4), **fields).mapped(torch.zeros_like)
        case.x[0, 0] = case.topk[0, 0] = case.w2[0, 0, 0] = 1
        case.w13[0, 0, 0], case.w13[0, 4, 0] = gate, up
        return self.forward(case.to(self.device))[0][0, 0].item()

    @pytest.mark.parametrize(
        ("activation", "value"),
        [
            (SILU, -24.8327),  # silu(5) * -5
            (Activation(limit=1), -0.7311),  # silu(1) * -1
            (Activation(limit=100), -24.8327),  # the limit matters
            (Activation(limit=1, limit_form="after"), -1.0),  # min(silu(5), 1) * -1
            (Activation(limit=7, alpha=1.702), -19.9960),  # 5 sigmoid(8.51) * (-5 + 1)
        ],
        ids=label,
    )
    def test_limits_by_hand(self, activation: Activation, value: float) -> None:
        # sgl-project/sglang#39920: a limit that was silently ignored
        assert self._scalar(5, -5, activation=activation) == pytest.approx(value, abs=1e-4)

    @pytest.mark.parametrize("layout", W13_LAYOUTS)
    def test_layouts_by_hand(self, layout: str) -> None:
        gate, up = torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 20, 30, 40])
        rows = {
            "gate_up": torch.cat([gate, up]),
            "up_gate": torch.cat([up, gate]),
            "interleaved": torch.stack([gate, up], 1).flatten(),
        }[layout]
        case = random_case([[0]], "float32", sizes=(1, 4, 4), layout=layout)
        case = case.mapped(torch.zeros_like)
        case.x[0, 0], case.topk[0, 0] = 1, 1
        case.w13[0, :, 0], case.w2[0] = rows, torch.eye(4)
        out, _ = self.forward(case.to(self.device))
        # silu(1) * 10, silu(2) * 20, silu(3) * 30, silu(4) * 40
        assert out[0].tolist() == pytest.approx([7.3106, 35.2319, 85.7317, 157.1222], abs=1e-3)

    @pytest.mark.parametrize(("on_input", "value"), [(True, 0.7311), (False, 1.7616)])
    def test_weight_on_input_by_hand(self, on_input: bool, value: float) -> None:
        # vllm-project/vllm#43694: silu(2 w) * 2 w or w * silu(2) * 2 with w = 0.5, never both
        case = random_case([[0, -1]], "float32", sizes=(2, 4, 4), on_input=on_input)
        case = case.mapped(torch.zeros_like)
        case.x[0, 0], case.topk[0, 0], case.w2[:, 0, 0] = 1, 0.5, 1
        case.w13[:, [0, 4], 0] = 2
        out, _ = self.forward(case.to(self.device))
        assert out[0, 0].item() == pytest.approx(value, abs=1e-4)

    def test_output_bias_is_weighted_once(self) -> None:
        # pytorch/torchtitan#4245: 0.3 and 0.2 of a bias of one
        case = random_case([[0, 1], [1, -1]], "float32", bias=True).mapped(torch.zeros_like)
        assert case.b2 is not None
        case.b2 += 1
        case.topk += torch.tensor([0.3, 0.2])
        out, _ = self.forward(case.to(self.device))
        want = torch.tensor([[0.5], [0.3]]).expand(2, 8)
        torch.testing.assert_close(out.cpu(), want, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("layout", W13_LAYOUTS)
    def test_prepared_weights(self, layout: str) -> None:
        case = random_case(PATTERNS["mixed"], "float32", bias=True, layout=layout)
        layer = self.experts(case)
        want, mass = oracle(case)
        given = case.to(self.device)
        with torch.no_grad():
            for _ in range(2):  # preparing twice converts once
                layer.prepare_weights()
                out = layer(given.x, given.ids, given.topk)
                assert ((out.double().cpu() - want).abs() <= tolerance(case, mass)).all()
        runner = layer.pipeline.runner
        if runner is not None:
            once = runner.prepare(layer.weights)
            twice = runner.prepare(once)
            assert torch.equal(once.w13, twice.w13)
            assert once.w13_layout == twice.w13_layout

    @pytest.mark.filterwarnings(NEEDS_DYNAMO)
    def test_compiles_fullgraph_twice_at_most(self) -> None:
        # T in (1, 7, 64); experts 3 and up are idle
        cases = [
            random_case([[t % 3, (t + 1) % 4 - 1] for t in range(tokens)], "float32")
            for tokens in (1, 7, 64)
        ]
        layer = self.experts(cases[0], compile=True)
        graphs: list[object] = []

        def count(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        torch.compiler.reset()
        compiled = torch.compile(layer, backend=count, fullgraph=True)
        for case in cases:
            x, ids, topk = (t.to(self.device) for t in (case.x, case.ids, case.topk))
            results: list[list[Tensor | None]] = []
            for run in (compiled, layer):
                x = x.detach().requires_grad_()
                layer.zero_grad()
                out = run(x, ids, topk)
                out.square().sum().backward()
                results.append([out, x.grad, layer.w13.grad, layer.w2.grad])
            for mine, eager in zip(*results, strict=True):
                torch.testing.assert_close(mine, eager)
        assert len(graphs) <= 2

"""Contract tests of an expert runner, for the test suite of whoever writes one.

    class TestMine(RunnerConformance):
        backend = "mine"

Results are compared with loops over tokens and slots in float64 (``cases.oracle``), within a bound
that follows from the roundings a runner may make (``bounds``). What the backend doesn't offer must
be refused when a layer is built and is then skipped. Sizes are those next to ours that it takes.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import given

from moe_core import Activation, ConfigError, Experts, MoEConfig, moe_forward
from moe_core.config import ACTIVATIONS, DTYPES, LIMIT_FORMS, W13_LAYOUTS
from moe_core.conformance import bounds, on_ranks
from moe_core.conformance.cases import (
    SILU,
    SURE,
    Case,
    exact_case,
    exact_result,
    gradient_size,
    identity_places,
    identity_rows,
    oracle,
    poison,
    random_case,
    scale_of,
    slots,
    sum_length,
)
from moe_core.conformance.pairs import check_pairs, pairs, partners
from moe_core.conformance.peak import peak_bytes
from moe_core.conformance.rank import Job
from moe_core.conformance.strategies import EXAMPLES, routings
from moe_core.conformance.target import NOT_CLAIMED, NOT_HERE, Conformance
from moe_core.layouts import ExpertContiguous

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

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
SHAPES = [(4, 13, 7), (5, 1, 1), (4, 12, 20), (9, 40, 24), (4, 264, 272)]
"""E, H, I: odd ones, the least, and more than a tile."""
NEEDS_DYNAMO = "ignore:.*should not be instantiated:DeprecationWarning"  # torch's own, tracing


def tolerance(case: Case, mass: Tensor) -> Tensor:
    return bounds.forward(mass, case.w13.dtype, sum_length(case))


class RunnerConformance(Conformance):
    """Subclass it and set ``backend`` to a spec; tests collect the subclass."""

    profile: ClassVar[str] = "runner"
    autograd: ClassVar[bool | None] = None
    """Whether gradients are asked for; None = where the manifest offers them."""
    refuses: ClassVar[frozenset[str] | None] = None
    """Axes that this backend is known to refuse: a refusal of any other one fails. None = what the
    manifest doesn't offer."""

    @property
    def learns(self) -> bool:
        return self.target.autograd if self.autograd is None else self.autograd

    @property
    def dtype(self) -> str:
        return self.target.dtypes[0]

    def case(
        self,
        ids: list[list[int]] | Tensor,
        dtype: str = "",
        sizes: tuple[int, int, int] = (4, 8, 16),
        **fields: Any,
    ) -> Case:
        """``random_case`` with the sizes (E, H, I) that the backend takes."""
        return random_case(ids, dtype or self.dtype, sizes=self.sizes(*sizes), **fields)

    def sizes(self, experts: int, hidden: int, inner: int) -> tuple[int, int, int]:
        fit = self.target.fit
        return (
            fit("num_experts", experts),
            fit("hidden_size", hidden),
            fit("intermediate_size", inner),
        )

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
        wants = {"device": self.device, "inference": not self.learns} | wants
        layer = self.or_skip(lambda: Experts(config, backend=self.backend, **wants))
        layer.load_full_weights(case.w13, case.w2, case.b13, case.b2)
        return layer

    def forward(self, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
        """``[T, H]`` and what it depends on, by the names of ``Case.floats``."""
        poison(self.device, case.floats.values(), max(case.ids.numel(), 1))
        if case.on_input:
            layer, used = self.experts(case), case.floats
            own = {"w13": layer.w13, "w2": layer.w2, "b13": layer.w13_bias, "b2": layer.w2_bias}
            used |= {n: t for n, t in own.items() if t is not None}
            return layer(case.x, case.ids, case.topk), used
        biases = {"w13_bias": case.b13, "w2_bias": case.b2}
        how = {"w13_layout": case.layout, "activation": case.activation, "backend": self.backend}
        given = (case.x, case.ids, case.topk, case.w13, case.w2)
        return self.or_skip(lambda: moe_forward(*given, **biases, **how)), case.floats

    def or_skip(self, build: Callable[[], Any]) -> Any:
        try:
            return build()
        except ConfigError as error:
            if error.resolution is None:
                raise
            mine = self.target.mine(error.resolution)
            if self.refuses is not None and not (mine and {r.axis for r in mine} <= self.refuses):
                raise
            self.target.skip(error.resolution)

    def check(self, case: Case) -> None:
        """Forward and backward against the oracle; nothing given is written to."""
        theirs = case.mapped(lambda t: t.double().requires_grad_())
        mine = case.to(self.device).mapped(lambda t: t.detach().requires_grad_(self.learns))
        (out, used), (want, mass) = self.forward(mine), oracle(theirs)
        assert (out.shape, out.dtype) == (case.x.shape, case.x.dtype)
        error = (out.detach().double().cpu() - want.detach()).abs()
        assert (error <= tolerance(case, mass)).all(), f"off by {error.max():.2e}"
        for now, then in zip(mine.tensors, case.tensors, strict=True):
            assert torch.equal(now.cpu(), then), "an input was written to"
        if self.learns:
            self._check_gradients(case, out, used, want, theirs)

    def _check_gradients(
        self, case: Case, out: Tensor, used: dict[str, Tensor], want: Tensor, theirs: Case
    ) -> None:
        upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        poison(self.device, case.floats.values(), max(case.ids.numel(), 1))
        grads = torch.autograd.grad(out, list(used.values()), upstream.to(out))
        exact = torch.autograd.grad(
            want, list(theirs.floats.values()), upstream, allow_unused=True, materialize_grads=True
        )
        idle = [e for e in range(len(case.w13)) if not (case.ids == e).any()]
        for name, grad, right in zip(used, grads, exact, strict=True):
            error = (grad.double().cpu() - right).abs()
            limit = bounds.gradient(right, case.w13.dtype, gradient_size(case))
            assert (error <= limit).all(), f"gradient of {name} off by {error.max():.2e}"
            if name not in ("x", "topk"):
                assert not grad[idle].any(), f"idle experts have a gradient in {name}"

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_routing_patterns(self, pattern: str, dtype: str) -> None:
        self.check(self.case(PATTERNS[pattern], dtype))

    @EXAMPLES
    @given(ids=routings(num_experts=5))
    def test_any_routing(self, ids: list[list[int]]) -> None:
        self.check(self.case(ids, sizes=(5, 8, 8)))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_scaled_identity_is_exact(self, pattern: str, dtype: str) -> None:
        case = exact_case(slots(PATTERNS[pattern]), getattr(torch, dtype), self.sizes(4, 8, 8))
        out, _ = self.forward(case.to(self.device))
        assert torch.equal(out.cpu(), exact_result(case))

    @pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=label)
    def test_activations(self, activation: Activation) -> None:
        self.check(self.case(PATTERNS["mixed"], activation=activation))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", W13_LAYOUTS)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("on_input", [False, True])
    def test_layouts_biases_and_weighting(
        self, layout: str, bias: bool, on_input: bool, dtype: str
    ) -> None:
        case = self.case(PATTERNS["mixed"], dtype, bias=bias, layout=layout, on_input=on_input)
        self.check(case)
        self.check(case.tokens(0, 0))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("sizes", SHAPES, ids=str)
    def test_sizes(self, sizes: tuple[int, int, int], dtype: str) -> None:
        self.check(self.case(PATTERNS["all experts"], dtype, sizes=sizes))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_many_rows(self, dtype: str) -> None:
        """600 tokens, half of all slots to one expert: exact numbers, and a gradient whose sum over
        tokens is a float32 one."""
        tokens = torch.arange(600)
        ids = torch.stack([tokens * 0, 1 + tokens % 3], 1)
        case = exact_case(ids, getattr(torch, dtype), self.sizes(4, 8, 8))
        mine = case.to(self.device)
        mine.w2.requires_grad_(self.learns)  # the others' gradients overflow in float16
        out, used = self.forward(mine)
        assert torch.equal(out.detach().cpu(), exact_result(case))
        if not self.learns:
            return
        (got,) = torch.autograd.grad(out, [used["w2"]], torch.ones_like(out))
        places = identity_places(*case.w2.shape[1:])[:4]
        steps = bounds.gamma(bounds.ROUNDINGS, bounds.unit(case.x.dtype))
        for expert in range(4):
            weight = torch.where(case.ids == expert, case.topk.double(), 0).sum(1)
            want = (weight[:, None] * case.x.double()).sum(0)[:4]  # none of these is negative
            mine = got[expert, 0, places].double().cpu()
            assert ((mine - want).abs() <= steps * want).all(), f"{mine.tolist()}, not {want}"

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_long_sums_are_wide(self, dtype: str) -> None:
        """One and many that are too small to be added to it in half precision."""
        case = self.case([[0, -1]], dtype, sizes=(2, 256, 256)).mapped(torch.zeros_like)
        tiny = torch.finfo(case.x.dtype).eps / 4
        _, hidden, inner = case.w2.shape
        case.topk[0, 0] = 1
        for row in (case.x[0], *case.w2[0]):
            row[:] = tiny
            row[0] = 1
        case.w13[0, :inner, 0] = SURE
        case.w13[0, inner:] = 1
        out, _ = self.forward(case.to(self.device))
        want = SURE * (1 + (hidden - 1) * tiny) * (1 + (inner - 1) * tiny)
        steps = bounds.gamma(bounds.ROUNDINGS, bounds.unit(case.x.dtype))
        error = (out.double().cpu() - want).abs()
        assert (error <= steps * want).all(), f"{out[0, 0].item()}, not {want}"

    def test_workspace_bytes_are_enough(self) -> None:
        """What a call without gradients holds at its peak, results included. On CPUs the memory
        inside of an operator can't be seen."""
        for ids in ([[0, 0]] * 64, [[t % 4, -1] for t in range(64)], [[0, 1]]):
            case = self.case(ids, sizes=(4, 64, 48)).to(self.device)
            layer = self.experts(case)
            runner = layer.pipeline.runner
            declared = 0 if runner is None else runner.workspace_bytes(*case.ids.shape)
            if not declared:
                pytest.skip(f"{NOT_CLAIMED}workspace_bytes")
            with torch.no_grad():
                record, _ = layer.dispatch(case.x, case.ids, case.topk)
                taken = peak_bytes(lambda: layer.run(record), self.device)  # noqa: B023
            assert taken <= declared, f"{case.ids.shape}: takes {taken} bytes, declares {declared}"

    def test_replicas(self) -> None:
        """More slots than experts, for inference."""
        config = self.target.config(num_experts=7, top_k=3)
        on_ranks.placements(Job(self.backend, config, device=self.device, autograd=False))

    def test_uninitialised_memory_twice(self) -> None:
        # pytorch/pytorch#172439, #193633, #154557: sizes 5 0 7 0 0 3 and 8 rows of nobody
        ids = [[0]] * 5 + [[-1]] * 8 + [[2]] * 7 + [[5]] * 3
        case = self.case(ids, sizes=(6, 16, 32))
        for _ in range(2):
            self.check(case)

    def test_every_layout_that_it_takes(self) -> None:
        """Each port, from every local transport that leads to it, and the way back."""
        runners = self.target.of("runner")
        transports = partners("transport") + self.target.of("transport")
        tried = check_pairs(self.target, transports, runners)
        reached = {(pair.runner.label, pair.path.runner_in) for pair in tried}
        ports = {(c.label, taken) for c in runners for taken in c.part.takes}
        if ports - reached:
            pytest.skip(f"{NOT_HERE}no local transport leads to {sorted(ports - reached)}")

    def test_gaps_and_tail_are_nobodys(self) -> None:
        """NaN between experts, after the last one and in what comes back for those rows."""
        case = exact_case(slots([[0], [0], [2], [2], [2]]), self._torch_dtype, self.sizes(4, 8, 8))
        run_ports = [
            pair
            for pair in pairs(self.target, partners("transport"), self.target.of("runner"))
            if pair.path.runner_in == "expert_contiguous"
        ]
        if not run_ports:
            pytest.skip(f"{NOT_CLAIMED}takes=expert_contiguous")
        layer, dtype = self.experts(case), case.x.dtype
        rows, weight = torch.full((20, case.x.shape[1]), math.nan), torch.full((20,), math.nan)
        mine = torch.tensor([0, 1, 8, 9, 10])
        rows[mine], weight[mine] = case.x.float(), case.topk[:, 0].float()
        counts = torch.tensor([2, 0, 3], dtype=torch.int32)
        counts = torch.cat([counts, counts.new_zeros(len(case.w13) - 3)])
        starts = torch.tensor([0, 8, 8] + [16] * (len(counts) - 2), dtype=torch.int32)
        pipeline = run_ports[0].build(self.target)
        assert pipeline.runner is not None
        record = ExpertContiguous(
            rows.to(dtype).to(self.device).requires_grad_(self.learns),
            counts.to(self.device),
            starts.to(self.device),
            weight.to(case.topk).to(self.device),
            expert_alignment=8,
        )
        every = [getattr(record, f.name) for f in fields(record)]
        given = [t for t in every if isinstance(t, torch.Tensor)]
        before = [t.clone() for t in given]
        out: Any = pipeline.runner.run(record, layer.weights)
        for now, then in zip(given, before, strict=True):
            torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
        scale = scale_of(torch.tensor([0, 0, 2, 2, 2]))
        if "weight" in out.paid:
            scale = scale * case.topk[:, 0]
        want = identity_rows(case) * scale[:, None].to(dtype)
        assert torch.equal(out.rows[mine].cpu(), want)
        if not self.learns:
            return
        upstream = torch.full_like(record.rows, math.nan)
        upstream[mine] = 1
        leaves = [record.rows, layer.w13, layer.w2]
        grads = torch.autograd.grad(out.rows, leaves, upstream)
        assert grads[0][mine].isfinite().all()
        assert grads[1].isfinite().all()
        weighted = identity_rows(case) * (case.topk[:, :1].to(dtype) if "weight" in out.paid else 1)
        places, exact = identity_places(*case.w2.shape[1:]), torch.zeros_like(case.w2)
        for expert, part in ((0, slice(0, 2)), (2, slice(2, 5))):
            exact[expert][:, places] = weighted[part, : len(places)].sum(0)
        assert torch.equal(grads[2].cpu(), exact)

    def test_a_row_alone_has_the_same_bits(self) -> None:
        case = self.case([[t % 4, (t + 1) % 4] for t in range(37)]).to(self.device)
        layer = self.experts(case)
        runner = layer.pipeline.runner
        if runner is None or not runner.batch_invariant:
            pytest.skip(f"{NOT_CLAIMED}batch_invariant")
        whole = layer(case.x, case.ids, case.topk)
        for t in (0, 17, 36):
            one = case.tokens(t, t + 1)
            assert torch.equal(layer(one.x, one.ids, one.topk), whole[t : t + 1])

    def test_nothing_of_an_invalid_slot_is_used(self) -> None:
        case = self.case(PATTERNS["mixed"]).to(self.device)
        out, _ = self.forward(case)
        invalid = case.ids < 0
        bad = replace(case, topk=torch.where(invalid, math.nan, case.topk), x=case.x.clone())
        bad.x[invalid.all(1)] = math.nan
        bad.x.requires_grad_(self.learns)
        bad.topk.requires_grad_(self.learns)
        poisoned, _ = self.forward(bad)
        assert torch.equal(out, poisoned)
        if not self.learns:
            return
        poisoned.square().sum().backward()
        for tensor, rows in ((bad.x, invalid.all(1)), (bad.topk, invalid)):
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()
            assert not tensor.grad[rows].any()

    def test_strided_inputs_and_expanded_gradient(self) -> None:
        case = self.case(PATTERNS["mixed"])
        strided = case.mapped(lambda t: t.mT.contiguous().mT)
        strided.x = torch.stack([case.x, case.x], -1)[..., 0]
        strided.ids = case.ids.T.contiguous().T
        self.check(strided)
        grads: list[tuple[Tensor, ...]] = []
        for expanded in (True, False) if self.learns else ():
            call = case.to(self.device).mapped(lambda t: t.detach().requires_grad_())
            out, used = self.forward(call)
            one = torch.ones((), device=self.device, dtype=out.dtype)
            upstream = one.expand_as(out) if expanded else torch.ones_like(out)
            grads.append(torch.autograd.grad(out, list(used.values()), upstream))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    def _one_expert(self, gate: list[float], up: list[float], weight: float, **how: Any) -> Tensor:
        """What one expert gives for an input of (1, 0, ...) and these gates and ups: ``[H]``."""
        case = self.case([[0, -1]], sizes=(2, 4, 4), **how).mapped(torch.zeros_like)
        inner, count = case.w2.shape[2], len(gate)
        case.x[0, 0], case.topk[0, 0] = 1, weight
        halves = torch.zeros(2, inner)
        halves[0, :count], halves[1, :count] = torch.tensor(gate), torch.tensor(up)
        case.w13[0, :, 0] = {
            "gate_up": halves.flatten(),
            "up_gate": halves.flip(0).flatten(),
            "interleaved": halves.T.flatten(),
        }[case.layout]
        case.w2[0, range(count), range(count)] = 1
        return self.forward(case.to(self.device))[0][0].detach()

    def _near(self, got: Tensor, *values: float) -> None:
        """``values`` have four decimals; besides that a runner's roundings."""
        want = torch.tensor(values, dtype=torch.float64)
        limit = 5e-5 + bounds.gamma(bounds.ROUNDINGS, bounds.unit(self._torch_dtype)) * want.abs()
        error = (got[: len(values)].double().cpu() - want).abs()
        assert (error <= limit).all(), f"{got[: len(values)].tolist()}, not {values}"

    @property
    def _torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

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
        self._near(self._one_expert([5], [-5], 1, activation=activation), value)

    @pytest.mark.parametrize("layout", W13_LAYOUTS)
    def test_layouts_by_hand(self, layout: str) -> None:
        out = self._one_expert([1, 2, 3, 4], [10, 20, 30, 40], 1, layout=layout)
        # silu(1) * 10, silu(2) * 20, silu(3) * 30, silu(4) * 40
        self._near(out, 7.3106, 35.2319, 85.7317, 157.1222)

    @pytest.mark.parametrize(("on_input", "value"), [(True, 0.7311), (False, 1.7616)])
    def test_weight_on_input_by_hand(self, on_input: bool, value: float) -> None:
        # vllm-project/vllm#43694: silu(2 w) * 2 w or w * silu(2) * 2 with w = 0.5, never both
        self._near(self._one_expert([2], [2], 0.5, on_input=on_input), value)

    def test_output_bias_is_weighted_once(self) -> None:
        # pytorch/torchtitan#4245: a quarter and a half of a bias of one
        case = self.case([[0, 1], [1, -1]], bias=True).mapped(torch.zeros_like)
        assert case.b2 is not None
        case.b2 += 1
        case.topk += torch.tensor([0.25, 0.5])
        out, _ = self.forward(case.to(self.device))
        assert torch.equal(out.cpu(), torch.tensor([[0.75], [0.25]]).expand_as(out).to(out.dtype))

    @pytest.mark.parametrize("layout", W13_LAYOUTS)
    def test_prepared_weights(self, layout: str) -> None:
        case = self.case(PATTERNS["mixed"], layout=layout)
        layer = self.experts(case)
        want, mass = oracle(case)
        given = case.to(self.device)
        with torch.no_grad():
            for factor in (1, 1, 2):  # preparing twice converts once; stale ones are made anew
                layer.w2.copy_(case.w2 * factor)
                layer.prepare_weights()
                if factor == 2:
                    layer.w2.copy_(case.w2)
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
            self.case([[t % 3, (t + 1) % 4 - 1] for t in range(tokens)]) for tokens in (1, 7, 64)
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
                x = x.detach().requires_grad_(self.learns)
                layer.zero_grad()
                out = run(x, ids, topk)
                results.append([out])
                if self.learns:
                    out.square().sum().backward()
                    results[-1] += [x.grad, layer.w13.grad, layer.w2.grad]
            for mine, eager in zip(*results, strict=True):
                torch.testing.assert_close(mine, eager)
        assert len(graphs) <= 2

"""What every backend owes a layer, whatever it claims: nobody can skip these.

    class TestMine(CoreConformance):
        backend = "mine"

Requests here ask for the least that the parts offer (``Target.config``). Parts that the spec leaves
open are chosen as for any user of it.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from moe_core import (
    ConfigError,
    Experts,
    HandleError,
    InputError,
    MoELayer,
    RouterConfig,
    Routing,
)
from moe_core.conformance import bounds, on_ranks
from moe_core.conformance.cases import (
    Case,
    exact_case,
    exact_result,
    gradient_size,
    oracle,
    slots,
    sum_length,
)
from moe_core.conformance.rank import Job
from moe_core.conformance.target import PREFERRED, Conformance

if TYPE_CHECKING:
    from torch import Tensor

IDS = [[2, 0], [0, -1], [3, 3], [-1, -1], [0, 2], [1, 0]]


class CoreConformance(Conformance):
    """Subclass it and set ``backend`` to a spec; tests collect the subclass."""

    profile: ClassVar[str] = "core"

    @property
    def learns(self) -> bool:
        return self.target.autograd

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.target.dtypes[0])

    def layer(self, **changes: Any) -> MoELayer:
        torch.manual_seed(0)
        how = {"backend": self.backend, "device": self.device, "inference": not self.learns}
        names = ("inference", "max_tokens_per_rank")
        how |= {name: changes.pop(name) for name in names if name in changes}
        return MoELayer(self.target.config(**changes), **how)

    def exact(self, **wants: Any) -> tuple[Experts, Case]:
        """Experts with exact numbers and a batch for them; ``exact_result`` has the answer."""
        config = self.target.config()
        sizes = (config.num_experts, config.hidden_size, config.intermediate_size)
        ids = slots([(row * config.top_k)[: config.top_k] for row in IDS])
        case = exact_case(ids, self.dtype, sizes)
        wants = {"device": self.device, "inference": not self.learns} | wants
        experts = Experts(config, backend=self.backend, **wants)
        experts.load_full_weights(case.w13, case.w2)
        return experts, case.to(self.device)

    def tokens(self, layer: MoELayer, *shape: int) -> Tensor:
        drawn = torch.Generator().manual_seed(1)
        x = torch.randn(*shape, layer.config.hidden_size, generator=drawn, dtype=torch.float64)
        return x.to(self.device, layer.experts.dtype)

    def case(self, layer: MoELayer, x: Tensor, routing: Routing) -> Case:
        """The call that the routed experts got, for the oracle."""
        ids, weights = routing.ids_and_weights()
        w, e = layer.config, layer.experts
        given = Case(
            *(x.detach().view(len(ids), -1), ids, weights.detach()),
            *(e.w13.detach(), e.w2.detach()),
            layout=w.w13_layout,
            activation=w.activation,
        )
        return given.to("cpu")

    def check(self, layer: MoELayer, x: Tensor, y: Tensor, routing: Routing) -> Tensor:
        """The routed part of ``y`` against the oracle → its bound ``[T, H]``."""
        case = self.case(layer, x, routing)
        want, mass = oracle(case)
        limit = bounds.forward(mass, case.w13.dtype, sum_length(case))
        error = (y.detach().double().cpu().view_as(want) - want).abs()
        assert (error <= limit).all(), f"off by {error.max():.2e}"
        return limit

    def local(self, **changes: Any) -> Job:
        """A job of one rank, for what the suites of transports check on many."""
        config = self.target.config(hidden_size=8, num_experts=7, top_k=3, **changes)
        return Job(self.backend, config, tokens=(5,), device=self.device, autograd=self.learns)

    # -- numbers

    def test_exact_numbers(self) -> None:
        on_ranks.exact_numbers(self.local())

    def test_numbers_and_gradients(self) -> None:
        finest = min(self.target.dtypes, key=["float64", *PREFERRED].index)
        on_ranks.numbers(self.local(dtype=finest))

    def test_steps_without_tokens(self) -> None:
        on_ranks.idle_steps(self.local())

    def test_bad_input_raises(self) -> None:
        on_ranks.faults(self.local())

    def test_a_layer_gives_the_numbers_of_the_definition(self) -> None:
        layer = self.layer()
        x = self.tokens(layer, 3, 4)
        y, routing = layer(x, return_routing=True)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        self.check(layer, x, y, routing)

    def test_gradients_of_a_layer(self) -> None:
        """Router, experts and input, against the reference backend in float64."""
        if not self.learns:
            return  # that it says so is for test_offer
        layer = self.layer(router=RouterConfig(renormalize=True))
        exact = MoELayer(replace(layer.config, dtype="float64"), backend="reference")
        exact.load_state_dict({k: v.double().cpu() for k, v in layer.state_dict().items()})
        x = self.tokens(layer, 7)
        grads: list[list[Tensor]] = []
        for model, rows in ((layer, x), (exact, x.double().cpu())):
            rows = rows.clone().requires_grad_()
            model(rows).square().sum().backward()
            found = [rows.grad, *(p.grad for p in model.parameters())]
            grads.append([g for g in found if g is not None])
        assert len(grads[0]) == len(grads[1]) == 4
        _, routing = layer(x, return_routing=True)
        size = gradient_size(self.case(layer, x, routing))
        for got, want in zip(*grads, strict=True):
            error = (got.double().cpu() - want).abs().max().item()
            assert error <= bounds.gradient(want, self.dtype, size)

    def test_idle_experts_have_zero_gradients(self) -> None:
        if not self.learns:
            return
        experts, case = self.exact()
        case.x.requires_grad_()
        ids = torch.where(case.ids >= 0, 1, -1)
        experts(case.x, ids, case.topk).sum().backward()
        idle = [e for e in range(len(experts.w13)) if e != 1]
        for parameter in experts.parameters():
            assert parameter.grad is not None
            assert not parameter.grad[idle].any()
            assert parameter.grad[1].any()

    # -- nothing is normal

    def test_no_tokens_and_leading_shapes(self) -> None:
        layer = self.layer()
        for shape in ((0,), (2, 0), (0, 3), (), (2, 1, 3)):
            layer.zero_grad()
            x = self.tokens(layer, *shape).requires_grad_(self.learns)
            y = layer(x)
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
            if not self.learns:
                continue
            y.sum().backward()
            for tensor in (x, *layer.parameters()):
                assert tensor.grad is not None
                assert x.numel() or not tensor.grad.any()

    def test_padding_is_not_read(self) -> None:
        """NaN in masked tokens; they choose nobody, come back as zeros, and change no other."""
        layer = self.layer()
        mask = torch.tensor([True, False, True, True, False, True, True], device=self.device)
        x = self.tokens(layer, 7)
        dirty = torch.where(mask[:, None], x, math.nan).requires_grad_(self.learns)
        y, routing = layer(dirty, token_mask=mask, return_routing=True)
        ids, weights = routing.ids_and_weights()
        assert not y[~mask].any()
        assert (ids[~mask] == -1).all()
        assert not weights[~mask].any()
        clean = torch.where(mask[:, None], x, 0)
        self.check(layer, clean, y, routing)
        if self.learns:
            y.sum().backward()
            assert dirty.grad is not None
            assert not dirty.grad[~mask].any()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())

    # -- each factor once

    @pytest.mark.parametrize("renormalize", [False, True])
    def test_the_scaling_factor_reaches_the_routed_output_once(self, renormalize: bool) -> None:
        outs: list[Tensor] = []
        routed: list[Tensor] = []
        limit = torch.zeros(())
        for factor in (1.0, 2.5):
            router = RouterConfig(routed_scaling_factor=factor, renormalize=renormalize)
            layer = self.layer(router=router, num_shared_experts=1)
            x = self.tokens(layer, 5)
            y, routing = layer(x, return_routing=True)
            assert layer.shared_experts is not None
            part = y - layer.shared_experts(x)
            # the subtraction, and the sum that it undoes, round once each
            spare = 2 * bounds.unit(self.dtype) * y.detach().double().cpu().abs()
            case = self.case(layer, x, routing)
            want, mass = oracle(case)
            limit = limit * 2.5 + bounds.forward(mass, self.dtype, sum_length(case)) + spare
            assert ((part.detach().double().cpu() - want).abs() <= limit).all()
            outs.append(part.detach().double().cpu())
            routed.append(routing.ids_and_weights()[1].double())
        steps = bounds.gamma(2 * bounds.ROUTER_STEPS, bounds.unit(torch.float32))
        torch.testing.assert_close(routed[1], 2.5 * routed[0], rtol=steps, atol=0)
        spread = steps * 2.5 * outs[0].abs().amax()
        assert ((outs[1] - 2.5 * outs[0]).abs() <= limit + spread).all()

    def test_weights_are_linear_and_ids_count_as_often_as_they_occur(self) -> None:
        experts, case = self.exact()
        whole = experts(case.x, case.ids, case.topk)
        assert torch.equal(whole.cpu(), exact_result(case.to("cpu")))
        assert torch.equal(experts(case.x, case.ids, 2 * case.topk), 2 * whole)
        assert torch.equal(experts(case.x, case.ids, -case.topk), -whole)
        alone = torch.zeros_like(whole)
        for slot in range(case.ids.shape[1]):
            only = torch.arange(case.ids.shape[1], device=self.device) == slot
            alone += experts(case.x, torch.where(only, case.ids, -1), case.topk)
            # weight 0 with a valid id is real work, and adds nothing
            zero = experts(case.x, case.ids, torch.where(only, case.topk, 0))
            assert torch.equal(zero, experts(case.x, torch.where(only, case.ids, -1), case.topk))
        assert torch.equal(alone, whole)

    @pytest.mark.parametrize("ids", [torch.int16, torch.int32, torch.int64], ids=str)
    def test_dtypes_of_ids_and_weights(self, ids: torch.dtype) -> None:
        # vllm-project/vllm#48895, ROCm/aiter#5255: read as another dtype, plausible numbers
        experts, case = self.exact()
        want = exact_result(case.to("cpu"))
        for weights in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            out = experts(case.x, case.ids.to(ids), case.topk.to(weights))
            assert torch.equal(out.cpu(), want)

    # -- what goes in and comes out

    @pytest.mark.parametrize("inference", [False, True])
    def test_inputs_stay_and_outputs_are_fresh(self, inference: bool) -> None:
        experts, case = self.exact(inference=inference or not self.learns)
        wide = torch.stack([case.x, case.x], 1)
        x, ids = wide[:, 1], case.ids.T.contiguous().T  # not contiguous
        before = [t.clone() for t in (wide, ids, case.topk)]
        first, second = experts(x, ids, case.topk), experts(x, ids, case.topk)
        assert torch.equal(first, second)
        assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        assert first.untyped_storage().data_ptr() != wide.untyped_storage().data_ptr()
        second.detach().fill_(7)
        assert torch.equal(first.cpu(), exact_result(case.to("cpu")))
        for now, then in zip((wide, ids, case.topk), before, strict=True):
            assert torch.equal(now, then)

    def test_handles(self) -> None:
        experts, case = self.exact()
        if experts.pipeline.transport is not None:
            on_ranks.handles(self.local())
            return
        with pytest.raises(HandleError, match="fused"):
            experts.dispatch(case.x, case.ids, case.topk)

    def test_autocast_changes_nothing(self) -> None:
        experts, case = self.exact()
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16):
            out = experts(case.x, case.ids, case.topk)
        assert torch.equal(out.cpu(), exact_result(case.to("cpu")))

    def test_a_gradient_nobody_can_give_is_refused(self) -> None:
        experts, case = self.exact(inference=True)
        assert not experts(case.x, case.ids, case.topk).requires_grad
        case.x.requires_grad_()
        with pytest.raises(InputError, match="inference=True"):
            experts(case.x, case.ids, case.topk)
        with torch.no_grad():
            experts(case.x, case.ids, case.topk)

    # -- the layer as an object

    def test_the_parts_are_those_that_were_named(self) -> None:
        layer = self.layer()
        chosen = {role: c.label for role, c in layer.resolution.parts.items()}
        for role in self.target.roles:
            if role in chosen:  # a fused path takes the place of transport and runner
                assert chosen[role] in [c.label for c in self.target.of(role)]
        assert set(chosen) & set(self.target.roles)
        described = layer.describe()
        assert json.loads(json.dumps(described)) == described
        assert described["parts"] == chosen

    def test_state_dict_is_the_canonical_form(self) -> None:
        layer = self.layer()
        c = layer.config
        assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == {
            "experts.w13": (c.num_experts, 2 * c.intermediate_size, c.hidden_size),
            "experts.w2": (c.num_experts, c.hidden_size, c.intermediate_size),
            "router.weight": (c.num_experts, c.hidden_size),
        }
        assert all(v.isfinite().all() for v in layer.state_dict().values())
        other = self.layer()
        for parameter in other.parameters():
            parameter.data.zero_()
        other.load_state_dict(layer.state_dict())
        x = self.tokens(layer, 5)
        assert torch.equal(other(x), layer(x))
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))

    def test_another_dtype_is_another_choice(self) -> None:
        layer = self.layer()
        for name in PREFERRED:
            dtype = getattr(torch, name)
            if not self.target.offers("dtype", name):
                with pytest.raises(ConfigError, match="dtype"):
                    copy.deepcopy(layer).to(dtype)
                continue
            moved = copy.deepcopy(layer).to(dtype)
            assert moved.describe()["dtype"] == name
            router = torch.float64 if name == "float64" else torch.float32
            assert moved.router.weight.dtype == router
            x = self.tokens(moved, 5)
            y, routing = moved(x, return_routing=True)
            self.check(moved, x, y, routing)

    def test_prepared_weights_follow_the_parameters(self) -> None:
        experts, case = self.exact()
        want = exact_result(case.to("cpu"))
        with torch.no_grad():
            for _ in range(2):
                experts.prepare_weights()
                assert torch.equal(experts(case.x, case.ids, case.topk).cpu(), want)
            experts.w2.mul_(2)  # stale now
            assert torch.equal(experts(case.x, case.ids, case.topk).cpu(), 2 * want)

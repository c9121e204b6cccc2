"""The layer as a whole, on every local backend: what it returns, refuses, and never does."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import moe_core
import moe_core.functional
import moe_core.registry
from moe_core import (
    Activation,
    ConfigError,
    Experts,
    HandleError,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    Router,
    RouterConfig,
    Routing,
    moe_forward,
    trace,
)
from moe_core.contracts import IdSpace
from moe_core.interfaces import FusedPath
from moe_core.reference import expert_forward
from moe_core.registry import register_backend, unregister_backend
from moe_core.routing import TopKRouter

BACKENDS = ["reference", "torch", "torch[gemm=loop]", "reference+torch", "torch+reference"]
V4 = RouterConfig(
    scoring_func="sqrtsoftplus", correction_bias=True, renormalize=True, routed_scaling_factor=1.5
)


def config(**changes: Any) -> MoEConfig:
    base = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_experts": 6,
        "top_k": 3,
        "router": V4,
        "activation": Activation(limit=2.0),
        "num_shared_experts": 1,
        "dtype": "float64",
    }
    return MoEConfig(**base | changes)


def layer(backend: str = "auto", seed: int = 0, **changes: Any) -> MoELayer:
    torch.manual_seed(seed)
    built = MoELayer(config(**changes), backend=backend)
    if built.config.router.correction_bias:
        built.router.e_score_correction_bias.normal_(0, 0.1)  # pyright: ignore
    return built


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(
        *shape, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": RouterConfig(), "activation": Activation(name="gelu"), "bias": True},
        {"router": RouterConfig(kind="hash", vocab_size=11, renormalize=True)},
        {"activation": Activation(name="relu2", gated=False), "num_shared_experts": 2},
        {
            "activation": Activation(alpha=1.702, limit=7.0),
            "w13_layout": "interleaved",
            "bias": True,
        },
        {"apply_router_weight_on_input": True, "w13_layout": "up_gate"},
        {"router": RouterConfig(num_expert_group=3, topk_group=2), "combine": "per_slot"},
    ],
    ids=["v4", "bias", "hash", "ungated", "gpt-oss", "on-input", "grouped"],
)
def test_forward_and_gradients_equal_the_reference(backend: str, changes: dict[str, Any]) -> None:
    ours, oracle = layer(backend, **changes), layer("reference", **changes)
    with torch.no_grad():
        for (name, mine), theirs in zip(ours.named_parameters(), oracle.parameters(), strict=True):
            if "bias" in name:
                mine.normal_(0, 0.3)
            theirs.copy_(mine)
    ids = torch.arange(10).view(2, 5) % 7
    results = []
    for model in (ours, oracle):
        x = tokens(2, 5).requires_grad_()
        y = model(x, ids)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "torch", "torch[gemm=loop]"])
def test_gradcheck(backend: str) -> None:
    model = layer(backend, hidden_size=16, intermediate_size=4, num_experts=4, top_k=2)
    names = [n for n, _ in model.named_parameters()]

    def run(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, params, strict=True)), (x,))

    params = [p.detach().clone().requires_grad_() for p in model.parameters()]
    inputs = (tokens(3).requires_grad_(), *params)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_is_normal(backend: str) -> None:
    model = layer(backend)
    for shape in ((0,), (2, 0), (0, 3)):
        model.zero_grad()
        x = torch.empty(*shape, 16, dtype=torch.float64, requires_grad=True)
        y = model(x)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert not p.grad.any(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tokens_are_not_read_and_change_nothing(backend: str) -> None:
    model = layer(backend)
    x = tokens(7)
    mask = torch.tensor([True, False, True, True, False, True, True])
    dirty = torch.where(mask[:, None], x, math.nan).requires_grad_()
    y, routing = model(dirty, token_mask=mask, return_routing=True)
    assert torch.equal(y[~mask], torch.zeros(2, 16, dtype=torch.float64))
    assert (routing.topk_ids[~mask] == -1).all()
    assert (routing.topk_weights[~mask] == 0).all()
    alone = model(x[mask])
    torch.testing.assert_close(y[mask], alone, rtol=1e-12, atol=1e-13)
    y.sum().backward()
    assert torch.equal(dirty.grad[~mask], torch.zeros(2, 16, dtype=torch.float64))  # pyright: ignore
    assert all(p.grad.isfinite().all() for p in model.parameters())  # pyright: ignore


def test_inputs_are_not_written_to_and_outputs_are_fresh() -> None:
    for backend in BACKENDS:
        model = layer(backend, num_shared_experts=0)
        wide = tokens(6, 2)
        x = wide[:, 1]  # not contiguous
        before = wide.clone()
        first, second = model(x), model(x)
        assert torch.equal(wide, before)
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
        assert first.untyped_storage().data_ptr() != wide.untyped_storage().data_ptr()


def test_shapes_dtypes_and_values_are_refused_before_anything_runs() -> None:
    model = layer("torch")
    experts, x = model.experts, tokens(4)
    ids, weights = torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, 3)
    for call, message in (
        (lambda: model([1.0]), "must be a tensor, not a list"),  # pyright: ignore
        (lambda: model(x[:, :8]), r"\[\.\.\., 16\]"),
        (lambda: model(x.float()), "must be torch.float64"),
        (lambda: model(x, phase="train"), "prefill, decode"),
        (
            lambda: model(x, token_mask=torch.ones(3, dtype=torch.bool)),
            "token_mask must have shape",
        ),
        (lambda: model(x, token_mask=torch.ones(4)), "must be bool"),
        (lambda: experts(x, ids[:, :2], weights), r"\(4, 3\)"),
        (lambda: experts(x, ids.double(), weights), "int32 or int64"),
        (lambda: experts(x, ids, weights.long()), "float dtype"),
        (lambda: experts(x, ids.clone().fill_(6), weights), r"12 of 12 topk_ids .* first is 6"),
        (lambda: experts(x, ids - 2, weights), "first is -2 at token 0, slot 0"),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_any_integer_id_dtype_gives_the_same_numbers(backend: str, dtype: torch.dtype) -> None:
    experts = layer(backend).experts
    x, ids = tokens(4), torch.tensor([[0, 1, 5], [2, 2, 3], [4, 0, 1], [5, 4, 3]])
    weights = torch.full((4, 3), 0.5)
    expected = experts(x, ids, weights)
    assert torch.equal(experts(x, ids.to(dtype), weights), expected)
    for half in (torch.bfloat16, torch.float16):  # .5 is exact in both
        assert torch.equal(experts(x, ids, weights.to(half)), expected)


def test_weights_are_not_narrowed_to_the_rows_dtype() -> None:
    """A float32 weight of 1 + 2^-10 is 1 in bfloat16; the sum must see it (sglang#39351)."""
    for backend in ("reference", "torch"):
        experts = Experts(config(dtype="bfloat16", top_k=2), backend=backend)
        with torch.no_grad():
            experts.w13.fill_(1 / 16)
            experts.w2.fill_(1 / 24)
        x = torch.ones(1, 16, dtype=torch.bfloat16)
        ids = torch.tensor([[0, 1]])
        expert = experts(x, ids, torch.tensor([[1.0, 0.0]])).double()
        y = experts(x, ids, torch.tensor([[1 + 2**-10, -1.0]])).double()
        torch.testing.assert_close(y, expert * 2**-10, rtol=2**-8, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_handles_are_single_use_and_do_not_mix(backend: str) -> None:
    one, other = layer(backend).experts, layer(backend).experts
    x, ids = tokens(3), torch.tensor([[0, 1, 2], [3, 4, 5], [0, -1, 5]])
    a, b = torch.rand(3, 3).double(), torch.rand(3, 3).double()
    record_a, handle_a = one.dispatch(x, ids, a)
    record_b, handle_b = one.dispatch(2 * x, ids, b)  # two in flight
    out_b, out_a = one.run(record_b), one.run(record_a)
    assert torch.equal(one.combine(out_b, handle_b), one(2 * x, ids, b))
    with pytest.raises(HandleError, match="another"):
        other.combine(out_a, handle_a)
    assert torch.equal(one.combine(out_a, handle_a), one(x, ids, a))
    with pytest.raises(HandleError, match="already combined"):
        one.combine(out_a, handle_a)


def test_scale_reaches_the_output_exactly_once() -> None:
    """Routed part only: 1.5 scales it, and the shared expert isn't touched."""
    for backend in BACKENDS:
        plain, scaled = (
            layer(backend, router=RouterConfig(renormalize=True, routed_scaling_factor=f))
            for f in (1.0, 1.5)
        )
        scaled.load_state_dict(plain.state_dict())
        x = tokens(5)
        shared = plain.shared_experts(x)  # pyright: ignore
        torch.testing.assert_close(
            scaled(x) - shared, 1.5 * (plain(x) - shared), rtol=1e-11, atol=1e-13
        )


def test_casting_and_moving_choose_again_and_keep_integer_buffers() -> None:
    model = layer("torch", router=RouterConfig(kind="hash", vocab_size=50_000, renormalize=True))
    table = model.router.tid2eid.clone()  # pyright: ignore
    assert model.experts.describe()["runner"]["engine"] == "loop"
    model.to(torch.bfloat16)
    assert model.experts.describe()["dtype"] == "bfloat16"
    assert model.experts.describe()["runner"]["engine"] == "grouped_mm"
    assert model.backend_name == "torch"
    assert torch.equal(model.router.tid2eid, table)  # pyright: ignore
    assert model.router.weight.dtype == torch.float32
    y = model(torch.randn(4, 16, dtype=torch.bfloat16), torch.arange(4))
    assert y.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="loop"):
        layer("torch[gemm=grouped]").double()


def test_autocast_does_not_lower_the_layer() -> None:
    model = layer("torch", dtype="float32")
    x = tokens(6).float()
    expected, routing = model(x, return_routing=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, again = model(x, return_routing=True)
        assert torch.equal(y, expected)
        assert torch.equal(again.topk_weights, routing.topk_weights)
        assert model(x.bfloat16()).dtype == torch.float32  # what a Linear before it would give


def test_top1_with_constant_weights_warns_and_truly_has_no_gradient() -> None:
    with pytest.warns(UserWarning, match="router gets no gradient"):
        model = MoELayer(config(top_k=1, num_shared_experts=0))
    model(tokens(5)).square().sum().backward()
    # K = 1, renormalised: the weight is 1.5 whatever the logit is.
    assert not model.router.weight.grad.any()  # pyright: ignore
    with pytest.warns(UserWarning, match="router gets no gradient"):
        MoELayer(config(top_k=1, router=RouterConfig(softmax_before_topk=False)))
    MoELayer(config(top_k=1), inference=True)  # filterwarnings=error: would raise
    learns = MoELayer(config(top_k=1, router=RouterConfig(), num_shared_experts=0))
    learns(tokens(5)).square().sum().backward()
    assert learns.router.weight.grad.any()  # pyright: ignore


def test_inference_layers_need_no_gradient_and_refuse_to_give_one() -> None:
    model = MoELayer(config(), inference=True)
    assert not any(p.requires_grad for p in model.parameters())
    assert not model(tokens(2)).requires_grad
    with pytest.raises(InputError, match="inference=True"):
        model(tokens(2).requires_grad_())


def test_max_tokens_per_rank_is_a_limit() -> None:
    model = MoELayer(config(), max_tokens_per_rank=4)
    model(tokens(4))
    with pytest.raises(InputError, match=r"5 tokens.*max_tokens_per_rank=4"):
        model(tokens(5))
    with pytest.raises(ConfigError, match="max_tokens_per_rank"):
        MoELayer(config(), max_tokens_per_rank=0)


def test_building_faults() -> None:
    with pytest.raises(ConfigError, match="ep_size") as error:
        MoELayer(config(), ParallelConfig(ep_size=2), "torch")
    refusals = error.value.resolution.refusals  # pyright: ignore
    assert {r.part for r in refusals if r.axis == "ep_size"} == {"torch.transport"}
    assert {f.field for f in error.value.faults} == {"parallel"}  # no process group either
    with pytest.raises(ConfigError, match=r"needs torch\.distributed\.init_process_group"):
        MoELayer(config(), ParallelConfig(ep_size=2))
    with pytest.raises(ConfigError, match="policy"):
        MoELayer(config(), policy="lenient")
    with pytest.raises(LookupError, match="did you mean 'torch'"):
        MoELayer(config(), backend="torhc")


def test_unknown_variables_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_BACKENDS", "torch")
    with pytest.raises(ConfigError, match="did you mean 'MOE_BACKEND'"):
        MoELayer(config())


def test_building_on_the_meta_device_makes_no_numbers() -> None:
    model = MoELayer(config(), device="meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(layer().state_dict())
    assert torch.equal(model(tokens(3)), layer()(tokens(3)))


def test_own_router_and_saved_routing() -> None:
    calls: list[torch.Size] = []

    def everyone_to_expert_two(x: torch.Tensor, input_ids: torch.Tensor | None) -> Any:
        calls.append(x.shape)
        return torch.full((x.shape[0], 1), 2), torch.ones(x.shape[0], 1, dtype=x.dtype)

    model = MoELayer(
        config(top_k=1, num_shared_experts=0), router=everyone_to_expert_two, inference=True
    )
    x = tokens(2, 3)
    y, routing = model(x, return_routing=True)
    expected = expert_forward(x.view(6, 16), 2, model.experts.weights)
    torch.testing.assert_close(y.view(6, 16), expected, rtol=1e-12, atol=1e-13)
    again = model(x, routing=routing)
    assert torch.equal(again, y)
    assert calls == [torch.Size([6, 16])]  # replayed, not routed again


def test_checkpointing_with_saved_routing_survives_a_router_that_flips() -> None:
    """Recomputed routing may flip ties; replayed routing can't (Automodel#3140)."""

    class Flipping(TopKRouter):
        calls = 0

        def forward(self, hidden_states, input_ids=None, token_mask=None) -> Routing:
            Flipping.calls += 1
            noise = torch.randn_like(hidden_states) * (Flipping.calls > 1)
            return super().forward(hidden_states + noise, input_ids, token_mask)

    for reentrant in (False, True):
        Flipping.calls = 0
        plain = layer("torch")
        model = MoELayer(plain.config, backend="torch", router=Flipping(plain.config))
        model.load_state_dict(plain.state_dict())
        x = tokens(9).requires_grad_()
        plain(x).square().sum().backward()
        expected, x.grad = x.grad, None
        routing = model.router(x)

        def run(x: torch.Tensor, routing: Routing = routing, model: MoELayer = model) -> Any:
            return model(x, routing=routing)

        y = checkpoint(run, x, use_reentrant=reentrant)
        y.square().sum().backward()  # pyright: ignore
        torch.testing.assert_close(x.grad, expected, rtol=1e-11, atol=1e-13)


class LogitsOnly(Router):
    routing_ids = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(6, 16, dtype=torch.float64))

    def forward(self, hidden_states, input_ids=None, token_mask=None) -> Routing:
        return Routing(None, None, router_logits=hidden_states @ self.weight.T)


class RoutesByItself(FusedPath):
    """Sends each token to its best expert, weight 1: routing inside the kernel."""

    def forward(self, hidden_states, routing, weights) -> torch.Tensor:
        best = routing.router_logits.argmax(-1)
        rows = [
            expert_forward(row[None], int(e), weights)
            for row, e in zip(hidden_states, best, strict=True)
        ]
        return torch.cat(rows)


def test_a_routing_without_ids_goes_to_a_kernel_that_routes_and_to_no_other() -> None:
    for backend in ("torch", "reference"):
        with pytest.raises(ConfigError, match="routing_ids: wanted no"):
            MoELayer(config(), backend=backend, router=LogitsOnly())
    register_backend(
        {
            "name": "inside",
            "api": "1.0",
            "parts": [
                {
                    "role": "fused",
                    "target": f"{__name__}:RoutesByItself",
                    "pays": ["weight", "slot_sum", "rank_sum", "tp_sum"],
                    "offer": {
                        "routing_ids": [False],
                        "dtype": ["float64"],
                        "limit": ["before"],
                        "autograd": True,
                    },
                }
            ],
        }
    )
    try:
        model = MoELayer(config(num_shared_experts=0), backend="inside", router=LogitsOnly())
        x = tokens(4)
        with trace() as seen:
            y = model(x)
        best = x[:, :6].argmax(-1)
        for row, expert, got in zip(x, best.tolist(), y, strict=True):
            want = expert_forward(row[None], expert, model.experts.weights)[0]
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        assert list(seen.calls[0].stages) == ["router", "fused"]
        with pytest.raises(InputError, match="was chosen for"):
            model(x, routing=layer().router(x))
        with pytest.raises(HandleError, match="is fused"):
            model.experts.pipeline.dispatch(x, Routing(None, None))
    finally:
        unregister_backend("inside")


def test_prepared_weights_follow_the_parameters() -> None:
    for layout in ("gate_up", "interleaved", "up_gate"):
        experts = layer("torch", w13_layout=layout).experts
        x, ids = tokens(4), torch.tensor([[0, 1, 2]] * 4)
        weights = torch.rand(4, 3).double()
        before = experts(x, ids, weights)
        experts.prepare_weights()
        with torch.no_grad():
            torch.testing.assert_close(experts(x, ids, weights), before, rtol=1e-12, atol=1e-13)
            experts.prepare_weights()  # twice is once
            torch.testing.assert_close(experts(x, ids, weights), before, rtol=1e-12, atol=1e-13)
            experts.w2.mul_(2)  # stale: prepared again at the next call
            torch.testing.assert_close(experts(x, ids, weights), 2 * before, rtol=1e-12, atol=1e-13)
        experts.w2.data = experts.w2.data / 2
        with torch.no_grad():
            torch.testing.assert_close(experts(x, ids, weights), before, rtol=1e-12, atol=1e-13)


def test_full_weights_are_loaded_whole_or_not_at_all() -> None:
    experts = layer(bias=True).experts
    w13, w2 = torch.randn(6, 48, 16), torch.randn(6, 16, 24)
    biases = torch.randn(6, 48), torch.randn(6, 16)
    experts.load_full_weights(w13, w2, *biases)
    assert torch.equal(experts.w13, w13.double())
    assert torch.equal(experts.w2_bias, biases[1].double())  # pyright: ignore
    kept = experts.w13.clone()
    with pytest.raises(InputError, match=r"w2 must have shape .*needs w13_bias"):
        experts.load_full_weights(torch.zeros(6, 48, 16), w2[1:])
    assert torch.equal(experts.w13, kept)


def test_moe_forward_is_the_experts() -> None:
    experts = layer("torch", bias=True).experts
    x, ids = tokens(2, 4), torch.arange(24).view(8, 3) % 7 - 1
    weights = torch.rand(8, 3).double()
    y = moe_forward(
        x, ids, weights, experts.w13, experts.w2,
        w13_bias=experts.w13_bias, w2_bias=experts.w2_bias, activation=experts.config.activation,
    )  # fmt: skip
    assert torch.equal(y, experts(x, ids, weights))
    with pytest.raises(InputError, match=r"w13 must have shape .*gated=False"):
        moe_forward(x, ids, weights, experts.w13, experts.w2, activation=Activation(gated=False))


def test_trace_shows_what_went_where() -> None:
    model = layer("torch")
    model.name = "block 3"
    x = tokens(5)
    with trace() as seen:
        y, routing = model(x, return_routing=True)
        model(x)
    assert [c.name for c in seen.calls] == ["block 3", "block 3"]
    call = seen.calls[0]
    assert list(call.stages) == ["router", "dispatch", "experts", "combine", "shared_experts"]
    assert all(seconds > 0 for seconds in call.stages.values())
    counts = [int((routing.topk_ids == e).sum()) for e in range(6)]
    assert call.rows_per_expert == counts
    assert seen.rows_per_expert == [2 * c for c in counts]
    assert seen.payload_bytes == [[0]]
    assert seen.collectives == []
    starts = [sum(counts[:e]) for e in range(6)]
    assert call.slot_rows is not None
    assert call.expert_rows is not None
    for token in range(5):
        for slot in range(3):
            expert = int(routing.topk_ids[token, slot])
            row = int(call.slot_rows[token, slot])
            assert starts[expert] <= row < starts[expert] + counts[expert]
    total = (call.expert_rows * routing.topk_weights[..., None]).sum(1) + model.shared_experts(x)  # pyright: ignore
    torch.testing.assert_close(total, y, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(call.output, y, rtol=0, atol=0)
    model(x)
    assert len(seen.calls) == 2  # closed


def test_compiles_whole_with_few_graphs() -> None:
    model = layer("torch", dtype="float32")
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for count in (1, 7, 64):
        x = tokens(count).float()
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


def test_state_dict_is_the_canonical_form() -> None:
    model = layer("torch", bias=True)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert shapes == {
        "experts.w13": (6, 48, 16),
        "experts.w2": (6, 16, 24),
        "experts.w13_bias": (6, 48),
        "experts.w2_bias": (6, 16),
        "router.weight": (6, 16),
        "router.e_score_correction_bias": (6,),
        "shared_experts.w13": (48, 16),
        "shared_experts.w2": (16, 24),
    }
    assert all(v.isfinite().all() for v in model.state_dict().values())
    reference = MoELayer(model.config, backend="reference")
    reference.load_state_dict(model.state_dict())
    for original in (model, reference, layer("torch", dtype="float32")):
        x = tokens(2).to(original.experts.dtype)
        assert torch.equal(copy.deepcopy(original)(x), original(x))


def test_describe_is_json_and_shows_what_is_in_effect() -> None:
    described = layer("torch").describe()
    assert json.loads(json.dumps(described)) == described
    assert described["backend"] == "torch"
    assert described["widths"] == ParallelConfig().to_dict()
    assert described["parts"]["runner"] == "torch.runner"
    assert not layer("torch").stats()["invalid_ids"]
    assert moe_core.MoELayer is MoELayer


def test_parameters_put_in_place_by_assignment_are_followed() -> None:
    model = MoELayer(config(), device="meta")
    state = layer(dtype="float32").state_dict()
    model.load_state_dict(state, assign=True)
    assert model.config.dtype == "float32"
    assert model.experts.counts.dropped_slots.device.type == "cpu"
    x = tokens(3).float()
    assert torch.equal(model(x), layer(dtype="float32")(x))


def test_the_config_is_that_of_the_layer_as_it_is() -> None:
    model = layer()
    assert "bfloat16" not in model.describe()["weight_bytes"]
    model.bfloat16()
    assert model.config.dtype == model.experts.config.dtype == "bfloat16"
    # six experts and the shared one, each of 48 * 16 + 16 * 24 numbers; the router stays float32
    assert model.describe()["weight_bytes"]["bfloat16"] == 7 * 1152 * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_three_stages_ignore_autocast_like_the_whole(backend: str) -> None:
    experts = layer(backend, dtype="float32").experts
    x, ids, weights = tokens(4).float(), torch.tensor([[0, 1, 2]] * 4), torch.rand(4, 3)
    expected = experts(x, ids, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        record, handle = experts.dispatch(x, ids, weights)
        assert torch.equal(experts.combine(experts.run(record), handle), expected)


def test_a_given_routing_is_checked_with_a_mask_as_without() -> None:
    model, x = layer(), tokens(4)
    routing = model.router(tokens(5))
    for mask in (None, torch.ones(4, dtype=torch.bool)):
        with pytest.raises(InputError, match="topk_ids must have"):
            model(x, token_mask=mask, routing=routing)
    with pytest.raises(InputError, match="int32 or int64"):
        model.experts(x, torch.zeros(4, 3, dtype=torch.complex128), torch.ones(4, 3))


def test_a_callers_router_stays_the_callers() -> None:
    own = TopKRouter(config())
    MoELayer(config(), router=own, inference=True)
    assert own.weight.requires_grad
    MoELayer(config(top_k=1), router=lambda x, ids: None)  # no warning: what it does is unknown


def test_moe_forward_sees_what_is_registered_later() -> None:
    w13, w2 = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    args = (torch.randn(1, 4), torch.tensor([[0]]), torch.ones(1, 1), w13, w2)
    before = moe_forward(*args, backend="torch")
    manifest = moe_core.registry.get("reference").backend.to_dict() | {"name": "torch"}
    register_backend(manifest, replace=True)
    try:
        pipeline = moe_core.functional._cached_pipeline
        misses = pipeline.cache_info().misses
        torch.testing.assert_close(moe_forward(*args, backend="torch"), before)
        assert pipeline.cache_info().misses == misses + 1
    finally:
        unregister_backend("torch")


def test_prepared_weights_are_not_mixed_up_with_what_lay_there_before() -> None:
    """Tensors that come and go get each other's memory; each call has its own weights."""
    experts = layer("torch", w13_layout="up_gate").experts
    x, ids, weights = tokens(4), torch.tensor([[0, 1, 2]] * 4), torch.rand(4, 3).double()
    experts.prepare_weights()
    w2 = experts.w2.detach().clone()
    with torch.no_grad():
        expected = experts(x, ids, weights)
        for scale in range(1, 9):
            own = {"w2": w2 * scale, "w13": experts.w13.detach().clone()}
            y = torch.func.functional_call(experts, own, (x, ids, weights))
            torch.testing.assert_close(y, expected * scale, rtol=1e-12, atol=1e-12)
            del own


def test_layers_pickle() -> None:
    for backend in ("torch", "reference"):
        model = layer(backend)
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(tokens(3)), model(tokens(3)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_prepare_weights_of_their_own(copied) -> None:
    experts = layer("torch", w13_layout="up_gate").experts
    x, ids, weights = tokens(4), torch.tensor([[0, 1, 2]] * 4), torch.rand(4, 3).double()
    experts.prepare_weights()
    again = copied(experts)
    with torch.no_grad():
        before = experts(x, ids, weights)
        again.w2.mul_(2)
        torch.testing.assert_close(again(x, ids, weights), 2 * before, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(experts(x, ids, weights), before, rtol=1e-12, atol=1e-13)
        assert again._prepared[1].w13.data_ptr() != again.w13.data_ptr()


def test_weights_made_in_inference_mode_can_be_prepared() -> None:
    with torch.inference_mode():
        experts = layer("torch", w13_layout="up_gate").experts
        x, ids, weights = tokens(4), torch.tensor([[0, 1, 2]] * 4), torch.rand(4, 3).double()
        before = experts(x, ids, weights)
        experts.prepare_weights()
        torch.testing.assert_close(experts(x, ids, weights), before, rtol=1e-12, atol=1e-13)


def test_ids_that_are_not_logical_and_other_devices_are_refused_before_anything_travels() -> None:
    model, x = layer(), tokens(3)
    routing = model.router(x)
    with pytest.raises(InputError, match="must be logical"):
        model(x, routing=replace(routing, id_space=IdSpace.PHYSICAL))
    with pytest.raises(InputError, match="the layer on cpu"):
        model(x.to("meta"))


def test_a_handle_keeps_what_it_was_given() -> None:
    experts = layer("torch").experts
    x, ids, weights = tokens(3), torch.tensor([[0, 1, 2]] * 3), torch.rand(3, 3).double()
    expected = experts(x, ids, weights)
    record, handle = experts.dispatch(x, ids, weights)
    ids.fill_(-1)
    weights.zero_()
    assert torch.equal(experts.combine(experts.run(record), handle), expected)

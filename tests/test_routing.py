"""Routing: the contract for both implementations, other projects' routers, the modules."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HashRouter,
    DeepseekV4TopKRouter,
)
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from moe_core.config import MoEConfig, RouterConfig
from moe_core.conformance.router import RouterConformance
from moe_core.contracts import IdSpace, Routing
from moe_core.errors import ConfigError, InputError
from moe_core.reference_routing import ReferenceRouter, reference_route
from moe_core.routing import CallableRouter, HashRouter, TopKRouter, build_router, route

T, H, E, K, V = 40, 16, 12, 3, 50


class TestRoute(RouterConformance):
    route_fn = staticmethod(route)


class TestReferenceRoute(RouterConformance):
    route_fn = staticmethod(reference_route)
    test_equals_the_reference = None  # pyright: ignore  # it is the reference


def layer(dtype: str = "float32", top_k: int = K, **router: Any) -> MoEConfig:
    return MoEConfig(
        hidden_size=H,
        intermediate_size=8,
        num_experts=E,
        top_k=top_k,
        router=RouterConfig(**router),
        dtype=dtype,
    )


# -- numbers by hand

both = pytest.mark.parametrize("fn", [route, reference_route])


def softmax(values: list[float], over: list[float]) -> list[float]:
    return [math.exp(v) / sum(map(math.exp, over)) for v in values]


@both
def test_softmax_before_or_after_the_choice(fn: Any) -> None:
    row = [1.2, -0.3, 0.8, 2.1, -1.0, 0.5, 0.1, -0.7]
    chosen = [2.1, 1.2]
    for config, want in (
        (RouterConfig(), softmax(chosen, row)),
        (RouterConfig(renormalize=True), softmax(chosen, chosen)),
        (RouterConfig(softmax_before_topk=False), softmax(chosen, chosen)),
    ):
        routing = fn(torch.tensor([row], dtype=torch.float64), 2, config)
        assert routing.topk_ids.tolist() == [[3, 0]]
        assert routing.topk_weights[0].tolist() == pytest.approx(want, rel=1e-14)
    assert softmax(chosen, chosen) == pytest.approx([0.7109, 0.2891], abs=5e-5)

    row = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    for before, want in ((True, [0.6103, 0.2245]), (False, [0.7311, 0.2689])):
        weights = fn(row, 2, RouterConfig(softmax_before_topk=before)).topk_weights
        assert weights[0].tolist() == pytest.approx(want, abs=5e-5)


@both
def test_top2_sum_counts_only_what_can_be_chosen(fn: Any) -> None:
    """Scores are negative here: for a missing second expert, 0 adds nothing and -inf would ban."""
    config = RouterConfig(
        scoring_func="sigmoid", correction_bias=True, num_expert_group=3, topk_group=1
    )
    logits = torch.tensor([[math.nan, 0.0, 0, 0, math.nan, math.nan]])
    bias = torch.tensor([0, -1.0, -0.7, -0.9, 9, 9])  # groups: -0.5 alone; -0.2 - 0.4; none
    assert fn(logits, 2, config, correction_bias=bias).topk_ids.tolist() == [[1, -1]]


# -- other projects' routers


def dense(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(ids), E, dtype=weights.dtype).scatter_add(1, ids, weights)


def gate(cls: Any, dtype: torch.dtype, **extra: Any) -> Any:
    sizes = {"num_experts_per_tok": K, "num_local_experts": E, "hidden_size": H}
    router = cls(SimpleNamespace(**sizes, **extra)).to(dtype)
    for value in router.state_dict().values():
        value.copy_(torch.randn(value.shape) if value.is_floating_point() else value)
    return router


@pytest.mark.parametrize("build", [build_router, ReferenceRouter])
@pytest.mark.parametrize("which", ["v4", "v4-hash", "v3", "mixtral"])
def test_equals_transformers(which: str, build: Any) -> None:
    """Same state_dict, same choices and weights. V3 and Mixtral cast to float32 inside."""
    torch.manual_seed(3)
    dtype = torch.float64 if which.startswith("v4") else torch.float32
    common: dict[str, Any] = {"routed_scaling_factor": 1.5}
    ours = {"renormalize": True, **common}
    input_ids = torch.randint(V, (T,))
    if which == "v3":
        common |= {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}
        ours |= {"num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid"}
        theirs = gate(DeepseekV3TopkRouter, dtype, **common)
    elif which == "mixtral":
        theirs, ours = gate(MixtralTopKRouter, dtype), {"renormalize": True}
    else:
        common["scoring_func"] = ours["scoring_func"] = "sqrtsoftplus"
        cls = DeepseekV4TopKRouter
        if which == "v4-hash":
            common["vocab_size"] = ours["vocab_size"] = V
            ours["kind"], cls = "hash", DeepseekV4HashRouter
        theirs = gate(cls, dtype, **common)
    if which == "v4-hash":
        theirs.tid2eid.copy_(torch.rand(V, E).argsort(1)[:, :K])
    if which in ("v3", "v4"):
        ours["correction_bias"] = True
    router: Any = build(layer(str(dtype), **ours))
    router.load_state_dict(theirs.state_dict())
    x = torch.randn(T, H, dtype=dtype) / 2
    extra = (input_ids,) if which == "v4-hash" else ()
    logits, weights, ids = theirs(x, *extra)
    routing = router(x, input_ids)
    torch.testing.assert_close(routing.router_logits, logits, rtol=0, atol=0)
    bound = 16 * torch.finfo(dtype).eps * (1 + logits.abs().max().item())
    got = dense(*routing.ids_and_weights())
    torch.testing.assert_close(got, dense(ids, weights), rtol=bound, atol=0)
    got.square().sum().backward()
    mine = router.weight.grad.clone()
    dense(ids, weights).square().sum().backward()
    scale = theirs.weight.grad.abs().max().item() * T
    torch.testing.assert_close(mine, theirs.weight.grad, rtol=0, atol=bound * scale)


# -- what is refused

X = torch.zeros(4, 6)
HASH = RouterConfig(kind="hash", vocab_size=9)
TABLE = torch.zeros(9, 2, dtype=torch.int64)
IDS = torch.zeros(4, dtype=torch.int64)
BIASED = RouterConfig(correction_bias=True)


@pytest.mark.parametrize(
    ("logits", "top_k", "config", "extra", "said"),
    [
        (X[0], 2, RouterConfig(), {}, ["router_logits must have shape [T, E], got [6]"]),
        (X.long(), 2, RouterConfig(), {}, ["must have a float dtype, got torch.int64"]),
        (X, 7, RouterConfig(), {}, ["top_k must be from 1 to the 6 experts there are, got 7"]),
        (X, 2, RouterConfig(num_expert_group=4, topk_group=1), {}, ["must divide the 6 experts"]),
        (X, 3, RouterConfig(num_expert_group=3, topk_group=1), {}, ["fewer experts than top_k=3"]),
        (X, 2, RouterConfig(), {"correction_bias": X[0]}, ["the config says correction_bias=Fal"]),
        (X, 2, RouterConfig(), {"tid2eid": TABLE}, ["the config says kind=topk"]),
        (X, 2, HASH, {}, ["needs input_ids of shape [4]", "needs tid2eid of shape [9, 2]"]),
        (X, 0, BIASED, {}, ["top_k must be", "correction_bias of shape [6] is missing"]),
        (
            *(X, 2, BIASED, {"correction_bias": X, "token_mask": X[:, 0]}),
            ["correction_bias must have shape [6], got [4, 6]", "bool dtype, got torch.float32"],
        ),
        (
            *(X, 2, HASH, {"input_ids": IDS[:3], "tid2eid": TABLE.float()}),
            ["input_ids must have shape [4], got [3]", "integer dtype, got torch.float32"],
        ),
        (X, 2, HASH, {"input_ids": IDS + 9, "tid2eid": TABLE}, ["vocab_size - 1 = 8, got 9"]),
        (X, 2, HASH, {"input_ids": IDS, "tid2eid": TABLE + 6}, ["ids from -1 to 5, got 6"]),
    ],
)
@both
def test_bad_arguments_are_named_all_at_once(
    fn: Any, logits: Any, top_k: int, config: RouterConfig, extra: Any, said: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        fn(logits, top_k, config, **extra)
    for part in said:
        assert part in str(caught.value)


# -- compiled


@pytest.mark.parametrize(
    "router",
    [
        {
            "scoring_func": "sigmoid",
            "num_expert_group": 4,
            "topk_group": 2,
            "correction_bias": True,
        },
        {"kind": "hash", "vocab_size": V, "scoring_func": "sqrtsoftplus", "renormalize": True},
    ],
)
def test_compiles_whole_at_most_twice(router: dict[str, Any]) -> None:
    torch._dynamo.reset()
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = build_router(layer(**router))
    compiled: Any = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (1, 7, 64):
        x, ids = torch.randn(tokens, H), torch.arange(tokens) % V
        mask = torch.arange(tokens) % 3 != 1
        got, want = compiled(x, ids, mask), module(x, ids, mask)
        for field in ("topk_ids", "topk_weights", "scores", "router_logits"):
            assert torch.equal(getattr(got, field), getattr(want, field))
        got.topk_weights.square().sum().backward()
    assert len(graphs) <= 2
    if "kind" in router:  # values can't be looked at here: out of range becomes -1
        ids = torch.tensor([0, -1, V, 1, 2, 3, 4])
        assert (compiled(torch.randn(7, H), ids).topk_ids[:, 0] < 0).tolist() == [
            *(False, True, True, False, False, False, False)
        ]


# -- modules


def test_parameters_keep_their_bits() -> None:
    """Router weights and biases stay float32 or wider; ids above 256 survive a cast to bfloat16."""
    wide = MoEConfig(
        hidden_size=H,
        intermediate_size=8,
        num_experts=400,
        top_k=2,
        router=RouterConfig(kind="hash", vocab_size=500),
    )
    router: Any = HashRouter(wide)
    assert router.tid2eid[[0, 383, 399]].tolist() == [[0, 1], [383, 384], [399, 0]]
    table, weight = router.tid2eid.clone(), router.weight.detach().clone()
    for cast in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.type(torch.bfloat16),
        lambda m: nn.Sequential(m).bfloat16()[0],
    ):
        cast(router)
        assert router.tid2eid.dtype == torch.int64
        assert torch.equal(router.tid2eid, table)
        assert torch.equal(router.weight, weight)
        assert router.weight.dtype == torch.float32
    biased: Any = TopKRouter(layer(correction_bias=True)).bfloat16()
    assert biased.e_score_correction_bias.dtype == torch.float32
    assert biased.double().e_score_correction_bias.dtype == torch.float64
    assert TopKRouter(layer("float64")).weight.dtype == torch.float64


def test_choices_from_bfloat16_states_are_those_of_float64() -> None:
    """Weights that are equal in bfloat16 decide; not by autocast, nor by the number of tokens."""
    torch.manual_seed(0)
    router: Any = TopKRouter(layer("bfloat16", top_k=2)).bfloat16()
    with torch.no_grad():
        router.weight.zero_()[:2] = torch.tensor([[1.0001], [1.0020]]) / H
    x = torch.ones(1, H, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
    assert routing.topk_ids.tolist() == [[1, 0]]
    assert routing.router_logits.dtype == routing.topk_weights.dtype == torch.float32

    router.reset_parameters()
    x = torch.randn(256, H).bfloat16()
    logits = router(x).router_logits
    exact = x.double() @ router.weight.double().t()
    # H products and sums, each within eps of the sum of magnitudes (a dot product's bound).
    bound = (
        H * torch.finfo(torch.float32).eps * (x.double().abs() @ router.weight.double().abs().t())
    )
    for got in (logits, torch.cat([router(row[None]).router_logits for row in x])):
        assert ((got - exact).abs() <= bound).all()


def test_routers_start_and_end_well() -> None:
    torch.manual_seed(0)
    big = TopKRouter(MoEConfig(hidden_size=400, intermediate_size=8, num_experts=100, top_k=2))
    assert big.weight.std().item() == pytest.approx(1 / 20, rel=4 / math.sqrt(2 * 40000))
    assert isinstance(build_router(layer()), TopKRouter)
    with pytest.raises(ConfigError, match=r"router\.kind='hash': TopKRouter does topk"):
        TopKRouter(layer(kind="hash", vocab_size=V))
    meta: Any = build_router(layer(kind="hash", vocab_size=V), "meta").to_empty(device="cpu")
    meta.reset_parameters()
    assert meta.tid2eid.tolist() == [[(t + j) % E for j in range(K)] for t in range(V)]
    with pytest.raises(InputError, match=r"hidden_states must have shape \[T, 16\], got \[2, 3\]"):
        build_router(layer())(torch.zeros(2, 3))
    for cls in (TopKRouter, ReferenceRouter):
        router: Any = cls(layer())
        router(torch.zeros(0, H)).topk_weights.sum().backward()
        assert router.weight.grad.eq(0).all()


def test_a_callers_own_router() -> None:
    """Ids and weights of any width give the same numbers; what doesn't fit is refused."""
    made: Any
    ids = torch.tensor([[0, 11, -1], [5, 5, 5]])
    weights = torch.tensor([[0.5, 0.25, 7], [0.125, 1, 2]])
    want = [[0.5, 0.25, 0], [0.125, 1, 2]]
    x = torch.zeros(2, H)
    for id_dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            made = ids.to(id_dtype), weights.to(dtype)
            routing = CallableRouter(lambda x, i, made=made: made, layer())(x)
            got, got_weights = routing.ids_and_weights()
            assert (got.dtype, got_weights.dtype) == (torch.int64, torch.float32)
            assert torch.equal(got, ids)
            assert got_weights.tolist() == want
    mask = torch.tensor([False, True])
    scored = Routing(ids, weights, scores=torch.ones(2, E))
    routing = CallableRouter(lambda x, i: scored, layer())(x.double(), None, mask)
    assert routing.topk_ids.tolist() == [[-1] * 3, [5] * 3]
    assert routing.topk_weights.tolist() == [[0] * 3, [0.125, 1, 2]]
    assert routing.topk_weights.dtype == torch.float64
    assert routing.scores is scored.scores
    bare = Routing(None, None, router_logits=torch.zeros(2, E))
    assert CallableRouter(lambda x, i: bare, layer())(x, None, mask) is bare
    for made, said in (
        ((ids[:, :2], weights.long()), r"topk_ids must have shape \[2, 3\], got \[2, 2\].*float"),
        ((ids.bool(), weights), "integer dtype, got torch.bool"),
        ((ids.tolist(), weights), "must be tensors, got <class 'list'>"),
        (ids, "must return a Routing"),
        (Routing(ids, weights, id_space=IdSpace.LOCAL), "logical ids, got local"),
    ):
        with pytest.raises(InputError, match=said):
            CallableRouter(lambda x, i, made=made: made, layer())(x)

"""The routing kernels in the interpreter: against their torch twins, and by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_core import ConfigError, InputError, MoEConfig
from moe_core.config import RouterConfig
from moe_core.conformance import bounds
from moe_core.conformance.router import RouterConformance
from moe_core.routing import TopKRouter
from moe_triton import topk, twins_routing
from moe_triton.router import TritonRouter, route
from moe_triton.runtime import record_launches

torch.set_num_threads(1)
NAN, INF = math.nan, math.inf
SCORING = ("softmax", "sigmoid", "sqrtsoftplus")


@pytest.mark.slow
class TestConformance(RouterConformance):
    backend = "triton"


def logits(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Rows that differ much, and a few that are special where there are enough."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(tokens, experts, generator=generator)
    for row, value in ((1, NAN), (2, -INF), (3, INF), (4, 0.0)):
        if row < tokens:
            x[row, :: max(1, experts // 3)] = value
    return x


def how(**changes: Any) -> dict[str, Any]:
    """The arguments of the operator after the tensors."""
    given: dict[str, Any] = {
        "top_k": 2, "scoring_func": "softmax", "normalize": False, "scale": 1.5,
        "num_groups": 1, "topk_group": 1, "top2_sum": False,
    }  # fmt: skip
    return given | changes


def check(x: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None, **options: Any):
    got = topk.route(x, bias, None, None, mask, **how(**options))
    want = twins_routing.route(x, bias, None, None, mask, **how(**options))
    assert got[2].tolist() == want[2].tolist()
    finite = x.nan_to_num(0, 88.0, 0)
    for have, right in zip(got[:2], want[:2], strict=True):
        assert ((have - right).abs() <= bounds.router_weights(right, finite)).all()


# -- against the twins


@pytest.mark.parametrize("scoring_func", SCORING)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_kernel_is_its_twin(scoring_func: str, normalize: bool) -> None:
    for tokens, experts, top_k in ((7, 3, 2), (21, 8, 8), (5, 60, 6), (3, 257, 3)):
        bias = logits(1, experts, seed=1)[0] / 6
        mask = torch.arange(tokens) % 4 != 3
        for given, real in ((None, None), (bias, mask)):
            check(
                logits(tokens, experts), given, real,
                top_k=top_k, scoring_func=scoring_func, normalize=normalize,
            )  # fmt: skip


@pytest.mark.parametrize("top2_sum", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_groups_of_any_size(top2_sum: bool, biased: bool) -> None:
    for experts, groups, chosen, top_k in (
        (60, 12, 5, 6),
        (21, 3, 2, 4),
        (6, 6, 3, 3),
        (8, 2, 1, 4),
    ):
        check(
            logits(6, experts), logits(1, experts, seed=1)[0] / 6 if biased else None, None,
            top_k=top_k, scoring_func="sigmoid", num_groups=groups, topk_group=chosen,
            top2_sum=top2_sum,
        )  # fmt: skip


def test_more_experts_than_one_warp_holds() -> None:
    check(logits(2, 1500), None, None, top_k=5)
    check(logits(2, 1500), None, None, top_k=5, num_groups=4, topk_group=2)
    assert topk.block_sizes(8192, 1, 8)[1] == 16
    with pytest.raises(ValueError, match="9000 experts in 1 groups take 16384 columns"):
        topk.block_sizes(9000, 1, 8)
    config = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=9000, top_k=1)
    with pytest.raises(ConfigError, match=r"num_experts=9000: .* 8192"):
        TritonRouter(config, device="meta")


@pytest.mark.parametrize("scoring_func", SCORING)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_backward_is_its_twins(scoring_func: str, normalize: bool) -> None:
    """In float64 the twin; what errors in float32 are worth is bounded by the gradients' sizes."""
    for tokens, experts, top_k in ((6, 5, 3), (3, 60, 7)):
        x = logits(tokens, experts)
        x[0, :3] = torch.tensor([-90.0, -21.0, 60.0])
        mask = torch.arange(tokens) != 5
        ids = torch.randint(
            -1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(2)
        )
        ids[0] = torch.arange(top_k) // 2  # an expert twice
        able = x.isfinite() | (x == INF)
        ids = torch.where((ids >= 0) & able.gather(1, ids.clamp(min=0)) & mask[:, None], ids, -1)
        weights, scores = logits(8, top_k, seed=3)[-1:], torch.randn(tokens, experts)
        weights = weights.expand(tokens, top_k)  # strides of 0, as sum() gives
        for by_weight, by_score in ((weights, scores), (weights, None), (None, scores)):
            rest = (mask, scoring_func, normalize, 2.5)
            got = topk.route_backward(by_weight, by_score, x, ids, *rest)
            wide = [None if t is None else t.double() for t in (by_weight, by_score)]
            want = twins_routing.route_backward(*wide, x.double(), ids, *rest)
            assert got.isfinite().all()
            size = 2.5 * 8 * 100  # scale, largest upstream gradient, largest logit
            assert (got - want).abs().max() <= bounds.ROUTER_STEPS * size * 2**-23
            assert (got[~able] == 0).all()


# -- by hand


def test_a_choice_by_hand() -> None:
    # sigmoid(0) = 1/2, sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4; -0 equals 0: the lower id first
    x = torch.tensor([[0.0, math.log(3), -0.0, -math.log(3)], [NAN, -INF, 0.0, NAN]])
    weights, scores, ids = topk.route(
        x, None, None, None, None, **how(top_k=3, scoring_func="sigmoid", scale=2.0)
    )
    assert ids.tolist() == [[1, 0, 2], [2, -1, -1]]
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    torch.testing.assert_close(scores, torch.tensor([[0.5, 0.75, 0.5, 0.25], [0, 0, 0.5, 0]]))
    weights, _, ids = topk.route(
        x.flip(1), None, None, None, None, **how(top_k=2, normalize=True, scale=1.0)
    )
    assert ids.tolist() == [[2, 1], [1, -1]]
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.25], [1.0, 0.0]]))


def test_equal_logits_go_to_the_lower_ids_to_the_last() -> None:
    weights, _, ids = topk.route(
        torch.full((1, 60), -0.7), None, None, None, None, **how(top_k=60, normalize=True, scale=60)
    )
    assert ids.tolist() == [[*range(60)]]
    assert weights.tolist() == [[1.0] * 60]


def test_a_bias_moves_the_choice_only_and_groups_go_first() -> None:
    # scores 1/2 each; groups {0, 1, 2} and {3, 4, 5} hold 0.2 + 0.2 and 0.3 + 0: the first is best
    x, bias = torch.zeros(1, 6), torch.tensor([0.0, 0.2, 0.2, 0.3, -1.0, 0.0])
    weights, _, ids = topk.route(
        x, bias, None, None, None,
        **how(top_k=3, scoring_func="sigmoid", num_groups=2, top2_sum=True, scale=1.0),
    )  # fmt: skip
    assert ids.tolist() == [[1, 2, 0]]
    assert weights.tolist() == [[0.5, 0.5, 0.5]]
    # by the single best it is the second, of whom -1 leaves 4 last and 5 before it
    _, _, ids = topk.route(
        x, bias, None, None, None, **how(top_k=3, scoring_func="sigmoid", num_groups=2)
    )
    assert ids.tolist() == [[3, 5, 4]]


def test_a_table_chooses_by_token() -> None:
    x = torch.tensor([[0.0, math.log(3), NAN]] * 5)
    table = torch.tensor([[1, 0, 9], [1, 1, 9], [2, -1, 9], [0, 3, 9]], dtype=torch.int32)[:, :2]
    tokens = torch.tensor([9, 0, 9, 1, 9, 2, 9, 3, 9, 4])[1::2]  # strided; the last is unknown
    weights, _, ids = topk.route(
        x, None, tokens, table, None, **how(scoring_func="sigmoid", normalize=True, scale=1.0)
    )
    assert ids.tolist() == [[1, 0], [1, 1], [-1, -1], [0, -1], [-1, -1]]
    want = [[0.6, 0.4], [0.5, 0.5], [0, 0], [1, 0], [0, 0]]
    torch.testing.assert_close(weights, torch.tensor(want))
    # an expert that a row names twice gets both gradients: 2 * score * (1 - score)
    leaf = x[:2, :2].clone().requires_grad_()
    weights, _, _ = topk.route(
        leaf, None, tokens[:2], table, None, **how(scoring_func="sigmoid", scale=1.0)
    )
    weights.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.tensor([[1 / 4, 3 / 16], [0, 2 * 3 / 16]]))


def test_gradients_in_the_tails_by_hand() -> None:
    # far below 0: sigmoid(x) = e^x, sqrtsoftplus(x) = e^(x/2), slopes of their logarithms 1 and 1/2
    for scoring_func, slope in (("sigmoid", 1.0), ("sqrtsoftplus", 0.5)):
        leaf = torch.full((1, 2), -40.0, requires_grad=True)
        weights, scores, _ = topk.route(
            leaf, None, None, None, None,
            **how(scoring_func=scoring_func, normalize=True, scale=1.0),
        )  # fmt: skip
        want = math.exp(-40 * slope)
        torch.testing.assert_close(scores, torch.full((1, 2), want), rtol=1e-5, atol=0)
        (grad,) = torch.autograd.grad(scores[0, 0], leaf, retain_graph=True)
        torch.testing.assert_close(grad, torch.tensor([[want * slope, 0]]), rtol=1e-5, atol=0)
        (grad,) = torch.autograd.grad(weights[0, 0], leaf)  # d (1/2) = 1/2 * 1/2 * slope
        torch.testing.assert_close(grad, torch.tensor([[slope / 4, -slope / 4]]))


# -- as an operator


def test_empty_strided_and_untouched_inputs() -> None:
    leaf = torch.zeros(0, 4, requires_grad=True)
    routing = route(leaf, 2, RouterConfig())
    assert routing.topk_ids.shape == routing.topk_weights.shape == (0, 2)
    (routing.topk_weights.sum() + routing.scores.sum()).backward()
    assert leaf.grad.shape == (0, 4)
    wide = logits(6, 20)
    given = [
        wide[:, ::2].t().contiguous().t(),
        torch.arange(20.0)[::2] / 9,
        torch.arange(12)[::2] < 9,
    ]
    before = [t.clone() for t in given]
    config = RouterConfig(scoring_func="sigmoid", correction_bias=True)
    strided = route(given[0], 3, config, correction_bias=given[1], token_mask=given[2])
    dense = route(
        before[0].contiguous(), 3, config,
        correction_bias=before[1].contiguous(), token_mask=before[2].contiguous(),
    )  # fmt: skip
    for name in ("topk_ids", "topk_weights", "scores"):
        assert torch.equal(getattr(strided, name), getattr(dense, name))
    for now, then in zip(given, before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_one_launch_each_way() -> None:
    for tokens in (1, 17):
        leaf = logits(tokens, 16).requires_grad_()
        with record_launches() as forward:
            routing = route(leaf, 2, RouterConfig(renormalize=True))
        with record_launches() as backward:
            routing.topk_weights.sum().backward()
        assert (forward.count, backward.count) == (1, 1)


def test_opcheck() -> None:
    x = logits(7, 6, seed=5)[5:].requires_grad_()
    bias = torch.arange(6.0) / 9
    mask, empty = torch.tensor([True, False]), torch.zeros(0, 6, requires_grad=True)
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    args = (2, "sigmoid", True, 2.0, 2, 1, True)
    for given in (x, empty):
        torch.library.opcheck(
            topk.route, (given, bias, None, None, mask[: len(given)], *args), test_utils=tests
        )
    ids = torch.tensor([[0, 5], [-1, 2]])
    torch.library.opcheck(
        topk.route_backward,
        (torch.ones(2, 2), None, x.detach(), ids, mask, "sigmoid", True, 2.0),
        test_utils=tests,
    )


def test_the_router_compiles_into_one_graph() -> None:
    config = MoEConfig(
        hidden_size=5, intermediate_size=4, num_experts=6, top_k=2,
        router=RouterConfig(scoring_func="sigmoid", correction_bias=True, renormalize=True),
    )  # fmt: skip
    eager = TritonRouter(config)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(eager), backend=counter, fullgraph=True, dynamic=True)
    graphs: list[int] = []
    for tokens in (3, 8):
        rows = torch.randn(tokens, 5)
        mask = torch.arange(tokens) != 1
        made = [router(rows, token_mask=mask) for router in (eager, compiled)]
        for routing in made:
            (routing.topk_weights.sum() + routing.scores.square().sum()).backward()
        assert torch.equal(made[0].topk_ids, made[1].topk_ids)
        torch.testing.assert_close(made[0].topk_weights, made[1].topk_weights, rtol=0, atol=0)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1]
    grads = [router.weight.grad for router in (eager, compiled)]
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0].any()


def test_state_and_errors_are_the_core_routers() -> None:
    config = MoEConfig(
        hidden_size=5, intermediate_size=4, num_experts=6, top_k=2,
        router=RouterConfig(correction_bias=True),
    )  # fmt: skip
    mine, core = TritonRouter(config), TopKRouter(config)
    mine.load_state_dict(core.state_dict(), strict=True)
    assert mine.half().weight.dtype == torch.float32
    rows = torch.randn(4, 5)
    with torch.no_grad():
        assert torch.equal(mine(rows).topk_ids, core(rows).topk_ids)
    with pytest.raises(InputError, match="float64 logits"):
        route(torch.zeros(2, 4, dtype=torch.float64), 2, RouterConfig())
    with pytest.raises(InputError, match="top_k must be from 1 to the 4"):
        route(torch.zeros(2, 4), 5, RouterConfig())


def test_a_gradient_of_a_gradient_is_refused() -> None:
    leaf = logits(7, 4)[5:].requires_grad_()
    routing = route(leaf, 2, RouterConfig())
    (grad,) = torch.autograd.grad(routing.topk_weights.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"moe_triton.route_backward.* but no autograd formula"):
        grad.sum().backward()

"""The contract of ``route`` as tests, for a function with its signature or for a router part::

    class TestMine(RouterConformance):
        backend = "mine"                        # the router that this spec gets
    class TestMyFunction(RouterConformance):
        route_fn = staticmethod(my_route)       # the signature of moe_core.route

The oracle is ``moe_core.reference_routing``; bounds are those of ``bounds.router_weights``.

A part is called as a module, with the identity for a gate, so that its logits are its input. Its
``weight [E, H]``, ``e_score_correction_bias`` and ``tid2eid`` go by these names. Logits that are
not finite can't be had so: they go to the class's ``route_fn`` if it has one, else row by row.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from moe_core import InputError, MoEConfig, Routing
from moe_core.config import RouterConfig, dtype_name
from moe_core.conformance import bounds
from moe_core.conformance.target import NOT_CLAIMED, Conformance, Target
from moe_core.pipeline import load_target
from moe_core.reference_routing import reference_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_core.interfaces import Router

NAN, INF = math.nan, math.inf
SCORES = [
    {"scoring_func": "softmax"},
    {"scoring_func": "softmax", "softmax_before_topk": False},
    {"scoring_func": "sigmoid"},
    {"scoring_func": "sqrtsoftplus"},
]
CONFIGS = [
    RouterConfig(**score, renormalize=renormalize, correction_bias=bias, routed_scaling_factor=1.5)  # type: ignore[arg-type]
    for score, renormalize, bias in itertools.product(SCORES, (False, True), (False, True))
]
GROUPS = [None, "max", "top2_sum"]
SIZES = [(0, 8, 2), (1, 1, 1), (7, 2, 1), (7, 3, 3), (33, 8, 3), (5, 60, 6), (3, 60, 60)]


def name(config: RouterConfig) -> str:
    score = config.scoring_func if config.softmax_before_topk else "softmax_after"
    flags = [f for f in ("renormalize", "correction_bias") if getattr(config, f)]
    return "-".join([score, *flags])


every_config = pytest.mark.parametrize("config", CONFIGS, ids=name)
every_score = pytest.mark.parametrize("config", [c for c in CONFIGS if c.renormalize], ids=name)


def _gate_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@functools.lru_cache(maxsize=256)
def _built(owner: Target, config: MoEConfig) -> Router:
    """The router that a layer would get. Skips what isn't claimed. Routers have no size axes."""
    found = owner.resolve(owner.fitted(config), router=None)
    if not found.ok:
        owner.skip(found)
    part = found.parts["router"]
    assert part.label in [c.label for c in owner.parts], f"{owner.spec} got the router {part.label}"
    return load_target(part)(config, device=owner.device)


def _call(router: Router, state: dict[str, Any], rows: torch.Tensor, call: Any) -> Routing:
    given = {name: tensor for name, tensor in state.items() if tensor is not None}
    return torch.func.functional_call(router, given, (rows,), call)


class RouterConformance(Conformance):
    """Contract tests of ``route_fn``, or of the router that ``backend`` gets."""

    profile: ClassVar[str] = "router"
    route_fn: ClassVar[Callable[..., Routing] | None] = None
    differentiable: ClassVar[bool | None] = None
    """Whether gradients are asked for; None = where the manifest offers them."""

    # -- what is tested

    def route(
        self, router_logits: torch.Tensor, top_k: int, config: RouterConfig, **given: Any
    ) -> Routing:
        """As ``moe_core.route``, by whatever is put to the test."""
        if self.route_fn is not None:
            return self.route_fn(router_logits, top_k, config, **given)
        num_experts, kept = router_logits.shape[1], dict(given)
        call = {name: kept.pop(name, None) for name in ("input_ids", "token_mask")}
        state = {
            "e_score_correction_bias": kept.get("correction_bias"),
            "tid2eid": kept.get("tid2eid"),
        }
        how = MoEConfig(
            hidden_size=num_experts,
            intermediate_size=1,
            num_experts=num_experts,
            top_k=top_k,
            router=config,
            dtype=dtype_name(router_logits.dtype),
        )
        if router_logits.isfinite().all():
            gate = torch.eye(num_experts, device=self.device, dtype=_gate_dtype(router_logits))
            return _call(_built(self.target, how), {**state, "weight": gate}, router_logits, call)
        router = _built(self.target, replace(how, hidden_size=1))
        route_fn = getattr(router, "route_fn", None)
        if route_fn is not None:
            return route_fn(router_logits, top_k, config, **given)
        rows: list[Routing] = []
        for t, row in enumerate(router_logits.to(_gate_dtype(router_logits))):
            one = {n: None if v is None else v[t : t + 1] for n, v in call.items()}
            ones = row.new_ones(1, 1).to(router_logits.dtype)
            rows.append(_call(router, state | {"weight": row[:, None]}, ones, one))
        fields = ("topk_ids", "topk_weights", "router_logits", "scores")
        joined: dict[str, Any] = {
            name: torch.cat([getattr(r, name) for r in rows]) for name in fields
        }
        return Routing(**joined, token_mask=call["token_mask"])

    @property
    def learns(self) -> bool:
        if self.differentiable is None:
            return self.route_fn is not None or self.target.autograd
        return self.differentiable

    @property
    def wide(self) -> torch.dtype:
        """float64, where it is offered."""
        able = self.route_fn is not None or "float64" in self.target.dtypes
        return torch.float64 if able else torch.float32

    # -- what the tests are made of

    def tensor(self, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.wide, device=self.device)

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(self.device, self.wide)

    def bias(self, config: RouterConfig, num_experts: int) -> dict[str, torch.Tensor]:
        given = {"correction_bias": self.random(num_experts, seed=9) / 6}
        return given if config.correction_bias else {}

    def ids_and_weights(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], torch.Tensor]:
        ids, weights = self.route(*args, **kwargs).ids_and_weights()
        assert ids.dtype == torch.int64
        return ids.tolist(), weights

    def assert_same(self, got: Routing, want: Routing) -> None:
        """Equal ids; weights and scores within the bound."""
        (ids, weights), (want_ids, want_weights) = got.ids_and_weights(), want.ids_and_weights()
        assert ids.dtype == torch.int64
        assert ids.tolist() == want_ids.tolist()
        assert got.scores is not None
        assert want.scores is not None
        assert want.router_logits is not None
        logits = want.router_logits.detach()
        logits = logits.nan_to_num(0, math.log(torch.finfo(logits.dtype).max), 0)
        for have, wanted in ((weights, want_weights), (got.scores, want.scores)):
            assert have.dtype == wanted.dtype
            assert ((have - wanted).abs() <= bounds.router_weights(wanted, logits)).all()

    def special_rows(self, num_experts: int, seed: int = 1) -> torch.Tensor:
        """Finite; all NaN or -inf; one NaN, -inf, +inf; two +inf; all equal; ties; far apart."""
        x = self.random(10, num_experts, seed=seed)
        x[1], x[2] = NAN, -INF
        x[3, num_experts // 2], x[4, 0], x[5, -1] = NAN, -INF, INF
        x[6, 0], x[6, -1] = INF, INF
        x[7] = 0
        x[8] = self.tensor([0.0, 1.0, 3.0])[torch.arange(num_experts) % 3]
        # the oracle chooses by Python floats: no two scores may be equal in float32 alone
        far = 40 if self.wide == torch.float64 else 15
        x[9] = torch.linspace(-far, far, num_experts, dtype=torch.float64)
        return x

    # -- against the definitions

    @pytest.mark.parametrize("group_score", GROUPS)
    @every_config
    def test_equals_the_reference(self, config: RouterConfig, group_score: str | None) -> None:
        for tokens, experts, top_k in SIZES:
            if group_score is not None:
                groups = {60: 12, 8: 4, 3: 3, 2: 2, 1: 1}[experts]
                chosen = max(1, groups // 2, -(-top_k * groups // experts))
                config = replace(
                    config, num_expert_group=groups, topk_group=chosen, group_score=group_score
                )
            logits = torch.cat([self.random(tokens, experts), self.special_rows(experts)])
            if tokens == 0:
                logits = logits[:0]
            mask = torch.arange(len(logits), device=self.device) % 5 != 4
            for token_mask in (None, mask):
                extra = {**self.bias(config, experts), "token_mask": token_mask}
                want = reference_route(logits, top_k, config, **extra)
                self.assert_same(self.route(logits, top_k, config, **extra), want)

    @every_config
    def test_rows_do_not_see_their_neighbours(self, config: RouterConfig) -> None:
        """A token has the same bits without the bad rows, alone, and from a strided input.

        (Vectorised kernels may round the last elements of a tensor differently; here as in the
        next test that would show.)
        """
        good, bad = self.random(33, 7, seed=3), self.special_rows(7)
        logits = torch.cat([good[:9], bad, good[9:]]).float()
        extra = self.bias(config, 7)
        rows = [*range(9), *range(9 + len(bad), len(logits))]
        mixed = self.route(logits, 3, config, **extra)
        strided = self.route(logits.t().contiguous().t(), 3, config, **extra)
        alone = self.route(logits[rows], 3, config, **extra)
        single = [self.route(logits[t : t + 1], 3, config, **extra) for t in rows]
        for field in ("topk_ids", "topk_weights", "scores"):
            whole = getattr(mixed, field)
            assert torch.equal(getattr(alone, field), whole[rows])
            assert torch.equal(getattr(strided, field), whole)
            assert torch.equal(torch.cat([getattr(r, field) for r in single]), whole[rows])

    # -- the choice

    @every_config
    def test_ties_go_to_the_lower_id(self, config: RouterConfig) -> None:
        flat = {"correction_bias": self.tensor([0.25] * 64)} if config.correction_bias else {}
        for value in (0.0, *self.random(40).tolist()):
            logits = self.tensor([[value] * 64], torch.float32)
            assert self.ids_and_weights(logits, 4, config, **flat)[0] == [[0, 1, 2, 3]]
            odd = {name: t[:35] for name, t in flat.items()}
            assert self.ids_and_weights(logits[:, :35], 35, config, **odd)[0] == [[*range(35)]]
        logits = self.tensor([[0, 0.7] * 2 + [0.7] + [0] * 59], torch.float32)  # at the boundary
        assert self.ids_and_weights(logits, 5, config, **flat)[0] == [[1, 3, 4, 0, 2]]

    @pytest.mark.parametrize("group_score", ["max", "top2_sum"])
    def test_tied_groups_go_to_the_lower_group(self, group_score: str) -> None:
        config = RouterConfig(
            scoring_func="sigmoid", num_expert_group=3, topk_group=1, group_score=group_score
        )
        logits = self.tensor([[0, 1, 2, 5, 5, 2]])
        assert self.ids_and_weights(logits, 2, config)[0] == [[3, 2]]

    @every_config
    def test_bad_logits_are_never_chosen(self, config: RouterConfig) -> None:
        logits = self.tensor([[NAN, 1, -INF, 3], [NAN] * 4, [-INF] * 4, [NAN, -INF, NAN, 0]])
        extra = {"correction_bias": self.tensor([0.0] * 4)} if config.correction_bias else {}
        ids, weights = self.ids_and_weights(logits, 3, config, **extra)
        assert ids == [[3, 1, -1], [-1] * 3, [-1] * 3, [3, -1, -1]]
        assert torch.isfinite(weights).all()
        assert (weights != 0).tolist() == [[i >= 0 for i in row] for row in ids]

    @every_config
    def test_infinity_comes_first_with_finite_weights(self, config: RouterConfig) -> None:
        logits = self.tensor([[1, 2, INF, 0], [INF, 9, 0, INF]], torch.float32)
        extra = {"correction_bias": self.tensor([0.1] * 4)} if config.correction_bias else {}
        ids, weights = self.ids_and_weights(logits, 2, config, **extra)
        assert [ids[0][0], *ids[1]] == [2, 0, 3]
        assert torch.isfinite(weights).all()
        if config.renormalize:
            torch.testing.assert_close(weights[1], self.tensor([0.75, 0.75], torch.float32))

    def test_bias_moves_the_choice_and_not_the_weight(self) -> None:
        """Also a bias that bfloat16 would swallow: 0.5 + 1e-3, from bfloat16 logits."""
        config = RouterConfig(scoring_func="sigmoid", correction_bias=True)
        logits = self.tensor([[0, 0]], torch.bfloat16)
        bias = self.tensor([0, 1e-3], torch.float32)
        ids, weights = self.ids_and_weights(logits, 1, config, correction_bias=bias)
        assert ids == [[1]]
        assert weights.tolist() == [[0.5]]
        bias = self.tensor([1, 1.001], torch.float32)  # equal in bfloat16
        assert self.ids_and_weights(logits, 1, config, correction_bias=bias)[0] == [[1]]
        bias = self.tensor([NAN, -INF], torch.float32)  # takes both experts out
        assert self.ids_and_weights(logits, 1, config, correction_bias=bias)[0] == [[-1]]

    def test_order_survives_where_scores_saturate(self) -> None:
        logits = self.tensor([[60, 70, 80], [-400, -300, -200]], torch.float32)
        config = RouterConfig(scoring_func="sigmoid")
        assert self.ids_and_weights(logits, 2, config)[0] == [[2, 1], [2, 1]]

    # -- the weights

    @every_score
    def test_normalised_weights_sum_to_the_factor(self, config: RouterConfig) -> None:
        for value in (-5000.0, -120.0, -50.0, 0.0, 50.0):
            logits = self.tensor([[value] * 8], torch.float32)
            plain = replace(config, routed_scaling_factor=1.0, correction_bias=False)
            assert self.ids_and_weights(logits, 8, plain)[1].sum().item() == 1.0
        extra = self.bias(config, 8)
        weights = self.ids_and_weights(100 * self.random(50, 8), 3, config, **extra)[1]
        bound = bounds.ROUTER_STEPS * torch.finfo(self.wide).eps
        torch.testing.assert_close(
            weights.sum(1), torch.full_like(weights[:, 0], 1.5), rtol=bound, atol=0
        )

    def test_underflowing_scores_share_by_their_logarithms(self) -> None:
        """Chosen by bias though sigmoid(-120) is 0 in float32; the other row is as if alone."""
        config = RouterConfig(scoring_func="sigmoid", renormalize=True, correction_bias=True)
        bias = self.tensor([5, 4, 0, 0], torch.float32)
        logits = self.tensor([[-120, -120 - math.log(3), -120, -120], [1, 2, 3, 4]], torch.float32)
        ids, weights = self.ids_and_weights(logits, 2, config, correction_bias=bias)
        assert ids == [[0, 1], [0, 1]]
        rounding = 120 * torch.finfo(torch.float32).eps  # of the logits themselves
        torch.testing.assert_close(weights[0].tolist(), [0.75, 0.25], rtol=rounding, atol=0)
        alone = self.ids_and_weights(logits[1:], 2, config, correction_bias=bias)[1]
        assert torch.equal(weights[1:], alone)

    def test_masked_tokens_get_nothing(self) -> None:
        mask = self.tensor([True, False, True], torch.bool)
        logits = self.random(3, 4)
        routing = self.route(logits, 2, RouterConfig(), token_mask=mask)
        alone = self.route(logits[mask], 2, RouterConfig())
        ids, weights = routing.ids_and_weights()
        assert ids[1].tolist() == [-1, -1]
        assert weights[1].tolist() == [0, 0]
        assert torch.equal(ids[mask], alone.ids_and_weights()[0])
        assert routing.token_mask is mask

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_computes_in_float32_and_autocast_changes_nothing(self, dtype: torch.dtype) -> None:
        config = RouterConfig(scoring_func="sqrtsoftplus", renormalize=True)
        low = self.random(9, 6).to(dtype)
        plain = self.route(low.float(), 2, config)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            cast = self.route(low, 2, config)
        for field in ("topk_ids", "topk_weights", "scores", "router_logits"):
            assert torch.equal(getattr(cast, field), getattr(plain, field))
            assert getattr(cast, field).dtype in (torch.float32, torch.int64)
        close = self.tensor([[1.0001, 1.0020]], torch.float32)  # equal in bfloat16
        assert self.ids_and_weights(close, 1, config)[0] == [[1]]

    # -- the part as a module

    def part(self, config: RouterConfig) -> Any:
        """The router of 6 experts for rows of 6, with the identity for a gate."""
        if self.route_fn is not None:
            pytest.skip(f"{NOT_CLAIMED}a function is no module")
        how = MoEConfig(
            hidden_size=6, intermediate_size=1, num_experts=6, top_k=2, router=config,
            dtype=dtype_name(self.wide),
        )  # fmt: skip
        router: Any = copy.deepcopy(_built(self.target, how)).requires_grad_(self.learns)
        with torch.no_grad():
            router.weight.copy_(torch.eye(6))
        return router

    def test_jitter_is_for_training(self) -> None:
        if not self.learns:
            pytest.skip(f"{NOT_CLAIMED}autograd")
        router, rows = self.part(RouterConfig(jitter=0.25)), self.random(40, 6)

        def factors() -> torch.Tensor:
            torch.manual_seed(3)
            return router(rows).router_logits.detach() / rows

        moved = factors()
        rounding = 8 * torch.finfo(self.wide).eps
        assert ((moved >= 0.75 - rounding) & (moved <= 1.25 + rounding)).all()
        assert moved.min() < 0.8  # of 240 draws from 0.75 to 1.25
        assert moved.max() > 1.2
        assert len(moved.unique()) > 200  # each element has its own
        assert torch.equal(factors(), moved)  # it comes from torch's generator
        router.eval()
        torch.testing.assert_close(factors(), torch.ones_like(rows), rtol=rounding, atol=0)

    @pytest.mark.parametrize("renormalize", [False, True])
    @pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
    def test_replayed_choices_are_weighed_anew(self, score: str, renormalize: bool) -> None:
        """As hash routing weighs what its table names: duplicates and empty slots too."""
        how: dict[str, Any] = {"scoring_func": score, "renormalize": renormalize}
        how["routed_scaling_factor"] = 1.5
        router, rows = self.part(RouterConfig(**how)), self.random(5, 6)
        ids = self.tensor([[5, 0], [-1, 3], [2, 2], [-1, -1], [0, 1]], torch.int64)
        try:
            made = router.reweight(router(rows), ids)
        except InputError:
            pytest.skip(f"{NOT_CLAIMED}reweight")
        want = reference_route(
            rows, 2, RouterConfig(kind="hash", vocab_size=5, **how),
            input_ids=torch.arange(5, device=rows.device), tid2eid=ids,
        )  # fmt: skip
        self.assert_same(made, want)

    # -- hash routing

    @pytest.mark.parametrize("renormalize", [False, True])
    def test_hash_follows_its_table(self, renormalize: bool) -> None:
        """Slot order, duplicates and -1 of the table; NaN experts and masked tokens out."""
        config = RouterConfig(
            kind="hash", scoring_func="sigmoid", vocab_size=3, renormalize=renormalize
        )
        table = self.tensor([[2, 0], [1, 1], [-1, 3]], torch.int32)
        extra = {
            "input_ids": self.tensor([0, 1, 2, 0, -7], torch.int64),
            "tid2eid": table,
            "token_mask": self.tensor([True] * 4 + [False], torch.bool),
        }
        logits = self.tensor([[-math.log(3), 0, math.log(3), 0]] * 5)
        logits[3, 2] = NAN
        ids, weights = self.ids_and_weights(logits, 2, config, **extra)
        assert ids == [[2, 0], [1, 1], [-1, 3], [-1, 0], [-1, -1]]
        want = [[0.75, 0.25], [0.5, 0.5], [0, 0.5], [0, 0.25], [0, 0]]
        if renormalize:
            want[2:4] = [0, 1], [0, 1]
        bound = bounds.ROUTER_STEPS * torch.finfo(self.wide).eps
        torch.testing.assert_close(weights, self.tensor(want), rtol=bound, atol=0)

    # -- gradients, empty and strided inputs

    @every_config
    def test_gradients(self, config: RouterConfig) -> None:
        """Finite everywhere, those of the reference, and those of finite differences."""
        if not self.learns:
            pytest.skip(f"{NOT_CLAIMED}autograd")
        extreme = self.tensor([[-5000, -300, -120, 0], [5000, 300, 120, 0], [0, 0, 0, 0]])
        logits = torch.cat([self.special_rows(4), extreme])
        extra = self.bias(config, 4)
        grads: list[torch.Tensor] = []
        for fn in (self.route, reference_route):
            leaf = logits.clone().requires_grad_()
            routing = fn(leaf, 3, config, **extra)
            assert routing.scores is not None
            out = torch.cat([routing.ids_and_weights()[1], routing.scores], dim=1)
            with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
                (out * self.random(*out.shape, seed=5)).sum().backward()
            assert leaf.grad is not None
            assert torch.isfinite(leaf.grad).all()
            grads.append(leaf.grad)
        bound = bounds.ROUTER_STEPS * torch.finfo(self.wide).eps * (1 + 5000)
        torch.testing.assert_close(*grads, rtol=bound, atol=bound)
        leaf = self.random(2, 4, seed=8).requires_grad_()
        if self.wide == torch.float64:
            assert torch.autograd.gradcheck(
                lambda x: self.route(x, 2, config, **extra).ids_and_weights()[1], leaf
            )
        leaf = self.random(0, 4).requires_grad_()
        empty = self.route(leaf, 2, config, **extra)
        ids, weights = empty.ids_and_weights()
        assert ids.shape == weights.shape == (0, 2)
        weights.sum().backward()
        assert leaf.grad is not None

    def test_inputs_are_not_written_to(self) -> None:
        config = RouterConfig(scoring_func="sigmoid", correction_bias=True)
        given = [self.special_rows(6), self.random(6), torch.arange(10, device=self.device) < 5]
        before = [t.clone() for t in given]
        logits, bias, mask = given
        self.route(logits, 2, config, correction_bias=bias, token_mask=mask)
        for now, then in zip(given, before, strict=True):
            torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)

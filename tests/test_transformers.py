"""Equal to transformers' MoE blocks in float64, outputs and gradients, to their own casts.

DeepSeek-V4 stays in float64: relative 1e-12. Mixtral takes its softmax in float32 and DeepSeek-V3
its whole router; with u = 2^-24 their routing weights are off by a relative

    Mixtral      r = (6 L + 6 + K) u                   L = largest |logit|
    DeepSeek-V3  r = 2 d + (K + 12) u                  d = (H + 2) u max_e sum_h |x_h W_eh|

Mixtral: casting a logit and subtracting the maximum move it by 3 L u, exponential and quotient
add 3 u: (3 L + 3) u for each probability, twice that plus K sums and a division for their ratio.
V3: d is the error of a float32 product of H terms with both factors rounded; sigmoid's relative
error is at most that plus 4 u, and again twice for the ratio, with sums, division and scaling.

Outputs and expert gradients are linear in the weights, so they differ by at most r times the same
sum over absolute values, taken token by token and slot by slot. Backward through the router, the
gradient of a weight g is rounded too: with G = max_k |g_k| and scaling s, softmax, sigmoid and
ratio have Jacobians below 2 s G in the 1-norm, and D = (4 r + (E + T + 16) u) 2 s G bounds the
error of a logit's gradient with the products that follow.

The same two once more with their casts switched off are held to 1e-12, router gradients included.
No case rests on luck: each asserts that its choices were further apart than these errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core import Activation, MoEConfig, MoELayer, RouterConfig

pytest.importorskip("transformers", minversion="5.24")

from transformers import DeepseekV3Config, DeepseekV4Config, MixtralConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

H, INNER, E, VOCAB = 16, 12, 8, 11
SHAPE = (2, 7)
T = 14
U = 2.0**-24
EXACT = 1e-12

backends = pytest.mark.parametrize("backend", ["reference", "torch"])
seeds = pytest.mark.parametrize("seed", [0, 2, 3])  # V3 has a near-tie between groups in 1
casts = pytest.mark.parametrize("casts", [True, False], ids=["casts", "no casts"])


@dataclass
class Case:
    """Their block and our layer with the same weights, one input for both, one output gradient."""

    block: Any
    layer: MoELayer
    x: Tensor
    grad: Tensor
    input_ids: Tensor | None = None
    casts: bool = True

    def __post_init__(self) -> None:
        self.grads: dict[str, tuple[Tensor, Tensor]] = {}
        theirs, ours = (self.x.clone().requires_grad_() for _ in range(2))
        ids = () if self.input_ids is None else (self.input_ids,)
        with pytest.MonkeyPatch.context() as patch:
            if not self.casts:
                patch.setattr(torch.Tensor, "float", lambda tensor: tensor)
                patch.setattr(torch.Tensor, "type", lambda tensor, dtype: tensor)
            self.theirs = self.block(theirs, *ids)
            with torch.no_grad():
                _, self.their_weights, self.their_ids = self.block.gate(self.x, *ids)
        self.ours, routing = self.layer(ours, *ids, return_routing=True)
        self.ids, self.weights = routing.ids_and_weights()
        self.logits, self.scores = routing.router_logits, routing.scores
        self.weights.retain_grad()
        self.theirs.backward(self.grad)
        self.ours.backward(self.grad)
        their = dict(self.block.named_parameters())
        our = dict(self.layer.named_parameters())
        pairs = {
            "router": ("gate.weight", "router.weight"),
            "w13": ("experts.gate_up_proj", "experts.w13"),
            "w2": ("experts.down_proj", "experts.w2"),
        }
        for name, (a, b) in pairs.items():
            self.grads[name] = (_grad(their[a]), _grad(our[b]))
        self.grads["x"] = (_grad(theirs), _grad(ours))
        if self.layer.shared_experts is not None:
            shared = self.block.shared_experts
            w13 = torch.cat([_grad(shared.gate_proj.weight), _grad(shared.up_proj.weight)])
            self.grads["shared w13"] = (w13, _grad(self.layer.shared_experts.w13))
            self.grads["shared w2"] = (
                _grad(shared.down_proj.weight),
                _grad(self.layer.shared_experts.w2),
            )

    @property
    def rows(self) -> Tensor:
        return self.x.reshape(T, H)

    def check_choice(self) -> None:
        assert torch.equal(self.ids.sort(1).values, self.their_ids.sort(1).values)

    def check_weights(self, relative: float) -> None:
        ours = torch.zeros(T, E).double().scatter_add(1, self.ids, self.weights.detach())
        theirs = (
            torch.zeros(T, E).double().scatter_add(1, self.their_ids, self.their_weights.double())
        )
        _within(ours, theirs, relative * theirs)

    def check_exact(self, *names: str) -> None:
        """The gradients of these names (all if none) and then the output, to ``EXACT``."""
        for name in names or ("y", *self.grads):
            ours, theirs = (self.ours, self.theirs) if name == "y" else self.grads[name]
            assert theirs.abs().max() > 0.01, f"{name} compares next to nothing"
            _within(ours, theirs, EXACT * theirs.abs().max(), name)

    def check_cast(self, relative: float, scale: float) -> None:
        """Outputs and gradients within what weights off by ``relative`` explain."""
        size = self._absolute_sums()
        weight_grad = _grad(self.weights).abs().amax(dim=1)
        extra = T + E + 16
        logit = (4 * relative + extra * U) * 2 * scale * weight_grad[:, None]  # D, [T, 1]
        gate = self.block.gate.weight.detach().abs()
        size = {name: relative * total for name, total in size.items()}
        size["x"] = size["x"] + logit * gate.sum(0)
        size["router"] = (logit * self.rows.abs()).sum(0).expand(E, H)
        for name, bound in size.items():
            ours, theirs = (self.ours, self.theirs) if name == "y" else self.grads[name]
            floor = EXACT * theirs.abs().max()
            _within(ours.reshape(bound.shape), theirs.reshape(bound.shape), bound + floor, name)

    def _absolute_sums(self) -> dict[str, Tensor]:
        """``y``, ``x``, ``w13``, ``w2``: the routed part of each as a sum over (token, slot) of
        absolute values, from their experts one row at a time."""
        experts = self.block.experts
        parameters = {"w13": experts.gate_up_proj, "w2": experts.down_proj}
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        total |= {name: torch.zeros(T, H).double() for name in ("y", "x")}
        grad = self.grad.reshape(T, H)
        for t in range(T):
            for k in range(self.ids.shape[1]):
                x = self.rows[t : t + 1].clone().requires_grad_()
                ids = self.ids[t : t + 1, k : k + 1]
                y = experts(x, ids, self.weights.detach()[t : t + 1, k : k + 1])
                got = torch.autograd.grad(y, [x, *parameters.values()], grad[t : t + 1])
                total["y"][t] += y[0].detach().abs()
                total["x"][t] += got[0][0].abs()
                for name, g in zip(parameters, got[1:], strict=True):
                    total[name] += g.abs()
        return total


def _grad(tensor: Any) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _within(ours: Tensor, theirs: Tensor, bound: Tensor, name: str = "") -> None:
    worst = ((ours - theirs).abs() - bound).max()
    assert worst <= 0, f"{name} is {worst:.3g} beyond its bound of up to {bound.max():.3g}"


def _build(
    block: Any, config: MoEConfig, backend: str, seed: int, scale: float = 1.0, casts: bool = True
) -> Case:
    """Random weights of deviation 1/sqrt(fan in) and an input of deviation ``scale``."""
    torch.manual_seed(seed)
    block.double()
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
        if hasattr(block.gate, "e_score_correction_bias"):
            block.gate.e_score_correction_bias.normal_(std=0.3)
        input_ids = None
        if hasattr(block.gate, "tid2eid"):
            block.gate.tid2eid.copy_(torch.randint(E, block.gate.tid2eid.shape))
            input_ids = torch.randint(VOCAB, SHAPE)
        layer = MoELayer(config, backend=backend)
        layer.router.weight.copy_(block.gate.weight)
        for name in ("e_score_correction_bias", "tid2eid"):
            if hasattr(block.gate, name):
                getattr(layer.router, name).copy_(getattr(block.gate, name))
        layer.experts.load_full_weights(block.experts.gate_up_proj, block.experts.down_proj)
        if layer.shared_experts is not None:
            shared = block.shared_experts
            w13 = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
            layer.shared_experts.w13.copy_(w13)
            layer.shared_experts.w2.copy_(shared.down_proj.weight)
    x = torch.randn(*SHAPE, H).double() * scale
    return Case(block, layer, x, torch.randn(*SHAPE, H).double(), input_ids, casts)


def _config(top_k: int, router: RouterConfig, **more: Any) -> MoEConfig:
    return MoEConfig(
        hidden_size=H,
        intermediate_size=INNER,
        num_experts=E,
        top_k=top_k,
        router=router,
        dtype="float64",
        **more,
    )


def _gap(scores: Tensor, chosen: int) -> Tensor:
    """``[T]``: how far the last chosen one is from the first that wasn't."""
    ordered = scores.sort(dim=-1, descending=True).values
    return ordered[:, chosen - 1] - ordered[:, chosen]


def _v4(kind: str, backend: str, seed: int) -> Case:
    theirs = DeepseekV4Config(
        hidden_size=H,
        moe_intermediate_size=INNER,
        n_routed_experts=E,
        num_experts_per_tok=3,
        num_hidden_layers=2,
        mlp_layer_types=["hash_moe", "moe"],
        vocab_size=VOCAB,
        swiglu_limit=1.5,
    )
    theirs._experts_implementation = "eager"
    router = RouterConfig(
        kind=kind,
        scoring_func="sqrtsoftplus",
        renormalize=True,
        routed_scaling_factor=theirs.routed_scaling_factor,
        correction_bias=kind == "topk",
        vocab_size=VOCAB if kind == "hash" else None,
    )
    config = _config(3, router, activation=Activation(limit=1.5), num_shared_experts=1)
    block = DeepseekV4SparseMoeBlock(theirs, layer_idx=int(kind == "topk"))
    return _build(block, config, backend, seed, scale=2.0)


@backends
@seeds
@pytest.mark.parametrize("kind", ["topk", "hash"])
def test_deepseek_v4(kind: str, backend: str, seed: int):
    case = _v4(kind, backend, seed)
    assert case.logits is not None
    assert case.logits.max() < 20  # above, their softplus drops e^-x, which float64 still sees
    if kind == "topk":
        choice = case.scores + case.block.gate.e_score_correction_bias
        assert _gap(choice, 3).min() > EXACT
        plain = case.scores.topk(3).indices.sort(1).values
        assert not torch.equal(plain, case.ids.sort(1).values)  # the bias does change the choice
    else:
        assert torch.equal(case.ids, case.block.gate.tid2eid[case.input_ids.flatten()])
        assert (case.ids.sort(1).values.diff(dim=1) == 0).any()  # twice the same expert
    case.check_choice()
    case.check_weights(EXACT)
    case.check_exact()


@pytest.mark.parametrize("kind", ["topk", "hash"])
def test_deepseek_v4_really_clamps(kind: str):
    case = _v4(kind, "torch", 0)
    shared = case.block.shared_experts
    routed = torch.einsum("th,tkih->tki", case.rows, case.block.experts.gate_up_proj[case.ids])
    for gate, up in (
        routed.chunk(2, dim=-1),
        (F.linear(case.rows, shared.gate_proj.weight), F.linear(case.rows, shared.up_proj.weight)),
    ):
        for beyond in (gate > 1.5, gate < -1.5, up > 1.5, up < -1.5):
            assert 0.05 < beyond.double().mean() < 0.5
    loose = _config(3, case.layer.config.router, activation=Activation(), num_shared_experts=1)
    free = MoELayer(loose, backend="torch")
    free.load_state_dict(case.layer.state_dict())
    assert (free(case.x, case.input_ids) - case.theirs).abs().max() > 0.1


@backends
@seeds
@casts
def test_mixtral(casts: bool, backend: str, seed: int):
    theirs = MixtralConfig(
        hidden_size=H, intermediate_size=INNER, num_local_experts=E, num_experts_per_tok=2
    )
    theirs._experts_implementation = "eager"
    config = _config(2, RouterConfig(renormalize=True))
    case = _build(MixtralSparseMoeBlock(theirs), config, backend, seed, casts=casts)
    assert case.logits is not None
    largest = float(case.logits.detach().abs().max())
    # twice the relative error of a probability, which is the absolute one of a logit
    assert _gap(case.logits, 2).min() > 2 * (3 * largest + 3) * U
    case.check_choice()
    relative = (6 * largest + 6 + 2) * U
    if casts:
        case.check_weights(relative)
        case.check_cast(relative, scale=1.0)
    else:
        case.check_weights(EXACT)
        case.check_exact()


@backends
@seeds
@casts
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalised", "raw"])
def test_deepseek_v3(renormalize: bool, casts: bool, backend: str, seed: int):
    top_k, groups, kept, scale = 3, 4, 2, 2.5
    theirs = DeepseekV3Config(
        hidden_size=H,
        moe_intermediate_size=INNER,
        n_routed_experts=E,
        n_shared_experts=2,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=kept,
        routed_scaling_factor=scale,
        norm_topk_prob=renormalize,
    )
    theirs._experts_implementation = "eager"
    router = RouterConfig(
        scoring_func="sigmoid",
        renormalize=renormalize,
        routed_scaling_factor=scale,
        num_expert_group=groups,
        topk_group=kept,
        correction_bias=True,
    )
    config = _config(top_k, router, num_shared_experts=2)
    case = _build(DeepseekV3MoE(theirs), config, backend, seed, casts=casts)
    gate = case.block.gate
    product = float(F.linear(case.rows.abs(), gate.weight.detach().abs()).max())
    cast = (H + 2) * U * product
    choice = case.scores + gate.e_score_correction_bias
    group = choice.view(T, groups, -1).sum(-1)  # two experts each: the sum of the best two
    assert _gap(group, kept).min() > 4 * (cast + 4 * U)
    keep = group >= group.topk(kept).values[:, -1:]
    inside = choice.masked_fill(~keep.repeat_interleave(E // groups, 1), -torch.inf)
    assert _gap(inside, top_k).min() > 2 * (cast + 4 * U)
    case.check_choice()
    relative = 2 * cast + (top_k + 12) * U
    if casts:
        case.check_weights(relative)
        case.check_cast(relative, scale)
        case.check_exact("shared w13", "shared w2")
    else:
        case.check_weights(EXACT)
        case.check_exact()

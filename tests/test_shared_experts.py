"""Shared experts: gated, cut over tp, as slots. Counted once, whatever the widths."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from moe_core import (
    Activation,
    ConfigError,
    InputError,
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RouterConfig,
    Routing,
    trace,
)
from moe_core.conformance.pool import ranks

CONFIG = MoEConfig(
    hidden_size=12,
    intermediate_size=8,
    num_experts=5,
    top_k=2,
    router=RouterConfig(scoring_func="sigmoid", renormalize=True, routed_scaling_factor=2.5),
    num_shared_experts=1,
    dtype="float64",
)
APART, SLOTS = ({"shared_placement": p} for p in ("apart", "slots"))


def layer(
    config: MoEConfig, parallel: ParallelConfig | None = None, spec: str = "auto", **more: Any
) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(config, parallel, spec, **more)


def tokens(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 12, dtype=torch.float64, generator=generator)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def by_definition(x: Tensor, weights: dict[str, Tensor], config: MoEConfig) -> Tensor:
    """Expert by expert, gate and up rows picked one by one. No limit, silu."""
    w13, w2 = weights["w13"], weights["w2"]
    count, width = config.num_shared_experts, config.shared_width
    total = torch.zeros_like(x)
    for s in range(count):
        inner = range(s * width, (s + 1) * width)
        first, second = list(inner), [count * width + i for i in inner]
        gate_rows, up_rows = {
            "gate_up": (first, second),
            "up_gate": (second, first),
            "interleaved": ([2 * i for i in inner], [2 * i + 1 for i in inner]),
        }[config.w13_layout]
        gate, up = x @ w13[gate_rows].T, x @ w13[up_rows].T
        total = total + (gate * torch.sigmoid(gate) * up) @ w2[:, inner.start : inner.stop].T
    return total


def test_the_gated_one_is_qwen2_moes() -> None:
    """transformers' block, gradients included; its float32 router is replaced by saved routing."""
    theirs = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=12,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=20,
            num_experts=5,
            num_experts_per_tok=2,
        )
    ).double()
    torch.manual_seed(3)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.5)
    ours = layer(
        replace(CONFIG, shared_intermediate_size=20, shared_gate=True), spec="torch[gemm=loop]"
    )
    ours.experts.load_full_weights(theirs.experts.gate_up_proj, theirs.experts.down_proj)
    mlp, gate = theirs.shared_expert, theirs.shared_expert_gate
    w13 = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    ours.load_shared_weights(w13, mlp.down_proj.weight, gate.weight)
    x = tokens(7)
    with torch.no_grad():
        _, weights, ids = theirs.gate(x)

    class Saved(nn.Module):
        def forward(self, _: Tensor) -> tuple[None, Tensor, Tensor]:
            return None, weights, ids

    theirs.gate = Saved()  # pyright: ignore
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = ours(mine, routing=Routing(ids, weights))
    expected = theirs(other[None])[0]
    close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    close(mine.grad, other.grad)
    shared = ours.shared_experts
    close(shared.gate.grad, gate.weight.grad)
    close(shared.w13.grad, torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad]))
    close(shared.w2.grad, mlp.down_proj.weight.grad)


def test_the_gate_is_computed_in_float32() -> None:
    """A logit of -8 - 2^-5 is -8 in bfloat16, which would make the result 3 % too large."""
    config = replace(CONFIG, dtype="bfloat16")
    plain, gated = (layer(replace(config, shared_gate=g)).shared_experts for g in (False, True))
    gate = torch.zeros(1, 12)
    gate[0, :2] = torch.tensor([-8.0, -(2.0**-5)])
    assert plain is not None
    assert gated is not None
    gated.load_full_weights(plain.w13, plain.w2, gate)
    x = torch.ones(1, 12, dtype=torch.bfloat16)
    factor = torch.sigmoid(torch.tensor(-8 - 2.0**-5, dtype=torch.float64))
    torch.testing.assert_close(gated(x).double(), plain(x).double() * factor, rtol=2**-8, atol=0)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_shared_experts": 2},
    {"num_shared_experts": 3, "w13_layout": "interleaved"},
    {"num_shared_experts": 2, "w13_layout": "up_gate", "combine": "per_slot"},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_apart_and_slots_are_the_definition(changes: dict[str, Any]) -> None:
    x = tokens(6)
    apart, slots = (layer(replace(CONFIG, **changes, **p)) for p in (APART, SLOTS))
    assert slots.shared_experts is None
    state = apart.state_dict()
    assert list(state) == list(slots.state_dict())
    assert all(torch.equal(state[k], v) for k, v in slots.state_dict().items())  # same seed
    shared = {n: torch.randn_like(state[f"shared_experts.{n}"]) for n in ("w13", "w2")}
    for model in (apart, slots):
        model.load_shared_weights(**shared)
        kept = model.state_dict()
        assert all(torch.equal(kept[f"shared_experts.{n}"], w) for n, w in shared.items())
    routed = layer(replace(apart.config, num_shared_experts=0))
    expected = routed(x) + by_definition(x, shared, apart.config)
    close(apart(x), expected)
    close(slots(x), expected)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    "changes",
    [*VARIANTS, {"activation": Activation(name="relu2", gated=False), "num_shared_experts": 2}],
)
def test_slots_give_the_gradients_of_apart(changes: dict[str, Any], backend: str) -> None:
    apart, slots = (layer(replace(CONFIG, **changes, **p), spec=backend) for p in (APART, SLOTS))
    grads = []
    for model in (apart, slots):
        x = tokens(6).requires_grad_()
        mask = torch.tensor([True, True, False, True, True, True])
        y = model(x, token_mask=mask)
        assert not y[2].any()
        y.square().sum().backward()
        # the state_dict of the gradients: the hooks lay them out like the parameters
        for p in model.parameters():
            assert p.grad is not None
        named = copy.deepcopy(model)
        with torch.no_grad():
            for theirs, mine in zip(named.parameters(), model.parameters(), strict=True):
                theirs.copy_(mine.grad)
        grads.append({"y": y, "x": x.grad, **named.state_dict()})
    assert list(grads[0]) == list(grads[1])
    for name, grad in grads[0].items():
        close(grads[1][name], grad)


def test_slots_load_what_apart_saved_and_the_reverse() -> None:
    config = replace(CONFIG, num_shared_experts=2)
    apart = nn.Sequential(layer(replace(config, **APART)))
    torch.manual_seed(9)
    slots = nn.Sequential(MoELayer(replace(config, **SLOTS)))
    x, state = tokens(3), apart.state_dict()
    slots.load_state_dict(state)
    close(slots(x), apart(x))
    assert all(torch.equal(state[k], v) for k, v in slots.state_dict().items())
    meta = nn.Sequential(layer(replace(config, **SLOTS), device="meta"))
    meta.load_state_dict(state, assign=True)
    assert torch.equal(meta(x), slots(x))
    twin = copy.deepcopy(slots)
    with torch.no_grad():
        twin[0].experts.w2[-1:] += 1  # pyright: ignore
    assert not torch.equal(twin.state_dict()["0.shared_experts.w2"], state["0.shared_experts.w2"])
    assert torch.equal(slots.state_dict()["0.shared_experts.w2"], state["0.shared_experts.w2"])
    apart.load_state_dict(twin.state_dict())
    close(apart(x), twin(x))

    before = slots.state_dict()["0.experts.w13"].clone()
    less = {k: v for k, v in state.items() if k != "0.shared_experts.w13"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.shared_experts.w13"'):
        slots.load_state_dict(less)
    told = slots.load_state_dict(less | {"0.experts.w13": before}, strict=False)
    assert told.missing_keys == ["0.shared_experts.w13"]
    assert told.unexpected_keys == []
    assert torch.equal(slots.state_dict()["0.experts.w13"], before)
    with pytest.raises(RuntimeError, match="don't fit together"):
        slots.load_state_dict(state | {"0.experts.w13": before[..., :3]})


def test_whole_shared_weights_have_to_fit() -> None:
    for where in (APART, SLOTS):
        model = layer(replace(CONFIG, **where))
        with pytest.raises(InputError, match=r"w13 must have shape \(16, 12\).*w2 .*gate"):
            model.load_shared_weights(torch.ones(8, 12), torch.ones(12, 9), torch.ones(1, 12))
    with pytest.raises(InputError, match="no shared experts"):
        layer(replace(CONFIG, num_shared_experts=0)).load_shared_weights(tokens(1), tokens(1))
    gated = layer(replace(CONFIG, shared_gate=True))
    with pytest.raises(InputError, match=r"gate must have shape \(1, 12\)"):
        gated.load_shared_weights(torch.ones(16, 12), torch.ones(12, 8))


def test_what_slots_cannot_is_refused_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        replace(
            CONFIG,
            shared_placement="slots",
            shared_intermediate_size=9,
            shared_gate=True,
            bias=True,
            dispatch_dtype="bfloat16",
        )
    fields = {f.field for f in error.value.faults}
    assert fields == {"shared_intermediate_size", "shared_gate", "bias", "dispatch_dtype"}
    assert all("or use apart" in f.message for f in error.value.faults)
    with pytest.raises(ConfigError) as error:
        replace(
            CONFIG, num_shared_experts=0, shared_gate=True, shared_tp=True, shared_placement="slots"
        )
    assert {f.field for f in error.value.faults} == {"shared_gate", "shared_tp", "shared_placement"}
    with pytest.raises(ConfigError, match=r"shared_placement='slot'.*did you mean"):
        replace(CONFIG, shared_placement="slot")


def test_slots_compile_as_one_graph_and_run_in_bfloat16() -> None:
    torch._dynamo.reset()
    config = replace(CONFIG, hidden_size=16, dtype="bfloat16", **SLOTS)
    model, counter = layer(config, spec="torch"), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for count in (1, 7):
        x = torch.randn(count, 16, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count <= 2
    model.experts.prepare_weights()
    with torch.no_grad():
        assert model(x).shape == (7, 16)


# On several ranks.


def identities(config: MoEConfig, parallel: ParallelConfig, spec: str) -> tuple[Tensor, Tensor]:
    """Routed experts return 0, shared ones x."""
    model = layer(config, parallel, spec)
    hidden, groups = config.hidden_size, model.experts.groups
    zeros = torch.zeros(config.num_experts, hidden, hidden, dtype=torch.float64)
    model.experts.load_full_weights(zeros, zeros)
    one = torch.eye(hidden, dtype=torch.float64)
    model.load_shared_weights(one, one)
    part = 0 if parallel.rows == "replicated" else groups.dp_rank * 2 + groups.ep_rank
    x = tokens(5 - part, seed=part)
    return x, model(x).detach()


@pytest.mark.parametrize("rows", ["distinct", "replicated"])
@pytest.mark.parametrize("where", [{}, {"shared_tp": True}, SLOTS], ids=["whole", "cut", "slots"])
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_the_shared_expert_counts_once(ep: int, tp: int, where: dict[str, Any], rows: str) -> None:
    """sglang#26845 counted it R times, tpu-inference#3435 1/R times."""
    linear = Activation(name="identity", gated=False)
    config = replace(CONFIG, intermediate_size=12, activation=linear, **where)
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, rows=rows)
    modes = ["replicated"] if rows == "replicated" else ["replicated", "all_to_all"]
    for mode in modes:
        spec = f"nccl[mode={mode}]+torch"
        for x, y in ranks(parallel.world_size).run(identities, config, parallel, spec):
            assert torch.equal(y, x)


TOKENS = {1: [5], 2: [5, 3], 4: [5, 0, 1, 4]}


def step(
    config: MoEConfig, parallel: ParallelConfig, spec: str, on_meta: bool = False
) -> dict[str, Any]:
    model = layer(config, parallel, spec)
    if on_meta:
        state, model = model.state_dict(), layer(config, parallel, spec, device="meta")
        model.to_empty(device="cpu")
        model.load_state_dict(state)
    experts, groups = model.experts, model.experts.groups
    part = groups.dp_rank * parallel.ep_size + groups.ep_rank
    sizes = TOKENS[parallel.ep_size * parallel.dp_size]
    if parallel.rows == "replicated":
        sizes, part = [6], 0
    x = tokens(sizes[part], seed=part).requires_grad_()
    with trace() as seen:
        y = model(x)
    (y.square().sum()).backward()
    n = experts.placement.num_local_experts(groups.ep_rank)
    if config.shared_slots:
        shared = {"w13": experts.w13.grad[n:], "w2": experts.w2.grad[n:]}  # pyright: ignore
    else:
        shared = {k: p.grad for k, p in model.shared_experts.named_parameters()}
    return {
        "y": y.detach(),
        "x": x.grad,
        "shared": shared,
        "collectives": seen.collectives,
        "place": (groups.dp_rank, groups.ep_rank, groups.tp_rank),
    }


@pytest.mark.parametrize("mode", ["all_to_all", "replicated"])
@pytest.mark.parametrize(
    ("ep", "tp", "dp"), [(2, 1, 1), (1, 2, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)]
)
def test_slots_on_ranks_are_one_process_apart(ep: int, tp: int, dp: int, mode: str) -> None:
    config = replace(CONFIG, num_shared_experts=2)
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    spec = f"nccl[mode={mode}]+torch"
    alone = layer(config, spec="reference")
    parts = [tokens(n, seed=i).requires_grad_() for i, n in enumerate(TOKENS[ep * dp])]
    whole = [alone(part) for part in parts]
    torch.cat(whole).square().sum().backward()
    w13, w2 = alone.shared_experts.w13.grad, alone.shared_experts.w2.grad
    results = ranks(parallel.world_size).run(step, replace(config, **SLOTS), parallel, spec)
    for got in results:
        dp_rank, ep_rank, tp_rank = got["place"]
        part = dp_rank * ep + ep_rank
        torch.testing.assert_close(got["y"], whole[part], rtol=1e-12, atol=1e-12)
        close(got["x"], parts[part].grad)
        # ep ranks have the sum over ep already; dp replicas saw their own tokens only
        same = [g for g in results if g["place"][1:] == (ep_rank, tp_rank)]
        inner = slice(tp_rank * 8 // tp, (tp_rank + 1) * 8 // tp)
        full = w13.view(2, 2, 8, 12)[:, :, inner].transpose(0, 1).reshape(2, -1, 12)
        close(sum(g["shared"]["w13"] for g in same), full)
        close(sum(g["shared"]["w2"] for g in same), w2.view(12, 2, 8)[..., inner].transpose(0, 1))


def test_slots_with_replicated_rows_split_the_tokens() -> None:
    config = replace(CONFIG, num_shared_experts=2)
    parallel = ParallelConfig(ep_size=2, rows="replicated")
    alone = layer(config, spec="reference")
    x = tokens(6, seed=0).requires_grad_()
    y = alone(x)
    y.square().sum().backward()
    spec = "nccl[mode=replicated]+torch"
    for got in ranks(2).run(step, replace(config, **SLOTS), parallel, spec):
        close(got["y"], y)
        close(got["x"], x.grad)
        w2 = alone.shared_experts.w2.grad
        close(got["shared"]["w2"], w2.view(12, 2, 8).transpose(0, 1))


def only_shared(config: MoEConfig) -> tuple[Tensor, list[list[int]], list[list[int]]]:
    spec, x = "nccl[mode=all_to_all]+torch", tokens(3)
    model = layer(config, ParallelConfig(ep_size=dist.get_world_size()), spec)
    nobody = Routing(torch.full((3, 2), -1), torch.zeros(3, 2))
    with trace() as seen:
        y = model(x, routing=nobody)
    return y.detach(), seen.calls[0].combine_bytes, seen.payload_bytes


def test_slots_never_travel() -> None:
    apart = layer(CONFIG).shared_experts
    assert apart is not None
    expected = apart(tokens(3))
    for y, home, out in ranks(4).run(only_shared, replace(CONFIG, **SLOTS)):
        close(y, expected)
        assert not any(any(row) for row in (*home, *out))


@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("on_meta", [False, True])
def test_cut_over_tp_the_gated_one_is_the_same(ep: int, tp: int, on_meta: bool) -> None:
    config = replace(
        CONFIG, num_shared_experts=2, shared_intermediate_size=6, shared_gate=True, shared_tp=True
    )
    parallel, spec = ParallelConfig(ep_size=ep, tp_size=tp), "nccl[mode=all_to_all]+torch"
    alone = layer(config, spec="reference")
    parts = [tokens(n, seed=i).requires_grad_() for i, n in enumerate(TOKENS[ep])]
    whole = [alone(part) for part in parts]
    torch.cat(whole).square().sum().backward()
    shared = alone.shared_experts
    results = ranks(parallel.world_size).run(step, config, parallel, spec, on_meta)
    for got in results:
        _, ep_rank, tp_rank = got["place"]
        close(got["y"], whole[ep_rank])
        close(got["x"], parts[ep_rank].grad)
        assert got["collectives"].count("shared.reduce") == 1
        mine = [g["shared"] for g in results if g["place"][2] == tp_rank]
        inner = slice(tp_rank * 3, tp_rank * 3 + 3)
        w13 = shared.w13.grad.view(2, 2, 6, 12)[:, :, inner].reshape(-1, 12)
        close(sum(g["w13"] for g in mine), w13)
        close(sum(g["w2"] for g in mine), shared.w2.grad.view(12, 2, 6)[..., inner].reshape(12, -1))
        close(sum(g["gate"] for g in mine), shared.gate.grad)
        assert torch.equal(got["y"], results[ep_rank * tp]["y"])  # the same bits on all tp ranks


def uneven_cut() -> str:
    config = replace(CONFIG, shared_intermediate_size=7, shared_tp=True)
    try:
        MoELayer(config, ParallelConfig(tp_size=dist.get_world_size()))
    except ConfigError as error:
        return str(error)
    return ""


def test_tp_must_divide_a_shared_expert() -> None:
    for text in ranks(2).run(uneven_cut):
        assert "tp_size=2: shared_tp cuts each shared expert's width of 7" in text

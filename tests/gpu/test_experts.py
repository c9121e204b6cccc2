"""The experts against float64, forward and backward, and the promises that need a device."""

from __future__ import annotations

from typing import Any

import gpu_oracle as oracle
import pytest
import torch

from moe_core import Experts, MoEConfig, MoELayer, RouterConfig
from moe_triton.runtime import count_compilations

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXPERT_KERNELS = {
    "up_kernel",
    "down_kernel",
    "down_backward_kernel",
    "outer_kernel",
    "bias_backward_kernel",
    "bias_product_kernel",
}
GPT_OSS = {"bias": True, "layout": "interleaved", "limit": 7.0, "alpha": 1.702}


@pytest.mark.parametrize(
    ("tokens", "sizes", "top_k", "dtype", "how"),
    [
        (0, (8, 256, 128), 2, BF16, {}),
        (1, (8, 256, 128), 2, BF16, {}),
        (7, (5, 200, 136), 3, BF16, {"invalid": 0.3}),
        (7, (5, 97, 51), 3, BF16, {"bias": True}),
        (64, (128, 512, 256), 8, BF16, {}),
        (300, (32, 512, 256), 4, BF16, GPT_OSS),
        (1000, (8, 1024, 512), 2, BF16, {"layout": "up_gate"}),
        (3000, (16, 768, 384), 4, BF16, {"limit": 10.0, "busy": 9}),
        (3000, (4, 320, 192), 2, BF16, {"name": "relu2", "gated": False, "invalid": 1.0}),
        (500, (8, 256, 512), 2, FP16, {"name": "gelu", "bias": True}),
        (130, (6, 192, 160), 2, FP32, GPT_OSS),
    ],
)
def test_against_float64(
    tokens: int, sizes: Any, top_k: int, dtype: Any, how: Any, device: torch.device
):
    call = oracle.make_call(tokens, sizes, top_k, dtype, device, **how)
    upstream = torch.randn_like(call.floats["x"])
    wanted, wanted_grads = call.both("torch[gemm=loop]", upstream, torch.float64)
    out, grads = call.both("triton", upstream)
    oracle.check_close(out, wanted, dtype, call.size, "result")
    for name, exact in wanted_grads.items():
        oracle.check_close(grads[name], exact, dtype, call.size, f"gradient of {name}")
    again, grads_again = call.both("triton", upstream)
    assert torch.equal(out, again)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_again[name]), name


def test_idle_experts_have_zero_gradients(device: torch.device):
    call = oracle.make_call(64, (16, 256, 128), 2, BF16, device, bias=True, busy=3)
    _, grads = call.both("triton", torch.randn_like(call.floats["x"]))
    for name in ("w13", "w2", "b13", "b2"):
        assert not grads[name][3:].any(), name
        assert grads[name][:3].any(), name


def test_what_nobody_owns_is_not_read(device: torch.device):
    call = oracle.make_call(200, (8, 256, 128), 4, BF16, device, invalid=0.5)
    clean = call.run("triton")
    call.floats["topk"] = call.floats["topk"].masked_fill(call.ids < 0, float("nan"))
    # what torch hands out next holds NaN
    blocks = [torch.full((2**22,), float("nan"), device=device, dtype=BF16) for _ in range(8)]
    del blocks
    assert torch.equal(call.run("triton"), clean)


def layer(device: torch.device, **how: Any) -> MoELayer:
    config = MoEConfig(
        hidden_size=256,
        intermediate_size=192,
        num_experts=16,
        top_k=4,
        router=RouterConfig(renormalize=True),
        dtype="bfloat16",
    )
    return MoELayer(config, backend="triton", device=device, **how)


def draw(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.randn(tokens, 256, device=device, dtype=BF16)


@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_graph_whose_routing_changes(tokens: int, device: torch.device):
    moe = layer(device, inference=True, cuda_graph=True)
    held = draw(tokens, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            moe(held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = moe(held)
    choices: list[torch.Tensor] = []
    for _ in range(3):
        fresh = draw(tokens, device)
        held.copy_(fresh)
        graph.replay()
        with torch.no_grad():
            assert torch.equal(out, moe(fresh))
            choices.append(moe.router(fresh).topk_ids)
    assert not torch.equal(choices[0], choices[1])


def test_nothing_waits_for_the_device(device: torch.device):
    moe, x = layer(device), draw(40, device).requires_grad_()

    def step() -> None:
        moe(x).square().sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError):  # it does see one
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_in_one_graph(compiler: str, device: torch.device):
    moe, x = layer(device, compile=True), draw(24, device)
    compiled = torch.compile(moe, fullgraph=True, backend=compiler)
    wanted = moe(x.requires_grad_())
    wanted_grad = torch.autograd.grad(wanted.sum(), x)[0]
    out = compiled(x)
    grad = torch.autograd.grad(out.sum(), x)[0]
    for actual, exact in ((out, wanted), (grad, wanted_grad)):
        oracle.check_close(actual.detach(), exact.detach().double(), BF16, 10_000, compiler)


def test_nothing_is_compiled_after_warmup(device: torch.device):
    moe = layer(device)
    runner: Any = moe.experts.pipeline.runner
    runner.warmup(moe.experts.weights, 4, max_tokens=3000)

    def steps() -> list[str]:
        with count_compilations() as names:
            for tokens in (1, 5, 16, 100, 257, 1024, 3000):
                x = draw(tokens, device).requires_grad_()
                moe(x).sum().backward()
                with torch.no_grad():
                    moe(x)
        return names

    # the kernels that route, sort and sum are few, and aren't the runner's to make ready
    assert {name for name in steps() if name in EXPERT_KERNELS} == set()
    assert steps() == []


def test_a_row_has_the_same_bits_in_every_batch(device: torch.device):
    config = MoEConfig(
        hidden_size=256, intermediate_size=192, num_experts=8, top_k=2, dtype="bfloat16"
    )
    experts = Experts(config, backend="triton[batch_invariant=true]", device=device)
    x = draw(2000, device)
    ids = torch.rand(2000, 8, device=device).topk(2, 1).indices
    weights = torch.rand(2000, 2, device=device)
    with torch.no_grad():
        whole = experts(x, ids, weights)
        for part in (slice(0, 1), slice(3, 20), slice(1000, 1900)):
            assert torch.equal(experts(x[part], ids[part], weights[part]), whole[part])


def gigabytes_free() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


def test_rows_past_two_billion_elements(device: torch.device):
    """[T, K, H] of 2**31 + elements; the last tokens' results are those of a call of their own."""
    tokens, top_k, hidden = 2**18 + 64, 8, 1024
    if gigabytes_free() < 24:
        pytest.skip("needs 24 GiB of free GPU memory")
    assert tokens * top_k * hidden > 2**31
    call = oracle.make_call(tokens, (8, hidden, 32), top_k, BF16, device)
    with torch.no_grad():
        out = call.run("triton")
        last = slice(tokens - 128, tokens)
        part = oracle.Call(call.ids[last], dict(call.floats), call.layout, call.activation)
        for name in ("x", "topk"):
            part.floats[name] = call.floats[name][last]
        wide = {name: t.double() for name, t in part.floats.items()}
        exact = part.run("torch[gemm=loop]", wide)
    oracle.check_close(out[last], exact, BF16, part.size, "the last tokens")


def test_weights_past_two_billion_elements(device: torch.device):
    """w13 of 2**31 + elements; the last expert is where the offset is largest."""
    experts, hidden, inner = 260, 2048, 2048
    if gigabytes_free() < 24:
        pytest.skip("needs 24 GiB of free GPU memory")
    assert experts * 2 * inner * hidden > 2**31
    call = oracle.make_call(8, (1, hidden, inner), 1, BF16, device)
    w13 = torch.zeros(experts, 2 * inner, hidden, device=device, dtype=BF16)
    w2 = torch.zeros(experts, hidden, inner, device=device, dtype=BF16)
    w13[-1], w2[-1] = call.floats["w13"][0], call.floats["w2"][0]
    wide = {name: t.double() for name, t in call.floats.items()}
    with torch.no_grad():
        exact = call.run("torch[gemm=loop]", wide)
        call.ids += experts - 1
        out = call.run("triton", {**call.floats, "w13": w13, "w2": w2})
    oracle.check_close(out, exact, BF16, call.size, "the last expert")

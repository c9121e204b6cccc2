"""The torch runner: the conformance suite on both engines, and what is its own."""

from __future__ import annotations

import logging
import math
import weakref
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_core import Activation, ConfigError, InputError, MoEConfig, resolve
from moe_core.conformance.runner import RunnerConformance
from moe_core.contracts import BuildContext, ExpertWeights
from moe_core.convert import Permute
from moe_core.layouts import ExpertContiguous, TokenMajor
from moe_core.manifest import Request
from moe_torch.grouped import ENGINES, _readable, row_experts
from moe_torch.runner import TorchRunner

torch.set_num_threads(1)


class TestTorch(RunnerConformance):
    backend = "torch"
    refuses: ClassVar[frozenset[str]] = frozenset()


class TestTorchLoop(RunnerConformance):
    backend = "torch[gemm=loop]"
    refuses: ClassVar[frozenset[str]] = frozenset()


class TestReference(RunnerConformance):
    backend = "reference"
    refuses: ClassVar[frozenset[str]] = frozenset({"compile"})


# Experts of 2, 0 and 3 rows, then a tail of two rows.
STARTS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
COUNTS = torch.tensor([2, 0, 3], dtype=torch.int32)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def operator(name: str, engine: str) -> Any:
    suffix = "_loop" if engine == "loop" else ""
    return getattr(torch.ops.moe_torch, name + suffix).default


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def runner(
    dtype: str = "float32", sizes: tuple[int, int] = (8, 16), gemm: str = "auto", **request: Any
) -> TorchRunner:
    asked = Request(dtype=dtype, hidden_size=sizes[0], intermediate_size=sizes[1], **request)
    return TorchRunner(
        BuildContext(asked, dtype, "cpu", 3, 3, 0, pays=("weight",), options={"gemm": gemm})
    )


def weights(dtype: torch.dtype = torch.float32, gated: bool = True, **fields: Any) -> ExpertWeights:
    rows = 32 if gated else 16
    made = {
        "w13": normal(3, rows, 8, dtype=dtype),
        "w2": normal(3, 8, 16, dtype=dtype),
        "w13_bias": normal(3, rows, dtype=dtype),
        "w2_bias": normal(3, 8, dtype=dtype),
        "w13_layout": "gate_up",
        "activation": Activation(gated=gated),
    }
    return ExpertWeights(**(made | fields))


def test_row_experts_with_gaps_and_tail() -> None:
    assert row_experts(STARTS, COUNTS, 7).tolist() == [0, 0, 2, 2, 2, 3, 3]
    gaps = torch.tensor([0, 4, 4, 8], dtype=torch.int32)
    assert row_experts(gaps, COUNTS, 9).tolist() == [0, 0, 3, 3, 2, 2, 2, 3, 3]


@each_engine
def test_operators_are_well_registered(engine: str) -> None:
    x, w = normal(7, 8).requires_grad_(), normal(3, 12, 8).requires_grad_()
    opcheck(operator("grouped_mm", engine), (x, w, STARTS, COUNTS))
    opcheck(operator("grouped_outer", engine), (normal(7, 12).requires_grad_(), x, STARTS, COUNTS))


def test_loop_gradients_by_finite_differences() -> None:
    x = normal(7, 3, dtype=torch.float64).requires_grad_()
    w = normal(3, 5, 3, dtype=torch.float64).requires_grad_()

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ENGINES["loop"](x, w, STARTS, COUNTS)

    assert torch.autograd.gradcheck(call, (x, w))
    assert torch.autograd.gradgradcheck(call, (x, w))


@each_engine
def test_tail_is_neither_read_nor_returned(engine: str) -> None:
    x, w = normal(7, 8), normal(3, 12, 8).requires_grad_()
    x[5:] = math.nan
    x.requires_grad_()
    y = ENGINES[engine](x, w, STARTS, COUNTS)
    by_hand = torch.cat([x[:2] @ w[0].T, x[2:5] @ w[2].T, torch.zeros(2, 12)])
    torch.testing.assert_close(y, by_hand)
    upstream = normal(7, 12)
    upstream[5:] = math.nan
    y.backward(upstream)
    assert x.grad is not None
    assert w.grad is not None
    dx = torch.cat([upstream[:2] @ w[0], upstream[2:5] @ w[2], torch.zeros(2, 8)])
    torch.testing.assert_close(x.grad, dx.detach())
    dw = [upstream[:2].T @ x[:2], torch.zeros(12, 8), upstream[2:5].T @ x[2:5]]
    torch.testing.assert_close(w.grad, torch.stack(dw).detach())


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("gemm", ["grouped", "loop"])
def test_alignment_gaps_change_nothing(gemm: str, on_input: bool) -> None:
    part = runner(gemm=gemm, weight_on_input=on_input)
    spread = torch.tensor([0, 1, 4, 5, 6])  # the rows of STARTS, aligned to 4
    results: list[list[torch.Tensor]] = []
    for gaps in (False, True):
        w = weights()
        x, route = normal(5, 8).requires_grad_(), normal(5).requires_grad_()
        record = ExpertContiguous(x, COUNTS, STARTS, route)
        if gaps:
            wide, wide_route = torch.full((9, 8), math.nan), torch.full((9,), math.nan)
            record = ExpertContiguous(
                wide.index_put((spread,), x),
                COUNTS,
                torch.tensor([0, 4, 4, 8], dtype=torch.int32),
                wide_route.index_put((spread,), route),
                expert_alignment=4,
            )
        leaves = [x, route, w.w13, w.w2, w.w13_bias, w.w2_bias]
        for leaf in leaves:
            assert leaf is not None
            leaf.requires_grad_()
        out = part.run(record, w)
        assert out.paid == ("weight",)
        upstream = torch.full_like(out.rows, math.nan)
        upstream[spread if gaps else slice(5)] = normal(5, 8)
        grads = torch.autograd.grad(out.rows, leaves, upstream)  # pyright: ignore[reportArgumentType]
        results.append([out.rows[spread] if gaps else out.rows, *grads])
    for dense, gapped in zip(*results, strict=True):
        torch.testing.assert_close(dense, gapped)


def test_grouped_mm_takes_any_layout_and_says_when_it_copies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # huggingface/transformers#48644, pytorch/pytorch#172440: strides and addresses off 16 bytes
    x, w = normal(7, 8), normal(3, 12, 8)
    want = ENGINES["loop"](x, w, STARTS, COUNTS)
    odd = torch.empty(7 * 8 + 1)[1:].view(7, 8).copy_(x)
    wide = torch.empty(7, 9)[:, :8].copy_(x)
    for rows in (odd, wide, x.T.contiguous().T):
        torch.testing.assert_close(ENGINES["grouped_mm"](rows, w, STARTS, COUNTS), want)
    one = torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    row = normal(8).as_strided((1, 8), (0, 1))  # torch calls it contiguous
    torch.testing.assert_close(ENGINES["grouped_mm"](row, w, one, one.diff()), row @ w[0].T)
    assert not _readable(odd)  # torch 2.13 on CPUs would take it, 2.10 and CUDA don't
    assert not caplog.records
    strided = torch.empty(3, 12, 9)[..., :8].copy_(w)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(ENGINES["grouped_mm"](x, strided, STARTS, COUNTS), want)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "torch[gemm=loop]" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "sizes", "gemm", "engine"),
    [
        ("float32", (8, 16), "auto", "grouped_mm"),
        ("float32", (8, 16), "loop", "loop"),
        ("float32", (6, 16), "auto", "loop"),  # 24 bytes
        ("float32", (8, 6), "auto", "loop"),
        ("bfloat16", (8, 16), "grouped", "grouped_mm"),
        ("float16", (12, 16), "auto", "loop"),  # 24 bytes
        ("float64", (8, 16), "auto", "loop"),
    ],
)
def test_the_engine_is_chosen_when_built(
    dtype: str, sizes: tuple[int, int], gemm: str, engine: str
) -> None:
    described = runner(dtype, sizes, gemm).describe()
    assert described["engine"] == engine
    assert bool(described["why_not_grouped"]) == (engine == "loop" and gemm == "auto")


def test_grouped_is_refused_where_it_is_not_able() -> None:
    config = MoEConfig(hidden_size=6, intermediate_size=7, num_experts=4, top_k=2)
    asked = "torch[gemm=grouped]"
    refused = resolve(config, backend=asked).refusals
    assert {(r.code, r.axis, r.wanted) for r in refused} == {
        ("check", "hidden_size", "6"),
        ("check", "intermediate_size", "7"),
    }
    double = replace(config, hidden_size=8, intermediate_size=8, dtype="float64")
    assert [r.axis for r in resolve(double, backend=asked).refusals] == ["dtype"]
    assert resolve(replace(double, dtype="float32"), backend=asked).ok
    assert resolve(double, backend="torch").ok
    assert [r.code for r in resolve(config, backend="torch[gemm=fast]").refusals] == ["option"]
    with pytest.raises(ConfigError, match="gemm=loop"):
        runner("float64", gemm="grouped")


def test_what_does_not_fit_is_an_error() -> None:
    part, w = runner(), weights()
    record = ExpertContiguous(normal(5, 8), COUNTS, STARTS, normal(5))
    with pytest.raises(InputError, match="paid already"):
        part.run(replace(record, paid=("weight",)), w)
    with pytest.raises(InputError, match="bfloat16"):
        part.run(replace(record, rows=record.rows.bfloat16()), w)
    with pytest.raises(InputError, match="token_major"):
        part.run(TokenMajor(normal(5, 8), COUNTS, COUNTS), w)


def test_prepare_makes_halves_once() -> None:
    rows = torch.arange(4.0).view(1, 4, 1)
    given = weights(w13=rows, w13_bias=rows.view(1, 4), w13_layout="interleaved")
    made = runner().prepare(given)
    assert made.w13_bias is not None
    assert made.w13.flatten().tolist() == made.w13_bias.flatten().tolist() == [0, 2, 1, 3]
    assert made.w13.is_contiguous()
    assert runner().prepare(made) is made
    swapped = runner().prepare(replace(given, w13_layout="up_gate"))
    assert swapped.w13.flatten().tolist() == [2, 3, 0, 1]
    plain = replace(given, activation=Activation(gated=False))
    assert runner().prepare(plain) is plain


class Peak(TorchDispatchMode):
    """The most bytes alive at once of the storages made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
            tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
            return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}

        given = storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for key, storage in storages(out).items():
            if key not in given and key not in self.alive:
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_workspace_is_a_bound(dtype: str) -> None:
    # vllm-project/vllm#57270: the worst case is what counts; here every routing has as many rows
    ids = torch.tensor([[0, 1], [2, -1]]).repeat(32, 1)
    rows = normal(64, 8, dtype=getattr(torch, dtype))
    limits = [None, 0.5]
    for gated, on_input, limit, bias in product(
        (True, False), (True, False), limits, (True, False)
    ):
        part = runner(dtype, weight_on_input=on_input, gated=gated)
        act = Activation(gated=gated, limit=limit)
        w = weights(rows.dtype, gated=gated, activation=act)
        w = w if bias else replace(w, w13_bias=None, w2_bias=None)
        record, _ = Permute(part.context).there(TokenMajor(rows, ids, normal(64, 2)))
        with torch.no_grad(), Peak() as peak:
            part.run(record, w)
        assert peak.peak <= part.workspace_bytes(64, 2)
        assert part.workspace_bytes(64, 2) <= 4 * peak.peak, "a bound of no use"
    # by hand, float32, H=8 I=16: 128 rows of 32*16 + 8*4 + 16*8 + 64, and 4 biases of 40 floats
    assert runner().workspace_bytes(64, 2) == 128 * 736 + 4 * 40 * 4
    assert runner().workspace_bytes(0, 2) == 4 * 40 * 4

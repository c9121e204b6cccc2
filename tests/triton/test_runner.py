"""The triton runner in the interpreter: the conformance suite, and what is its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from grouped_rows import IDS, LAYOUTS, NUM_EXPERTS, normal, rows_of
from torch.library import opcheck

from moe_core import Activation, InputError
from moe_core.conformance.runner import RunnerConformance
from moe_core.contracts import BuildContext, ExpertWeights
from moe_core.layouts import ExpertContiguous, ExpertMasked, Indexed, TokenMajor
from moe_core.manifest import Request
from moe_triton import configs, ops, runtime
from moe_triton.runner import TritonRunner, _on_meta

torch.set_num_threads(1)
# NumPy warns where a device makes an infinity
numpy_overflows = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@numpy_overflows
class TestTriton(RunnerConformance):
    backend = "torch+triton"
    refuses: ClassVar[frozenset[str]] = frozenset({"dtype"})


@numpy_overflows
@pytest.mark.slow
class TestTritonAlone(RunnerConformance):
    """With its own transport, invariant and with little memory."""

    backend = "triton[batch_invariant=true;recompute=true]"
    refuses: ClassVar[frozenset[str]] = frozenset({"dtype"})


HIDDEN, INNER, TOP_K = 12, 10, 2


def weights(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> ExpertWeights:
    return ExpertWeights(
        w13=normal(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype=dtype),
        w2=normal(NUM_EXPERTS, HIDDEN, INNER, dtype=dtype),
        w13_bias=normal(NUM_EXPERTS, 2 * INNER, dtype=dtype) if bias else None,
        w2_bias=normal(NUM_EXPERTS, HIDDEN, dtype=dtype) if bias else None,
        w13_layout="gate_up",
        activation=Activation(),
    )


def runner(
    takes: str = "indexed",
    pays: tuple[str, ...] = ("weight",),
    *,
    weight_on_input: bool = False,
    **options: str,
) -> TritonRunner:
    request = Request(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        weight_on_input=weight_on_input,
    )
    context = BuildContext(
        request=request,
        dtype="float32",
        device="cpu",
        num_experts=NUM_EXPERTS,
        num_local_experts=NUM_EXPERTS,
        first_local_expert=0,
        takes=takes,
        pays=pays,
        options=options,
    )
    return TritonRunner(context)


def record(layout: str) -> Any:
    rows = rows_of(layout)
    x, places = rows.inputs(HIDDEN, torch.float32), rows.places
    row_weights = rows.by_slot(dtype=torch.float32)
    counts, starts = places.tokens_per_expert, places.expert_starts
    if layout == "indexed":
        return Indexed(x, places.sorted_token_ids, rows.slot_rows, counts, starts, row_weights)
    if layout == "expert_contiguous":
        return ExpertContiguous(x, counts, starts, row_weights, 4)
    return ExpertMasked(x, counts, row_weights)


@pytest.mark.parametrize("on_input", [False, True])
def test_three_layouts_are_one_computation(on_input: bool) -> None:
    """The same rows in each layout, NaN around them: the same results and gradients."""
    seen: list[list[torch.Tensor]] = []
    values = normal(len(IDS), HIDDEN)
    routed = normal(*IDS.shape)
    upstream = normal(*IDS.shape, HIDDEN)
    slots = rows_of("indexed").places
    for layout in LAYOUTS:
        rows, given, own = rows_of(layout), record(layout), weights()
        source = slots.slots(rows_of("indexed").mine)  # the same order by expert in each
        mine = rows.places.slots(rows.mine)
        with torch.no_grad():
            if layout == "indexed":
                given.rows.copy_(values)
                given.topk_weights.copy_(routed)
            else:
                given.rows.view(-1, HIDDEN)[mine] = values[source // TOP_K]
                given.row_weights.view(-1)[mine] = routed.view(-1)[source]
        owed = given.topk_weights if layout == "indexed" else given.row_weights
        leaves = [given.rows, owed, own.w13, own.w2, own.w13_bias, own.w2_bias]
        for leaf in leaves:
            leaf.requires_grad_()
        out: Any = runner(layout, weight_on_input=on_input).run(given, own)
        assert (out.layout, out.paid) == (
            "slot_major" if layout == "indexed" else layout,
            ("weight",),
        )
        grad = torch.full_like(out.rows, float("nan"))
        grad.view(-1, HIDDEN)[mine] = upstream.view(-1, HIDDEN)[source]
        grads = torch.autograd.grad(out.rows, leaves, grad)
        by_row = grads[0].view(-1, HIDDEN)
        if layout != "indexed":
            by_slot = torch.zeros(IDS.numel(), HIDDEN)
            by_slot[source] = by_row[mine]
            by_row = by_slot.view(*IDS.shape, HIDDEN).sum(1)
        seen.append(
            [out.rows.detach().view(-1, HIDDEN)[mine], by_row, grads[1].view(-1)[mine], *grads[2:]]
        )
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            assert torch.equal(one, two)
    assert all(t.isfinite().all() for t in seen[0])


def test_masked_rows_may_be_sliced() -> None:
    given, own = record("expert_masked"), weights()
    wide = torch.cat([given.rows, given.rows], 1)[:, : given.rows.shape[1]]
    assert not wide.is_contiguous()
    mine = rows_of("expert_masked").mine
    dense, sliced = (
        run(runner("expert_masked"), r, own).rows.view(-1, HIDDEN)[mine]
        for r in (given, replace(given, rows=wide))
    )
    assert torch.equal(dense, sliced)


def run(part: TritonRunner, given: Any, own: ExpertWeights) -> Any:
    """Its result, as the record that it is."""
    return part.run(given, own)


def test_refusals() -> None:
    given, own = record("indexed"), weights()
    with pytest.raises(InputError, match="takes indexed, expert_contiguous or expert_masked"):
        runner().run(TokenMajor(given.rows, IDS, given.topk_weights), own)
    with pytest.raises(InputError, match=r"torch\.float32 and expert weights torch\.bfloat16"):
        runner().run(given, weights(torch.bfloat16))
    with pytest.raises(InputError, match="paid already"):
        runner().run(replace(given, paid=("weight",)), own)
    assert run(runner(pays=()), replace(given, paid=("weight",)), own).paid == ("weight",)


def test_nothing_is_kept_without_gradients() -> None:
    """The first product is made for a backward only, and not even then with ``recompute``."""
    given, own = record("indexed"), weights()
    learning = replace(given, rows=given.rows.clone().requires_grad_())
    kept: list[int] = []
    for one, how in ((given, {}), (learning, {}), (learning, {"recompute": "true"})):
        with runtime.record_launches() as made:
            runner(**how).run(one, own)
        up = made.made[0]
        assert up.name == "up_kernel"
        kept.append(up.args[8].numel() if up.args[8] is not None else 0)
    assert kept == [0, IDS.numel() * 2 * INNER, 0]


@pytest.mark.parametrize("layout", ["indexed", "expert_contiguous"])
def test_warmup_covers_all_sizes(layout: str) -> None:
    # NVIDIA/TensorRT-LLM#15311: kernels compiled in mid-run, for new numbers of tokens
    part, own, most = runner(layout), weights(), 300
    with runtime.record_launches() as ready:
        assert part.warmup(own, TOP_K, most) == len(ready.variants) <= 28
    with (
        runtime.record_launches() as all_sizes,
        runtime.planning(runtime.CHIPS["interpreter"]),
    ):
        for tokens in range(1, most + 1):
            part._plan(_on_meta(own), TOP_K, tokens)
    assert all_sizes.variants == ready.variants
    given = record(layout)
    owed = given.topk_weights if isinstance(given, Indexed) else given.row_weights
    leaves = [given.rows, owed, own.w13, own.w2, own.w13_bias, own.w2_bias]
    with runtime.record_launches() as real:
        part.run(given, own)
        for leaf in leaves:
            leaf.requires_grad_()
        out = run(part, given, own).rows
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
    assert {launched.name for launched in real.made} == {launched.name for launched in ready.made}
    assert real.variants <= ready.variants


@pytest.mark.parametrize("layout", ["indexed", "expert_contiguous"])
def test_few_variants_on_hopper(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the four tile heights, and no more kernels for T in between."""
    monkeypatch.setattr(runtime, "chip", lambda device: runtime.CHIPS["sm90"])
    part, most = runner(layout), 600
    own = replace(
        _on_meta(weights(torch.bfloat16)),
        w13=torch.empty(NUM_EXPERTS, 96, 64, dtype=torch.bfloat16, device="meta"),
        w2=torch.empty(NUM_EXPERTS, 64, 48, dtype=torch.bfloat16, device="meta"),
    )
    with runtime.record_launches() as ready:
        part.warmup(own, TOP_K, most)
    ups = [launched for launched in ready.made if launched.name == "up_kernel"]
    assert {launched.meta["BLOCK_M"] for launched in ups} == set(configs.BUCKETS)
    assert all(launched.meta["W_TMA"] for launched in ups)
    with runtime.record_launches() as all_sizes, runtime.planning(runtime.CHIPS["sm90"]):
        for tokens in range(1, most + 1):
            part._plan(own, TOP_K, tokens)
    assert all_sizes.variants == ready.variants
    forward = [v for v in ready.variants if v[0] in ("up_kernel", "down_kernel")]
    # per height: up with and without its product kept, down of results and of gradients
    assert len(forward) == 4 * len(configs.BUCKETS)


def test_warmup_of_masked_rows() -> None:
    with runtime.record_launches() as ready:
        assert runner("expert_masked").warmup(weights(), TOP_K, 64) == len(ready.variants) == 10


def test_tiles_grow_with_the_batch_unless_invariant() -> None:
    heights = [configs.bucket(rows) for rows in (0, 1, 16, 16.5, 32, 64, 100, 1e6)]
    assert heights == [16, 16, 16, 32, 32, 64, 128, 128]
    chip = runtime.CHIPS["sm90"]
    how: dict[str, Any] = {"itemsize": 2, "n": 2048, "k": 4096, "halves": 2}
    made = {
        configs.choose("up", chip, rows_per_expert=r, batch_invariant=True, **how)
        for r in (1, 20, 50, 1000)
    }
    assert [config.block_m for config in made] == [64]


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_programs_of_a_grid_run_at_once(family: str) -> None:
    """``per_sm`` programs share a multiprocessor's memory and its 64 Ki registers, of which a
    thread that sums ``n`` results takes n for these alone."""
    chip = runtime.CHIPS[family]
    tables = configs.TABLE | {(*key, 0): c for key, c in configs.SHORT_SUMS.items()}
    mine = {key: c for key, c in tables.items() if key[1] == family}
    assert mine
    for (kernel, _, itemsize, *_), config in mine.items():
        shared = configs.shared_bytes(kernel, config, itemsize, 2)
        assert shared * config.per_sm <= chip.shared_memory + 1024, (kernel, config)
        sums = config.block_m * config.block_n * (2 if kernel == "up" else 1)
        assert sums * config.per_sm <= 2**16 * 0.6, (kernel, config)


def test_short_sums_share_a_multiprocessor() -> None:
    how: dict[str, Any] = {"itemsize": 2, "rows_per_expert": 1000, "n": 2048}
    short, long = (configs.choose("down", runtime.CHIPS["sm90"], k=k, **how) for k in (768, 2048))
    assert (short.per_sm, long.per_sm) == (2, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weighs", [True, False])
def test_opcheck(layout: str, weighs: bool) -> None:
    rows, own = rows_of(layout), weights(bias=weighs)
    x = rows.inputs(HIDDEN, torch.float32).nan_to_num(0.5).requires_grad_()
    row_weights = rows.by_slot(dtype=torch.float32).nan_to_num(0.5).requires_grad_()
    leaves = [own.w13, own.w2, *([own.w13_bias, own.w2_bias] if weighs else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    places = rows.places
    given = (
        x, own.w13, own.w2, own.w13_bias, own.w2_bias, row_weights if weighs else None,
        places.sorted_token_ids, rows.slot_rows, places.tokens_per_expert, places.expert_starts,
    )  # fmt: skip
    how = ("interleaved", "silu", True, 0.5, False, 1.702, False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(ops.experts, (*given, *how, True, False), test_utils=tests)
    detached = [None if t is None else t.detach() for t in given]
    out, pre = ops.run_experts(*detached, *how, True, False)
    needs = [t is not None for t in given[:6]]
    args = (torch.zeros_like(out), *detached, pre, *how, False, needs)
    opcheck(ops.experts_backward, args, test_utils=tests)


def test_second_derivatives_are_refused() -> None:
    given, own = record("indexed"), weights()
    leaf = given.rows.nan_to_num(0.5).requires_grad_()
    out = run(runner(), replace(given, rows=leaf), own).rows
    (grad,) = torch.autograd.grad(out.nan_to_num().square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"experts_backward.* no autograd formula"):
        grad.sum().backward()


def test_prepared_weights_are_dense() -> None:
    own = weights()
    strided = replace(own, w13=own.w13.mT.contiguous().mT)
    ready = runner().prepare(strided)
    assert ready.w13.is_contiguous()
    assert torch.equal(ready.w13, own.w13)
    again = runner().prepare(ready)
    assert (again.w13.data_ptr(), again.w2.data_ptr()) == (ready.w13.data_ptr(), own.w2.data_ptr())


def test_workspace_is_what_is_allocated() -> None:
    assert runner().workspace_bytes(7, 2) == 7 * 2 * 4 * (INNER + HIDDEN) + 1024

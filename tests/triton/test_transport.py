"""The local transport in the interpreter: its suite, its records, and a whole layer around it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_core import ConfigError, HandleError, MoEConfig, MoELayer, Routing
from moe_core.conformance.transport import TransportConformance
from moe_core.contracts import BuildContext
from moe_core.convert import Index
from moe_core.errors import MoEError
from moe_core.layouts import ExpertContiguous, Indexed, SlotMajor, TokenMajor
from moe_core.manifest import Request
from moe_triton.runtime import record_launches
from moe_triton.transport import TritonTransport

torch.set_num_threads(1)
SPEC = "triton"
CONFIG = MoEConfig(hidden_size=8, intermediate_size=16, num_experts=4, top_k=2)


@pytest.mark.slow
class TestConformance(TransportConformance):
    backend = "triton+torch"


@pytest.mark.slow
class TestConformanceWithItsRunner(TransportConformance):
    backend = SPEC


def transport(gives: str = "indexed", pays: tuple[str, ...] = ("weight",)) -> TritonTransport:
    context = BuildContext(Request(), "float32", "cpu", 4, 4, 0)
    return TritonTransport(replace(context, gives=gives, pays=pays))


def batch(ids: list[list[int]]) -> tuple[torch.Tensor, Routing]:
    """Rows of ones, twos, ...; the weight of flat slot j is j + 1."""
    topk_ids = torch.tensor(ids)
    rows = torch.arange(1.0, len(ids) + 1)[:, None].expand(-1, 3)
    return rows, Routing(topk_ids, torch.arange(1.0, topk_ids.numel() + 1).view(topk_ids.shape))


def test_rows_stay_and_ids_are_sorted_as_the_converter_sorts_them() -> None:
    rows, routing = batch([[2, -1], [0, 2], [2, 0], [3, -1]])
    record, handle = transport().dispatch(rows, routing)
    assert isinstance(record, Indexed)
    assert record.rows is rows
    assert record.topk_weights is routing.topk_weights
    ids, weights = routing.ids_and_weights()
    index = Index(BuildContext(Request(), "float32", "cpu", 4, 4, 0))
    want, _ = index.there(TokenMajor(rows, ids, weights))
    for name in ("sorted_token_ids", "slot_rows", "tokens_per_expert", "expert_starts"):
        assert torch.equal(getattr(record, name), getattr(want, name))
    assert handle.plan.slot_rows.tolist() == [[2, -1], [0, 3], [4, 1], [5, -1]]
    assert handle.plan.slot_rows.dtype == torch.int64


@pytest.mark.parametrize("gives", ["indexed", "token_major"])
def test_a_combine_by_hand(gives: str) -> None:
    rows, routing = batch([[2, -1], [0, 2]])
    mine = transport(gives)
    record, handle = mine.dispatch(rows, routing)
    assert record.layout == gives
    results = torch.tensor([[[1.0], [torch.nan]], [[10.0], [100.0]]]).expand(2, 2, 3)
    out = mine.combine(SlotMajor(results), handle)
    assert out.tolist() == [[1] * 3, [3 * 10 + 4 * 100] * 3]
    with pytest.raises(HandleError, match="already combined"):
        mine.combine(SlotMajor(results), handle)
    # weights that the runner has paid, and rows that are summed already
    early = transport(gives, pays=())
    _, handle = early.dispatch(rows, routing)
    paid = SlotMajor(results, paid=("weight",))
    assert early.combine(paid, handle).tolist() == [[1] * 3, [110] * 3]
    _, handle = early.dispatch(rows, routing)
    summed = TokenMajor(rows, *routing.ids_and_weights(), paid=("weight", "slot_sum"))
    assert early.combine(summed, handle) is rows


def test_what_does_not_fit_is_refused() -> None:
    rows, routing = batch([[2, 1]])
    mine, results = transport(), torch.zeros(1, 2, 3)
    for record, words in (
        (SlotMajor(results, paid=("weight",)), "paid twice"),
        (ExpertContiguous(results[0], results, results, results), "not expert_contiguous"),
    ):
        _, handle = mine.dispatch(rows, routing)
        with pytest.raises(MoEError, match=words):
            mine.combine(record, handle)
    _, handle = mine.dispatch(rows, routing)
    with pytest.raises(HandleError, match="another"):
        transport().combine(SlotMajor(results), handle)


def test_a_layer_is_the_torch_layer_in_three_launches_besides_its_runner() -> None:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG, backend=SPEC)
    parts = layer.resolution.parts
    assert {role: c.backend.name for role, c in parts.items()} == dict.fromkeys(
        ("router", "transport", "runner"), "triton"
    )
    assert layer.resolution.path.dispatched == "indexed"
    assert layer.resolution.path.converter is None
    other = MoELayer(CONFIG, backend="torch")
    other.load_state_dict(layer.state_dict())
    grads: list[Any] = []
    outs: list[torch.Tensor] = []
    for each in (layer, other):
        x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
        with record_launches() as made:
            outs.append(each(x))
        if each is layer:
            names = [launch.name for launch in made.made]
            assert names[:2] == ["route_kernel", "count_pairs_kernel"]
            assert names[-1] == "sum_rows_kernel"
        outs[-1].square().sum().backward()
        grads.append([x.grad, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)
    assert all(g.any() for g in grads[0])


def test_a_layer_compiles_into_one_graph() -> None:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG, backend=SPEC)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(layer), backend=counter, fullgraph=True, dynamic=True)
    frames: list[int] = []
    for tokens in (5, 9):
        x = torch.randn(tokens, 8)
        made = [each(x) for each in (layer, compiled)]
        for out in made:
            out.square().sum().backward()
        torch.testing.assert_close(*made, rtol=0, atol=0)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]
    grads = [[p.grad for p in each.parameters()] for each in (layer, compiled)]
    torch.testing.assert_close(*grads)


def test_any_runner_goes_with_it() -> None:
    layer = MoELayer(CONFIG, backend=SPEC + "+torch")
    assert layer.resolution.path.dispatched == "token_major"
    assert layer.resolution.path.converter.name == "permute"
    with pytest.raises(ConfigError, match="dtype"):
        MoELayer(replace(CONFIG, dtype="float64"), backend=SPEC)

"""Who is timed: moe-core's backends, and other projects' kernels where they are installed.

All get rows, ids and weights that are chosen already and do what ``moe_core``'s experts do: sort,
both products with the activation, the weighted sum. A contender that isn't installed or can't do a
cell says why.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from moe_core import ParallelConfig
from moe_core.building import resolve_or_raise
from moe_core.contracts import ExpertWeights, Routing
from moe_core.errors import MoEError
from moe_core.pipeline import Pipeline
from moe_core.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from suite.problem import Problem

    Forward = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]


class Contender(ABC):
    """``name`` stands in the results. ``syncs``: it waits for the device; no graph can hold it."""

    name: str
    layout: str = ""
    """Of ``w13``; empty: as the shape has it."""
    syncs = False
    trains = True

    @abstractmethod
    def why_not(self, problem: Problem) -> str:
        """Empty where it can do the cell."""

    @abstractmethod
    def build(self, problem: Problem) -> Forward:
        """``(x, topk, weights) -> [T, H]``; ``weights`` by the names in ``weights_of``."""

    def weights_of(self, problem: Problem) -> dict[str, Tensor]:
        own = problem.weights.own
        named = {
            "w13": problem.weights.w13(self.layout or own.w13_layout),
            "w2": own.w2,
            "b13": own.w13_bias,
            "b2": own.w2_bias,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def inference(self, problem: Problem) -> Callable[[], Tensor]:
        """A forward without gradients."""
        forward, weights = self.build(problem), self.weights_of(problem)

        def call() -> Tensor:
            with torch.no_grad():
                return forward(problem.x, problem.topk, weights)

        return call

    def training(self, problem: Problem) -> Callable[[], dict[str, Tensor]]:
        """A forward and a backward → gradients, those of ``w13`` as the shape lays it out."""
        forward, weights = self.build(problem), self.weights_of(problem)
        weights = {name: t.detach().requires_grad_() for name, t in weights.items()}
        x, topk = (t.clone().requires_grad_() for t in (problem.x, problem.topk))
        inputs = {"x": x, "topk": topk, **weights}

        def call() -> dict[str, Tensor]:
            out = forward(x, topk, weights)
            grads = torch.autograd.grad(out, list(inputs.values()), problem.upstream)
            return dict(zip(inputs, grads, strict=True))

        return call

    def in_shape_layout(self, problem: Problem, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients to compare: ``w13``'s laid out as the shape has it."""
        wanted = problem.weights.own.w13_layout
        if not self.layout or self.layout == wanted:
            return grads
        from suite.problem import _split

        gate, up = _split(grads["w13"], self.layout)
        if wanted == "interleaved":
            laid = torch.stack([gate, up], 2).flatten(1, 2)
        else:
            laid = torch.cat([gate, up] if wanted == "gate_up" else [up, gate], 1)
        return {**grads, "w13": laid}


class Backend(Contender):
    """A backend of moe-core, from the rows and ids that a layer's router has chosen."""

    def __init__(self, spec: str, name: str, *, syncs: bool = False) -> None:
        self.spec, self.name, self.syncs = spec, name, syncs

    def _pipeline(self, problem: Problem) -> Pipeline:
        return _pipeline(problem.weights.config, self.spec, problem.weights.device, problem.trains)

    def why_not(self, problem: Problem) -> str:
        try:
            self._pipeline(problem)
        except MoEError as error:
            return str(error).replace("\n", "; ")
        return ""

    def build(self, problem: Problem) -> Forward:
        pipeline, own, ids = self._pipeline(problem), problem.weights.own, problem.ids
        ready = None if problem.trains else pipeline.prepare(own)

        def forward(x: Tensor, topk: Tensor, weights: dict[str, Tensor]) -> Tensor:
            used = ready or ExpertWeights(
                weights["w13"],
                weights["w2"],
                weights.get("b13"),
                weights.get("b2"),
                own.w13_layout,
                own.activation,
            )
            return pipeline.forward(x, Routing(ids, topk), used)

        return forward


@lru_cache(maxsize=16)
def _pipeline(config: Any, spec: str, device: torch.device, autograd: bool) -> Pipeline:
    resolution = resolve_or_raise(
        config, ParallelConfig(), spec, device, autograd=autograd, router="none"
    )
    return Pipeline(resolution, Placement(config.num_experts), config.dtype, str(device))


class Peer(Contender):
    """Another project's kernels. ``module`` is what is imported."""

    module: str

    def why_not(self, problem: Problem) -> str:
        act = problem.weights.config.activation
        if problem.weights.own.w13_bias is not None or act.limit is not None or act.alpha:
            return "takes plain silu without biases here"
        if problem.trains and not self.trains:
            return "has no backward"
        try:
            importlib.import_module(self.module)
        except Exception as error:
            return f"not usable here: {type(error).__name__}: {error}".replace("\n", "; ")
        return ""


class Vllm(Peer):
    """``fused_experts`` (vllm/model_executor/layers/fused_moe), with its own tuned table."""

    name, module = "vllm", "vllm.model_executor.layers.fused_moe"
    layout, trains = "gate_up", False

    def build(self, problem: Problem) -> Forward:
        fused = importlib.import_module(self.module).fused_experts
        ids = problem.ids.int()

        def forward(x: Tensor, topk: Tensor, weights: dict[str, Tensor]) -> Tensor:
            return fused(x, weights["w13"], weights["w2"], topk, ids)

        return forward


class ScatterMoe(Peer):
    """``scattermoe.mlp.GLUMLP``, whose first half is up and whose second is the gate."""

    name, module = "scattermoe", "scattermoe.mlp"
    layout = "up_gate"

    def build(self, problem: Problem) -> Forward:
        s = problem.cell.shape
        with torch.device("meta"):
            mlp = importlib.import_module(self.module).GLUMLP(
                s.hidden_size, s.intermediate_size, s.num_experts, s.top_k
            )

        def forward(x: Tensor, topk: Tensor, weights: dict[str, Tensor]) -> Tensor:
            named = {"experts.weight": weights["w13"], "output_experts.weight": weights["w2"]}
            ids = problem.ids
            return torch.func.functional_call(mlp, named, (x, topk.to(x.dtype), ids))

        return forward


class SonicMoe(Peer):
    """``sonicmoe.functional.moe_general_routing_inputs``: weights as ``[2I, H, E]`` views."""

    name, module = "sonic-moe", "sonicmoe.functional"
    layout = "interleaved"

    def build(self, problem: Problem) -> Forward:
        run = importlib.import_module(self.module).moe_general_routing_inputs
        swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
        s, device = problem.cell.shape, problem.ids.device
        tokens = torch.arange(problem.cell.tokens, device=device, dtype=torch.int32)
        tokens = tokens.repeat_interleave(s.top_k)
        ids = problem.ids.flatten().int()
        stream = torch.cuda.current_stream().cuda_stream

        def forward(x: Tensor, topk: Tensor, weights: dict[str, Tensor]) -> Tensor:
            w13, w2 = (weights[name].permute(1, 2, 0) for name in ("w13", "w2"))
            return run(
                x, topk.flatten(), tokens, ids, w13, None, w2, None, s.num_experts, stream, swiglu,
                not problem.trains,
            )[0]  # fmt: skip

        return forward


OURS = "triton"
CONTENDERS: tuple[Contender, ...] = (
    Backend("triton", OURS),
    Backend("torch", "grouped_mm"),
    Backend("torch[gemm=loop]", "loop", syncs=True),
    Vllm(),
    ScatterMoe(),
    SonicMoe(),
)
"""The first is what the others are peers of."""


def describe() -> str:
    """A line per contender."""
    lines: list[str] = []
    for contender in CONTENDERS:
        what = inspect.getdoc(type(contender)) or ""
        if isinstance(contender, Backend):
            what = f"moe-core's backend {contender.spec}"
        lines.append(f"{contender.name}: {what.splitlines()[0]}")
    return "\n".join(lines)

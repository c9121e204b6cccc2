"""How large a layer is: parameters, operations per token, bytes on each rank. Plain integers."""
# pyright: strict

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_core.config import MoEConfig, ParallelConfig
from moe_core.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Parameters of one layer. ``expert``: one routed expert, biases included; ``shared``: all
    shared experts and their gate; ``expert_biases``: the part of ``expert`` that is biases."""

    router: int
    expert: int
    num_experts: int
    top_k: int
    shared: int
    expert_biases: int = 0

    @property
    def total(self) -> int:
        return self.router + self.num_experts * self.expert + self.shared

    @property
    def active(self) -> int:
        """What one token meets: the router, its ``top_k`` experts, the shared ones."""
        return self.router + self.top_k * self.expert + self.shared

    @property
    def flops_per_token(self) -> int:
        """Of a forward: a multiplication and an addition per active matrix element. Activations,
        biases and sums are left out. A training step takes three times as many."""
        return 2 * (self.active - self.top_k * self.expert_biases)


def layer_sizes(config: MoEConfig, *, router: bool = True) -> LayerSizes:
    """``router`` False: the caller routes, and that is not counted."""
    hidden, inner = config.hidden_size, config.intermediate_size
    halves = 2 if config.activation.gated else 1
    biases = (config.w13_rows + hidden) if config.bias else 0
    return LayerSizes(
        router=config.num_experts * hidden if router else 0,
        expert=(halves + 1) * inner * hidden + biases,
        num_experts=config.num_experts,
        top_k=config.top_k,
        shared=(halves + 1) * config.shared_size * hidden + hidden * config.shared_gate,
        expert_biases=biases,
    )


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """``dense``: parameters outside the MoE layers by name, all of them active for each token."""

    layers: tuple[LayerSizes, ...]
    dense: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + sum(self.dense.values())

    @property
    def active(self) -> int:
        return sum(layer.active for layer in self.layers) + sum(self.dense.values())


@dataclass(frozen=True, slots=True)
class RankSizes:
    """What one rank holds. ``parameters``: elements, replicas counted; ``bytes_by_dtype``: of
    parameters and of the router's buffers (choice bias, hash table)."""

    parameters: int
    bytes_by_dtype: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


def rank_sizes(
    config: MoEConfig,
    parallel: ParallelConfig | None = None,
    placement: Placement | None = None,
    ep_rank: int = 0,
    *,
    router: bool = True,
) -> RankSizes:
    """Weights of one layer on the ranks with this ``ep_rank`` (tp and dp make no difference).

    ``tp_size`` cuts experts but not ``w2_bias``. Every rank has the whole router, and the shared
    experts: whole, or cut over tp where they are slots or ``shared_tp``. A copy made by
    ``prepare_weights`` comes on top.
    """
    parallel = parallel or ParallelConfig()
    placement = placement or Placement(config.num_experts, parallel.ep_size)
    tp, halves = parallel.tp_size, 2 if config.activation.gated else 1
    hidden = config.hidden_size
    expert = (halves + 1) * hidden * config.intermediate_size // tp
    if config.bias:
        expert += config.w13_rows // tp + hidden
    shared = (halves + 1) * hidden * config.shared_size
    if config.shared_tp or config.shared_slots:
        shared //= tp
    weights = placement.num_local_experts(ep_rank) * expert + shared + hidden * config.shared_gate
    found = {config.dtype: weights}
    gate = config.num_experts * hidden if router else 0
    buffers: dict[str, int] = {}
    if router:
        scores = "float64" if config.dtype == "float64" else "float32"  # whatever the layer's dtype
        found[scores] = found.get(scores, 0) + gate
        if config.router.correction_bias:
            buffers[scores] = config.num_experts
        if config.router.kind == "hash":
            buffers["int64"] = (config.router.vocab_size or 0) * config.top_k
    dtypes = {**found, **buffers}
    return RankSizes(
        parameters=weights + gate,
        bytes_by_dtype={d: BYTES[d] * (found.get(d, 0) + buffers.get(d, 0)) for d in dtypes},
    )

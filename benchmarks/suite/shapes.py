"""What is timed: the MoE layers of six models, and at most 60 named cells.

``deepseek-*`` are the slice that a rank of an expert-parallel group of 8 holds: a batch of T tokens
per rank, spread evenly, brings each rank T · top_k rows for its num_experts / 8 experts, and so
many rows are what T tokens that choose among these experts alone bring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_core import MoEConfig

MOST_CELLS = 60
DECODE_TOKENS = 64
"""Up to so many tokens a cell is a decode step: captured in a graph, and the cache is cold."""
FORWARD, TRAIN = "forward", "train"
"""``train`` is forward and backward, timed as one; the gradients are those of rows, routing weights
and all expert weights."""


@dataclass(frozen=True)
class Shape:
    """``num_experts``: those that are here. ``source``: where the numbers stand."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    source: str
    bias: bool = False
    w13_layout: str = "gate_up"
    activation: dict[str, Any] = field(default_factory=dict[str, Any])
    dtype: str = "bfloat16"

    def config(self) -> MoEConfig:
        from moe_core import Activation, MoEConfig

        return MoEConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            bias=self.bias,
            w13_layout=self.w13_layout,
            activation=Activation(**self.activation),
            dtype=self.dtype,
        )


_CLASS = "transformers 5.24.0"
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("mixtral-8x7b", 4096, 14336, 8, 2, f"{_CLASS}, MixtralConfig's defaults"),
        Shape(
            "qwen3-30b-a3b", 2048, 768, 128, 8, "Qwen/Qwen3-30B-A3B, config.json"
        ),
        Shape(
            "deepseek-v3-ep8", 7168, 2048, 32, 8,
            f"{_CLASS}, DeepseekV3Config's defaults: 256 experts over 8 ranks",
        ),
        Shape(
            "deepseek-v4-ep8", 4096, 2048, 32, 6,
            f"{_CLASS}, DeepseekV4Config's defaults: 256 experts over 8 ranks",
            activation={"limit": 10.0},
        ),
        Shape(
            "gpt-oss-120b", 2880, 2880, 128, 4, f"{_CLASS}, GptOssConfig's defaults",
            bias=True, w13_layout="interleaved", activation={"limit": 7.0, "alpha": 1.702},
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    shape: Shape
    tokens: int
    passes: str

    @property
    def name(self) -> str:
        return f"{self.shape.name}/T{self.tokens}/{self.passes}"

    @property
    def rows(self) -> int:
        return self.tokens * self.shape.top_k

    @property
    def is_decode(self) -> bool:
        return self.passes == FORWARD and self.tokens <= DECODE_TOKENS


_WAVES = (
    ((FORWARD, 16), (FORWARD, 4096)),
    ((TRAIN, 4096), (FORWARD, 1)),
    ((FORWARD, 256), (FORWARD, 16384)),
    ((FORWARD, 64), (FORWARD, 1024)),
    ((TRAIN, 1024), (TRAIN, 16384)),
    ((FORWARD, 4), (TRAIN, 256)),
)
"""In the order in which they tell most: a suite that runs out of time has each shape at a decode
step and at a large batch."""

CELLS = tuple(
    Cell(shape, tokens, passes)
    for wave in _WAVES
    for shape in SHAPES.values()
    for passes, tokens in wave
)
assert len(CELLS) <= MOST_CELLS


def tiny(cell: Cell) -> Cell:
    """The same cell at sizes that Triton's interpreter can run: to try code paths on a CPU."""
    shape = Shape(
        f"tiny-{cell.shape.name}", 32, 48, 4, 2, "made up",
        bias=cell.shape.bias,
        w13_layout=cell.shape.w13_layout,
        activation=cell.shape.activation,
    )  # fmt: skip
    return Cell(shape, min(cell.tokens, 5), cell.passes)

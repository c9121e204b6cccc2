"""Faulty expert runners. R rows, one per (token, slot); E experts of this rank."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from moe_core.activation import activate, split_gate_up
from moe_core.capabilities import filled_options
from moe_core.conformance.mutants import active, mutant
from moe_core.interfaces import ExpertRunner
from moe_core.pipeline import load_target

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.contracts import BuildContext, ExpertWeights


class MutantRunner(ExpertRunner):
    """Its carrier, unless a method says something else."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        carrier = active["runner"]
        self.inner = load_target(carrier)(replace(context, options=filled_options(carrier)))
        self.batch_invariant = self.inner.batch_invariant
        self.kept: Any = None

    def run(self, record: Any, weights: ExpertWeights) -> Any:
        return self.inner.run(record, weights)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        return self.inner.prepare(weights)

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        return self.inner.workspace_bytes(num_tokens, top_k)


runner = functools.partial(mutant, "runner", MutantRunner, "run", takes="expert_contiguous")
by_token = functools.partial(
    mutant, "runner", MutantRunner, "run", takes="token_major", carrier="reference"
)
EXACT = "test_scaled_identity_is_exact"
PATTERNS = "test_routing_patterns"
OPTIONS = "test_layouts_biases_and_weighting"


def owners(record: Any) -> Tensor:
    """int64 ``[R]``: each row's expert, E for nobody's."""
    starts, counts = record.expert_starts[:-1], record.tokens_per_expert
    rows = torch.arange(len(record.rows), device=starts.device)[:, None]
    inside = (rows >= starts) & (rows < starts + counts)
    return torch.where(inside.any(1), inside.int().argmax(1), len(counts))


class Grad(torch.autograd.Function):
    """Itself; the gradient goes through ``change``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


def grad(x: Tensor, change: Any) -> Any:
    return Grad.apply(x, change)


@runner(control=True)
def unchanged(self: Any, record: Any, weights: Any) -> Any:
    """Nothing is wrong."""
    return self.inner.run(record, weights)


# -- which expert, which row


@runner(killer=EXACT)
def neighbours_w13(self: Any, record: Any, weights: Any) -> Any:
    """The first product takes the next expert's matrix."""
    return self.inner.run(record, replace(weights, w13=weights.w13.roll(-1, 0)))


@runner(killer=EXACT)
def neighbours_w2(self: Any, record: Any, weights: Any) -> Any:
    """The second product takes the next expert's matrix."""
    return self.inner.run(record, replace(weights, w2=weights.w2.roll(-1, 0)))


@runner(killer=EXACT)
def last_expert_idle(self: Any, record: Any, weights: Any) -> Any:
    """The last expert's rows come back as zeros."""
    out = self.inner.run(record, weights)
    mine = (owners(record) == len(weights.w2) - 1)[:, None]
    return replace(out, rows=torch.where(mine, 0, out.rows))


@runner(killer=EXACT)
def one_row_per_expert(self: Any, record: Any, weights: Any) -> Any:
    """Every row of an expert gets the result of its first (Triton-distributed#185)."""
    out = self.inner.run(record, weights)
    own = owners(record)
    first = record.expert_starts.long()[own.clamp(max=len(weights.w2) - 1)]
    return replace(out, rows=torch.where((own < len(weights.w2))[:, None], out.rows[first], 0))


@runner(killer="test_many_rows")
def tile_of_64_rows(self: Any, record: Any, weights: Any) -> Any:
    """An expert's rows past the 64th are those of the first tile again."""
    out = self.inner.run(record, weights)
    own, rows = owners(record), torch.arange(len(record.rows), device=record.rows.device)
    start = record.expert_starts.long()[own.clamp(max=len(weights.w2) - 1)]
    again = torch.where(own < len(weights.w2), start + (rows - start) % 64, rows)
    return replace(out, rows=out.rows[again])


@runner(killer="test_sizes")
def columns_of_eight(self: Any, record: Any, weights: Any) -> Any:
    """Columns past the last whole block of eight stay zero."""
    out = self.inner.run(record, weights)
    columns = torch.arange(out.rows.shape[1], device=out.rows.device)
    return replace(out, rows=torch.where(columns < len(columns) // 8 * 8, out.rows, 0))


@runner(killer="test_sizes")
def one_tile_of_columns(self: Any, record: Any, weights: Any) -> Any:
    """Columns past 128 repeat the first ones (marin#7484: one width of tile was wrong)."""
    out = self.inner.run(record, weights)
    columns = torch.arange(out.rows.shape[1], device=out.rows.device)
    return replace(out, rows=out.rows[:, columns % 128])


@runner(killer="test_sizes")
def short_inner_sum(self: Any, record: Any, weights: Any) -> Any:
    """The second product stops after 256 terms."""
    terms = torch.arange(weights.w2.shape[2], device=weights.w2.device)
    return self.inner.run(record, replace(weights, w2=torch.where(terms < 256, weights.w2, 0)))


@by_token(killer="test_nothing_of_an_invalid_slot", needs={"autograd": True})
def minus_one_wraps(self: Any, record: Any, weights: Any) -> Any:
    """Id -1 is the last expert (vllm-project/vllm#46408)."""
    return self.inner.run(replace(record, topk_ids=record.topk_ids % len(weights.w2)), weights)


@by_token(killer=EXACT)
def last_slot_dropped(self: Any, record: Any, weights: Any) -> Any:
    """A token's last slot is left out."""
    slot = torch.arange(record.topk_ids.shape[1], device=record.topk_ids.device)
    ids = torch.where(slot < len(slot) - 1, record.topk_ids, -1)
    return self.inner.run(replace(record, topk_ids=ids), weights)


@by_token(killer="duplicates")
def duplicates_once(self: Any, record: Any, weights: Any) -> Any:
    """An expert that a token chose twice counts once."""
    ids = record.topk_ids
    earlier = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(2)
    return self.inner.run(replace(record, topk_ids=ids.masked_fill(earlier, -1)), weights)


@by_token(killer="all experts")
def wrong_where_all_are_chosen(self: Any, record: Any, weights: Any) -> Any:
    """Where K = E the first slot is left out."""
    ids = record.topk_ids
    if ids.shape[1] == len(weights.w2):
        ids = torch.cat([torch.full_like(ids[:, :1], -1), ids[:, 1:]], 1)
    return self.inner.run(replace(record, topk_ids=ids), weights)


@by_token(killer=EXACT)
def odd_batches(self: Any, record: Any, weights: Any) -> Any:
    """The last of an odd number of tokens is not computed."""
    ids = record.topk_ids.clone()
    ids[len(ids) - len(ids) % 2 :] = -1
    return self.inner.run(replace(record, topk_ids=ids), weights)


@by_token(killer="test_strided")
def strides_ignored(self: Any, record: Any, weights: Any) -> Any:
    """Rows are read as if they were contiguous."""
    x = record.rows
    if len(x) > 1:
        x = torch.as_strided(x, x.shape, (x.shape[1], 1))
    return self.inner.run(replace(record, rows=x), weights)


@runner(killer="test_strided")
def strides_of_weights_ignored(self: Any, record: Any, weights: Any) -> Any:
    """The first matrix is read as if it were contiguous."""
    w = weights.w13
    plain = torch.empty(w.shape, device="meta").stride()
    return self.inner.run(record, replace(weights, w13=torch.as_strided(w, w.shape, plain)))


# -- gaps, tails, memory


@runner(killer="test_gaps")
def tail_is_read(self: Any, record: Any, weights: Any) -> Any:
    """Rows of nobody are summed up, times zero."""
    out = self.inner.run(record, weights)
    return replace(out, rows=out.rows + 0 * record.rows.sum(0))


@runner(killer="test_gaps")
def gaps_are_ignored(self: Any, record: Any, weights: Any) -> Any:
    """Experts' rows are taken to follow each other without a gap."""
    ends = record.tokens_per_expert.cumsum(0)
    starts = torch.cat([ends[:1] * 0, ends]).to(record.expert_starts)
    return self.inner.run(replace(record, expert_starts=starts, expert_alignment=1), weights)


@runner(killer="test_gaps", needs={"autograd": True})
def gaps_are_experts(self: Any, record: Any, weights: Any) -> Any:
    """A gap's rows are computed with the expert before it, and reach its gradient."""
    counts = record.expert_starts.diff()
    return self.inner.run(replace(record, tokens_per_expert=counts, expert_alignment=1), weights)


@runner(killer="test_gaps", needs={"autograd": True})
def gradients_of_nobody(self: Any, record: Any, weights: Any) -> Any:
    """The upstream gradient of rows of nobody is summed up, times zero."""
    out = self.inner.run(record, weights)
    return replace(out, rows=grad(out.rows, lambda g: g + 0 * g.sum(0)))


@runner(killer="test_gaps")
def writes_its_input(self: Any, record: Any, weights: Any) -> Any:
    """Rows of nobody are set to zero where they lie."""
    with torch.no_grad():
        record.rows.detach()[owners(record) == len(weights.w2)] = 0
    return self.inner.run(record, weights)


@runner(killer=PATTERNS)
def writes_the_weights(self: Any, record: Any, weights: Any) -> Any:
    """Clamps the second matrix where it lies."""
    weights.w2.detach().clamp_(-0.5, 0.5)
    return self.inner.run(record, weights)


@runner(killer="test_handles")
def output_is_a_buffer(self: Any, record: Any, weights: Any) -> Any:
    """Without gradients the results lie in a buffer that the next call uses again."""
    out = self.inner.run(record, weights)
    if torch.is_grad_enabled() or not len(out.rows):
        return out
    if self.kept is None or self.kept.dtype != out.rows.dtype or len(self.kept) < len(out.rows):
        self.kept = out.rows.clone()
    buffer = self.kept[: len(out.rows)]
    return replace(out, rows=buffer.copy_(out.rows))


@runner(killer="test_uninitialised")
def unwritten_rows(self: Any, record: Any, weights: Any) -> Any:
    """The first expert's rows are not written where there is one of them."""
    out = self.inner.run(record, weights)
    lone = (owners(record) == 0) & (record.tokens_per_expert[0] == 1)
    return replace(out, rows=torch.where(lone[:, None], torch.empty_like(out.rows), out.rows))


@runner(killer="test_workspace")
class WorkspaceTooSmall(MutantRunner):
    """Declares a hundredth of the scratch that it takes."""

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        return self.inner.workspace_bytes(num_tokens, top_k) // 100


# -- numbers


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


def by_expert(
    record: Any, weights: Any, first: Any = product, middle: Any = None, second: Any = product
) -> Any:
    """Each expert in turn: ``first(x, w13) -> h``, ``middle(h)``, ``second(h, w2) -> y``."""
    own, rows = owners(record), []
    order = [(own == e).nonzero()[:, 0] for e in range(len(weights.w2) + 1)]
    for e, mine in enumerate(order[:-1]):
        h = first(record.rows[mine], weights.w13[e])
        h = h if weights.w13_bias is None else h + weights.w13_bias[e]
        h = middle(h) if middle else activate(h, weights.activation, weights.w13_layout)
        y = second(h, weights.w2[e])
        rows.append(y if weights.w2_bias is None else y + weights.w2_bias[e])
    rows.append(torch.zeros_like(record.rows[order[-1]]))
    return replace(record, rows=torch.cat(rows)[torch.cat(order).argsort()])


def column_by_column(x: Tensor, w: Tensor) -> Tensor:
    total = x.new_zeros(len(x), len(w))
    for j in range(x.shape[1]):
        total = total + x[:, j : j + 1] * w[:, j]
    return total


def row_by_row(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([w @ row for row in x]) if len(x) else x @ w.T


def in_half(self: Any, record: Any, weights: Any, **how: Any) -> Any:
    """``by_expert`` in half precision, where the weight is somebody else's."""
    if record.rows.dtype.itemsize > 2 or "weight" in self.context.pays:
        return self.inner.run(record, weights)
    return by_expert(record, weights, **how)


@runner(killer="test_long_sums", needs={"dtype": "bfloat16"})
def narrow_first_sum(self: Any, record: Any, weights: Any) -> Any:
    """The first product adds up in the rows' dtype."""
    return in_half(self, record, weights, first=column_by_column)


@runner(killer="test_long_sums", needs={"dtype": "bfloat16"})
def narrow_second_sum(self: Any, record: Any, weights: Any) -> Any:
    """The second product adds up in the rows' dtype."""
    return in_half(self, record, weights, second=column_by_column)


@runner(killer="test_many_rows", needs={"dtype": "bfloat16", "autograd": True})
def narrow_gradient_sum(self: Any, record: Any, weights: Any) -> Any:
    """A weight's gradient is added up over tokens in the rows' dtype."""
    return in_half(self, record, weights, second=row_by_row)


@runner(killer="test_sizes", needs={"dtype": "float64"})
def float64_in_float32(self: Any, record: Any, weights: Any) -> Any:
    """float64 rows are computed in float32."""
    out = self.inner.run(record, weights)
    return replace(out, rows=out.rows.float().to(out.rows.dtype))


@runner(killer=EXACT, needs={"dtype": "bfloat16"})
def wide_rows(self: Any, record: Any, weights: Any) -> Any:
    """Half precision comes back as float32."""
    out = self.inner.run(record, weights)
    half = out.rows.dtype.itemsize == 2
    return replace(out, rows=out.rows.float() if half else out.rows)


def _act(self: Any, record: Any, weights: Any, **change: Any) -> Any:
    act = replace(weights.activation, **change)
    return self.inner.run(record, replace(weights, activation=act))


@runner(killer="test_activations", needs={"activation": "gelu"})
def gelu_approximated(self: Any, record: Any, weights: Any) -> Any:
    """The approximation is used for the exact gelu too."""
    name = weights.activation.name
    return _act(self, record, weights, name="gelu_tanh" if name == "gelu" else name)


@runner(killer="test_activations", needs={"activation": "relu2"})
def square_forgotten(self: Any, record: Any, weights: Any) -> Any:
    """relu2 is relu."""
    return _act(self, record, weights, name=weights.activation.name.removesuffix("2"))


@runner(killer="test_limits_by_hand", needs={"limit": "before"})
def limit_ignored(self: Any, record: Any, weights: Any) -> Any:
    """Nothing is clamped (sgl-project/sglang#39920)."""
    return _act(self, record, weights, limit=None)


@runner(killer="test_limits_by_hand", needs={"limit": "after"})
def limit_before_in_any_case(self: Any, record: Any, weights: Any) -> Any:
    """The gate is clamped before the activation where it should be after."""
    return _act(self, record, weights, limit_form="before")


@runner(killer="test_activations", needs={"limit": "before"})
def up_is_not_clamped(self: Any, record: Any, weights: Any) -> Any:
    """Only the gate is clamped."""
    act = weights.activation
    if act.limit is None or not act.gated or act.alpha or "weight" in self.context.pays:
        return self.inner.run(record, weights)

    def middle(h: Tensor) -> Tensor:
        gate, up = split_gate_up(h, weights.w13_layout)
        return activate(gate, replace(act, gated=False), "gate_up") * up

    return by_expert(record, weights, middle=middle)


@runner(killer="test_limits_by_hand", needs={"alpha": True})
def alpha_ignored(self: Any, record: Any, weights: Any) -> Any:
    """GPT-OSS's form is plain silu."""
    return _act(self, record, weights, alpha=None)


@runner(killer="test_layouts_by_hand", needs={"w13_layout": "up_gate"})
def up_first_ignored(self: Any, record: Any, weights: Any) -> Any:
    """up_gate is read as gate_up."""
    layout = weights.w13_layout.replace("up_gate", "gate_up")
    return self.inner.run(record, replace(weights, w13_layout=layout))


@runner(killer="test_layouts_by_hand", needs={"w13_layout": "interleaved"})
def interleaving_ignored(self: Any, record: Any, weights: Any) -> Any:
    """interleaved is read as gate_up."""
    layout = weights.w13_layout.replace("interleaved", "gate_up")
    return self.inner.run(record, replace(weights, w13_layout=layout))


@runner(killer=OPTIONS, needs={"bias": True})
def first_bias_ignored(self: Any, record: Any, weights: Any) -> Any:
    """The bias of the first product is left out."""
    return self.inner.run(record, replace(weights, w13_bias=None))


@runner(killer="test_output_bias", needs={"bias": True})
def second_bias_twice(self: Any, record: Any, weights: Any) -> Any:
    """The bias of the second product is added twice."""
    bias = weights.w2_bias
    return self.inner.run(record, replace(weights, w2_bias=None if bias is None else 2 * bias))


@runner(killer=OPTIONS, needs={"bias": True})
def bias_of_one_expert(self: Any, record: Any, weights: Any) -> Any:
    """All experts get the first one's bias."""
    bias = weights.w2_bias
    first = None if bias is None else bias[:1].expand_as(bias)
    return self.inner.run(record, replace(weights, w2_bias=first))


# -- the routing weight


@runner(killer="test_weight_on_input", needs={"weight_on_input": True})
def weight_on_output_in_any_case(self: Any, record: Any, weights: Any) -> Any:
    """The weight meets the result where it should meet the input."""
    if "weight" not in self.context.pays:
        return self.inner.run(record, weights)
    out = self.inner.run(replace(record, row_weights=torch.ones_like(record.row_weights)), weights)
    return replace(out, rows=(out.rows * record.row_weights[:, None]).to(out.rows.dtype))


@runner(killer="test_weight_on_input", needs={"weight_on_input": True})
def weight_on_both_sides(self: Any, record: Any, weights: Any) -> Any:
    """The weight meets input and result (vllm-project/vllm#43694)."""
    out = self.inner.run(record, weights)
    if "weight" not in self.context.pays:
        return out
    return replace(out, rows=(out.rows * record.row_weights[:, None]).to(out.rows.dtype))


@runner(killer=EXACT)
def weight_unasked(self: Any, record: Any, weights: Any) -> Any:
    """Pays the weight that another is to pay, and says nothing of it."""
    out = self.inner.run(record, weights)
    if "weight" in self.context.pays:
        return out
    valid = (owners(record) < len(weights.w2))[:, None]
    paid = (out.rows * record.row_weights[:, None]).to(out.rows.dtype)
    return replace(out, rows=torch.where(valid, paid, out.rows))


@runner(killer="test_weight_on_input", needs={"weight_on_input": True})
def weight_unpaid(self: Any, record: Any, weights: Any) -> Any:
    """Says that it paid the weight, and didn't."""
    ones = torch.ones_like(record.row_weights)
    return self.inner.run(replace(record, row_weights=ones), weights)


# -- gradients


@runner(killer=PATTERNS, needs={"autograd": True})
def no_gradient_for_the_input(self: Any, record: Any, weights: Any) -> Any:
    """The rows are cut off from the graph."""
    return self.inner.run(replace(record, rows=record.rows.detach()), weights)


@runner(killer=OPTIONS, needs={"autograd": True, "weight_on_input": True})
def no_gradient_for_the_weight(self: Any, record: Any, weights: Any) -> Any:
    """The routing weight that it pays is cut off from the graph."""
    return self.inner.run(replace(record, row_weights=record.row_weights.detach()), weights)


@runner(killer=PATTERNS, needs={"autograd": True})
def last_experts_gradient(self: Any, record: Any, weights: Any) -> Any:
    """The last expert's second matrix gets no gradient."""
    w2 = torch.cat([weights.w2[:-1], weights.w2[-1:].detach()])
    return self.inner.run(record, replace(weights, w2=w2))


@runner(killer="test_idle_experts", needs={"autograd": True})
def garbage_for_idle_experts(self: Any, record: Any, weights: Any) -> Any:
    """The gradients of experts without rows are not written (pytorch/pytorch#172439)."""
    idle = (record.tokens_per_expert == 0).view(-1, 1, 1)
    w2 = grad(weights.w2, lambda g: torch.where(idle, 1e-3, g))
    return self.inner.run(record, replace(weights, w2=w2))


@runner(killer="test_no_tokens", needs={"autograd": True})
def nothing_has_no_graph(self: Any, record: Any, weights: Any) -> Any:
    """Where nobody has a row the result depends on no weight: their gradient is None."""
    if record.tokens_per_expert.sum() == 0:
        return replace(record, rows=record.rows * 1)
    return self.inner.run(record, weights)


@runner(killer="test_numbers_and_gradients", needs={"autograd": True})
def second_backward(self: Any, record: Any, weights: Any) -> Any:
    """From the second backward on the gradient of the input is scaled."""
    out = self.inner.run(record, weights)

    def change(g: Tensor) -> Tensor:
        self.kept = (self.kept or 0) + 1
        return g * 1.5 if self.kept > 1 else g

    return replace(out, rows=grad(out.rows, change)) if out.rows.requires_grad else out


# -- the life of the part


@runner(killer=EXACT)
def second_call(self: Any, record: Any, weights: Any) -> Any:
    """From the second call on the last row of the first expert is missing."""
    out = self.inner.run(record, weights)
    self.kept = (self.kept or 0) + bool(len(out.rows))
    rows = torch.arange(len(out.rows), device=out.rows.device)
    last = (rows == record.tokens_per_expert[0] - 1)[:, None]
    return replace(out, rows=torch.where(last, 0, out.rows)) if self.kept > 1 else out


@runner(killer="test_no_tokens")
def dies_of_nothing(self: Any, record: Any, weights: Any) -> Any:
    """No rows are an error."""
    if not len(record.rows):
        raise ValueError("no rows")
    return self.inner.run(record, weights)


@runner(killer="test_exact_numbers")
def wrong_without_graph(self: Any, record: Any, weights: Any) -> Any:
    """The short cut for inference forgets the last expert."""
    out = self.inner.run(record, weights)
    if torch.is_grad_enabled():
        return out
    mine = (owners(record) == len(weights.w2) - 1)[:, None]
    return replace(out, rows=torch.where(mine, 0, out.rows))


@runner(killer="test_prepared")
class StalePreparation(MutantRunner):
    """Weights are prepared once, whatever becomes of them."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        if self.kept is None:
            self.kept = replace(weights, w2=weights.w2.clone())
        return self.kept


@runner(killer="test_prepared")
class LyingPreparation(MutantRunner):
    """The halves of the prepared copy have changed places, and it doesn't say so."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        made = self.inner.prepare(weights)
        return replace(made, w13=made.w13.roll(made.w13.shape[1] // 2, 1))


@runner(killer="test_replicas")
def replicas_unknown(self: Any, record: Any, weights: Any) -> Any:
    """Slots past the number of experts are not computed."""
    out = self.inner.run(record, weights)
    mine = (owners(record) < self.context.num_experts)[:, None]
    return replace(out, rows=torch.where(mine, out.rows, 0))

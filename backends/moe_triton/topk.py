"""Routing in one kernel: scores, choice and weights of each token from its router logits.

``moe_triton::route`` answers as ``moe_core.routing.route`` does; its derivative is one kernel too.
A program holds whole rows of logits in registers and takes the best expert ``top_k`` times. Keys of
64 bits, the choice score above and the id below, make every maximum unique: ties go to the lower
id, without a sort. Expert e of group g stands in column ``g * BLOCK_S + e % S``, S the size of a
group, so groups may have any size.

Results of a row depend on that row alone: block sizes come from E, never from the number of tokens.
"""

# To a type checker kernels aren't Python: constexpr arguments, tensors that are subscripted.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_triton.runtime import launch

SOFTMAX, SIGMOID, SQRTSOFTPLUS = 0, 1, 2
SCORING = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "sqrtsoftplus": SQRTSOFTPLUS}
MAX_EXPERTS = 8192
"""Experts in one row that a program can hold, groups padded to powers of two."""

_SIGMOID = tl.constexpr(SIGMOID)
_SOFTMAX = tl.constexpr(SOFTMAX)
_NEVER = tl.constexpr(-(2**63))  # below every key
_LAST = tl.constexpr(2**31 - 1)  # index ^ _LAST falls as the index rises
_LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
_LOW = tl.constexpr(-20.0)  # below this e^x - e^2x/2 is softplus(x), to the last bit


@triton.jit
def _log1p(e):
    """log(1 + e) for e in [0, 1], from its series in e / (2 + e): no cancellation, no libdevice."""
    z = tl.div_rn(e, 2.0 + e)
    s = z * z
    tail = 1.0 / 17.0
    tail = 1.0 / 15.0 + s * tail
    tail = 1.0 / 13.0 + s * tail
    tail = 1.0 / 11.0 + s * tail
    tail = 1.0 / 9.0 + s * tail
    tail = 1.0 / 7.0 + s * tail
    tail = 1.0 / 5.0 + s * tail
    tail = 1.0 / 3.0 + s * tail
    return 2.0 * z + 2.0 * z * s * tail


@triton.jit
def _softplus(x):
    return tl.where(x > 0, x, 0.0) + _log1p(tl.exp(-tl.abs(x)))


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0, 1.0, e), 1.0 + e)


@triton.jit
def _score(x, SCORE: tl.constexpr):
    """Sigmoid or sqrtsoftplus of finite logits."""
    if SCORE == _SIGMOID:
        return _sigmoid(x)
    else:
        e = tl.exp(tl.where(x < _LOW, x, _LOW))
        low = tl.exp(tl.where(x < _LOW, x, _LOW) * 0.5) * (1.0 - e * 0.25)
        return tl.where(x < _LOW, low, tl.sqrt_rn(_softplus(tl.where(x < _LOW, 0.0, x))))


@triton.jit
def _score_slope(x, SCORE: tl.constexpr):
    """The derivative of ``_score``, accurate in its tails."""
    if SCORE == _SIGMOID:
        e = tl.exp(-tl.abs(x))
        return tl.div_rn(e, (1.0 + e) * (1.0 + e))
    else:
        below = tl.where(x < _LOW, x, _LOW)
        above = tl.where(x < _LOW, 0.0, x)
        low = 0.5 * tl.exp(below * 0.5) * (1.0 - 0.75 * tl.exp(below))
        high = tl.div_rn(0.5 * _sigmoid(above), tl.sqrt_rn(_softplus(above)))
        return tl.where(x < _LOW, low, high)


@triton.jit
def _log_score(x, SCORE: tl.constexpr):
    """Logarithm of the score; for softmax up to a constant per row."""
    if SCORE == _SOFTMAX:
        return x
    elif SCORE == _SIGMOID:
        return tl.where(x < 0, x, 0.0) - _log1p(tl.exp(-tl.abs(x)))
    else:
        below = tl.where(x < _LOW, x, _LOW)
        high = tl.log(_softplus(tl.where(x < _LOW, 0.0, x)))
        return 0.5 * tl.where(x < _LOW, below - 0.5 * tl.exp(below), high)


@triton.jit
def _log_score_slope(x, SCORE: tl.constexpr):
    if SCORE == _SOFTMAX:
        return x * 0.0 + 1.0
    elif SCORE == _SIGMOID:
        return _sigmoid(-x)
    else:
        below = tl.where(x < _LOW, x, _LOW)
        above = tl.where(x < _LOW, 0.0, x)
        high = tl.div_rn(0.5 * _sigmoid(above), _softplus(above))
        return tl.where(x < _LOW, 0.5 * (1.0 - 0.5 * tl.exp(below)), high)


@triton.jit
def _masked_powers(x, able):
    """``exp(x - max)`` over the able ones of each row and 0 elsewhere; and the row's sum, not 0."""
    top = tl.max(tl.where(able, x, float("-inf")), axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    power = tl.where(able, tl.exp(tl.where(able, x - top[:, None], 0.0)), 0.0)
    total = tl.sum(power, axis=1)
    return power, tl.where(total > 0, total, 1.0), top


@triton.jit
def _keys(value, able, index):
    """int64 that orders by value, equals by the lower index; ``_NEVER`` where not able."""
    value = tl.where(value == 0, 0.0, value)  # -0 equals 0
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (index ^ _LAST).to(tl.int64)
    return tl.where(able, key, _NEVER)


@triton.jit
def _rows(logits, mask, num_tokens, stride_t, stride_e, stride_m, group_size, num_groups,
          HAS_MASK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
          BLOCK_S: tl.constexpr):  # fmt: skip
    """Which rows and experts this program has, their logits, and which experts can be chosen."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = row < num_tokens
    column = tl.arange(0, BLOCK_G * BLOCK_S)
    group, place = column // BLOCK_S, column % BLOCK_S
    expert = group * group_size + place
    exists = live[:, None] & ((group < num_groups) & (place < group_size))[None, :]
    row = row.to(tl.int64)
    at = row[:, None] * stride_t + expert.to(tl.int64)[None, :] * stride_e
    x = tl.load(logits + at, mask=exists, other=float("-inf"))
    able = exists & (x == x) & (x != float("-inf"))
    if HAS_MASK:
        real = tl.load(mask + row * stride_m, mask=live, other=0) != 0
        able = able & real[:, None]
    return row, live, expert, exists, x, able


@triton.jit
def _clean(x, able):
    return tl.where(able, tl.where(x > _LARGEST, _LARGEST, x), 0.0)


@triton.jit
def _best_groups(choice, key, topk_group, num_groups, TOP2: tl.constexpr, BLOCK_T: tl.constexpr,
                 BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """The keys, ``_NEVER`` outside the best groups of each row."""
    keys = tl.reshape(key, (BLOCK_T, BLOCK_G, BLOCK_S))
    values = tl.where(key == _NEVER, float("-inf"), choice)
    values = tl.reshape(values, (BLOCK_T, BLOCK_G, BLOCK_S))
    score = tl.max(values, axis=2)
    if TOP2:
        best = tl.max(keys, axis=2)
        second = tl.max(tl.where(keys == best[:, :, None], float("-inf"), values), axis=2)
        score += tl.where(second == float("-inf"), 0.0, second)
    group = tl.arange(0, BLOCK_G)[None, :]
    order = _keys(score, (group < num_groups) & (score != float("-inf")), group)
    kept = order == _NEVER  # nothing there to choose
    for _ in range(topk_group):
        first = tl.max(order, axis=1)[:, None]
        kept = kept | (order == first)
        order = tl.where(order == first, _NEVER, order)
    keys = tl.where(kept[:, :, None], keys, _NEVER)
    return tl.reshape(keys, (BLOCK_T, BLOCK_G * BLOCK_S))


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(logits, bias, input_ids, table, mask, topk_ids, topk_weights, scores,
                 num_tokens, num_experts, vocab_size, num_groups, group_size, topk_group, scale,
                 stride_t, stride_e, stride_b, stride_i, stride_v, stride_k, stride_m,
                 TOP_K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
                 HAS_BIAS: tl.constexpr, HASH: tl.constexpr, HAS_MASK: tl.constexpr,
                 GROUPS: tl.constexpr, TOP2: tl.constexpr, BLOCK_T: tl.constexpr,
                 BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    row, live, expert, exists, x, able = _rows(
        logits, mask, num_tokens, stride_t, stride_e, stride_m, group_size, num_groups,
        HAS_MASK, BLOCK_T, BLOCK_G, BLOCK_S,
    )  # fmt: skip
    clean = _clean(x, able)
    if SCORE == _SOFTMAX:
        power, total, top = _masked_powers(clean, able)
        score = tl.div_rn(power, total[:, None] + tl.zeros_like(power))
    else:
        score = tl.where(able, _score(clean, SCORE), 0.0)
    out = row[:, None] * num_experts + expert[None, :]
    tl.store(scores + out, score, mask=exists)

    slot = tl.arange(0, BLOCK_K)[None, :]
    if HASH:
        token = tl.load(input_ids + row * stride_i, mask=live, other=-1).to(tl.int64)
        known = (token >= 0) & (token < vocab_size)
        entry = tl.load(
            table + token[:, None] * stride_v + slot * stride_k,
            mask=known[:, None] & (slot < TOP_K),
            other=-1,
        ).to(tl.int64)
        good = (entry >= 0) & (entry < num_experts)
        seen = tl.load(logits + row[:, None] * stride_t + entry * stride_e, mask=good, other=0.0)
        good = good & (seen == seen) & (seen != float("-inf"))
        if HAS_MASK:
            real = tl.load(mask + row * stride_m, mask=live, other=0) != 0
            good = good & real[:, None]
        ids = tl.where(good, entry, -1)
    else:
        if HAS_BIAS:
            moved = tl.load(bias + expert * stride_b, mask=expert < num_experts, other=0.0)
            choice = score + moved.to(tl.float32)[None, :]
        elif TOP2:
            choice = score
        else:
            choice = x
        open_ = able & (choice == choice) & (choice != float("-inf"))
        key = _keys(choice, open_, expert[None, :])
        if GROUPS:
            key = _best_groups(choice, key, topk_group, num_groups, TOP2, BLOCK_T, BLOCK_G, BLOCK_S)
        ids = tl.full((BLOCK_T, BLOCK_K), -1, tl.int64)
        for k in range(TOP_K):
            best = tl.max(key, axis=1)[:, None]
            chosen = tl.where(best == _NEVER, -1, (best & _LAST) ^ _LAST)
            ids = tl.where(slot == k, chosen, ids)
            key = tl.where(key == best, _NEVER, key)

    filled = (ids >= 0) & live[:, None] & (slot < TOP_K)
    at = row[:, None] * stride_t + tl.where(filled, ids, 0) * stride_e
    picked = _clean(tl.load(logits + at, mask=filled, other=0.0), filled)
    if NORMALIZE:
        share, shares, _ = _masked_powers(_log_score(picked, SCORE), filled)
        weight = tl.div_rn(share, shares[:, None] + tl.zeros_like(share))
    elif SCORE == _SOFTMAX:
        share = tl.exp(tl.where(filled, picked - top[:, None], 0.0))
        weight = tl.div_rn(share, total[:, None] + tl.zeros_like(share))
    else:
        weight = _score(picked, SCORE)
    at = row[:, None] * TOP_K + slot
    wanted = live[:, None] & (slot < TOP_K)
    tl.store(topk_ids + at, ids, mask=wanted)
    tl.store(topk_weights + at, tl.where(filled, weight * scale, 0.0), mask=wanted)


@triton.jit(do_not_specialize=["num_tokens"])
def route_backward_kernel(logits, mask, topk_ids, grad_weights, grad_scores, grad_logits,
                          num_tokens, num_experts, scale, stride_t, stride_e, stride_m,
                          stride_gt, stride_gk, stride_st, stride_se,
                          TOP_K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
                          HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
                          HAS_SCORES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
                          BLOCK_K: tl.constexpr):  # fmt: skip
    """Duplicates of an expert in a row add up, in slot order."""
    row, live, expert, exists, x, able = _rows(
        logits, mask, num_tokens, stride_t, stride_e, stride_m, num_experts, 1,
        HAS_MASK, BLOCK_T, 1, BLOCK_S,
    )  # fmt: skip
    clean = _clean(x, able)
    by_score, by_logit = tl.zeros_like(clean), tl.zeros_like(clean)
    if HAS_SCORES:
        at = row[:, None] * stride_st + expert.to(tl.int64)[None, :] * stride_se
        by_score += tl.load(grad_scores + at, mask=able, other=0.0)
    if HAS_WEIGHTS:
        slot = tl.arange(0, BLOCK_K)[None, :]
        wanted = live[:, None] & (slot < TOP_K)
        ids = tl.load(topk_ids + row[:, None] * TOP_K + slot, mask=wanted, other=-1)
        filled = ids >= 0
        at = row[:, None] * stride_gt + slot * stride_gk
        grad = scale * tl.load(grad_weights + at, mask=filled, other=0.0)
        if NORMALIZE:
            at = row[:, None] * stride_t + ids * stride_e
            picked = _clean(tl.load(logits + at, mask=filled, other=0.0), filled)
            share, shares, _ = _masked_powers(_log_score(picked, SCORE), filled)
            share = tl.div_rn(share, shares[:, None] + tl.zeros_like(share))
            mean = tl.sum(share * grad, axis=1)
            grad = share * (grad - mean[:, None]) * _log_score_slope(picked, SCORE)
        for k in range(TOP_K):
            here = (
                expert.to(tl.int64)[None, :] == tl.sum(tl.where(slot == k, ids, 0), axis=1)[:, None]
            )
            given = tl.sum(tl.where(slot == k, grad, 0.0), axis=1)[:, None]
            if NORMALIZE:
                by_logit += tl.where(here, given, 0.0)
            else:
                by_score += tl.where(here, given, 0.0)
    if SCORE == _SOFTMAX:
        power, total, _ = _masked_powers(clean, able)
        score = tl.div_rn(power, total[:, None] + tl.zeros_like(power))
        by_logit += score * (by_score - tl.sum(score * by_score, axis=1)[:, None])
    else:
        by_logit += by_score * _score_slope(clean, SCORE)
    # clamped logits have no gradient
    by_logit = tl.where(able & (x <= _LARGEST), by_logit, 0.0)
    tl.store(grad_logits + row[:, None] * num_experts + expert[None, :], by_logit, mask=exists)


def block_sizes(num_experts: int, num_groups: int, top_k: int) -> tuple[dict[str, int], int]:
    """``BLOCK_*`` of a row's width, and warps. One warp as long as it can hold a row, so that no
    reduction goes through shared memory. Raises ``ValueError`` past ``MAX_EXPERTS`` columns."""
    groups = triton.next_power_of_2(num_groups)
    size = triton.next_power_of_2(num_experts // num_groups)
    columns = groups * size
    if columns > MAX_EXPERTS:
        raise ValueError(
            f"{num_experts} experts in {num_groups} groups take {columns} columns of one row, a "
            f"program holds {MAX_EXPERTS}"
        )
    tokens, slots = max(1, min(16, 256 // columns)), triton.next_power_of_2(top_k)
    warps = max(1, min(16, columns // 512))
    return {"BLOCK_T": tokens, "BLOCK_G": groups, "BLOCK_S": size, "BLOCK_K": slots}, warps


@torch.library.custom_op("moe_triton::route", mutates_args=())
def route(
    logits: Tensor,
    correction_bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    token_mask: Tensor | None,
    top_k: int,
    scoring_func: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    topk_group: int,
    top2_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``logits`` float32 ``[T, E]`` → weights ``[T, K]``, scores ``[T, E]``, ids int64 ``[T, K]``.

    With ``input_ids`` ``[T]`` and ``tid2eid`` ``[vocab_size, K]`` the table chooses. ``normalize``:
    weights sum to ``scale``. ``num_groups`` 1: no groups. Derivatives: of weights and scores.
    """
    num_tokens, num_experts = logits.shape
    weights, scores, ids = _outputs(logits, top_k)
    blocks, warps = block_sizes(num_experts, num_groups, top_k)
    mask = None if token_mask is None else token_mask.view(torch.uint8)
    launch(
        route_kernel,
        (triton.cdiv(num_tokens, blocks["BLOCK_T"]),),
        logits, correction_bias, input_ids, tid2eid, mask, ids, weights, scores,
        num_tokens, num_experts, 0 if tid2eid is None else tid2eid.shape[0],
        num_groups, num_experts // num_groups, topk_group, scale,
        *logits.stride(), _stride(correction_bias), _stride(input_ids),
        *((0, 0) if tid2eid is None else tid2eid.stride()), _stride(mask),
        TOP_K=top_k,
        SCORE=SCORING[scoring_func],
        NORMALIZE=normalize,
        HAS_BIAS=correction_bias is not None,
        HASH=tid2eid is not None,
        HAS_MASK=mask is not None,
        GROUPS=num_groups > 1,
        TOP2=top2_sum,
        **blocks,
        num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return weights, scores, ids


@route.register_fake
def _(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(logits, args[4])


def _outputs(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int64)
    return logits.new_empty(num_tokens, top_k), logits.new_empty(num_tokens, num_experts), ids


@torch.library.custom_op("moe_triton::route_backward", mutates_args=())
def route_backward(
    grad_weights: Tensor | None,
    grad_scores: Tensor | None,
    logits: Tensor,
    topk_ids: Tensor,
    token_mask: Tensor | None,
    scoring_func: str,
    normalize: bool,
    scale: float,
) -> Tensor:
    """The gradient of ``logits`` ``[T, E]``. Scores and weights are computed anew."""
    (num_tokens, num_experts), top_k = logits.shape, topk_ids.shape[1]
    grad = logits.new_empty(num_tokens, num_experts)
    blocks, warps = block_sizes(num_experts, 1, top_k)
    mask = None if token_mask is None else token_mask.view(torch.uint8)
    launch(
        route_backward_kernel,
        (triton.cdiv(num_tokens, blocks["BLOCK_T"]),),
        logits, mask, topk_ids, grad_weights, grad_scores, grad,
        num_tokens, num_experts, scale, *logits.stride(), _stride(mask),
        *((0, 0) if grad_weights is None else grad_weights.stride()),
        *((0, 0) if grad_scores is None else grad_scores.stride()),
        TOP_K=top_k,
        SCORE=SCORING[scoring_func],
        NORMALIZE=normalize,
        HAS_MASK=mask is not None,
        HAS_WEIGHTS=grad_weights is not None,
        HAS_SCORES=grad_scores is not None,
        BLOCK_T=blocks["BLOCK_T"],
        BLOCK_S=blocks["BLOCK_S"],
        BLOCK_K=blocks["BLOCK_K"],
        num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return grad


@route_backward.register_fake
def _(grad_weights: Tensor | None, grad_scores: Tensor | None, logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _bias, _input_ids, _table, token_mask, _top_k, *how = inputs
    ctx.how = how[:3]
    ctx.save_for_backward(logits, output[2], token_mask)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, weights: Tensor | None, scores: Tensor | None, _ids: Any) -> Any:
    grad = None
    if ctx.needs_input_grad[0] and not (weights is None and scores is None):
        logits, ids, mask = ctx.saved_tensors
        grad = route_backward(weights, scores, logits, ids, mask, *ctx.how)
    return (grad, *[None] * 11)


route.register_autograd(_differentiate, setup_context=_save)


def _stride(vector: Tensor | None) -> int:
    return 0 if vector is None else vector.stride(0)

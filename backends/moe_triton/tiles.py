"""What the grouped products share: a schedule of tiles over all experts, and where their rows are.

Positions count rows sorted by expert: expert e has positions ``expert_starts[e]`` up to
``expert_starts[e] + tokens_per_expert[e]`` (without ``expert_starts``: from ``e * capacity``). A
position's row is found through ``sorted_token_ids`` where there are some, else it is the position.

The schedule needs no table and no host: each program sums the experts' tiles once, in registers,
and finds its tiles in there. Tiles of one expert are neighbours, ``GROUP_M`` of them side by side,
so that programs which run at the same time share weights and rows in the L2 cache.
"""
# Pyright doesn't know what triton.jit makes of a function.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

NONE, TOKEN, SLOT = 0, 1, 2
"""What a row is found by: its position, or the token or flat slot in ``sorted_token_ids``."""

_NONE = tl.constexpr(NONE)
_TOKEN = tl.constexpr(TOKEN)


@triton.jit
def tile_ends(tokens_per_expert, num_experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """int32 ``[EXPERTS]``: how many tiles of ``BLOCK_M`` rows experts 0 to e have together."""
    expert = tl.arange(0, EXPERTS)
    rows = tl.load(tokens_per_expert + expert, mask=expert < num_experts, other=0)
    return tl.cumsum((rows + BLOCK_M - 1) // BLOCK_M, axis=0)


@triton.jit
def first_position(expert_starts, expert, capacity):
    if expert_starts is None:
        return expert * capacity
    else:
        return tl.load(expert_starts + expert)


@triton.jit
def find_tile(ends, tile, tiles_n, tokens_per_expert, expert_starts, capacity,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):  # fmt: skip
    """Of tile number ``tile``: its expert, first and one past the last position, first column."""
    passed = ends * tiles_n <= tile
    expert = tl.sum(passed.to(tl.int32), axis=0)
    before = tl.max(tl.where(passed, ends, 0), axis=0)
    rows = tl.load(tokens_per_expert + expert)
    start = first_position(expert_starts, expert, capacity)
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    local = tile - before * tiles_n
    group = local // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = local - group * GROUP_M * tiles_n
    row = (group * GROUP_M + inside % height) * BLOCK_M
    return expert, start + row, start + rows, (inside // height) * BLOCK_N


@triton.jit
def find_rows(position, sorted_token_ids, top_k, BY: tl.constexpr):
    """The number of each position's row: of the position, its token or its slot."""
    if BY == _NONE:
        return position
    else:
        slot = tl.load(sorted_token_ids + position)
        if BY == _TOKEN:
            return slot // top_k
        else:
            return slot


@triton.jit
def load_weights(row_weights, position, sorted_token_ids, BY: tl.constexpr):
    """float32: the routing weights of positions, which lie by slot or by position."""
    if BY == _NONE:
        at = position
    else:
        at = tl.load(sorted_token_ids + position)
    return tl.load(row_weights + at).to(tl.float32)


@triton.jit
def row_offsets(row, period, stride_outer, stride_inner):
    """int64: where row ``row`` begins in a tensor of rows, or of blocks of ``period`` rows."""
    row = row.to(tl.int64)
    return (row // period) * stride_outer + (row % period) * stride_inner


@triton.jit
def load_tile(pointers, column, num_columns, stride, EVEN: tl.constexpr):
    """``pointers [n]`` and ``column [m]`` → ``[n, m]``, zeros past ``num_columns``."""
    at = pointers[:, None] + column.to(tl.int64)[None, :] * stride
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(column < num_columns)[None, :], other=0.0)


@triton.jit
def load_bias(bias, column, inside, stride):
    """float32 ``[1, n]``: an expert's bias of these columns."""
    at = bias + column.to(tl.int64) * stride
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_block(base, row, num_rows, stride_row, column, num_columns, stride_column,
               EVEN_ROWS: tl.constexpr):  # fmt: skip
    """``[rows, columns]``, zeros past both ends. For rows that are dense: columns that are masked,
    and not replaced, are loaded 16 bytes at a time."""
    row_at = row.to(tl.int64)[:, None] * stride_row
    at = base + row_at + column.to(tl.int64)[None, :] * stride_column
    mask = (column < num_columns)[None, :]
    if not EVEN_ROWS:
        mask = mask & (row < num_rows)[:, None]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """``total + a @ b`` in float32. ``UPCAST`` is for the interpreter, whose bfloat16 is wrong."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _half(x, RIGHT: tl.constexpr):
    both = tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1))
    left, right = tl.split(both)
    if RIGHT:
        return right
    else:
        return left


@triton.jit
def columns_of(x, PART: tl.constexpr, PARTS: tl.constexpr):
    """``[m, n]`` → ``[m, n / PARTS]``, from column ``PART * n / PARTS`` on. Results that are
    finished in parts (1, 2 or 4) take fewer registers."""
    if PARTS == 1:
        return x
    elif PARTS == 2:
        return _half(x, PART == 1)
    else:
        tl.static_assert(PARTS == 4)
        return _half(_half(x, PART >= 2), PART % 2 == 1)

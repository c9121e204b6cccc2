"""What each rank does and asserts, in a process of its own; ``transport`` and ``fused`` say when.

Every function is a task for ``pool.ranks(n).run(task, job)`` (or a plain call, for one rank), so it
is looked up by name in the worker, as the backend is by its spec: entry points have to work there.
All that a rank compares with it computes by itself, from seeds that every rank knows; so each rank
checks its own results, and no rank sees another's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_core import ConfigError, Experts, HandleError, InputError, Routing, trace
from moe_core.conformance import bounds
from moe_core.conformance.cases import (
    Case,
    exact_result,
    gradient_size,
    identity_rows,
    oracle,
    poison,
    random_case,
    scale_of,
    sum_length,
)
from moe_core.conformance.rank import Job, Rank
from moe_core.layouts import ExpertContiguous, RankGrouped, Record, TokenMajor
from moe_core.placement import Placement, w13_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PATTERNS = ("any", "first", "last", "skewed", "none")
STEPS = (
    (3, 0, 5, 0, 0, 1, 0),
    (0, 2, 0, 0, 4, 0, 0),
    (1, 0, 0, 2, 0, 0, 0),
    (0, 0, 1, 1, 3, 0, 0),
)
"""Tokens of four holders in seven steps: each is idle at times, and all are in the last."""


def exact_numbers(job: Job, patterns: tuple[str, ...] = PATTERNS) -> None:
    """Which expert, which token, which weight, which rank: all in exact integers.

    Each pattern twice in a row; the second time what nobody may read is NaN. No output may be
    touched by a later call.
    """
    me = Rank(job)
    kept: list[tuple[Tensor, Tensor]] = []
    for pattern in patterns if job.ids is None else ("given",):
        if job.ids is None:
            ids = me.ids(pattern, job.tokens)
        else:
            top_k = job.config.top_k
            given = [job.ids[holder] for holder in me.holders]
            ids = [torch.tensor(i, dtype=torch.int64).view(-1, top_k) for i in given]
        whole = me.exact(ids)
        own = me.own(whole, ids)
        mine, want = whole.tokens(own.start, own.stop), exact_result(whole)[own]
        invalid = mine.ids < 0
        dirty = replace(
            mine,
            x=torch.where(invalid.all(1, keepdim=True), math.nan, mine.x),
            topk=torch.where(invalid, math.nan, mine.topk),
        )
        for case, how in ((mine, ""), (dirty, ", NaN where nobody may read")):
            with torch.set_grad_enabled(case is mine):  # what needs no graph may take a short cut
                out = me.run(case)
            me.equal(out, want, f"ids {pattern!r}{how}")
            kept.append((out, want))
    for out, want in kept:
        me.equal(out, want, "an output changed when the layer was called again")


def large_batches(job: Job) -> None:
    exact_numbers(job, ("skewed",))


def received_rows(job: Job) -> None:
    """What reaches the runner: every row that its experts need, in order, and nothing else."""
    me = Rank(job)
    for pattern in ("any", "last", "none"):
        ids = me.ids(pattern, job.tokens)
        whole = me.exact(ids)
        own = me.own(whole, ids)
        mine = whole.tokens(own.start, own.stop).to(job.device)
        want = exact_result(whole)[own]
        first = me.layer.placement.first_expert(me.groups.ep_rank)
        check = lambda record: _check_record(me, record, whole, first, len(me.layer.w13))  # noqa: B023, E731
        record, handle = me.layer.dispatch(mine.x, mine.ids, mine.topk)
        check(record)
        out = me.layer.combine(me.layer.run(record), handle)
        me.equal(out, want, f"staged, ids {pattern!r}")
        _, record, handle = _by_itself(me, mine, check)  # a converter would hide what it ignores
        me.equal(me.transport.combine(record, handle), want, f"by itself, ids {pattern!r}")


def _check_record(me: Rank, record: Record, whole: Case, first: int, count: int) -> None:
    if isinstance(record, ExpertContiguous):
        starts, counts = record.expert_starts.tolist(), record.tokens_per_expert.tolist()
        for e in range(count):
            token, slot = (whole.ids == first + e).nonzero(as_tuple=True)
            me.check(
                counts[e] == len(token), f"expert {first + e}: {counts[e]} rows, not {len(token)}"
            )
            part = slice(starts[e], starts[e] + counts[e])
            me.equal(record.rows[part], whole.x[token], f"rows of expert {first + e}")
            me.equal(record.row_weights[part], whole.topk[token, slot], f"weights of {first + e}")
    elif isinstance(record, TokenMajor | RankGrouped):
        local = whole.ids - first
        local = torch.where((local >= 0) & (local < count), local, -1)
        needed, kept = (local >= 0).any(1), (record.topk_ids >= 0).any(1)
        me.equal(record.topk_ids[kept], local[needed], "local ids")
        me.equal(record.rows[kept], whole.x[needed], "rows")
        weights = torch.where(local >= 0, whole.topk, 0)[needed]
        got = record.topk_weights
        if isinstance(record, TokenMajor):  # a rank's own tokens come as they are
            got = torch.where(record.topk_ids >= 0, got, 0)
        me.equal(got[kept], weights, "weights")


def slot_order(job: Job) -> None:
    """combine=per_slot: products summed in slot order, rounded once, the same bits everywhere."""
    me = Rank(job)
    ids = me.ids("any", job.tokens)
    for own in ids:  # the first slot on the first rank, the others on the last
        own[::2, 0], own[::2, 1:] = 0, job.config.num_experts - 1
    whole = me.exact(ids)
    generator = torch.Generator().manual_seed(11)
    whole.topk = torch.randn(whole.topk.shape, generator=generator).to(whole.topk)
    # a large one, then two that only count if the sum is not rounded in between
    big = 2.0 / torch.finfo(me.dtype).eps
    whole.topk[::2, 0], whole.topk[::2, 1:] = big, 1.0
    own = me.own(whole, ids)
    path = me.layer.resolution.path
    early = path is not None and path.payers["weight"] == "runner"
    wide = bounds.fine(me.dtype)
    total = torch.zeros(whole.x.shape, dtype=wide)
    for slot in range(job.config.top_k):
        expert, weight = whole.ids[:, slot : slot + 1], whole.topk[:, slot : slot + 1]
        row = (identity_rows(whole).double() * scale_of(expert)).to(wide) * weight
        row = row.to(me.dtype).to(wide) if early else row
        total = total + torch.where(expert >= 0, row, 0)
    want = total.to(me.dtype)[own]
    for _ in range(2):
        out = me.run(whole.tokens(own.start, own.stop))
        me.equal(out, want, "bits of the sum over slots")


def numbers(job: Job) -> None:
    """Forward and backward, twice, against a float64 oracle of one process; then once more with
    every rank but the last idle."""
    me = Rank(job)
    _numbers(me, "any", times=2)
    _numbers(me, "last", times=1)


def wire_dtypes(job: Job) -> None:
    """What rows travel in costs one rounding of its own, and shows in the bytes."""
    _numbers(Rank(job), "any", times=1)
    traffic(job)


def _numbers(me: Rank, pattern: str, times: int) -> None:
    job, config, wide = me.job, me.config, bounds.fine(me.dtype)
    ids = me.ids(pattern, job.tokens)
    whole = random_case(
        torch.cat(ids), config.dtype,
        sizes=(config.num_experts, config.hidden_size, config.intermediate_size),
        bias=config.bias, activation=config.activation, layout=config.w13_layout,
        on_input=config.apply_router_weight_on_input,
    )  # fmt: skip
    me.layer.load_full_weights(whole.w13, whole.w2, whole.b13, whole.b2)
    own = me.own(whole, ids)
    theirs = whole.mapped(lambda t: t.double().requires_grad_())
    want, mass = oracle(theirs)
    request, spans = me.layer.resolution.request, job.parallel.ep_size * job.parallel.tp_size > 1
    dispatch = getattr(torch, request.dispatch_dtype) if spans else me.dtype
    combine = getattr(torch, request.combine_dtype) if spans else wide
    limit = bounds.forward(
        mass, me.dtype, sum_length(whole),
        dispatch=None if dispatch == me.dtype else dispatch,
        combine=combine,
        partial_sums=job.parallel.ep_size * job.parallel.tp_size,
    )[own]  # fmt: skip
    backward = job.autograd and dispatch == me.dtype and combine == wide
    upstream = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view(want.shape)
    upstream = upstream.to(me.dtype)
    leaves, exact = theirs.floats, ()
    if backward:
        exact = torch.autograd.grad(
            want, list(leaves.values()), upstream.double(), allow_unused=True,
            materialize_grads=True,
        )  # fmt: skip
    for _ in range(times):
        mine = whole.tokens(own.start, own.stop).to(job.device)
        mine = mine.mapped(lambda t: t.detach().requires_grad_(job.autograd))
        me.layer.zero_grad()
        out = me.run(mine)
        me.within(out, want[own], limit, f"output, ids {pattern!r}")
        if not backward:
            continue
        poison(job.device, [out, me.layer.w13], mine.ids.numel())
        out.backward(upstream[own].to(job.device))
        for name, right in zip(leaves, exact, strict=True):
            got, right = _gradient(me, mine, name), _share(me, name, right, own)
            me.check(got is not None, f"gradient of {name} is None, ids {pattern!r}")
            most = bounds.gradient(right, me.dtype, gradient_size(whole))
            me.within(got, right, most, f"gradient of {name}, ids {pattern!r}")


def _gradient(me: Rank, mine: Case, name: str) -> Any:
    own = {"w13": me.layer.w13, "w2": me.layer.w2, "b13": me.layer.w13_bias, "b2": me.layer.w2_bias}
    tensor = own[name] if name in own else getattr(mine, name)
    return tensor.grad


def _share(me: Rank, name: str, whole: Tensor, own: slice) -> Tensor:
    """This rank's part of a gradient: its tokens, or its experts and its cut of them."""
    if name in ("x", "topk"):
        return whole[own]
    first = me.layer.placement.first_expert(me.groups.ep_rank)
    part, tp = whole[first : first + me.layer.w13.shape[0]], me.job.parallel.tp_size
    if name == "w2":
        return part.chunk(tp, -1)[me.groups.tp_rank]
    if name == "b2":
        return part
    c = me.config
    blocks = w13_blocks(
        c.intermediate_size, c.activation.gated, c.w13_layout, me.groups.tp_rank, tp
    )
    return torch.cat([part.narrow(1, a, b - a) for a, b in blocks], 1)


def traffic(job: Job) -> None:
    """Bytes to each rank: what the transport's ``payload`` says, and combines in return."""
    me = Rank(job)
    ids = me.ids("any", job.tokens)
    whole = me.exact(ids)
    own = me.own(whole, ids)
    mine = whole.tokens(own.start, own.stop).to(job.device)
    with trace() as seen:
        me.layer(mine.x, mine.ids, mine.topk)
    (call,) = seen.calls
    rank, config, size = me.groups.rank, job.config, job.parallel.ep_size
    if job.parallel.ep_size * job.parallel.tp_size == 1:
        quiet = (call.payload_bytes, call.combine_bytes, call.collectives) == ([[0]], [[0]], [])
        me.check(quiet, f"a local layer communicates: {call.collectives}, {call.traffic}")
        return
    payload = me.transport.payload
    request = me.layer.resolution.request
    item = {
        n: getattr(torch, getattr(request, n)).itemsize for n in ("dispatch_dtype", "combine_dtype")
    }
    per_slot = config.combine == "per_slot"
    back = me.dtype.itemsize if per_slot else item["combine_dtype"]
    most = max(len(i) for i in ids)
    for peer in range(size):
        if peer == me.groups.ep_rank:
            continue
        place = (me.groups.dp_rank * size + peer) * job.parallel.tp_size + me.groups.tp_rank
        sent = _counts(me, ids[me.holder], peer)
        came = _counts(me, ids[peer], me.groups.ep_rank) if me.per_replica > 1 else sent
        rows, rows_back = sent[payload == "slots"], came[per_slot or payload == "slots"]
        if payload == "all":
            rows, rows_back = most, most * (config.top_k if per_slot else 1)
        elif payload == "nodes":
            rows, rows_back = _by_node(me, ids, peer, per_slot)
        for what, got, count, itemsize in (
            ("payload", call.payload_bytes, rows, item["dispatch_dtype"]),
            ("combine", call.combine_bytes, rows_back, back),
        ):
            said, bound = got[rank][place], count * config.hidden_size * itemsize
            good = said <= bound if payload == "all" else said == bound
            me.check(good, f"{what}: {said} bytes to rank {place}, {payload} are {bound}")


def _counts(me: Rank, ids: Tensor, ep_rank: int, last: int | None = None) -> tuple[int, int]:
    """Rows (tokens) and slots with an expert on that rank, or on one from there to the last."""
    placement, last = me.layer.placement, ep_rank if last is None else last
    end = placement.first_expert(last) + placement.num_local_experts(last)
    there = (ids >= placement.first_expert(ep_rank)) & (ids < end)
    return int(there.any(1).sum()), int(there.sum())


def _by_node(me: Rank, ids: list[Tensor], peer: int, per_slot: bool) -> tuple[int, int]:
    """Rows to that rank, and results to it, where a row crosses to a node once: to the rank that
    has the sender's place there, and on to each rank of the node that needs it."""
    mine, share = me.groups.ep_rank, me.layer.resolution.request.ep_ranks_per_node
    assert share is not None
    (node, place), (their_node, their_place) = divmod(mine, share), divmod(peer, share)
    if node != their_node:
        if place != their_place:
            return 0, 0
        there, here = ((n * share, n * share + share - 1) for n in (their_node, node))
        return _counts(me, ids[mine], *there)[0], _counts(me, ids[peer], *here)[per_slot]
    sources = range(0, len(ids), share)
    out = sum(_counts(me, ids[first + place], peer)[0] for first in sources)
    return out, sum(_counts(me, ids[first + their_place], mine)[per_slot] for first in sources)


def faults(job: Job) -> None:
    """The last rank brings something bad: all ranks raise in this step, and the next one works."""
    limit = max(job.tokens)
    me = Rank(job, max_tokens_per_rank=limit)
    ids = me.ids("any", job.tokens)
    whole = me.exact(ids)
    own = me.own(whole, ids)
    mine, want = whole.tokens(own.start, own.stop).to(job.device), exact_result(whole)[own]
    bad = job.parallel.world_size - 1
    other = torch.float64 if me.dtype == torch.float32 else torch.float32
    many = mine.x.new_zeros(limit + 1, job.config.hidden_size)
    zeros = mine.ids.new_zeros(limit + 1, job.config.top_k)
    inputs = {
        "hidden size": (mine.x[:, 1:], mine.ids, mine.topk),
        "dtype of rows": (mine.x.to(other), mine.ids, mine.topk),
        "number of choices": (mine.x, mine.ids[:, 1:], mine.topk[:, 1:]),
        "dtype of ids": (mine.x, mine.ids.double(), mine.topk),
        "too many tokens": (many, zeros, zeros.to(mine.topk)),
    }
    if torch.device(job.device).type == "cpu":  # elsewhere values are not looked at
        inputs["id = num_experts"] = (
            mine.x,
            mine.ids.clone().fill_(job.config.num_experts),
            mine.topk,
        )
        inputs["id = -2"] = (mine.x, mine.ids.clone().fill_(-2), mine.topk)
    for kind in inputs:
        given = inputs[kind] if me.groups.rank == bad else (mine.x, mine.ids, mine.topk)
        said = ""
        try:
            me.layer(*given)
        except InputError as error:
            said = str(error)
        me.check(bool(said), f"{kind} on rank {bad}: no InputError here")
        if job.parallel.world_size > 1:
            me.check(f"rank {bad}: " in said, f"{kind}: the error doesn't name rank {bad}: {said}")
        me.equal(me.layer(mine.x, mine.ids, mine.topk), want, f"the step after: {kind}")


def handles(job: Job) -> None:
    """Two in flight, combined in the other order; a handle used twice or by another layer."""
    me = Rank(job)
    other = me.another()
    batches: list[tuple[Case, Tensor]] = []
    more = tuple(t + 1 for t in job.tokens)
    plans = (("any", job.tokens), ("skewed", more), ("any", job.tokens[::-1]))
    for turn, (pattern, tokens) in enumerate(plans):  # no two have the same weights
        ids = me.ids(pattern, tokens)
        whole = me.exact(ids)
        whole.topk = whole.topk.roll(turn, 1)
        own = me.own(whole, ids)
        batches.append((whole.tokens(own.start, own.stop).to(job.device), exact_result(whole)[own]))
    other.load_state_dict(me.layer.state_dict())
    for grads in (True, False):  # what needs no graph may use its buffers again
        with torch.set_grad_enabled(grads):
            _in_flight(me, other, batches[0], batches[1])
            _in_flight(me, other, batches[2], batches[0])
            _transport_handles(me, other, batches[0])


def _in_flight(me: Rank, other: Any, a: tuple[Case, Tensor], b: tuple[Case, Tensor]) -> None:
    (first, want_first), (second, want_second) = a, b
    record, handle = me.layer.dispatch(first.x, first.ids, first.topk)
    most = me.transport.max_in_flight
    if most is not None and most < 2:
        dispatch = lambda: me.layer.dispatch(second.x, second.ids, second.topk)  # noqa: E731
        _refuses(me, dispatch, "a second dispatch in flight")
        out = me.layer.run(record)
    else:
        record_b, handle_b = me.layer.dispatch(second.x, second.ids, second.topk)
        out_b, out = me.layer.run(record_b), me.layer.run(record)
        me.equal(me.layer.combine(out_b, handle_b), want_second, "the second of two in flight")
    _refuses(me, lambda: other.combine(out, handle), "another layer's handle")
    me.equal(me.layer.combine(out, handle), want_first, "the first of two in flight")
    _refuses(me, lambda: me.layer.combine(out, handle), "a handle used twice")


def _transport_handles(me: Rank, other: Any, batch: tuple[Case, Tensor]) -> None:
    """The transport by itself: a pipeline guards its own handle and would hide it."""
    (case, want), transport = batch, me.transport
    begun, record, handle = _by_itself(me, case, lambda _: None)
    _refuses(me, begun.finish, "finish() twice")
    foreign = lambda: other.pipeline.transport.combine(record, handle)  # noqa: E731
    _refuses(me, foreign, "another transport's handle")
    me.equal(transport.combine(record, handle), want, "the transport by itself")
    _refuses(me, lambda: transport.combine(record, handle), "a transport's handle used twice")


def _by_itself(me: Rank, case: Case, check: Callable[[Record], None]) -> tuple[Any, Any, Any]:
    """→ what was begun, the experts' results as the transport takes them, and its own handle.
    ``check`` sees what it gave."""
    pipeline = me.layer.pipeline
    begun = me.transport.dispatch_begin(
        case.x, pipeline.slot_map.physical(Routing(case.ids, case.topk))
    )
    record, handle = begun.finish()
    check(record)
    state = None
    if pipeline.converter is not None:
        record, state = pipeline.converter.there(record)
    record = me.layer.run(record)
    if pipeline.converter is not None:
        record = pipeline.converter.back(record, state)
    return begun, record, handle


def _refuses(me: Rank, call: Any, what: str) -> None:
    try:
        call()
    except HandleError:
        return
    me.fail(f"{what} raises no HandleError")


def idle_steps(job: Job) -> None:
    """Seven steps in which some holders, and at last all, have no token: nobody waits, every
    gradient is there, and all ranks make the same collectives."""
    me = Rank(job)
    for step in range(len(STEPS[0])):
        tokens = [STEPS[h % 4][step] for h in range(me.per_replica * job.parallel.dp_size)]
        ids = me.ids("any", tokens)
        whole = me.exact(ids)
        own = me.own(whole, ids)
        mine = whole.tokens(own.start, own.stop).to(job.device)
        mine = mine.mapped(lambda t: t.requires_grad_(job.autograd))
        me.layer.zero_grad()
        with trace() as seen:
            out = me.run(mine)
        me.equal(out, exact_result(whole)[own], f"step {step}")
        if job.autograd:
            out.sum().backward()
            for name, parameter in me.layer.named_parameters():
                me.check(parameter.grad is not None, f"step {step}: no gradient of {name}")
                finite = parameter.grad.isfinite().all()  # pyright: ignore[reportOptionalMemberAccess]
                me.check(bool(finite), f"step {step}: gradient of {name} is not finite")
        if job.parallel.world_size > 1:
            said: list[Any] = [None] * job.parallel.world_size
            dist.all_gather_object(said, seen.collectives)
            me.check(all(names == said[0] for names in said), f"step {step}: collectives {said}")


def placements(job: Job) -> None:
    """Replicas, on one rank and on two, and ids without weights: each slot is computed once."""
    experts, size = job.config.num_experts, job.parallel.ep_size
    usual = tuple(range(experts))
    for name, slot_experts, holes in (
        ("two replicas of the first and last expert", (*usual, 0, experts - 1), False),
        ("other order, holes", (*usual[::-1], 0), True),
    ):
        try:  # the gradients of replicas aren't summed
            me = Rank(job, placement=Placement(experts, size, slot_experts, holes), inference=True)
        except ConfigError as error:
            if error.faults:
                raise
            continue  # more slots than the part takes, or not as many on each rank
        for pattern in ("any", "first"):
            ids = me.ids(pattern, job.tokens)
            whole = me.exact(ids)
            own = me.own(whole, ids)
            out = me.run(whole.tokens(own.start, own.stop))
            me.equal(out, exact_result(whole)[own], f"{name}, ids {pattern!r}")


def many_layers(job: Job) -> None:
    """Groups belong to the widths, not to a layer."""
    me = Rank(job)

    def groups() -> int:
        return len(dist.distributed_c10d._world.pg_map)  # pyright: ignore[reportAttributeAccessIssue]

    before = groups()
    for _ in range(10):
        me.another()
    me.check(groups() == before, f"10 more layers made {groups() - before} process groups")


def on_meta(job: Job) -> None:
    """The first rank alone builds a layer on the meta device: no other is asked."""
    if job.parallel.world_size > 1 and dist.get_rank() > 0:
        return
    layer = Experts(job.config, job.parallel, job.spec, device="meta", inference=not job.autograd)
    assert all(t.is_meta for t in layer.state_dict().values()), "something was allocated"


def parts(job: Job) -> None:
    """final_sum=caller: what the ranks that hold the same rows get is, in sum, the result."""
    me = Rank(job)
    for pattern in ("any", "first"):
        ids = me.ids(pattern, job.tokens)
        whole = me.exact(ids)
        own = me.own(whole, ids)
        out = me.run(whole.tokens(own.start, own.stop)).detach()
        dtype = me.layer.resolution.request.combine_dtype
        me.check(str(out.dtype) == f"torch.{dtype}", f"parts in {out.dtype}, not {dtype}")
        total = out.clone()
        groups = [me.groups.tp, me.groups.ep if job.parallel.rows == "replicated" else None]
        for group in filter(None, groups):
            dist.all_reduce(total, group=group)
        me.equal(total.to(me.dtype), exact_result(whole)[own], f"the sum of parts, ids {pattern!r}")

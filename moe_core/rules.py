"""Which widths (ep, tp, dp) go with a layer and with a part: a table, over requests and offers.

No rule knows the name of a backend, so a plugin is judged like a shipped one. ``judge`` runs the
table. A rule that fires refuses (``require``), says something (``warn``), has another width to
propose (``adjust``: refused under policy ``strict``, applied and reported under ``adjust``) or puts
a part that serves before others (``prefer``).

With ``ep_size * tp_size == 1`` nothing travels and any transport is the local path: the rules
about parts are then silent. What SGLang's rules say (``moe_core/profiles``) is read here in our
widths, ``world = dp * ep * tp``; its rules on ``moe_dp_size`` hold by construction.
"""
# pyright: strict

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moe_core.config import MoEConfig, ParallelConfig, RouterConfig
from moe_core.manifest import ANY, ONE, Offer, Range, Request, meets, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

POLICIES = ("strict", "adjust")
_MOVERS = ("transport", "fused")
_COMPUTERS = ("runner", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A layer and, where the rule is about a part, an offer that break a rule; nothing else is
    wrong with them."""

    parallel: ParallelConfig
    num_experts: int = 8
    intermediate_size: int = 64
    offer: Offer = field(default_factory=Offer)
    max_tokens_per_rank: int | None = None
    ranks_per_node: int | None = None
    jitter: float = 0.0

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(
            hidden_size=32,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=2,
            router=RouterConfig(jitter=self.jitter),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``applies(request, offer)`` says that the rule is broken.

    ``roles``: the parts whose offers it looks at; empty for a rule on the request alone.
    ``axes``: what it speaks of; the plain comparison of these axes is then left out, so that one
    fault is told once. ``message`` and ``fix`` are templates over ``numbers``; ``note`` is added
    to the report of an adjustment, ``change`` gives the new widths.
    """

    id: str
    applies: Callable[[Request, Offer], bool]
    action: str  # require | adjust | warn | prefer
    message: str
    fix: str
    example: Example
    roles: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    change: Callable[[Request], Mapping[str, int]] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that fired, its texts filled with numbers."""

    rule: Rule
    message: str
    fix: str
    note: str = ""


def judge(request: Request, offer: Offer | None = None, role: str = "") -> list[Finding]:
    """The rules that fire: those on the request alone, or those on the offer of a part."""
    if role and request.ep_size * request.tp_size == 1:
        return []
    offered = offer or Offer()
    fired = [
        rule
        for rule in RULES
        if (role in rule.roles if role else not rule.roles) and rule.applies(request, offered)
    ]
    texts = numbers(request, offered) if fired else {}
    return [
        Finding(r, *(text.format_map(texts) for text in (r.message, r.fix, r.note))) for r in fired
    ]


def adjusted(request: Request, finding: Finding) -> Request:
    """The request with the widths that an ``adjust`` rule proposes."""
    assert finding.rule.change is not None
    return with_widths(request, **finding.rule.change(request))


def with_widths(request: Request, **widths: int) -> Request:
    changed = replace(request, **widths)
    return replace(changed, uneven_experts=changed.num_experts % changed.ep_size != 0)


def numbers(request: Request, offer: Offer) -> dict[str, Any]:
    """What the templates of rules can name."""
    q, ranks = request, request.ep_size * request.tp_size
    inner, experts = q.intermediate_size, q.num_experts

    def slice_fits(tp: int) -> bool:
        return (
            inner % tp == 0
            and meets(inner // tp, offer.intermediate_size)
            and (tp == 1 or meets(tp, offer.tp_size) or offer.tp_size == ONE)  # a runner has none
        )

    def evenly(ep: int) -> bool:
        return experts % ep == 0 and (ep == 1 or meets(ep, offer.ep_size))

    def fills_nodes(ep: int) -> bool:
        holds = (experts % ep == 0 or offer.uneven_experts) and meets(ep, offer.ep_size)
        return holds and not _nodes_unfit(with_widths(q, ep_size=ep), offer)

    slices, node_ranks = _nearest(q.tp_size, inner, slice_fits), q.ep_ranks_per_node
    node_widths = _nearest(q.ep_size, experts, fills_nodes)
    return asdict(q) | {
        "ranks": ranks,
        "empty": q.ep_size - experts,
        "sharing": _sharing(q),
        "left_over": experts % q.ep_size,
        "share": inner // q.tp_size,
        "tp_widths": _nearest(q.tp_size, inner, lambda tp: inner % tp == 0),
        "ep_widths": _nearest(q.ep_size, experts, evenly),
        "padded_intermediate": -(-inner // q.tp_size) * q.tp_size,
        "padded_experts": -(-experts // q.ep_size) * q.ep_size,
        "slice_fix": f"set tp_size={slices}" if slices else "no tp_size gives it such a slice",
        "node_ranks": node_ranks,
        "nodes": q.ep_size // (node_ranks or 1),
        "node_fix": f"set ep_size={node_widths}" if node_widths else "no ep_size fits here",
        "offered_nodes": show(offer.ranks_per_node),
        "offered_slice": show(offer.intermediate_size),
        "offered_rows": show(offer.rows),
        "offered_tokens": show(offer.max_tokens_per_rank),
        "same_ranks": _same_ranks(q, offer),
        "rows_note": (
            f"hand each of the {ranks} ranks tokens of its own: ranks that go on sharing theirs "
            f"compute them {q.tp_size} times"
            if q.rows == "distinct"
            else f"the {ranks} ranks go on sharing their tokens"
        ),
    }


def _nearest(width: int, largest: int, good: Callable[[int], bool]) -> str:
    """``"2 or 4"``: the closest good widths below and above."""
    below = next((w for w in range(min(width - 1, largest), 0, -1) if good(w)), None)
    above = next((w for w in range(width + 1, largest + 1) if good(w)), None)
    return " or ".join(str(w) for w in (below, above) if w is not None)


def _same_ranks(request: Request, offer: Offer) -> str:
    """Widths without tp for a part that spreads whole experts, on as many ranks as asked for."""
    ranks = request.ep_size * request.tp_size

    def holds(ep: int) -> bool:
        even = request.num_experts % ep == 0
        return ep <= request.num_experts and (even or offer.uneven_experts)

    if holds(ranks):
        return (
            f"set ep_size={ranks}, tp_size=1 (the same {ranks} ranks), or policy='adjust', which "
            "does that and reports it"
        )
    wrong = f"ep_size={ranks} doesn't fit {request.num_experts} experts"
    for ep in range(ranks - 1, 1, -1):
        dp = request.dp_size * ranks // ep
        fits = holds(ep) and meets(ep, offer.ep_size)
        if ranks % ep == 0 and fits and meets(dp, offer.dp_size):
            return f"set ep_size={ep}, tp_size=1, dp_size={dp} (the same ranks; {wrong})"
    return f"choose another backend or other widths ({wrong})"


def _slice_unfit(request: Request, offer: Offer) -> bool:
    whole, uneven = divmod(request.intermediate_size, request.tp_size)
    return request.tp_size > 1 and not uneven and not meets(whole, offer.intermediate_size)


def _sharing(request: Request) -> int:
    """How many ranks hold the same tokens."""
    return request.copies


def _nodes_unfit(request: Request, offer: Offer) -> bool:
    share = request.ep_ranks_per_node
    return share is None or not meets(share, offer.ranks_per_node)


def _spans(request: Request, offer: Offer) -> bool:
    one = offer.tp_size in (ONE, (1,))
    ranks = request.ep_size * request.tp_size
    return one and request.tp_size > 1 and meets(ranks, offer.ep_size)


# An offer of a part that spreads whole experts over two or more ranks and cuts none.
_SPREADS = Offer(ep_size=ANY, dp_size=ANY, rows=("distinct",))
_BY_NODE = replace(_SPREADS, ranks_per_node=ANY, uneven_experts=True)

RULES: tuple[Rule, ...] = (
    Rule(
        id="tp-divides-intermediate",
        applies=lambda q, _: q.intermediate_size % q.tp_size != 0,
        action="require",
        message=(
            "tp_size={tp_size} doesn't divide intermediate_size={intermediate_size}, and every "
            "rank of a tp group holds an equal slice of each expert"
        ),
        fix=(
            "set tp_size={tp_widths}, or pad intermediate_size to {padded_intermediate} "
            "(zero rows in w13, zero columns in w2)"
        ),
        example=Example(parallel=ParallelConfig(tp_size=6)),
    ),
    Rule(
        # Could be served (a rank without rows is normal); refused because such a rank only costs:
        # it holds nothing, computes nothing, and waits in every collective.
        id="expert-per-rank",
        applies=lambda q, _: q.num_experts < q.ep_size,
        action="require",
        message=(
            "ep_size={ep_size} spreads num_experts={num_experts} experts, so {empty} of the "
            "ranks would hold none and only wait for the others"
        ),
        fix="set ep_size={num_experts} or less, and give the other ranks to dp_size or tp_size",
        example=Example(parallel=ParallelConfig(ep_size=12)),
    ),
    Rule(
        id="replicated-alone",
        applies=lambda q, _: q.rows == "replicated" and q.ep_size == 1,
        action="warn",
        message=(
            "rows='replicated' says that the ranks of an ep group hold the same tokens, and with "
            "ep_size=1 there is one such rank: it changes nothing"
        ),
        fix="leave rows at 'distinct', or set ep_size",
        example=Example(parallel=ParallelConfig(tp_size=2, rows="replicated")),
    ),
    Rule(
        id="jitter-of-shared-tokens",
        applies=lambda q, _: q.jitter and _sharing(q) > 1,
        action="require",
        message=(
            "router.jitter is noise that each rank draws for itself, and {sharing} ranks hold the "
            "same tokens (tp_size={tp_size}, rows={rows}): they would route them apart"
        ),
        fix="set router.jitter=0, or spread whole experts with ep_size and give ranks own tokens",
        example=Example(parallel=ParallelConfig(tp_size=2), jitter=0.1),
    ),
    Rule(
        id="uneven-experts",
        applies=lambda q, o: (
            q.num_experts % q.ep_size != 0
            and q.num_experts > q.ep_size
            and meets(q.ep_size, o.ep_size)
            and not o.uneven_experts
        ),
        action="require",
        message=(
            "num_experts={num_experts} over ep_size={ep_size} leaves {left_over} over, and this "
            "part needs equally many on each rank"
        ),
        fix=(
            "set ep_size={ep_widths}, or pass placement=Placement({num_experts}, {ep_size}, "
            "holes=True) (it counts {padded_experts} ids, the last without weights), or choose a "
            "backend that offers uneven_experts"
        ),
        roles=_MOVERS,
        example=Example(parallel=ParallelConfig(ep_size=3), offer=_SPREADS),
    ),
    Rule(
        # SGLang rewrites ep_size to tp_size here (arg_groups/overrides.py:1610-1620).
        id="spanning",
        applies=_spans,
        action="adjust",
        message=(
            "this part spreads whole experts over its ranks and cuts none, and tp_size={tp_size} "
            "asks for experts cut in {tp_size}"
        ),
        fix="{same_ranks}",
        note="{rows_note}",
        change=lambda q: {"ep_size": q.ep_size * q.tp_size, "tp_size": 1},
        roles=_MOVERS,
        axes=("ep_size", "tp_size"),
        example=Example(parallel=ParallelConfig(ep_size=2, tp_size=4), offer=_SPREADS),
    ),
    Rule(
        id="rows",
        applies=lambda q, o: q.ep_size > 1 and not meets(q.rows, o.rows),
        action="require",
        message=(
            "this part takes rows={offered_rows} over an ep group, and the layer has rows={rows}"
        ),
        fix=(
            "hand in rows that way and say so in ParallelConfig.rows (distinct: every rank has "
            "tokens of its own; replicated: all ranks of the ep group have the same)"
        ),
        roles=_MOVERS,
        example=Example(parallel=ParallelConfig(ep_size=4, rows="replicated"), offer=_SPREADS),
    ),
    Rule(
        id="tokens-unsaid",
        applies=lambda q, o: o.max_tokens_per_rank is not None and q.max_tokens_per_rank is None,
        action="require",
        message=(
            "this part makes its buffers once, for {offered_tokens} tokens per rank, and "
            "max_tokens_per_rank isn't set"
        ),
        fix="set max_tokens_per_rank to the most tokens that one rank ever has in one call",
        roles=_MOVERS,
        example=Example(
            parallel=ParallelConfig(ep_size=4),
            offer=replace(_SPREADS, max_tokens_per_rank=Range(max=1024)),
        ),
    ),
    Rule(
        id="tokens-unfit",
        applies=lambda q, o: (
            q.max_tokens_per_rank is not None
            and not meets(q.max_tokens_per_rank, o.max_tokens_per_rank)
        ),
        action="require",
        message=(
            "max_tokens_per_rank={max_tokens_per_rank}, and this part's buffers hold "
            "{offered_tokens} tokens per rank"
        ),
        fix="set max_tokens_per_rank within that and split larger batches, or take another mode",
        roles=_MOVERS,
        example=Example(
            parallel=ParallelConfig(ep_size=4),
            offer=replace(_SPREADS, max_tokens_per_rank=Range(max=1024)),
            max_tokens_per_rank=4096,
        ),
    ),
    Rule(
        id="tp-slice",
        applies=_slice_unfit,
        action="require",
        message=(
            "tp_size={tp_size} cuts intermediate_size={intermediate_size} into slices of {share}, "
            "and this part takes {offered_slice}"
        ),
        fix="{slice_fix}, or spread whole experts with ep_size instead",
        roles=_COMPUTERS,
        example=Example(
            parallel=ParallelConfig(tp_size=8),
            intermediate_size=768,
            offer=Offer(intermediate_size=Range(min=128, multiple_of=128)),
        ),
    ),
    Rule(
        id="nodes-unfit",
        applies=lambda q, o: q.ep_size > 1 and o.ranks_per_node is not None and _nodes_unfit(q, o),
        action="require",
        message=(
            "this part sends a row to a node once, so an ep group must fill nodes evenly, with "
            "{offered_nodes} ranks on each; ep_size={ep_size} with tp_size={tp_size} doesn't where "
            "nodes have {ranks_per_node} ranks"
        ),
        fix=(
            "{node_fix}, or take a mode or backend that sends rows straight to each rank, or set "
            "MOE_RANKS_PER_NODE if nodes hold another number"
        ),
        roles=_MOVERS,
        example=Example(parallel=ParallelConfig(ep_size=6), ranks_per_node=4, offer=_BY_NODE),
    ),
    Rule(
        # One rank per node, or all on one: the plain way sends the same, in fewer steps.
        id="once-per-node",
        applies=lambda q, o: (
            o.ranks_per_node is not None
            and not _nodes_unfit(q, o)
            and 1 < (q.ep_ranks_per_node or 1) < q.ep_size
        ),
        action="prefer",
        message=(
            "the {ep_size} ranks of an ep group lie on {nodes} nodes, {node_ranks} on each, and "
            "this part sends a row to a node once"
        ),
        fix="name another mode or backend to send rows straight to each rank",
        roles=_MOVERS,
        example=Example(parallel=ParallelConfig(ep_size=8), ranks_per_node=4, offer=_BY_NODE),
    ),
)

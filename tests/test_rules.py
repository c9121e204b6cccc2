"""Rules about widths: each fires where it must and nowhere else, and says so in plain words."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moe_core import ConfigError, MoEConfig, ParallelConfig, registry, resolve, rules
from moe_core.manifest import ANY, Backend, Offer, Part, Range
from moe_core.registry import register_backend, unregister_backend
from moe_core.resolution import make_request
from moe_core.rules import POLICIES, RULES, Rule, judge, numbers

if TYPE_CHECKING:
    from moe_core.resolution import Resolution

GOLDENS = Path(__file__).parent / "goldens" / "rules"
EVERYTHING = Offer(ep_size=ANY, tp_size=ANY, dp_size=ANY, uneven_experts=True)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch):
    """No backend is installed but the test's own, so that texts depend on nothing else."""
    monkeypatch.delenv("MOE_BACKEND", raising=False)
    monkeypatch.setattr(registry, "_discover", list)
    registry.refresh()
    yield
    if "plugin" in registry.all_names():
        unregister_backend("plugin")
    registry.refresh()  # last: the next look finds what is installed


def plugin(transport: Offer = EVERYTHING, runner: Offer | None = None, fused: Offer | None = None):
    layouts: dict[str, Any] = {"takes": ("slot_major",), "gives": ("token_major",)}
    debts: dict[str, Any] = {"pays": ("rank_sum", "tp_sum"), "may_pay": ("weight", "slot_sum")}
    parts = [Part(role="transport", target="x:T", offer=transport, **layouts, **debts)]
    rows = ("expert_contiguous",)
    parts.append(Part(role="runner", target="x:R", offer=runner or Offer(), takes=rows, gives=rows))
    if fused is not None:
        parts = [Part(role="fused", target="x:F", offer=fused)]
    register_backend(Backend(name="plugin", parts=tuple(parts)), replace=True)


def ask(
    config: MoEConfig,
    parallel: ParallelConfig,
    tokens: int | None,
    policy: str = "strict",
    node: int | None = None,
) -> Resolution:
    return resolve(
        config,
        parallel,
        "plugin",
        router="none",
        autograd=False,
        max_tokens_per_rank=tokens,
        ranks_per_node=node,
        policy=policy,
    )


def install_for(rule: Rule) -> None:
    plugin(
        rule.example.offer if "transport" in rule.roles else EVERYTHING,
        rule.example.offer if "runner" in rule.roles else Offer(),
    )


def fired(found: Resolution) -> list[str]:
    said = [r.axis for r in found.refusals if r.code == "rule"]
    said += [a.rule for a in (*found.warnings, *found.preferences)]
    return said + list(dict.fromkeys(a.rule for a in found.adjustments))


# The nearest layer that the rule has nothing against: widths, then max_tokens_per_rank.
FITS = {
    "tp-divides-intermediate": (ParallelConfig(tp_size=8), None),
    "expert-per-rank": (ParallelConfig(ep_size=8), None),
    "replicated-alone": (ParallelConfig(ep_size=2, rows="replicated"), None),
    "jitter-of-shared-tokens": (ParallelConfig(ep_size=2), None),
    "uneven-experts": (ParallelConfig(ep_size=4), None),
    "spanning": (ParallelConfig(ep_size=8), None),
    "rows": (ParallelConfig(ep_size=4), None),
    "tokens-unsaid": (ParallelConfig(ep_size=4), 1024),
    "tokens-unfit": (ParallelConfig(ep_size=4), 1024),
    "tp-slice": (ParallelConfig(tp_size=6), None),
    "nodes-unfit": (ParallelConfig(ep_size=4), None),  # one node
    "once-per-node": (ParallelConfig(ep_size=4), None),
}


def check(rule: Rule) -> None:
    """Its example breaks it and nothing else; a layer close by doesn't break it."""
    install_for(rule)
    example = rule.example
    node = example.ranks_per_node
    found = ask(example.config, example.parallel, example.max_tokens_per_rank, node=node)
    assert fired(found) == [rule.id]
    assert found.ok == (rule.action in ("warn", "prefer"))
    assert len(found.refusals) != found.ok
    parallel, tokens = FITS[rule.id]
    found = ask(example.config, parallel, tokens, node=node)
    assert (found.ok, fired(found), found.refusals) == (True, [], ())


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
def test_every_rule_fires_on_its_example_only(rule: Rule) -> None:
    check(rule)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
@pytest.mark.parametrize("constant", [False, True])
def test_no_rule_is_always_or_never_true(
    rule: Rule, constant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = replace(rule, applies=lambda *_: constant)
    monkeypatch.setattr(rules, "RULES", tuple(mutant if r is rule else r for r in RULES))
    with pytest.raises(AssertionError):
        check(rule)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
@pytest.mark.parametrize("policy", POLICIES)
def test_golden_texts(rule: Rule, policy: str) -> None:
    """What a user reads. A change here is a change of the interface: read the new text first."""
    install_for(rule)
    example = rule.example
    tokens, node = example.max_tokens_per_rank, example.ranks_per_node
    found = ask(example.config, example.parallel, tokens, policy, node)
    golden = GOLDENS / f"{rule.id}.{policy}.txt"
    assert found.table() + "\n" == golden.read_text(encoding="utf-8")


def test_the_table_is_consistent() -> None:
    names = {f"{rule.id}.{policy}.txt" for rule in RULES for policy in POLICIES}
    assert {path.name for path in GOLDENS.iterdir()} == names
    assert len(names) == len(RULES) * len(POLICIES)
    for rule in RULES:
        assert rule.action in ("require", "adjust", "warn", "prefer")
        assert (rule.change is not None) == (rule.action == "adjust")
        assert not (rule.action == "warn" and rule.roles)  # a part's warning would go unheard
        assert rule.action != "prefer" or rule.roles  # and a layer has nothing to be preferred to


# ------------------------------------------------------- an oracle, written without the rules

WHOLE = replace(
    EVERYTHING, tp_size=(1,), uneven_experts=False, rows=("distinct",), max_tokens_per_rank=(4, 8)
)
BY_FOUR = Offer(intermediate_size=Range(min=4, multiple_of=4))


def can_run(whole: bool, experts: int, inner: int, p: ParallelConfig, tokens: int | None) -> bool:
    """Whether a transport (whole: spreads whole experts, evenly, distinct rows, 4 or 8 tokens) and
    a runner of slices by four can run this."""
    if inner % p.tp_size or inner // p.tp_size % 4 or p.ep_size > experts:
        return False
    if not whole or p.ep_size == p.tp_size == 1:
        return True
    even = experts % p.ep_size == 0
    return p.tp_size == 1 and even and p.rows == "distinct" and tokens in (4, 8)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_resolve_agrees_with_the_oracle(whole: bool, policy: str) -> None:
    plugin(WHOLE if whole else EVERYTHING, BY_FOUR)
    outcomes: list[bool] = []
    for experts, inner, ep, tp, rows, tokens in itertools.product(
        (1, 2, 3, 4, 6), (8, 12), (1, 2, 3, 4), (1, 2, 3, 4), ("distinct", "replicated"), (None, 8)
    ):
        config = MoEConfig(hidden_size=4, intermediate_size=inner, num_experts=experts, top_k=1)
        asked = ParallelConfig(ep_size=ep, tp_size=tp, rows=rows)
        effective = asked
        if policy == "adjust" and whole and tp > 1:
            effective = replace(asked, ep_size=ep * tp, tp_size=1)
        found = ask(config, asked, tokens, policy)
        expected = can_run(whole, experts, inner, effective, tokens)
        assert found.ok == expected, (asked, experts, inner, tokens, found.table())
        assert found.parallel == (effective if expected else asked)
        assert bool(found.adjustments) == (expected and effective != asked)
        assert bool(found.refusals) != found.ok  # what failed says why
        outcomes.append(expected)
    assert 0.05 < sum(outcomes) / len(outcomes) < 0.95


# ------------------------------------------------------------------------------------- adjusting


def test_an_adjustment_is_reported_field_by_field() -> None:
    plugin(replace(EVERYTHING, tp_size=(1,)))
    config = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=8, top_k=1)
    found = ask(config, ParallelConfig(ep_size=1, tp_size=8, dp_size=3), None, "adjust")
    assert [(a.rule, a.field, a.before, a.after) for a in found.adjustments] == [
        ("spanning", "ep_size", 1, 8),
        ("spanning", "tp_size", 8, 1),
    ]
    assert found.parallel == ParallelConfig(ep_size=8, tp_size=1, dp_size=3)
    assert found.parallel.world_size == 24  # the same ranks as before
    assert found.to_dict()["parallel"]["ep_size"] == found.request.ep_size == 8
    same = ask(config, ParallelConfig(ep_size=8, dp_size=3), None)
    assert found.fingerprint == same.fingerprint  # ranks that agree on what runs


def test_adjusted_widths_are_judged_anew() -> None:
    plugin(replace(WHOLE, max_tokens_per_rank=None, uneven_experts=True))
    config = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=8, top_k=1)
    found = ask(config, ParallelConfig(ep_size=3, tp_size=2), None, "adjust")
    assert found.ok
    assert (found.request.ep_size, found.request.uneven_experts) == (6, True)  # 8 experts over 6
    found = ask(config, ParallelConfig(ep_size=4, tp_size=4), None, "adjust")
    assert fired(found) == ["spanning", "expert-per-rank"]
    assert "set ep_size=8, tp_size=1, dp_size=2" in found.why_not()  # 16 ranks, 8 experts
    assert found.parallel == ParallelConfig(ep_size=4, tp_size=4)


def test_a_part_that_serves_unchanged_is_preferred() -> None:
    plugin(EVERYTHING)
    spreads = replace(EVERYTHING, tp_size=(1,))
    layouts: dict[str, Any] = {"takes": ("slot_major",), "gives": ("token_major",)}
    debts: dict[str, Any] = {"may_pay": ("weight", "slot_sum", "rank_sum", "tp_sum")}
    part = Part(role="transport", target="x:T", offer=spreads, preference=9, **layouts, **debts)
    register_backend(Backend(name="eager", parts=(part,)))
    try:
        config = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=8, top_k=1)
        wants: dict[str, Any] = {"router": "none", "autograd": False, "policy": "adjust"}
        cut, whole = ParallelConfig(ep_size=2, tp_size=2), ParallelConfig(ep_size=4)
        assert resolve(config, cut, **wants).name == "plugin"
        assert resolve(config, whole, **wants).name == "eager+plugin"
        assert resolve(config, cut, "eager", **wants).parallel == whole
    finally:
        unregister_backend("eager")


@pytest.mark.parametrize(
    ("ep", "tp", "dp", "node", "share"),
    [
        (4, 1, 1, None, 4),  # nobody said: one node
        (4, 1, 1, 8, 4),
        (4, 1, 1, 4, 4),
        (4, 1, 1, 2, 2),
        (4, 1, 1, 1, 1),
        (4, 2, 1, 4, 2),  # pairs of tp side by side
        (2, 4, 1, 2, 1),  # a tp group over two nodes: each of its ranks has its own ep group
        (2, 1, 4, 4, 2),  # two groups to a node
        (3, 1, 2, 3, 3),
        (3, 1, 1, 2, None),  # 0 1 | 2
        (3, 1, 2, 4, None),  # 0 1 2 3 | 4 5
        (3, 1, 2, 6, 3),
        (2, 3, 1, 2, None),  # ep groups 0 3, 1 4, 2 5 on 0 1 | 2 3 | 4 5: each on two of three
    ],
)
def test_ranks_of_a_group_that_share_a_node(
    ep: int, tp: int, dp: int, node: int | None, share: int | None
) -> None:
    """Against the definition: which node each rank of each ep group is on."""
    config = MoEConfig(hidden_size=4, intermediate_size=12, num_experts=12, top_k=1)
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    request = make_request(config, parallel, ranks_per_node=node)
    assert request.ep_ranks_per_node == share
    groups = [
        [((d * ep + e) * tp + t) // (node or 99) for e in range(ep)]
        for d, t in itertools.product(range(dp), range(tp))
    ]
    if share is not None:
        for nodes in groups:
            assert {nodes.count(n) for n in nodes} == {share}
            assert nodes == sorted(nodes)


def test_who_knows_nodes_comes_first_only_where_it_helps() -> None:
    plugin(replace(EVERYTHING, ep_size=ANY))
    layouts: dict[str, Any] = {"takes": ("slot_major",), "gives": ("token_major",)}
    debts: dict[str, Any] = {"may_pay": ("weight", "slot_sum", "rank_sum", "tp_sum")}
    offer = replace(EVERYTHING, ranks_per_node=(1, 2))
    part = Part(role="transport", target="x:T", offer=offer, preference=-9, **layouts, **debts)
    register_backend(Backend(name="aware", parts=(part,)))
    try:
        config = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=8, top_k=1)
        wants: dict[str, Any] = {"router": "none", "autograd": False}
        wide = ParallelConfig(ep_size=4)

        def names(node: int | None, spec: str = "auto") -> tuple[str, list[str]]:
            found = resolve(config, wide, spec, ranks_per_node=node, **wants)
            return found.name, [p.rule for p in found.preferences]

        assert names(2) == ("aware+plugin", ["once-per-node"])
        assert names(2, "plugin") == ("plugin", [])
        assert names(None) == ("plugin", [])
        assert names(1) == ("plugin", [])  # nothing to fan out to
        assert names(1, "aware") == ("aware+plugin", [])
        refused = resolve(config, wide, "aware", ranks_per_node=4, **wants)
        assert fired(refused) == ["nodes-unfit"]  # it offers one or two to a node
        assert "1, 2 ranks on each" in refused.why_not()
    finally:
        unregister_backend("aware")


def test_a_fused_part_has_the_same_rules() -> None:
    plugin(fused=replace(WHOLE, intermediate_size=Range(multiple_of=128)))
    config = MoEConfig(hidden_size=4, intermediate_size=256, num_experts=8, top_k=1)
    assert ask(config, ParallelConfig(ep_size=2, tp_size=4), 8, "adjust").parallel.ep_size == 8
    found = ask(config, ParallelConfig(ep_size=3, rows="replicated"), None)
    assert fired(found) == ["uneven-experts", "rows", "tokens-unsaid"]  # all at once
    plugin(fused=replace(EVERYTHING, intermediate_size=Range(multiple_of=128)))
    assert fired(ask(config, ParallelConfig(tp_size=4), None)) == ["tp-slice"]


def test_one_rank_is_the_local_path_whatever_a_transport_offers() -> None:
    plugin(Offer(ep_size=(8, 16), tp_size=(1,), rows=("distinct",), max_tokens_per_rank=Range()))
    config = MoEConfig(
        hidden_size=4, intermediate_size=8, num_experts=3, top_k=1, dispatch_dtype="bfloat16"
    )
    for policy in POLICIES:
        found = ask(config, ParallelConfig(rows="replicated"), None, policy)
        assert found.ok
        assert fired(found) == ["replicated-alone"]
    assert not ask(config, ParallelConfig(ep_size=3), None).ok


def test_a_rule_replaces_the_comparison_of_its_axes() -> None:
    plugin(WHOLE)
    config = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=8, top_k=1)
    found = ask(config, ParallelConfig(ep_size=2, tp_size=2), 8)
    assert [(r.code, r.axis) for r in found.refusals] == [("rule", "spanning")]
    plugin(replace(WHOLE, ep_size=(8,)))  # 2 x 2 ranks are not 8: the plain comparison remains
    found = ask(config, ParallelConfig(ep_size=2, tp_size=2), 8)
    assert [(r.code, r.axis) for r in found.refusals] == [("axis", "ep_size"), ("axis", "tp_size")]


@pytest.mark.parametrize(
    ("experts", "ep", "offer", "widths"),
    [
        (8, 3, EVERYTHING, "2 or 4"),
        (12, 5, EVERYTHING, "4 or 6"),
        (12, 5, replace(EVERYTHING, ep_size=(2, 5, 12)), "2 or 12"),
        (7, 5, EVERYTHING, "1 or 7"),
        (7, 5, replace(EVERYTHING, ep_size=(5,)), "1"),
    ],
)
def test_the_nearest_widths_are_ones_that_work(
    experts: int, ep: int, offer: Offer, widths: str
) -> None:
    config = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=experts, top_k=1)
    request = make_request(config, ParallelConfig(ep_size=ep))
    assert numbers(request, offer)["ep_widths"] == widths
    (finding,) = judge(request, replace(offer, uneven_experts=False), "transport")
    assert f"set ep_size={widths}," in finding.fix
    padded = -(-experts // ep) * ep
    assert padded % ep == 0
    assert f"it counts {padded} ids" in finding.fix


def test_what_is_no_policy_and_no_number_is_a_config_error() -> None:
    config = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=2, top_k=1)
    with pytest.raises(ConfigError, match="did you mean 'adjust'") as error:
        resolve(config, policy="ajust", max_tokens_per_rank=0)
    assert [f.field for f in error.value.faults] == ["policy", "max_tokens_per_rank"]

"""SGLang's rules as data: every row by an example on each side, widths against its own formulas.

The facts are SGLang 0.5.23's source, at the places that the rows name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from moe_core import ConfigError, MoEConfig, ParallelConfig, profiles, resolve
from moe_core.manifest import ANY, Backend, Offer, Part
from moe_core.registry import register_backend, unregister_backend

if TYPE_CHECKING:
    from moe_core.profiles import Outcome, Row

PROFILE = profiles.load("sglang-0.5.23")
CHOICES = {name: flag.get("choices", []) for name, flag in PROFILE.flags.items()}


def run(text: str) -> Outcome:
    return profiles.run(PROFILE, PROFILE.parse([text]))


@pytest.mark.parametrize("row", PROFILE.rows, ids=lambda r: r.id)
def test_every_row_has_a_side_that_breaks_it_and_one_that_does_not(row: Row) -> None:
    broken, fits = run(row.breaks), run(row.fits)
    (step,) = (s for s in broken.steps if s.row is row)
    assert "{" not in step.says  # its numbers are filled in
    assert row not in [s.row for s in fits.steps]
    assert fits.refused == ()
    if row.action == "refuse":
        assert broken.refused[0].row is row  # where SGLang would stop
    else:
        assert broken.refused == ()
        assert bool(step.changes) == (row.action == "set")


def test_the_data_is_consistent() -> None:
    assert len({row.id for row in PROFILE.rows}) == len(PROFILE.rows) > 50
    for row in PROFILE.rows:
        assert re.fullmatch(r"[\w/]+\.py:\d+(-\d+)?(,\d+(-\d+)?)*", row.where)
        assert row.action in ("set", "refuse", "note")
        assert (row.set is not None) == (row.action == "set")
        assert set(row.set or {}) <= set(PROFILE.flags)
    transports, runners = CHOICES["moe_a2a_backend"], CHOICES["moe_runner_backend"]
    assert (len(transports), len(runners)) == (12, 22)
    assert set(PROFILE.names["spanning"]) | {"none", "ascend_tp"} == set(transports)
    for transport, possible in PROFILE.pairs.items():
        assert transport in transports
        assert set(possible) <= set(runners)


@pytest.mark.parametrize("transport", CHOICES["moe_a2a_backend"])
def test_which_transports_rewrite_ep(transport: str) -> None:
    found = run(f"tp=8,ep=4,moe_a2a_backend={transport}")
    rewritten = transport not in ("none", "ascend_tp")
    assert found.flags["ep_size"] == (8 if rewritten else 4)
    assert ("spanning" in [s.row.id for s in found.steps]) == rewritten
    expected = ParallelConfig(ep_size=8) if rewritten else None
    assert found.parallel == (expected or ParallelConfig(ep_size=4, tp_size=2, rows="replicated"))


@pytest.mark.parametrize(
    ("flags", "widths"),
    [
        ("tp=8", ParallelConfig(tp_size=8)),
        ("tp=8,ep=8", ParallelConfig(ep_size=8, rows="replicated")),
        ("tp=8,attn_cp=2,moe_dp=2,ep=4", ParallelConfig(ep_size=4, dp_size=2, rows="replicated")),
        ("tp=8,attn_cp=2,moe_dp=2", ParallelConfig(tp_size=4, dp_size=2)),
        ("tp=8,ep=3", None),
        ("tp=8,ep=4,attn_cp=2,moe_dp=2,a2a=deepep", None),  # ep := 8, times moe_dp is 16 of 8 ranks
        ("tp=8,dwdp_size=8", None),  # weights travel: we have no such mode
    ],
)
def test_the_widths_in_ours(flags: str, widths: ParallelConfig | None) -> None:
    found = run(flags)
    assert found.parallel == widths
    refused = [s.row.id for s in found.refused]
    assert ("widths" in refused) == (widths is None and "dwdp" not in flags)


def test_sglang_counts_ranks_as_we_do() -> None:
    tp, dp, ep = 24, 2, 3  # SGLang's tp_size is the whole group; what is left for experts' tp is 4
    ours = run(f"tp={tp},attn_cp={dp},moe_dp={dp},ep={ep}").parallel
    assert (ours.dp_size, ours.ep_size, ours.tp_size) == (2, 3, 4)
    for rank in range(tp):  # runtime_context.py:125-135
        dp_rank = rank // (tp // dp)
        ep_rank = rank % (tp // dp) // (tp // dp // ep)
        tp_rank = rank % (tp // dp // ep)
        assert rank == (dp_rank * ours.ep_size + ep_rank) * ours.tp_size + tp_rank


def test_our_policy_adjust_does_what_sglang_does() -> None:
    layouts: dict[str, Any] = {"takes": ("slot_major",), "gives": ("token_major",)}
    debts: dict[str, Any] = {"may_pay": ("weight", "slot_sum", "rank_sum", "tp_sum")}
    part = Part(role="transport", target="x:T", offer=Offer(ep_size=ANY), **layouts, **debts)
    register_backend(Backend(name="spreads", parts=(part,)))
    try:
        config = MoEConfig(hidden_size=4, intermediate_size=64, num_experts=16, top_k=2)
        before = ParallelConfig(ep_size=4, tp_size=2)  # SGLang's tp=8, ep=4
        found = resolve(config, before, "spreads", autograd=False, policy="adjust")
        assert found.parallel == run("tp=8,ep=4,a2a=deepep,num_experts=16").parallel
        assert not resolve(config, before, "spreads", autograd=False).ok
    finally:
        unregister_backend("spreads")


def test_order_matters_as_it_does_there() -> None:
    found = run("tp=8,ep=4,attn_dp=8,a2a=flashinfer,runner=flashinfer_cutlass")
    # ep_size=4 is refused although it would have become 8: the runner is looked at first.
    assert [s.row.id for s in found.refused] == ["cutlass-ep"]
    assert found.flags["ep_size"] == 8
    found = run("runner=megamoe,a2a=deepep,tp=4")
    assert (found.flags["moe_a2a_backend"], found.flags["moe_runner_backend"]) == (
        "megamoe",
        "auto",
    )


def test_what_is_typed_is_checked_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        PROFILE.parse(["--moe-a2a-bakend=deepep,tp=0", "deepep_mode=nrmal,tbo=yes,ep"])
    said = [str(fault) for fault in error.value.faults]
    assert len(said) == 5
    for text, expected in zip(
        said,
        ["did you mean 'moe_a2a_backend'", "at least 1", "did you mean 'normal'", "true or false"],
        strict=False,
    ):
        assert expected in text
    same = PROFILE.parse(["--tp-size=8, --moe-a2a-backend=deepep"])
    assert (
        same
        == PROFILE.parse(["tp=8", "a2a=deepep"])
        == {
            "tp_size": 8,
            "moe_a2a_backend": "deepep",
        }
    )
    with pytest.raises(ConfigError, match=r"did you mean 'sglang-0\.5\.23'"):
        profiles.load("sglang-0.5.32")


@pytest.mark.parametrize("text", ["open('x')", "a.b", "[x for x in y]", "a[0]", "lambda: 1"])
def test_expressions_only_compare_and_count(text: str) -> None:
    with pytest.raises(ValueError, match="a profile's expressions can't"):
        profiles.evaluate(text, {"a": 1})
    assert profiles.evaluate("a * 3 % 4 if a in (1, 2) else 0", {"a": 1}) == 3

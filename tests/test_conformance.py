"""The conformance suite itself: what it lets pass, what it catches, and what it says of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_core import MoEConfig, cli, registry
from moe_core.conformance import bounds, plugin
from moe_core.conformance.cases import (
    Case,
    exact_case,
    exact_result,
    oracle,
    random_case,
    slots,
)
from moe_core.conformance.claims import _ask, names, values
from moe_core.conformance.pool import ranks
from moe_core.conformance.rank import Job, Rank
from moe_core.conformance.target import Target, _nearest
from moe_core.errors import ConfigError
from moe_core.manifest import Offer, Range

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow  # each test runs suites in processes of their own

PARTS = '''
from dataclasses import replace
import torch
from moe_core import FusedPath, Router, route
from moe_core.convert import PermuteReceived
from moe_nccl.all_to_all import AllToAllTransport
from moe_torch.runner import TorchRunner

class NoAlpha(TorchRunner):
    def run(self, record, weights):
        plain = replace(weights.activation, alpha=None)
        return super().run(record, replace(weights, activation=plain))

class Staged(FusedPath):
    def __init__(self, context):
        super().__init__(context)
        on_input = context.request.weight_on_input
        whose = ("runner", "transport") if on_input else ("transport", "runner")
        pays = {"transport": ("slot_sum", "rank_sum", "tp_sum"), "runner": ()}
        pays[whose[0]] += ("weight",)
        self.move = AllToAllTransport(replace(context, pays=pays["transport"]))
        self.permute = PermuteReceived(context)
        self.runner = TorchRunner(replace(context, pays=pays["runner"]))

    def forward(self, hidden_states, routing, weights):
        record, handle = self.move.dispatch(hidden_states, routing)
        record, state = self.permute.there(record)
        return self.move.combine(self.permute.back(self.runner.run(record, weights), state), handle)

    def report_fault(self, message):
        self.move.report_fault(message)

class NoLimit(Staged):
    def forward(self, hidden_states, routing, weights):
        plain = replace(weights.activation, limit=None)
        return super().forward(hidden_states, routing, replace(weights, activation=plain))

class OwnRouter(Router):
    """No route_fn that a test could call."""
    def __init__(self, config, device=None):
        super().__init__()
        self.config = config
        weight = torch.randn(config.num_experts, config.hidden_size, device=device)
        self.weight = torch.nn.Parameter(weight / config.hidden_size**0.5)

    def forward(self, hidden_states, input_ids=None, token_mask=None):
        with torch.autocast("cpu", enabled=False):
            logits = hidden_states.float() @ self.weight.float().T
            return route(logits, self.config.top_k, self.config.router, token_mask=token_mask)
'''
MANIFESTS = """
import moe_nccl, moe_torch

def part(backend, role, target, **offer):
    (made,) = [p for p in backend["parts"] if p["role"] == role][:1]
    made = {k: v for k, v in made.items() if k not in ("mode", "check", "options")}
    return made | {"target": f"odd_parts:{target}", "offer": made["offer"] | offer}

def backend(name, *parts):
    return {"name": name, "api": "1.0", "parts": list(parts)}

runner = [p for p in moe_torch.BACKEND["parts"] if p["role"] == "runner"][0]
noalpha = backend("noalpha", part(moe_torch.BACKEND, "runner", "NoAlpha"))
narrow = backend("narrow", runner | {"check": None, "options": {}, "offer": {
    "dtype": ["bfloat16", "float32"], "autograd": False, "num_experts": {"min": 8},
    "hidden_size": {"min": 64, "multiple_of": 64}, "intermediate_size": {"min": 32, "max": 96}}})
gpuonly = backend("gpuonly", runner | {"offer": runner["offer"] | {"device": ["cuda"]}})
needy = backend("needy", runner | {"needs": ["no_such_package>=1"]})
everything = runner["offer"] | moe_nccl.BACKEND["parts"][0]["offer"]
everything = {"role": "fused", "offer": everything | {"compile": False, "device": ["cpu"]}}
fusedpair = backend("fusedpair", everything | {"target": "odd_parts:Staged"})
fusedbad = backend("fusedbad", everything | {"target": "odd_parts:NoLimit"})
ownrouter = backend("ownrouter", {"role": "router", "target": "odd_parts:OwnRouter",
    "offer": {"scoring_func": ["softmax", "sigmoid"], "autograd": True}})
"""
NAMES = ("noalpha", "narrow", "gpuonly", "needy", "fusedpair", "fusedbad", "ownrouter")
ALPHA = (
    "TestClaims::test_offer[noalpha.runner-alpha]",
    "TestRunner::test_activations[silu-alpha]",
    "TestRunner::test_activations[silu-before0.5-alpha]",
    "TestRunner::test_limits_by_hand[silu-before7-alpha--19.996]",
)
"""What a runner that ignores alpha fails; ``-k alpha`` selects these and nothing else of it."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds an installed distribution with the backends above."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd_parts.py").write_text(PARTS)
    (folder / "odd_manifests.py").write_text(MANIFESTS)
    info = folder / "odd-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    points = "\n".join(f"{name} = odd_manifests:{name}" for name in NAMES)
    (info / "entry_points.txt").write_text(f"[moe_core.backends]\n{points}\n")
    return folder


def start(
    *command: str, cwd: Path, path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("MOE_", "PYTEST_"))}
    kept |= {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def conformance(*args: str, cwd: Path, path: Path | None = None, **env: str) -> Any:
    return start("moe_core", "conformance", *args, cwd=cwd, path=path, **env)


def report(*args: str, cwd: Path, path: Path | None = None) -> tuple[int, dict[str, Any]]:
    done = conformance(*args, "--json", cwd=cwd, path=path)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


# -- what is right passes, in an empty folder and whatever lies around it


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("spec", "roles", "widths"),
    [
        ("torch", ["router", "transport", "runner"], [1]),
        ("reference", ["router", "transport", "runner"], [1]),
        ("nccl", ["transport"], [1, 2, 4]),
    ],
)
def test_shipped_backends_conform(
    spec: str, roles: list[str], widths: list[int], tmp_path: Path
) -> None:
    code, said = report(spec, cwd=tmp_path)
    assert (code, said["ok"], said["problems"]) == (cli.OK, True, []), said["tests"]["failed"]
    assert (said["roles"], said["widths"]["ranks"]) == (roles, widths)
    assert list(said["profiles"]) == ["core", *roles]
    for counts in said["profiles"].values():
        assert counts["passed"] > 10
        assert not counts["failed"] + counts["known"] + counts["skipped"] + counts["not_here"]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_a_hostile_folder_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --no-such-flag\npython_files = none_*.py\nfilterwarnings = error\n"
    )
    (tmp_path / "conftest.py").write_text("raise SystemExit('conftest of a stranger')\n")
    (tmp_path / "torch.py").write_text("raise ImportError('torch of a stranger')\n")
    done = conformance(
        "torch", "-k", "handles or duplicates", "--profile", "core", "--profile", "runner",
        "--", "-vv", cwd=tmp_path, PYTEST_ADDOPTS="--also-wrong",
    )  # fmt: skip
    assert done.returncode == cli.OK, done.stdout + done.stderr
    assert "TestCore::test_handles PASSED" in done.stdout
    assert "torch: conforms (core 1/1, runner " in done.stdout


def test_narrow_claims_are_met_and_not_walked_around(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes from multiples of 64, two dtypes, inference only: all else is refused, not skipped."""
    code, said = report("narrow", "--ranks", "1", cwd=tmp_path, path=odd)
    assert (code, said["ok"]) == (cli.OK, True), said["tests"]["failed"]
    runner, core = said["profiles"]["runner"], said["profiles"]["core"]
    assert runner["passed"] > 50
    assert runner["not_claimed"] > 50
    assert core["not_claimed"] == core["skipped"] == 0
    claims = said["not_claimed"]
    assert {"autograd", "bias", "alpha", "dtype (float64, float16)"} <= set(claims)
    assert "hidden_size (63, 65)" in claims
    monkeypatch.syspath_prepend(odd)
    registry.refresh()
    config = Target("narrow").config(hidden_size=65, intermediate_size=200, num_experts=4)
    assert (config.hidden_size, config.intermediate_size, config.num_experts) == (128, 96, 8)
    monkeypatch.undo()
    registry.refresh()


@pytest.mark.timeout(600)
def test_a_fused_path_conforms_at_every_width_and_its_mutant_does_not(
    odd: Path, tmp_path: Path
) -> None:
    code, said = report("fusedpair", "--profile", "fused", cwd=tmp_path, path=odd)
    assert (code, said["ok"]) == (cli.OK, True), said["tests"]["failed"]
    assert said["widths"] == {"ranks": [1, 2, 4], "ep": [1, 2, 4], "tp": [1, 2, 4], "dp": [1, 2]}
    code, said = report(
        "fusedbad", "--profile", "fused", "--ranks", "1", "-k", "option", cwd=tmp_path, path=odd
    )
    assert (code, said["ok"]) == (cli.NO, False)
    assert list(said["tests"]["failed"]) == ["TestFused::test_every_option_at_every_width[local]"]


def test_a_router_of_another_make_conforms(odd: Path, tmp_path: Path) -> None:
    """Without ``route_fn``; no bias, no groups, no float64: what else there is goes through it."""
    code, said = report("ownrouter", "--profile", "router", "-k", "softmax", cwd=tmp_path, path=odd)
    assert (code, said["ok"]) == (cli.OK, True), said["tests"]["failed"]
    ran = said["profiles"]["router"]
    assert ran["passed"] > 25
    assert ran["not_claimed"] > 30


# -- what is wrong is caught, named, and can be listed as known


def test_a_broken_contract_is_named(odd: Path, tmp_path: Path) -> None:
    code, said = report("noalpha", "-k", "alpha", cwd=tmp_path, path=odd)
    assert (code, said["ok"]) == (cli.NO, False)
    assert set(said["tests"]["failed"]) == set(ALPHA)
    assert "alpha" in said["tests"]["failed"][ALPHA[0]]
    assert said["badge"].startswith("noalpha: does NOT conform (core ")
    counts = said["profiles"]["runner"]
    assert (counts["passed"], counts["failed"]) == (0, 3)
    done = conformance("noalpha", "--profile", "core", "--", "-x", cwd=tmp_path, path=odd)
    assert done.returncode == cli.NO
    assert "1 failed" in done.stdout  # and stopped there


def test_known_faults_are_strict(odd: Path, tmp_path: Path) -> None:
    listed = tmp_path / "known.toml"

    def run(*lines: str) -> tuple[int, dict[str, Any]]:
        listed.write_text("\n".join(lines))
        return report("noalpha", "-k", "alpha", "--xfails", str(listed), cwd=tmp_path, path=odd)

    every = [f'"{name}" = "alpha is ignored, issue 7"' for name in ALPHA]
    code, said = run(*every)
    assert (code, said["ok"]) == (cli.OK, True)
    assert said["tests"]["known"] == dict.fromkeys(ALPHA, "alpha is ignored, issue 7")
    assert ", runner 0/3;" in said["badge"]  # it shows
    other = ALPHA[1].replace("silu-alpha", "silu")  # right, so not a known fault
    code, said = run(*every, f'"{other}" = "imagined"')
    assert code == cli.OK  # -k left it out
    listed.write_text(f'"{other}" = "imagined"')
    code, said = report(
        "noalpha", "-k", "test_activations", "--profile", "runner", "--xfails", str(listed),
        cwd=tmp_path, path=odd,
    )  # fmt: skip
    assert code == cli.NO
    assert "XPASS" in said["tests"]["failed"][other]
    code, said = run(*every, '"TestRunner::test_no_such" = "reason"', '"Elsewhere::x" = "reason"')
    assert code == cli.NO
    assert [p.split("'")[1] for p in said["problems"]] == [
        "TestRunner::test_no_such",
        "Elsewhere::x",
    ]
    listed.write_text(f'"{ALPHA[0]}" = ""')
    done = conformance("noalpha", "--xfails", str(listed), cwd=tmp_path, path=odd)
    assert done.returncode == cli.USAGE
    assert "needs a reason" in done.stderr


@pytest.mark.parametrize(
    ("name", "said_why"), [("gpuonly", "runs on cuda"), ("needy", "no_such_package")]
)
def test_what_cannot_run_here_is_no_success(
    name: str, said_why: str, odd: Path, tmp_path: Path
) -> None:
    code, said = report(name, "--profile", "runner", cwd=tmp_path, path=odd)
    assert (code, said["ok"]) == (cli.NO, False)
    assert said["profiles"]["runner"]["not_here"] > 100
    assert said["profiles"]["runner"]["passed"] == 0
    assert any(said_why in reason for reason in said["not_checkable_here"])
    assert said["problems"] == ["nothing was executed, and that proves nothing"]


def test_usage(tmp_path: Path) -> None:
    for args, code, words in (
        (["torhc"], cli.USAGE, "did you mean 'torch'?"),
        (["auto"], cli.USAGE, "conformance is of one backend"),
        (["torch,reference"], cli.USAGE, "conformance is of one backend"),
        (["reference+nccl"], cli.USAGE, "offers no runner"),
        (["torch", "--ranks", "3"], cli.USAGE, "must be some of 1, 2 and 4"),
        (["torch", "--", "--no-such-flag"], cli.USAGE, "--no-such-flag"),
        (["torch", "-k", "no_such_test"], cli.NO, "nothing was executed"),
    ):
        done = conformance(*args, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        assert words in done.stdout + done.stderr
    refused = start("moe_core", "list", "--", "-x", cwd=tmp_path)
    assert refused.returncode == cli.USAGE
    assert "list passes nothing on: -x" in refused.stderr


# -- the plugin in somebody's own pytest

LOAD = ("pytest", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "moe_core.conformance.plugin")


def test_without_a_backend_it_is_a_usage_error(tmp_path: Path) -> None:
    done = start(*LOAD, "--pyargs", "moe_core.conformance.suite", cwd=tmp_path)
    assert done.returncode == plugin.USAGE
    assert "no backend is named" in done.stdout + done.stderr
    # and the suites without the plugin aren't an empty success
    bare = start(*LOAD[:-2], "--pyargs", "moe_core.conformance.suite.test_core", "-q", cwd=tmp_path)
    assert bare.returncode not in (0, 5)


def test_pyargs_and_subclasses(tmp_path: Path) -> None:
    done = start(
        *LOAD, "--pyargs", "moe_core.conformance.suite.test_core", "--moe-backend", "torch",
        "-k", "handles", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "torch: conforms (core 1/1;" in done.stdout
    own = tmp_path / "test_own.py"
    own.write_text(
        "import pytest\n"
        "from moe_core.conformance.core import CoreConformance\n"
        "class TestMine(CoreConformance):\n"
        "    backend = 'reference'\n"
        "    def test_handles(self):\n"
        "        pytest.skip('not today')\n"
    )
    only = (str(own), "-q", "-k", "handles or stay")
    done = start(*LOAD[:-2], *only, cwd=tmp_path)  # plain pytest: a subclass may do what it likes
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    done = start(*LOAD, "--moe-backend", "reference", *only, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "can't be skipped: not today" in done.stdout


# -- what the tests are made of, by hand


def test_bounds_by_hand() -> None:
    assert bounds.unit(torch.bfloat16) == 2**-8
    assert bounds.unit(torch.float32) == 2**-24
    assert bounds.gamma(8, 2**-8) == (8 / 256) / (1 - 8 / 256)
    masses = torch.tensor([[[2.0]], [[3.0]]]).double()
    u, fine = 2**-8, 2**-24
    limit = bounds.forward(masses, torch.bfloat16, length=10, roundings=2)
    want = 2 * (2 * u / (1 - 2 * u)) + 3 * (10 * fine / (1 - 10 * fine))
    assert limit.item() == pytest.approx(want, rel=1e-12)
    wired = bounds.forward(
        masses, torch.bfloat16, 10, roundings=2,
        dispatch=torch.float16, combine=torch.float32, partial_sums=3,
    )  # fmt: skip
    extra = 3 * 2**-11 + 2 * (4 * fine / (1 - 4 * fine))
    assert (wired - limit).item() == pytest.approx(extra, rel=1e-9)
    grad = bounds.gradient(torch.tensor([-4.0, 1.0]), torch.float32, size=100, roundings=6)
    assert grad == 4 * (100 + 6) * 2**-23
    # a weight of 0.5 from logits of at most 3: 16 steps, each relative to the logarithm
    got = bounds.router_weights(torch.tensor([[0.5]]), torch.tensor([[1.0, -3.0]]))
    assert got.item() == pytest.approx(16 * 2**-23 * 4 * 0.5, rel=1e-6)
    with pytest.raises(AssertionError, match="leave no digit"):
        bounds.gamma(200, 2**-8)


def test_the_oracle_by_hand() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    case = Case(
        2 * one,
        slots([[0, 0]]),
        torch.tensor([[0.5, 0.25]]).double(),
        one[None].repeat(1, 2, 1),
        3 * one[None],
    )
    # gate = up = 2: silu(2) * 2 * 3, three quarters of it
    want = 2 / (1 + 2.718281828459045**-2) * 2 * 3 * 0.75
    assert oracle(case)[0].item() == pytest.approx(want, rel=1e-12)
    # magnitudes: |gate| 2, at most 1.13 of it, times |up| 2, times 3, weighted
    assert oracle(case)[1].flatten().tolist() == pytest.approx([2 * 1.13 * 2 * 3 * 0.75] * 2)


def test_exact_cases_are_exact_and_tell_who_is_who() -> None:
    ids = slots([[0, 6], [-1, 3], [2, 2]])
    for name in ("float64", "float32", "bfloat16", "float16"):
        case = exact_case(ids, getattr(torch, name), (7, 8, 8), holder=2)
        # columns: one, the holder + 1, the token's digits + 1
        assert case.x[:, :4].tolist() == [[1, 3, 1, 1], [1, 3, 1, 2], [1, 3, 1, 3]]
        # powers of two by (token + 2 slot + holder) mod 3
        assert case.topk.tolist() == [[2, 1], [0.5, 2], [1, 0.5]]
        factors = [2 * 1 + 1 * 7, 2 * 4, 1 * 3 + 0.5 * 3]
        assert exact_result(case)[:, 1].tolist() == [3 * f for f in factors]
        want, _ = oracle(case)
        assert torch.equal(want.to(case.x.dtype), exact_result(case))
    assert not torch.equal(exact_case(ids, torch.float32, (7, 8, 8)).x, case.x.float())
    drawn = random_case(ids, "float32", sizes=(7, 8, 8), bias=True)
    assert drawn.tokens(1, 2).x.shape == (1, 8)


def test_every_axis_can_be_asked_for() -> None:
    """An axis that has no way to be asked for is tested on requests alone: say how, in ``_ask``."""
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    for axis in (f.name for f in fields(Offer)):
        some = values(axis, getattr(Offer(), axis))
        asked = [_ask(axis, value, config) for value in some]
        assert all(ask is not None for ask in asked), axis


def test_values_hold_what_is_offered_and_what_is_not() -> None:
    assert values("hidden_size", Range(min=100, max=512, multiple_of=64)) == [
        *(99, 101, 128, 192, 320, 512, 513)
    ]
    assert values("top_k", (2, 4)) == [2, 4, 5]
    assert values("dtype", ("float32", "float8")) == [
        *("float32", "float64", "bfloat16", "float16", "float8")
    ]
    assert values("bias", False) == values("bias", True) == [False, True]
    assert _nearest(Range(min=64, max=200, multiple_of=64), 65) == 128
    assert _nearest(Range(min=64, max=200, multiple_of=64), 999) == 192
    assert [_nearest((16, 32), n) for n in (1, 17, 99)] == [16, 32, 32]


def test_a_refusal_by_a_rule_names_its_axes() -> None:
    from moe_core import ParallelConfig, resolve

    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=5, top_k=2)
    found = resolve(config, ParallelConfig(ep_size=2, rows="replicated"), "nccl[mode=all_to_all]")
    (refusal,) = [r for r in found.refusals if r.part.startswith("nccl")]
    assert refusal.code == "rule"
    assert names(refusal, "rows")
    assert not names(refusal, "dtype")


def uneven(job: Job) -> tuple[int, list[int], int]:
    me = Rank(job)
    ids = me.ids("any", job.tokens)
    whole = me.exact(ids)
    own = me.own(whole, ids)
    assert (whole.x[own][:, 1] == me.holder + 1).all()
    wrong = whole.x.clone()
    wrong[0, 0] += 1
    with pytest.raises(
        AssertionError, match=r"rank \d, {'ep_size': 2}, float32, per_rank: rows: 1 of"
    ):
        me.equal(wrong, whole.x, "rows")
    with pytest.raises(AssertionError, match="off by nan"):
        me.within(whole.x * float("nan"), whole.x, 1.0, "x")
    return me.holder, [len(i) for i in ids], me.layer.w13.shape[0]


def test_ranks_differ_and_failures_say_where() -> None:
    from moe_core import ParallelConfig

    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=7, top_k=3)
    job = Job("nccl+torch", config, ParallelConfig(ep_size=2), tokens=(4, 2))
    assert ranks(2).run(uneven, job) == [(0, [4, 2], 4), (1, [4, 2], 3)]
    with pytest.raises(AssertionError) as failed:
        ranks(2).run(broken_on_one, job)
    assert "--- rank 1\nTraceback" in str(failed.value)


def broken_on_one(job: Job) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("here")


def test_specs_that_are_no_one_backend() -> None:
    for spec in ("auto", "torch,reference", "reference+nccl"):
        with pytest.raises(ConfigError):
            Target(spec)
    both = Target("nccl+torch")
    assert both.roles == ("transport", "runner")
    assert [both.pinned(c) for c in both.parts][:2] == [
        *("nccl[mode=all_to_all]+torch", "nccl[mode=replicated]+torch")
    ]

"""The suites against faulty parts, and what runs them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from moe_core import cli, registry
from moe_core.conformance import mutants
from moe_core.conformance.mutants import carried_by, control, every, select
from moe_core.errors import ConfigError
from moe_core.manifest import ROLES

if TYPE_CHECKING:
    from pathlib import Path

OWN = """
import os, sys, time
from moe_core.conformance.mutants import Mutant, control, run
from moe_core.conformance.mutants.runners import MutantRunner

class Hangs(MutantRunner):
    def run(self, record, weights):
        time.sleep(100)

class Dies(MutantRunner):
    def run(self, record, weights):
        os._exit(9)

class Slips(MutantRunner):
    def run(self, record, weights):
        return no_such_name

class Wrong(MutantRunner):
    def run(self, record, weights):
        return self.inner.run(record, replace(weights, w2=2 * weights.w2))

def made(target):
    return Mutant(name=f"runner.{target}", role="runner", what="", target=f"own:{target}",
                  carrier="torch", killer="test_scaled_identity")

from dataclasses import replace
run.LIMIT = 5.0
if __name__ == "__main__":
    import own
    for o in run.run([(made(t), frozenset()) for t in sys.argv[1:]], 2):
        print(o.mutant.short, o.ran, repr(o.by), repr(o.reason), repr(o.problem), sep=" | ")
"""


def start(*args: str, cwd: Path, path: Path | None = None) -> Any:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("MOE_", "PYTEST_"))}
    kept |= {"PYTHONPATH": str(path)} if path else {}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=kept, capture_output=True, text=True, timeout=2000
    )


def conformance(*args: str, cwd: Path) -> Any:
    return start("-m", "moe_core", "conformance", "--jobs", "2", *args, cwd=cwd)


def test_there_are_enough_and_each_says_what_is_wrong() -> None:
    wrong = [m for m in every().values() if not m.control]
    count = Counter(m.role for m in wrong)
    assert set(count) == set(ROLES)
    assert sum(count.values()) >= 60
    assert min(count.values()) >= 15
    for m in wrong:
        assert m.what.endswith("."), m.name
        assert m.what != "Nothing is wrong."
    assert sum(m.control for m in every().values()) == len(ROLES)


def test_the_tests_that_are_tried_first_exist() -> None:
    names: dict[str, list[str]] = {}
    for profile in ("core", "claims", *ROLES):
        suite = importlib.import_module(f"moe_core.conformance.{profile}")
        kinds = [k for n, k in vars(suite).items() if n.endswith("Conformance")]
        names[profile] = [t for kind in kinds for t in dir(kind) if t.startswith("test_")]
    names["runner"] += ["duplicates", "all experts"]  # values of a parameter
    for m in every().values():
        known = names["core"] + names["claims"] + names[m.role]
        test = m.killer.partition("[")[0]
        assert any(test in name for name in known), f"{m.name}: no test is called {test}"


def test_what_is_selected() -> None:
    assert [m.name for m in select("runner.minus_one_wraps")] == ["runner.minus_one_wraps"]
    assert {m.role for m in select("minus_one_wraps")} == {"runner", "transport", "fused"}
    assert [m.name for m in select("minus_*", ("fused",))] == ["fused.minus_one_wraps"]
    assert not any(m.control for m in select("*"))
    assert [m.name for m in select("unchanged", ("router",))] == ["router.unchanged"]
    with pytest.raises(ConfigError, match=r"did you mean 'runner\.minus_one_wraps'"):
        select("runner.minus_one_wrap")


def test_a_carrier_must_reach_the_fault() -> None:
    (local,) = select("runner.minus_one_wraps")
    assert local.carrier == "reference"
    assert carried_by(local, "torch") is None  # it takes no token_major rows
    assert carried_by(local, "nccl") is None  # it has no runner
    (spread,) = select("transport.only_rank_0_is_right")
    assert carried_by(spread, "torch") is None  # never more than one rank
    moved = carried_by(spread, "nccl[mode=replicated]")
    assert moved is not None
    assert control(moved).carrier == "nccl[mode=replicated]"
    (narrow,) = select("runner.alpha_ignored")
    assert carried_by(narrow, "reference+reference") is not None
    assert "mutant" not in registry.all_names()


def test_the_manifest_is_the_carriers_narrowed() -> None:
    (found,) = select("runner.minus_one_wraps")
    mutants.install(found)
    try:
        (part,) = registry.get("mutant").backend.parts
        theirs = next(p for p in registry.get("reference").backend.parts if p.role == "runner")
        assert (part.takes, part.gives) == (("token_major",), ("slot_major",))
        assert part.offer == theirs.offer
        assert part.target == "moe_core.conformance.mutants.runners:minus_one_wraps"
    finally:
        registry.unregister_backend("mutant")


def test_one_is_killed_and_the_unchanged_survives(tmp_path: Path) -> None:
    asked = ("--profile", "router", "-k", "hash", "--json")
    done = conformance("--mutants", "hash_wraps", *asked, cwd=tmp_path)
    assert done.returncode == cli.OK, done.stderr
    said = json.loads(done.stdout)
    assert (said["killed"], said["total"], said["ok"]) == (1, 1, True)
    # the table's -1 belongs to nobody
    assert said["by"] == {"router.hash_wraps": "TestRouter::test_hash_follows_its_table[False]"}
    assert said["carriers"] == {"router of torch": {}}  # the killer was tried on it, and passed

    done = conformance("--mutants", "unchanged", *asked, cwd=tmp_path)
    assert done.returncode == cli.NO
    said = json.loads(done.stdout)
    assert (said["killed"], said["total"], said["by"]) == (0, 1, {})
    assert said["survived"] == ["router.unchanged"]
    assert "SURVIVED: router.unchanged: Nothing is wrong." in done.stderr
    assert "0/1 mutants killed (1 router)" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_hanging_dying_and_slips(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    done = start("own.py", "Hangs", "Dies", "Slips", "Wrong", "None", cwd=tmp_path, path=tmp_path)
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    said = {row[0]: row[1:] for row in rows}
    assert set(said) == {"Hangs", "Dies", "Slips", "Wrong", "None"}, done.stderr
    first = "'TestRunner::test_scaled_identity_is_exact[mixed-float32]'"
    assert said["Hangs"] == ["1", first, "'not done after 5 s, ended'", "''"]
    assert said["Dies"][1:] == [first, "'the process died'", "''"]
    assert said["Wrong"][1] == first
    assert "AssertionError" in said["Wrong"][2]
    # a mistake of the mutant's author is no kill
    assert said["Slips"][1] == "''"
    assert "not wrong: NameError: name 'no_such_name'" in said["Slips"][3]
    assert said["None"][1] == "''"
    assert "module 'own' has no attribute 'None'" in said["None"][3]


def test_a_kill_counts_only_if_the_carrier_passes(tmp_path: Path) -> None:
    """A carrier that is itself at fault: the report says so, and isn't ok."""
    (tmp_path / "own.py").write_text(
        "from moe_core.conformance import mutants\n"
        "from moe_core.conformance.mutants import run\n"
        "if __name__ == '__main__':\n"
        "    found = mutants.select('hash_*', ('router',))\n"
        "    mutants.control = lambda like: found[0]\n"
        "    report = run.kill(found, 2, lambda o: None, 'hash')\n"
        "    print(report['killed'], report['total'], report['ok'], *report['carriers'])\n"
    )
    done = start("own.py", cwd=tmp_path, path=tmp_path)
    assert done.stdout == "3 3 False router of torch\n", done.stderr


def test_usage(tmp_path: Path) -> None:
    for args, words in (
        (["--mutants", "hash_wrap"], "did you mean"),
        (["--mutants", "--jobs", "0"], "must be at least 1"),
        ([], "name the one to test, or ask for --mutants"),
        (["torhc", "--mutants"], "did you mean 'torch'"),
    ):
        done = start("-m", "moe_core", "conformance", *args, cwd=tmp_path)
        assert done.returncode == cli.USAGE, done.stdout + done.stderr
        assert words in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_every_mutant_is_killed(tmp_path: Path) -> None:
    done = conformance("--mutants", "--json", cwd=tmp_path)
    said = json.loads(done.stdout)
    assert (said["survived"], said["problems"], said["left_out"]) == ([], {}, []), done.stderr
    assert not any(said["carriers"].values()), said["carriers"]
    assert said["killed"] == said["total"] == len(said["by"]) >= 60
    assert done.returncode == cli.OK

"""``moe-core matrix``: what may run, what does, and what comes of a runner that is wrong."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from moe_core import MoEConfig, ParallelConfig, cli, environment, registry
from moe_core.capabilities import Candidate
from moe_core.cli import main
from moe_core.cli.matrix import Row, decide, execute
from moe_core.manifest import Backend

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MOE_PLUGINS", "")  # what else is installed doesn't matter here


MODES = ("all_to_all", "replicated", "hierarchical")


def matrix(capsys: pytest.CaptureFixture[str], *words: str, code: int = cli.OK) -> dict[str, Any]:
    assert main(["matrix", "--json", *words]) == code
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["spec"] for row in rows} == {
        f"{transport}+{runner}"
        for transport in ("reference", "torch", "triton", *(f"nccl[mode={m}]" for m in MODES))
        for runner in ("reference", "torch", "triton")
    }
    return {row["spec"]: row for row in rows if "triton" not in row["spec"]}


SIZES = ("--hidden-size", "16", "--intermediate-size", "8", "--top-k", "3", "--dtype", "float64")


def test_dry(capsys: pytest.CaptureFixture[str]):
    rows = matrix(capsys, "--dry", *SIZES)
    for spec, row in rows.items():
        alone, spread = row["cells"]
        assert (alone["ranks"], alone["status"], alone["refusals"]) == (1, "serves", [])
        assert (spread["ranks"], spread["status"]) == (2, "serves" if "nccl" in spec else "refused")
    refusals = rows["torch+torch"]["cells"][1]["refusals"]
    assert [(r["part"], r["axis"]) for r in refusals] == [("torch.transport", "ep_size")]
    # Rows of 16 float64 are 128 bytes; 3 slots; read and written, there and back.
    expected = {"torch+torch": ("permute", 4 * 3 * 128), "torch+reference": (None, 0)}
    expected["nccl[mode=all_to_all]+torch"] = ("permute_received", 4 * 3 * 128)
    for spec, wanted in expected.items():
        assert (rows[spec]["converter"], rows[spec]["bytes_per_token"]) == wanted
    nothing = matrix(capsys, "--dry", "--cuda-graph", code=cli.NO)
    reason = nothing["torch+torch"]["cells"][0]["reason"]
    assert reason.startswith("torch.transport | cuda_graph: wanted yes, offers no")


def test_shipped_pairs_run(capsys: pytest.CaptureFixture[str]):
    rows = matrix(capsys, *SIZES, "--set", "bias=true", "--num-experts", "5")
    for spec, row in rows.items():
        alone, spread = row["cells"]
        assert alone["status"] == "runs"
        assert alone["error"] < 1e-13
        assert spread["status"] == ("runs" if "nccl" in spec else "refused"), spread["output"]
        assert spread["error"] is None or spread["error"] < 1e-13


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["matrix", "--dry", "--nproc", "3"]) == cli.OK
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first == "hidden 1024, intermediate 2048, 8 experts, top 2, float32 on cpu"
    assert head.split("  ")[0] == "TRANSPORT"
    assert " 1 RANK  " in head
    assert " 3 RANKS " in head
    assert max(map(len, lines)) <= 100
    cells = [line.split() for line in lines]
    (number,) = (c[4] for c in cells if c[:2] == ["torch", "torch"])
    assert ["torch", "torch", "serves", "refused", number, "permute", "32,768"] in cells
    (note,) = (line for line in lines if line.startswith(f" {number}  "))
    assert note.startswith(f" {number}  torch.transport | ep_size: wanted 3, offers 1 | set ")

    def fail(rows: list[Row], *_: Any) -> None:
        rows[0].cells[0].status, rows[0].cells[0].reason = "fails", "RuntimeError: no kernel"

    monkeypatch.setattr("moe_core.cli.matrix.execute", fail)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["matrix"]) == cli.NO
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "\nnccl[mode=all_.." in out  # names give way, results don't
    assert " fails 1 " in out
    assert "\n 1  RuntimeError: no kernel\n" in out


CODE = """
    import os
    from dataclasses import replace
    import torch
    from moe_core.interfaces import FusedPath
    from moe_core.reference import ReferenceRunner, expert_forward

    class Good(ReferenceRunner):
        pass

    class Doubles(ReferenceRunner):
        def run(self, record, weights):
            out = super().run(record, weights)
            return replace(out, rows=out.rows * 2)

    class Detaches(ReferenceRunner):
        def run(self, record, weights):
            out = super().run(record, weights)
            return replace(out, rows=out.rows.detach() + 0 * record.rows.sum())

    class Raises(ReferenceRunner):
        def run(self, record, weights):
            print("on standard output")
            raise RuntimeError("no kernel")

    class Dies(ReferenceRunner):
        def run(self, record, weights):
            os._exit(3)

    class Whole(FusedPath):
        def forward(self, hidden_states, routing, weights):
            rows = [0 * (x + weights.w13.sum() + weights.w2.sum()) for x in hidden_states]
            for t, slots in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights)):
                for expert, weight in zip(*slots):
                    if expert >= 0:
                        y = expert_forward(hidden_states[t : t + 1], expert, weights)
                        rows[t] = rows[t] + weight * y[0]
            return torch.stack(rows)
"""


def test_wrong_ones_fail_and_hinder_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "made_up_parts.py").write_text(textwrap.dedent(CODE))
    monkeypatch.syspath_prepend(tmp_path)
    runner = {"takes": ["token_major"], "gives": ["slot_major"], "may_pay": ["weight"]}
    offer = {"autograd": True}
    parts: list[dict[str, Any]] = [
        {"role": "runner", "target": f"made_up_parts:{name}", "mode": name, **runner}
        for name in ("Detaches", "Dies", "Doubles", "Good", "Raises")
    ]
    parts.append({"role": "fused", "target": "made_up_parts:Whole", "mode": "Whole"})
    data = {"name": "made_up", "api": "1.0", "parts": [part | {"offer": offer} for part in parts]}
    backend = Backend.from_dict(data)
    reference = registry.get("reference").backend
    transport = next(p for p in reference.parts if p.role == "transport")
    candidates = [Candidate(backend, part, "made-up", "1") for part in backend.parts]
    candidates.append(Candidate(reference, transport, "moe-core", "1"))
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=3, top_k=2)
    wanted = {"device": "cpu", "autograd": True}
    rows = decide(candidates, config, [ParallelConfig()], wanted)
    assert {row.cells[0].status for row in rows} == {"serves"}
    execute(rows, config, wanted, 100)
    cells = {row.candidates[-1].part.mode: row.cells[0] for row in rows}
    assert list(cells) == ["Detaches", "Dies", "Doubles", "Good", "Raises", "Whole"]
    runs = {"Good": "runs", "Whole": "runs"}
    assert {mode: c.status for mode, c in cells.items()} == dict.fromkeys(cells, "fails") | runs
    assert cells["Detaches"].reason.endswith("a gradient is missing or not finite")
    assert cells["Dies"].reason == "the process died"
    assert cells["Doubles"].error == pytest.approx(1)  # twice the right answer
    assert cells["Doubles"].reason.startswith("relative error 1.0e+00, and rounding explains ")
    assert cells["Raises"].reason == "RuntimeError: no kernel"
    assert "Traceback" in cells["Raises"].output
    assert capfd.readouterr().out == ""

"""`moe-core run` over several processes, and the byte model trained over two."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_core import ParallelConfig
from moe_core.cli import main
from moe_core.cli.report import show
from moe_core.conformance.pool import ranks
from moe_core.demo.corpus import corpus
from moe_core.demo.model import ByteLM, LMConfig
from moe_core.routing import tokens_per_expert, updated_correction_bias
from moe_core.training import expert_parameter_names, sync_expert_gradients


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["run", "--json", "--max-bytes", "300", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def test_four_processes_score_as_one_in_float64(capsys: pytest.CaptureFixture[str]) -> None:
    one = report(capsys, "--dtype", "float64")
    four = report(capsys, "--dtype", "float64", "--nproc", "4", "--backend", "nccl+torch")
    assert four["score"]["bits"] == pytest.approx(one["score"]["bits"], rel=1e-9)
    assert four["agrees"]
    assert four["backend"]["name"] == "nccl+torch"
    assert four["ranks"] == 4
    for mine, whole in zip(four["layers"], one["layers"], strict=True):
        assert mine["rows_per_expert"] == whole["rows_per_expert"]
        assert mine["routing_flips"] == 0
    traffic = four["traffic"]
    assert traffic["payload_over_bound"] == 1.0
    assert sum(map(sum, traffic["payload_bytes"])) > 0
    assert all(traffic["payload_bytes"][r][r] == 0 for r in range(4))


def test_two_processes_in_float32_follow_a_token_as_one_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = report(capsys, "--trace", "-1")
    two = report(capsys, "--trace", "-1", "--nproc", "2")
    assert two["score"]["bits"] == pytest.approx(one["score"]["bits"], rel=1e-6)
    assert sum(layer["routing_flips"] for layer in two["layers"]) == 0
    assert two["trace"]["what"] == one["trace"]["what"]
    pairs = zip(two["trace"]["layers"], one["trace"]["layers"], strict=True)
    for layer, whole in pairs:
        for slot, other in zip(layer["slots"], whole["slots"], strict=True):
            assert slot["expert"] == other["expert"]
            assert (slot["rank"], slot["local_expert"]) == divmod(slot["expert"], 4)
            assert slot["weight"] == pytest.approx(other["weight"], rel=1e-5)
            assert slot["contribution"] == pytest.approx(other["contribution"], rel=1e-4)
            assert slot["buffer_row"] >= 0
    shown = io.StringIO()
    show(two, shown)
    assert "token rows sent between 2 ranks" in shown.getvalue()
    assert "payload/bound = 1.00" in shown.getvalue()


def test_a_fault_on_every_rank_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nproc", "2", "--backend", "torch"]) == 1
    err = capsys.readouterr().err
    assert "ep_size" in err
    assert "Traceback" not in err
    assert main(["run", "--nproc", "0"]) == 2
    capsys.readouterr()
    assert main(["run", "--nproc", "9"]) == 2
    assert "8 experts" in capsys.readouterr().err
    assert main(["run", "--nproc", "2", "--layer", "x.json", "--tensors", "y"]) == 2


def test_torchrun_ranks_report_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "moe_core", "run", "--max-bytes", "300", "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # one object, not two
    assert found["ranks"] == 2
    assert found["agrees"]


def byte_losses(parallel: ParallelConfig, steps: int) -> list[float]:
    """AdamW and the bias update without a loss, four windows a step, as the example trains."""
    torch.manual_seed(0)
    config = LMConfig(dropout=0.0, dtype="float64", hidden_size=32, intermediate_size=16)
    model = ByteLM(config, "nccl+torch" if parallel.ep_size > 1 else "torch", parallel=parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    own = set(expert_parameter_names(model))
    dense = [p for name, p in model.named_parameters() if name not in own]
    text = torch.frombuffer(bytearray(corpus()[0][:20_000]), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    mine = slice(*(4 // parallel.ep_size * (r + (dist.get_rank() if parallel.ep_size > 1 else 0))
                   for r in (0, 1)))  # fmt: skip
    history: list[float] = []
    routings: list[Any] = []
    for moe in model.moes:
        moe.router.register_forward_hook(lambda *call: routings.append(call[2]))
    for _ in range(steps):
        routings.clear()
        starts = torch.randint(0, 19_000, (4,), generator=generator)[mine]
        batch = torch.stack([text[s : s + 25] for s in starts.tolist()])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        counts = torch.stack([tokens_per_expert(r, config.num_experts) for r in routings])
        shown = loss.detach().clone()
        if parallel.ep_size > 1:
            sync_expert_gradients(model)
            for tensor in [counts, shown, *(p.grad for p in dense)]:
                dist.all_reduce(tensor)
            for tensor in [shown, *(p.grad for p in dense)]:
                tensor.div_(parallel.ep_size)  # pyright: ignore
        optimizer.step()
        for moe, count in zip(model.moes, counts, strict=True):
            bias = getattr(moe.router, "e_score_correction_bias", None)
            if bias is not None:
                bias.copy_(updated_correction_bias(bias, count, 1e-2))
        history.append(float(shown))
    return history


def test_training_the_byte_model_on_two_ranks_follows_one_process() -> None:
    want = torch.tensor(byte_losses(ParallelConfig(), 50), dtype=torch.float64)
    assert want[-5:].mean() < want[:5].mean() - 1  # it learns
    for got in ranks(2).run(byte_losses, ParallelConfig(ep_size=2), 50, limit=240):
        torch.testing.assert_close(
            torch.tensor(got, dtype=torch.float64), want, rtol=1e-9, atol=1e-9
        )

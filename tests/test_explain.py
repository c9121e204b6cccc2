"""``explain`` on mistakes that people made, from public reports: it names the mistake and the fix.

The reports are of other projects; what we answer is ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_core import ParallelConfig, cli, environment
from moe_core.cli import main
from moe_core.cli.explain import rules_table
from moe_core.registry import register_backend, unregister_backend

ROOT = Path(__file__).resolve().parents[1]
SPREADS: dict[str, Any] = {
    "role": "transport",
    "target": "nowhere:T",
    "takes": ["slot_major"],
    "gives": ["token_major"],
    "may_pay": ["weight", "slot_sum", "rank_sum", "tp_sum"],
    "offer": {
        "dtype": ["bfloat16"],
        "dispatch_dtype": ["bfloat16"],
        "combine_dtype": ["float32", "bfloat16"],
        "ep_size": [2, 4, 8],
        "dp_size": {"min": 1},
        "rows": ["distinct"],
        "autograd": True,
    },
}
SLICES: dict[str, Any] = {
    "role": "runner",
    "target": "nowhere:R",
    "takes": ["expert_contiguous"],
    "gives": ["expert_contiguous"],
    "offer": {"autograd": True, "intermediate_size": {"min": 128, "multiple_of": 128}},
}
MASKED = SLICES | {"takes": ["expert_masked"], "gives": ["expert_masked"], "preference": 99}
LOW_OFFER = SPREADS["offer"] | {"max_tokens_per_rank": {"max": 128}, "autograd": False}
NEEDY = SPREADS | {"needs": ["deep_ep_kernels>=2"]}


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch):
    """``wide`` spreads experts in bfloat16, ``blocks`` computes slices of 128s, ``masked`` takes
    another layout, ``needy`` lacks a package, ``low`` has small buffers and no backward."""
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    parts = {"wide": SPREADS, "blocks": SLICES, "masked": MASKED, "needy": NEEDY}
    parts["low"] = SPREADS | {"offer": LOW_OFFER}
    for name, part in parts.items():
        register_backend({"name": name, "api": "1.0", "parts": [part]})
    yield
    for name in parts:
        unregister_backend(name)


LOW = "--backend low --dtype bfloat16 --ep 2"
WIDE = "--dtype bfloat16 --backend wide"
MISTAKES = [
    # An EP width that leaves experts over: TensorRT-LLM#17532, vllm-ascend#16384.
    (f"{WIDE} --num-experts 12 --ep 8", cli.NO, "leaves 4 over", "set ep_size=4, or pass"),
    # More ranks than experts (the same reports; SGLang refuses it for DeepSeek models).
    ("--num-experts 4 --top-k 2 --ep 8", cli.NO, "4 of the ranks would hold none", "set ep_size=4"),
    # A spanning transport with experts cut by TP: vime#186 (an error about block_n in a kernel).
    (f"{WIDE} --ep 2 --tp 4", cli.NO, "asks for experts cut in 4", "set ep_size=8, tp_size=1"),
    # TP slices that a kernel's blocks don't divide: vime#186.
    ("--backend nccl+blocks --tp 32", cli.NO, "into slices of 64", "set tp_size=16"),
    # TP that doesn't divide the experts' width (SGLang: a bare assertion).
    ("--intermediate-size 1408 --tp 6", cli.NO, "doesn't divide", "set tp_size=4 or 8"),
    # A transport asked for and not there: ISEEKYAN/Megatron-LM#182 (it silently became another).
    ("--backend deepep", cli.USAGE, "no backend named 'deepep'", "to get it"),
    # Its package missing: vllm#15841, #25137.
    ("--backend needy --ep 2", cli.NO, "deep_ep_kernels is not installed", "pip install"),
    # A backend and an option that don't exist: vllm#27347 (a flag the version doesn't know).
    ("--backend trch", cli.USAGE, "no backend named 'trch'", "did you mean 'torch'?"),
    ("--backend torch[gemm=grouppd]", cli.NO, "wanted grouppd", "did you mean 'grouped'?"),
    # A field that matches nothing: transformers#48792 (accepted; another path ran).
    ("--set router.top_k_group=2", cli.USAGE, "unknown key", "did you mean 'topk_group'?"),
    # K out of range: laekov/fastmoe#197.
    ("--num-experts 4 --top-k 5", cli.USAGE, "top_k=5", "at most num_experts=4"),
    # A clamp that is none: TensorRT-LLM#15632 (review).
    ("--set activation.limit=0", cli.USAGE, "activation.limit=0", "a finite number above 0"),
    # A dtype that a transport lacks: DeepEP#154, sglang#9038.
    (
        "--backend wide --dtype float16 --ep 2",
        cli.NO,
        "wide.transport | dtype: wanted float16, offers bfloat16",
        "set dtype",
    ),
    # More tokens than a buffer holds: DeepEP#165, srt-slurm#42 (an assertion deep in C++).
    (f"{LOW} --max-tokens-per-rank 512", cli.NO, "buffers hold 1 to 128", "split larger batches"),
    (LOW, cli.NO, "max_tokens_per_rank isn't set", "the most tokens that one rank ever has"),
    # Training through a path without a backward: transformers' MegaMoE, found at the first step.
    (f"{LOW} --max-tokens-per-rank 8", cli.NO, "autograd: wanted yes", "inference=True"),
    # A pair that can't work: sglang#39079, #24502 (found in a first forward).
    ("--backend reference+masked", cli.NO, "no converter leads there", "would choose 'torch'"),
    # Hash routing without its table's size (a checkpoint whose field is named otherwise).
    (
        "--set router.kind=hash",
        cli.USAGE,
        "router.vocab_size=None",
        "needs the number of token ids",
    ),
    # Replicated tokens through an exchange of distinct ones: transformers#48518.
    (f"{WIDE} --ep 2 --rows replicated", cli.NO, "takes rows=distinct", "hand in rows that way"),
]


@pytest.mark.parametrize(("words", "code", "mistake", "fix"), MISTAKES, ids=lambda x: str(x)[:44])
def test_mistakes(
    words: str, code: int, mistake: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words.split()]) == code
    out, err = capsys.readouterr()
    text = out if code == cli.NO else err
    (line,) = {line for line in text.splitlines() if mistake in line} or {""}
    assert mistake in line
    assert fix in text[text.index(mistake) :]
    assert "Traceback" not in err


def test_an_unknown_variable_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blackwellboy/model-serving-minefield#19: it was ignored and looked configured."""
    monkeypatch.setenv("MOE_BACKENDS", "reference")
    assert main(["explain"]) == cli.USAGE
    assert "MOE_BACKENDS" in (text := capsys.readouterr().err)
    assert "did you mean 'MOE_BACKEND'?" in text


def test_auto_never_ends_in_a_pair_that_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    """sglang#39079. ``masked`` has the highest preference and no way to any transport."""
    assert main(["explain", "--json"]) == cli.OK
    data = json.loads(capsys.readouterr().out)
    assert data["parts"]["runner"]["backend"] == "torch"
    assert any("masked" in r["part"] and r["code"] == "no_path" for r in data["refusals"])


def test_adjusted_widths_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", *WIDE.split(), "--ep", "2", "--tp", "4", "--policy", "adjust"]
    assert main(words) == cli.OK
    assert "ep_size 2 -> 8, tp_size 4 -> 1 (spanning)" in capsys.readouterr().out
    assert main([*words, "--json", "--max-tokens-per-rank", "64"]) == cli.OK
    data = json.loads(capsys.readouterr().out)
    assert data["parallel"] == ParallelConfig(ep_size=8).to_dict()
    assert [a["field"] for a in data["adjustments"]] == ["ep_size", "tp_size"]
    assert data["request"]["max_tokens_per_rank"] == 64
    assert main(["explain", "--rows", "replicated"]) == cli.OK
    assert "warning    replicated-alone: " in capsys.readouterr().out


def test_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "tp=8,ep=4,moe_a2a_backend=deepep"
    assert main(["explain", "--sglang", flags]) == cli.OK
    out = capsys.readouterr().out
    assert "set    spanning: ep_size 4 -> 8" in out
    assert "[arg_groups/overrides.py:1578-1592,1610-1620]" in out
    assert out.splitlines()[-1].endswith(
        "ep_size=8, tp_size=1, dp_size=1, rows=distinct, final_sum=layer"
    )
    words = ["explain", "--sglang", flags, "--sglang", "runner=triton", "--num-experts", "60"]
    assert main(words) == cli.NO
    out = capsys.readouterr().out
    assert "it stops at the first refusal, experts-divide" in out  # 60 over 8
    assert "refuse pair-at-first-forward" in out
    assert main([*words, "--json"]) == cli.NO
    data = json.loads(capsys.readouterr().out)
    assert data["flags"]["num_experts"] == 60
    assert [s["id"] for s in data["steps"] if s["action"] == "refuse"] == [
        "experts-divide",
        "pair-at-first-forward",
    ]
    assert main(["explain", "--sglang", "tp=8,moe-a2a=deepep"]) == cli.USAGE
    assert main(["explain", "--profile", "sglang-0.5.23"]) == cli.OK
    assert "ep_size != tp_size" in capsys.readouterr().out
    assert main(["explain", "--profile", "sglang-0.5.23", "--json"]) == cli.OK
    assert len(json.loads(capsys.readouterr().out)["rows"]) > 50


def test_the_page_holds_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--rules"]) == cli.OK
    table = capsys.readouterr().out.strip()
    assert table == rules_table()
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert table in page, f"docs/choosing.md should hold\n{table}"


NO_TORCH = """
import sys
from moe_core.cli import main
for words in sys.argv[1:]:
    main(["explain", *words.split()])
print(sorted({"torch", "numpy", "safetensors", "triton"} & set(sys.modules)), file=sys.stderr)
"""


def test_no_torch() -> None:
    asked = ["--sglang tp=8,a2a=deepep", "--rules", "--backend nccl --ep 3 --tp 2 --policy adjust"]
    command = [sys.executable, "-c", NO_TORCH, *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]\n")

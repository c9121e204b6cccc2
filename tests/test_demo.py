"""The demo: its text, the baseline, the model that ships, and the script that trained it."""

from __future__ import annotations

import importlib.util
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_core.demo.corpus import Order2, corpus
from moe_core.demo.model import (
    ByteLM,
    LMConfig,
    Window,
    evaluate,
    load,
    read_tensors,
    save,
    score,
    windows,
)
from moe_core.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "moe_core/demo/byte_lm.safetensors"
TINY = LMConfig(context=16, hidden_size=16, num_heads=2, num_layers=2, intermediate_size=8)


@pytest.fixture(scope="module")
def model() -> ByteLM:
    return load()


@pytest.fixture(scope="module")
def held_out() -> bytes:
    return corpus()[1][:12_000]


def test_shipped_file():
    tensors, metadata = read_tensors(SHIPPED)
    assert SHIPPED.stat().st_size <= 2_000_000
    assert metadata.keys() == {"config", "facts"}
    assert {str(t.dtype) for t in tensors.values()} == {"torch.float16", "torch.int64"}


def test_shipped_model_has_deepseek_v4s_shape(model: ByteLM):
    first, *others = [moe.config for moe in model.moes]
    assert (first.router.kind, first.router.vocab_size) == ("hash", 256)
    assert len(others) >= 2
    assert {c.router.kind for c in others} == {"topk"}
    assert all(c.router.correction_bias for c in others)
    for config in (first, *others):
        assert config.router.scoring_func == "sqrtsoftplus"
        assert config.router.renormalize
        assert config.router.routed_scaling_factor == 1.5
        assert (config.activation.limit, config.activation.limit_form) == (10.0, "before")
        assert (config.num_shared_experts, config.dtype) == (1, "float32")


def test_shipped_model_beats_order_2_and_is_balanced(model: ByteLM, held_out: bytes):
    bits, rows = evaluate(model, held_out)
    assert bits < Order2(corpus()[0]).bits_per_byte(held_out)
    for counts in rows[1:]:
        assert max(counts) * len(counts) / sum(counts) <= 1.5


def test_probabilities_of_all_one_byte_texts_sum_to_one(model: ByteLM):
    bits = score(model, [Window(0, bytes([byte]), 1) for byte in range(256)])
    assert (2**-bits).sum().item() == pytest.approx(1, abs=1e-5)


def test_later_bytes_do_not_change_earlier_scores(model: ByteLM):
    text = b"The value of the expression is the result of the call."
    before, after = (
        score(model, [Window(0, t, len(t))]) for t in (text, text[:40] + b"Q" + text[41:])
    )
    torch.testing.assert_close(after[:40], before[:40], rtol=0, atol=1e-4)
    assert (after[40:42] - before[40:42]).abs().max() > 0.5


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 16, 17, 40])
def test_windows_score_each_byte_once(size: int, length: int):
    text = bytes(range(1, length + 1))
    found = list(windows(BytesIO(text), size))
    assert b"".join(w.text[-w.new :] for w in found) == text
    for window in found:
        assert window.text == text[window.offset : window.offset + len(window.text)]
        assert len(window.text) == min(size, length)
    for window in found[1:]:
        assert len(window.text) - window.new >= size // 2  # context
    assert b"".join(w.text[-w.new :] for w in windows(BytesIO(text), size, 5)) == text[:5]


def test_order_2_by_hand():
    baseline = Order2(b"aab")  # too short to tune on: k = 1
    # Without context a 2, b 1 of 3 with 2 different; after "a" a 1, b 1 of 2; after "aa" b of 1.
    alone = (2 + 2 / 256) / (3 + 2)
    after_a = (1 + 2 * alone) / (2 + 2)
    assert baseline.probability(b"", ord("a")) == pytest.approx(alone)
    assert baseline.probability(b"xa", ord("a")) == pytest.approx(after_a)
    assert baseline.probability(b"aa", ord("a")) == pytest.approx((0 + 1 * after_a) / (1 + 1))
    after_b = (1 + 2 * (1 + 2 / 256) / 5) / 4  # P(b | a)
    assert baseline.bits_per_byte(b"ab") == pytest.approx(
        -torch.tensor([alone, after_b]).log2().mean().item(), rel=1e-6
    )


def test_order_2_is_a_distribution():
    baseline = Order2(corpus()[0][:5000])
    for context in (b"", b"t", b"th", b"\xff\xfe"):
        total = sum(baseline.probability(context, byte) for byte in range(256))
        assert total == pytest.approx(1)


def test_held_out_text_is_not_in_the_training_text():
    def runs(text: bytes) -> set[tuple[str, ...]]:
        found: set[tuple[str, ...]] = set()
        for paragraph in text.decode().split("\n\n"):
            words = re.findall(r"\w+", paragraph)
            found |= {tuple(words[i : i + 8]) for i in range(len(words) - 7)}
        return found

    train, held_out = corpus()
    assert len(train) > 100_000
    assert len(held_out) > 20_000
    assert not runs(train) & runs(held_out)


def test_load_says_what_is_wrong_with_a_file(tmp_path: Path):
    file = tmp_path / "x.safetensors"
    with pytest.raises(InputError, match=r"x\.safetensors can't be read"):
        load(file)
    file.write_bytes(b"no")
    with pytest.raises(InputError, match="is not a safetensors file"):
        load(file)
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(InputError, match="not a byte-level model of moe-core"):
        load(file)
    save_file({"embedding.weights": torch.zeros(1)}, file, {"config": '{"num_layers": 1}'})
    with pytest.raises(InputError) as caught:
        load(file)
    assert "norm.weight is missing, [128]" in str(caught.value)
    assert "embedding.weights is unknown (did you mean 'embedding.weight'?)" in str(caught.value)


def test_saved_and_loaded_model_is_the_same(tmp_path: Path):
    torch.manual_seed(0)
    tiny = ByteLM(TINY).eval()
    tiny.load_state_dict({k: v.half().to(v.dtype) for k, v in tiny.state_dict().items()})
    save(tiny, tmp_path / "tiny.safetensors", {})
    text = [Window(0, b"some text", 9)]
    assert torch.equal(score(load(tmp_path / "tiny.safetensors"), text), score(tiny, text))


def test_training_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = ROOT / "examples/train_byte_lm.py"
    spec = importlib.util.spec_from_file_location("train_byte_lm", path)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "corpus", lambda: (corpus()[0][:5000], corpus()[1][:300]))
    monkeypatch.setattr(script, "LMConfig", lambda: TINY)
    file = tmp_path / "out.safetensors"
    script.main(["--steps", "2", "--out", str(file)])
    out, err = capsys.readouterr()
    assert "training 100%" in err
    assert "2 steps" in out
    bits, rows = evaluate(load(file), corpus()[1][:300])
    assert f"held-out text: {bits:.3f} bits per byte" in out
    assert bits < 8.1
    assert sum(rows[1]) > 0
    # Two balancing steps of 0.003 each, rounded to float16.
    bias = read_tensors(file)[0]["blocks.1.moe.router.e_score_correction_bias"].float()
    assert set(((bias * 1000).round().int().abs()).tolist()) <= {0, 3, 6}
    assert bias.abs().max() > 0

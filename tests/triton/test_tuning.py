"""Block sizes from a file, and the command that measures and writes them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_core import ConfigError, Experts, MoEConfig, cli
from moe_triton import configs, tuned
from moe_triton.configs import Config
from moe_triton.runtime import CHIPS, record_launches
from moe_triton.tuning import MOST_ELEMENTS, RANGES, candidates

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = MoEConfig(hidden_size=16, intermediate_size=24, num_experts=2, top_k=1)
UP = "up/interpreter/4/16/24x16"
OTHER = Config(32, 16, 16, 2, 1, 1, 1)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Named by the variable; not there yet."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuned.json"))
    return tmp_path / "tuned.json"


def up_config() -> dict[str, Any]:
    """What a layer of ``CONFIG`` launches its first product with."""
    experts = Experts(CONFIG, backend="triton", device="cpu", inference=True)
    with record_launches() as launches, torch.no_grad():
        experts(torch.ones(3, 16), torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
    (meta,) = (made.meta for made in launches.made if made.name == "up_kernel")
    return meta


def test_a_file_goes_before_the_table(file: Path):
    tuned.write(str(file), {UP: OTHER}, {"device": "a test"})
    assert up_config()["BLOCK_M"] == 32
    assert up_config()["num_warps"] == 2
    # the blocks of another shape are the shipped ones
    how: dict[str, Any] = {"itemsize": 4, "rows_per_expert": 2, "n": 48, "k": 16}
    chip = CHIPS["interpreter"]
    assert tuned.choose("up", chip, **how) == configs.choose("up", chip, **how)


def test_without_a_file():
    assert up_config()["BLOCK_M"] == configs.INTERPRETED["up"].block_m


def test_what_does_not_fit_a_chip_is_made_smaller(file: Path):
    """A file that was written on another chip can't ask for memory that this one lacks."""
    key = "down/sm80/2/128/4096x4096"
    big = Config(128, 256, 64, 8, 4)
    tuned.write(str(file), {key: big}, {})
    how: dict[str, Any] = {"itemsize": 2, "rows_per_expert": 128, "n": 4096, "k": 4096}
    chosen = tuned.choose("down", CHIPS["sm86"], **how)
    assert configs.shared_bytes("down", big, 2, 1) > CHIPS["sm86"].shared_memory
    assert configs.shared_bytes("down", chosen, 2, 1) <= CHIPS["sm86"].shared_memory
    assert chosen.block_n == 256 or chosen.num_stages == 2


def test_writing_keeps_what_is_there(file: Path):
    tuned.write(str(file), {"a": OTHER, "b": OTHER}, {"device": "one"})
    newer = replace(OTHER, block_m=64)
    tuned.write(str(file), {"b": newer}, {"device": "two"})
    assert tuned.read(str(file)) == {"a": OTHER, "b": newer}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read"),
        ("{", "can't be read"),
        ("[]", "no file of format 1"),
        ('{"format": 2, "configs": {}}', "no file of format 1"),
        ('{"format": 1, "configs": {"up": {"block_m": 16}}}', "needs block_m, block_n"),
        ('{"format": 1, "configs": {"up": {"block_m": 0}}}', "whole numbers above 0"),
        ('{"format": 1, "configs": {"up": {"blockm": 16}}}', "whole numbers above 0"),
        ('{"format": 1, "configs": {"up": 7}}', "whole numbers above 0"),
    ],
)
def test_a_bad_file_is_refused_when_a_layer_is_built(content: str | None, said: str, file: Path):
    tuned.read.cache_clear()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        Experts(CONFIG, backend="triton", device="cpu", inference=True)


@pytest.mark.parametrize("name", ["sm80", "sm86", "sm90", "gfx942", "interpreter"])
def test_candidates(name: str):
    chip = CHIPS[name]
    itemsize = 4 if name == "interpreter" else 2
    for kernel in configs.KERNELS:
        for height in configs.BUCKETS:
            shipped = configs.choose(
                kernel, chip, itemsize=itemsize, rows_per_expert=height, n=4096, k=4096
            )
            ask = tuned.Ask("", kernel, chip, itemsize, 1, 4096, 4096, shipped)
            found = candidates(ask)
            assert found[0] == shipped
            assert len(found) >= 5
            assert len(set(found)) == len(found)
            for config in found[1:]:
                needed = configs.shared_bytes(kernel, config, itemsize, 1)
                assert needed <= chip.shared_memory
                assert config.block_m * config.block_n <= MOST_ELEMENTS
                for field, (least, most) in RANGES.items():
                    changed = getattr(config, field) != getattr(shipped, field)
                    assert not changed or least <= getattr(config, field) <= most


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--hidden-size", "16", "--intermediate-size", "24", "--num-experts", "2"]
    flags += ["--backend", "triton", "--tokens", "2", "--samples", "1", "--warmup", "0", "--json"]
    # the variable names a file that isn't there yet: unset it, as the command's user would
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(tuned.VARIABLE)
        assert cli.main(["bench", "--tune", str(file), "--set", "top_k=1", *flags]) == cli.OK
    choices = {c["name"]: c for c in json.loads(capsys.readouterr().out)["choices"]}
    assert set(choices) == {UP, "down/interpreter/4/16/16x24"}
    written = tuned.read(str(file))
    for name, choice in choices.items():
        assert choice["tried"] > 3
        assert choice["left_out"] == 0
        assert 0 < choice["after_s"] <= choice["before_s"]
        assert asdict(written[name]) == choice["setting"]
    assert up_config()["BLOCK_M"] == choices[UP]["setting"]["block_m"]

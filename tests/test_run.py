"""``moe-core run``: a text through a model, a layer of one's own, and what is said of bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_core import MoEConfig, MoELayer, RouterConfig, Routing, environment, trace
from moe_core.cli import main
from moe_core.cli.layer_check import LayerReport
from moe_core.cli.report import Canvas, show
from moe_core.demo.model import ByteLM, LMConfig, load, save

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TINY = LMConfig(context=16, hidden_size=16, num_heads=2, num_layers=2, intermediate_size=8)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    save(ByteLM(TINY), file, {})
    return str(file)


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]):
    """Runs ``moe-core run ... --json``: the exit code and the object."""

    def run(*words: object) -> tuple[int, dict[str, Any]]:
        code = main(["run", "--json", *map(str, words)])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_the_shipped_model_on_the_sample(ran: Any):
    code, report = ran()
    assert (code, report["agrees"]) == (0, True)
    assert report["text"]["bytes"] == report["text"]["size"]
    # 255 bytes a window, 127 more in each after the first; 256 rows with the start.
    count = 1 + -(-(report["text"]["bytes"] - 255) // 127)
    assert report["text"]["windows"] == count
    for layer in report["layers"]:
        assert layer["tokens"] == count * 256
        assert sum(layer["rows_per_expert"]) == layer["tokens"] * layer["top_k"]
        assert 0 < layer["relative_error"] < layer["bound"] < 1e-4
        assert set(layer["seconds"]) >= {"router", "dispatch", "experts", "combine"}
    assert report["score"]["bits_per_byte"] < 4
    assert report["backend"]["source"] == "auto"


def test_score_is_that_of_the_model(tiny: str, ran: Any, tmp_path: Path):
    text = bytes(range(256))[:40]
    (tmp_path / "text").write_bytes(text)
    code, report = ran("--model", tiny, "--text", tmp_path / "text", "--backend", "reference")
    assert code == 0
    assert report["backend"]["name"] == "reference"
    model = load(tiny)
    bits = 0.0
    # By hand: 15 bytes a window, 7 new ones in each after the first, 4 in the last.
    for first, new in ((0, 15), (7, 7), (14, 7), (21, 7), (25, 4)):
        part = text[first : first + 15]
        logits = model(torch.tensor([[0, *part]]))[0, :-1].double()
        each = -logits.log_softmax(-1)[range(15), list(part)] / torch.tensor(2.0).log()
        bits += each[-new:].sum().item()
    assert report["score"]["bits"] == pytest.approx(bits, rel=1e-5)
    assert report["score"]["bits_per_byte"] == pytest.approx(bits / 40, rel=1e-5)
    assert report["score"]["perplexity_per_byte"] == pytest.approx(2 ** (bits / 40), rel=1e-5)


@pytest.mark.parametrize("text", [b"a", b"\x00\xff\xfe\r\n\x00", b"longer than the context" * 3])
def test_any_bytes_are_a_text(tiny: str, ran: Any, monkeypatch: Any, text: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    code, report = ran("--model", tiny, "--text", "-", "--trace", -1)
    assert code == 0
    assert report["text"]["bytes"] == len(text)
    assert report["trace"]["token"] == len(text) - 1
    assert report["trace"]["what"].startswith(f"byte {text[-1]:#04x}")


def test_max_bytes(tiny: str, ran: Any, tmp_path: Path):
    (tmp_path / "text").write_bytes(b"x" * 100_000)
    _, report = ran("--model", tiny, "--text", tmp_path / "text", "--max-bytes", 20)
    expected = {"size": 100_000, "bytes": 20, "windows": 2, "truncated": True}
    assert expected.items() <= report["text"].items()


def test_what_people_see(tiny: str, capsys: pytest.CaptureFixture[str]):
    assert main(["run", "--model", tiny, "--max-bytes", "40", "--trace", "3"]) == 0
    out = capsys.readouterr().out
    assert "layer 0 · hash routing" in out
    assert "layer 1 · topk routing" in out
    assert "█" in out
    assert "token 3 (byte 0x69 b'i'): row 4 of its batch" in out  # the sample begins "A mixture"
    assert out.splitlines()[-1].startswith("agrees with the float64 reference: worst relative")
    assert "\x1b" not in out  # not a terminal


def test_streams_that_know_only_ascii(tiny: str, ran: Any):
    _, report = ran("--model", tiny, "--max-bytes", 40)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show(report, stream)
    stream.flush()
    assert b"####" in raw.getvalue()
    canvas = Canvas(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert [canvas.bar(share, 4) for share in (0, 0.5, 1)] == ["    ", "██  ", "████"]
    assert canvas.bar(5 / 32, 4) == "▋   "  # five eighths of a cell


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--text", "{tmp}/none"], "none can't be read: No such file"),
        (["--text", "{tmp}"], "can't be read: Is a directory"),
        (["--text", "/dev/null"], "neither a file nor a pipe"),
        (["--text", "{tmp}/empty"], "is empty, there is nothing to score"),
        (["--model", "{tmp}/empty"], "is not a safetensors file"),
        (["--trace", "99999"], "--trace 99999: there are"),
        (["--backend", "torhc"], "did you mean 'torch'?"),
        (["--device", "nope"], "--device 'nope' can't be used here"),
        (["--max-bytes", "0"], "--max-bytes must be at least 1"),
        (["--tensors", "x", "--output", "y"], "--tensors needs --layer CONFIG.json; --output"),
        (["--layer", "{tmp}/empty"], "--layer needs --tensors"),
        (["--layer", "{tmp}/empty", "--tensors", "x"], "is not JSON"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path: Path, capsys: Any, words: list[str], says: str):
    (tmp_path / "empty").touch()
    assert main(["run", *(word.format(tmp=tmp_path) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_a_backend_that_computes_something_else_is_found_out(
    tiny: str, ran: Any, monkeypatch: pytest.MonkeyPatch
):
    from moe_torch import runner

    right = runner.TorchRunner.run

    def wrong(self: Any, record: Any, weights: Any) -> Any:
        result = right(self, record, weights)
        return replace(result, rows=result.rows * 1.001)

    monkeypatch.setattr(runner.TorchRunner, "run", wrong)
    code, report = ran("--model", tiny, "--max-bytes", 40)
    assert (code, report["agrees"]) == (1, False)
    assert 1e-4 < report["worst_relative_error"] < 2e-3
    code, report = ran("--model", tiny, "--max-bytes", 40, "--no-check")
    assert (code, report["agrees"], report["worst_relative_error"]) == (0, None, None)


def test_a_wrong_route_is_found_out():
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=1)
    layer, hidden = MoELayer(config, inference=True), torch.randn(5, 8)

    def report_on(routing: Routing | None) -> LayerReport:
        """Of a router that gave ``routing``; what follows it computes all right."""
        with trace() as seen:
            layer(hidden, routing=routing)
        report = LayerReport(layer)
        report.add(seen.calls[0])
        assert report.error is not None
        assert report.error < report.bound
        return report

    report = report_on(None)
    assert (report.flips, report.wrong_routes, report.agrees) == (0, 0, True)
    ids, weights = layer.router(hidden).ids_and_weights()
    report = report_on(Routing((ids + 1) % 4, weights))
    assert (report.flips, report.wrong_routes, report.agrees) == (5, 5, False)
    report = report_on(Routing(ids, weights * 1.01))
    assert (report.flips, report.wrong_routes, report.agrees) == (0, 0, False)
    assert report.weight_error == pytest.approx(0.01, rel=1e-3)


def test_a_near_tie_that_goes_the_other_way_is_rounding():
    layer = MoELayer(
        MoEConfig(hidden_size=2, intermediate_size=2, num_experts=2, top_k=1), inference=True
    )
    layer.router.load_state_dict({"weight": torch.tensor([[1.0, 0.0], [1.0, 1e-7]])})
    hidden = torch.ones(1, 2)  # logits 1 and 1.0000001: the reference takes expert 1
    for ids, flips in ((1, 0), (0, 1)):
        with trace() as seen:
            layer(hidden, routing=Routing(torch.tensor([[ids]]), torch.tensor([[0.5]])))
        report = LayerReport(layer)
        report.add(seen.calls[0])
        assert (report.flips, report.wrong_routes, report.agrees) == (flips, 0, True)


IDENTITY = {
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_experts": 2,
    "top_k": 2,
    "activation": {"name": "identity", "gated": False},
}


def layer_files(folder: Path, config: dict[str, Any], **tensors: Tensor) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "in.safetensors")
    return ["--layer", f"{folder}/config.json", "--tensors", f"{folder}/in.safetensors"]


@pytest.mark.parametrize("backend", ["torch", "nccl"])
def test_a_layer_by_hand(ran: Any, tmp_path: Path, backend: str):
    # Expert 0 gives x, expert 1 gives 2 x; the second token's second slot is not used.
    eye = torch.eye(2)
    words = layer_files(
        tmp_path,
        IDENTITY,
        hidden_states=torch.tensor([[[3.0, 4.0], [6.0, 8.0]]]),
        w13=torch.stack([eye, 2 * eye]),
        w2=torch.stack([eye, eye]),
        topk_ids=torch.tensor([[1, 0], [0, -1]]),
        topk_weights=torch.tensor([[0.5, 0.25], [2.0, 7.0]]),
    )
    output = tmp_path / "out.safetensors"
    code, report = ran(*words, "--backend", backend, "--trace", -2, "--output", output)
    assert code == 0
    (layer,) = report["layers"]
    assert layer["rows_per_expert"] == [2, 1]
    assert (layer["routing_flips"], layer["weight_relative_error"]) == (None, None)
    (path,) = report["trace"]["layers"]
    assert path["recomputed"] == (backend == "nccl")  # it sums the rows before they come home
    assert [s["expert"] for s in path["slots"]] == [1, 0]
    if backend == "torch":  # rows by expert, then token: (0, 1) and (1, 0), then (0, 0)
        assert [s["buffer_row"] for s in path["slots"]] == [2, 0]
    assert [(s["rank"], s["local_expert"]) for s in path["slots"]] == [(0, 1), (0, 0)]
    assert [s["contribution"] for s in path["slots"]] == [5.0, 1.25]  # |(3, 4)| = 5
    assert path["output"] == 6.25
    written = load_file(output)
    assert written["output"].tolist() == [[[3.75, 5.0], [12.0, 16.0]]]
    assert written["topk_ids"].tolist() == [[1, 0], [0, -1]]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_layer_with_everything(ran: Any, tmp_path: Path, dtype: str):
    torch.manual_seed(0)
    router = RouterConfig(kind="hash", vocab_size=9, scoring_func="sigmoid", renormalize=True)
    config = MoEConfig(
        hidden_size=8,
        intermediate_size=4,
        num_experts=3,
        top_k=2,
        router=router,
        num_shared_experts=2,
        bias=True,
    )
    layer = MoELayer(config, inference=True)
    state = {k.removeprefix("experts."): v for k, v in layer.state_dict().items()}
    shared = {k: v for k, v in layer.state_dict().items() if k.startswith("shared_experts.")}
    state = {k: v for k, v in state.items() if not k.startswith("shared_")} | shared
    hidden, ids = torch.randn(2, 3, 8), torch.randint(0, 9, (2, 3))
    words = layer_files(tmp_path, config.to_dict(), hidden_states=hidden, input_ids=ids, **state)
    output = tmp_path / "out.safetensors"
    code, report = ran(*words, "--dtype", dtype, "--output", output, "--trace", 5)
    assert (code, report["dtype"], report["layers"][0]["routing_flips"]) == (0, dtype, 0)
    expected = layer(hidden, ids)
    tolerance = 1e-5 if dtype == "float64" else 0.05
    torch.testing.assert_close(
        load_file(output)["output"].float(), expected, rtol=0, atol=tolerance
    )
    assert report["trace"]["layers"][0]["shared_contribution"] > 0


def test_an_empty_layer_call(ran: Any, tmp_path: Path):
    words = layer_files(
        tmp_path,
        IDENTITY,
        hidden_states=torch.zeros(0, 2),
        w13=torch.zeros(2, 2, 2),
        w2=torch.zeros(2, 2, 2),
        **{"router.weight": torch.zeros(2, 2)},
    )
    code, report = ran(*words)
    assert code == 0
    assert report["layers"][0]["rows_per_expert"] == [0, 0]
    assert report["layers"][0]["max_over_mean_load"] is None


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path, capsys: Any):
    words = layer_files(
        tmp_path,
        IDENTITY,
        hidden_states=torch.tensor([[1.0, float("nan")]]),
        w13=torch.zeros(2, 4, 2),
        w1=torch.zeros(1),
        topk_ids=torch.tensor([[0, 2]]),
        topk_weights=torch.tensor([[1, 1]]),
    )
    assert main(["run", *words]) == 2
    err = capsys.readouterr().err
    for fault in (
        "w2 is missing, [2, 2, 2]",
        "w13 is [2, 4, 2] and must be [2, 2, 2]",
        "w1 is unknown (did you mean 'w13'?)",
        "topk_ids holds 0 to 2 and must lie in -1 to 1",
        "topk_weights holds torch.int64 and must hold floating point numbers",
        "hidden_states holds 1 numbers that are not finite",
    ):
        assert fault in err


def test_as_a_process(tiny: str):
    words = [sys.executable, "-m", "moe_core", "run", "--model", tiny, "--text", "-", "--json"]
    result = subprocess.run(words, input=b"some text", capture_output=True, timeout=120, check=True)
    assert json.loads(result.stdout)["text"]["bytes"] == 9
    assert result.stderr == b""

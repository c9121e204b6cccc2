"""The command line: what it prints, its exit codes, and that it stays light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from moe_core import __version__, cli, environment, registry
from moe_core.cli import main

ROOT = Path(__file__).resolve().parents[1]
PART = {"role": "runner", "target": "x:Y", "takes": ["token_major"], "gives": ["token_major"]}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An installed backend ``broken`` whose manifest prints and then raises."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "noisy_broken.py").write_text("print('noise')\nraise ImportError('two\\nlines')\n")
    info = tmp_path / "noisy-7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 7\n")
    (info / "entry_points.txt").write_text("[moe_core.backends]\nbroken = noisy_broken:BACKEND\n")
    registry.refresh()
    yield
    registry.refresh()


def test_every_command_has_its_two_functions():
    for name in cli.COMMANDS:
        module = import_module(f"moe_core.cli.{name.replace('-', '_')}")
        assert callable(module.register)
        assert callable(module.run)


def test_list(broken: None, capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == cli.OK
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "DISTRIBUTION", "VERSION", "STATUS", "ROLES", "SUMMARY"]
    cells = {row.split()[0]: row.split() for row in rows}
    assert list(cells) == sorted(cells)
    assert cells["torch"][1:5] == ["moe-core", __version__, "available", "router,transport,runner"]
    assert cells["broken"][1:4] == ["noisy", "7", "broken"]
    assert " ".join(cells["broken"]).endswith("ImportError: two lines")
    starts = {row.index(f" {row.split()[3]}") for row in [head, *rows]}
    assert len(starts) == 1  # columns stand under each other


def test_list_json(broken: None, capsys: pytest.CaptureFixture[str]):
    assert main(["list", "--json"]) == cli.OK
    out, err = capsys.readouterr()
    backends = {b["name"]: b for b in json.loads(out)}  # the manifest's print is not in it
    assert "noise" in err
    assert backends["torch"]["roles"] == ["router", "transport", "runner"]
    assert backends["broken"]["status"] == "broken"
    assert backends["broken"]["traceback"].startswith("Traceback")


def test_explain(capsys: pytest.CaptureFixture[str]):
    assert main(["explain"]) == cli.OK
    assert capsys.readouterr().out.startswith("asked for 'auto' (auto): ")
    assert main(["explain", "--backend", "torch+reference", "--json"]) == cli.OK
    data = json.loads(capsys.readouterr().out)
    assert data["parts"]["transport"]["backend"] == "torch"
    assert data["parts"]["runner"]["backend"] == "reference"
    assert data["source"] == "argument"


def test_explain_takes_the_layer_from_a_file_and_from_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = {"hidden_size": 32, "intermediate_size": 64, "num_experts": 4, "top_k": 1}
    config |= {"backend": "reference", "router": {"scoring_func": "sigmoid"}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    flags = ["--top-k", "3", "--dtype", "float64", "--set", "router.renormalize=true"]
    flags += ["--set", "activation.name=gelu", "--inference", "--device", "cpu:0", "--json"]
    assert main(["explain", "--config", str(file), *flags]) == cli.OK
    data = json.loads(capsys.readouterr().out)
    assert (data["spec"], data["source"]) == ("reference", "config")
    wanted = {"hidden_size": 32, "num_experts": 4, "top_k": 3, "dtype": "float64"}
    wanted |= {"scoring_func": "sigmoid", "activation": "gelu", "autograd": False, "device": "cpu"}
    assert wanted.items() <= data["request"].items()


def test_explain_says_no(capsys: pytest.CaptureFixture[str]):
    words = ["explain", "--backend", "reference", "--ep", "2", "--tp", "4", "--compile"]
    assert main(words) == cli.NO
    out = capsys.readouterr().out
    refusals = [line for line in out.splitlines() if line.startswith("  reference.transport | ")]
    assert len(refusals) >= 3  # ep_size, tp_size, compile: all of them, not the first
    assert main([*words, "--json"]) == cli.NO
    data = json.loads(capsys.readouterr().out)
    assert not data["ok"]
    assert {"ep_size", "tp_size"} <= {r["axis"] for r in data["refusals"]}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["explain", "--backend", "a+b+c"], cli.USAGE, "backend='a+b+c': at character 4"),
        (["explain", "--backend", "torhc"], cli.USAGE, "did you mean 'torch'?"),
        (["explain", "--backend", "broken"], cli.BROKEN, "'broken' of noisy can't be loaded"),
        (["explain", "--config", "no/such.json"], cli.USAGE, "No such file"),
        (["explain", "--top-k", "9"], cli.USAGE, "top_k=9: at most num_experts=8"),
        (["explain", "--set", "router.knid=hash"], cli.USAGE, "did you mean 'kind'?"),
        (["explain", "--set", "bias"], cli.USAGE, "must look like bias=true"),
        (["explain", "--set", "dtype.x=1"], cli.USAGE, "dtype"),
        (["explain", "--top-k", "two"], cli.USAGE, "invalid int value"),
        (["lst"], cli.USAGE, "invalid choice: 'lst'"),
        ([], cli.USAGE, "required: COMMAND"),
    ],
)
def test_bad_input_is_a_sentence(
    broken: None, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
):
    assert main(words) == code
    out, err = capsys.readouterr()
    assert says in err
    assert "Traceback" not in err
    assert out.replace("noise\n", "") == ""


def test_bad_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("MOE_BAKEND", "torch")
    assert main(["list"]) == cli.USAGE
    assert "did you mean 'MOE_BACKEND'?" in capsys.readouterr().err
    assert main(["--version"]) == cli.OK
    assert capsys.readouterr().out == f"moe-core {__version__}\n"
    assert main(["explain", "--help"]) == cli.OK


def test_strict(broken: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("MOE_STRICT_PLUGINS", "1")
    assert main(["list"]) == cli.BROKEN
    assert "moe-core: backend 'broken' of noisy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "trace"),
    [(KeyboardInterrupt(), cli.INTERRUPTED, False), (ZeroDivisionError("x"), cli.BUG, True)],
)
def test_unforeseen_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    trace: bool,
):
    def fail() -> None:
        raise error

    monkeypatch.setattr("moe_core.cli.list.list_backends", fail)
    assert main(["list"]) == code
    assert ("Traceback" in capsys.readouterr().err) == trace


CHECK_LIGHT = """
import sys
from moe_core.cli import main
code = main(sys.argv[1:])
print(sorted({"torch", "numpy", "safetensors", "triton"} & set(sys.modules)), file=sys.stderr)
raise SystemExit(code)
"""


@pytest.mark.parametrize("words", [["list"], ["explain"], ["--help"]])
def test_no_torch(words: list[str]):
    command = [sys.executable, "-c", CHECK_LIGHT, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (cli.OK, "[]\n")


def test_a_reader_that_leaves():
    command = [sys.executable, "-m", "moe_core", "list"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # as people run it
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == cli.BROKEN_PIPE
        assert process.stderr.read() == b""

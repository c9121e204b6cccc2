"""``moe-core run``: a text through the demo model, or your tensors through one layer.

Every layer is traced and compared with the float64 reference. Exit codes: 0 the numbers agree,
1 they don't or the backend refuses, 2 a wrong spec, file, token or model, 3 a broken backend.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from moe_core.config import DTYPES, MoEConfig
from moe_core.errors import InputError

if TYPE_CHECKING:  # torch is imported once the arguments are known to be good
    import argparse

    from torch import Tensor

    from moe_core.cli.layer_check import LayerReport
    from moe_core.demo.model import Window
    from moe_core.demo.team import Load, Team
    from moe_core.layer import MoELayer
    from moe_core.tracing import LayerCall

BATCH = 16  # windows that go through the model together


def register(subparsers: Any) -> None:
    """Adds the command to the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="score a text with a small trained model, or run your own layer, on a backend",
        description="Scores a text with the small byte-level model that ships, shows what went "
        "where, and compares every layer with the float64 reference. With --layer: the same for "
        "one layer with your own weights and activations.",
        epilog="exit codes: 0 the numbers agree; 1 they don't, or the backend refuses; 2 a wrong "
        "spec, file, token or model; 3 a broken backend",
    )
    add = parser.add_argument
    add("--backend", metavar="SPEC", help="backend spec (default: MOE_BACKEND, else auto)")
    add("--text", metavar="FILE", help="text to score, - for standard input (default: a sample)")
    add("--model", metavar="FILE", help="a model of examples/train_byte_lm.py (default: shipped)")
    add("--nproc", metavar="N", type=int, help="spread the experts over N processes")
    add("--max-bytes", metavar="N", type=int, help="score the first N bytes only")
    add("--layer", metavar="CONFIG.json", help="run this one layer instead of the model")
    add("--tensors", metavar="FILE", help="with --layer: safetensors with weights and input")
    add("--output", metavar="FILE", help="with --layer: write the result as safetensors")
    add("--trace", metavar="TOKEN", type=int, help="follow this token; from the end if negative")
    add("--dtype", choices=DTYPES, help="of the layers (default: the model's or the config's)")
    add("--device", default="cpu", help="torch device (default: cpu)")
    add("--no-check", action="store_true", help="don't compare with the reference (faster)")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises ``MoEError`` for anything that the caller can put right."""
    _check_arguments(args)
    report = _run_layer(args) if args.layer else _run_text(args)
    if report is None:
        return 0
    if args.json:
        print(json.dumps(report, allow_nan=False))
    else:
        from moe_core.cli.report import show

        show(report, sys.stdout)
    return 1 if report["agrees"] is False else 0


def _check_arguments(args: argparse.Namespace) -> None:
    faults: list[str] = []
    if args.layer:
        only_text = [n for n in ("text", "model", "max_bytes") if getattr(args, n) is not None]
        faults += [f"--{n.replace('_', '-')} doesn't go with --layer" for n in only_text]
        if args.tensors is None:
            faults.append("--layer needs --tensors FILE, with the weights and the hidden_states")
    else:
        only_layer = [n for n in ("tensors", "output") if getattr(args, n) is not None]
        faults += [f"--{n} needs --layer CONFIG.json" for n in only_layer]
    if args.layer and args.nproc is not None:
        faults.append("--nproc doesn't go with --layer")
    if args.nproc is not None and args.nproc < 1:
        faults.append(f"--nproc must be at least 1, not {args.nproc}")
    if args.max_bytes is not None and args.max_bytes < 1:
        faults.append(f"--max-bytes must be at least 1, not {args.max_bytes}")
    if faults:
        raise InputError("; ".join(faults))


def _device(name: str) -> str:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name!r} can't be used here: {reason}") from error
    return name


# ---------------------------------------------------------------------------------------- a text


@dataclass
class Text:
    """A text to read from; ``size`` in bytes is known beforehand."""

    name: str
    size: int
    source: BinaryIO


def open_text(path: str | None, stack: ExitStack) -> Text:
    """The sample for None, standard input for ``-``. A regular file is read as it is scored (and
    closed by ``stack``), a pipe at once. ``InputError`` for what can't be read or is empty."""
    name = {None: "the sample", "-": "standard input"}.get(path) or str(path)
    source: BinaryIO
    if path is None:
        source = io.BytesIO((files("moe_core.demo") / "sample.txt").read_bytes())
    elif path == "-":
        source = io.BytesIO(sys.stdin.buffer.read())
    else:
        try:
            source = stack.enter_context(Path(path).open("rb"))  # noqa: SIM115
            mode = os.fstat(source.fileno()).st_mode
            if not stat.S_ISREG(mode):
                if not stat.S_ISFIFO(mode):
                    raise InputError(f"--text {path} is neither a file nor a pipe")
                source = io.BytesIO(source.read())
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"--text {path} can't be read: {reason}") from error
    size = source.seek(0, io.SEEK_END)
    source.seek(0)
    if not size:
        raise InputError(f"--text: {name} is empty, there is nothing to score")
    return Text(name, size, source)


def _run_text(args: argparse.Namespace) -> dict[str, Any] | None:
    with ExitStack() as stack:
        text = open_text(args.text, stack)
        wanted = min(text.size, args.max_bytes or text.size)
        token = _token_index(args.trace, wanted, "bytes of text")
        from moe_core.demo import team as teams

        load = teams.Load(args.model, args.backend, args.dtype, _device(args.device))
        team = _team(args.nproc, load, stack)
        return _score_text(args, text, wanted, token, team)


def _team(nproc: int | None, load: Load, stack: ExitStack) -> Team:
    from moe_core.demo import team as teams

    if teams.under_torchrun():
        if nproc is not None:
            raise InputError("--nproc starts ranks itself: leave it out under torchrun")
        team: Team = teams.TorchrunTeam(load)
    else:
        team = teams.PoolTeam(nproc, load) if nproc and nproc > 1 else teams.Team(load)
    stack.callback(team.close)
    return team


def _score_text(
    args: argparse.Namespace, text: Text, wanted: int, token: int | None, team: Team
) -> dict[str, Any] | None:
    """None on a rank that reports to another."""
    from moe_core.cli.layer_check import LayerReport, follow
    from moe_core.cli.report import Progress
    from moe_core.cli.traffic import Traffic
    from moe_core.demo import model as demo

    whole = team.whole()
    layers = [LayerReport(moe, check=not args.no_check) for moe in whole.moes]
    traffic = Traffic(whole.config.moe(0), team.size)
    bits, done, count = 0.0, 0, 0
    traced: dict[str, Any] | None = None
    progress = Progress(wanted, "scoring")
    windows = demo.windows(text.source, whole.config.context - 1, wanted)
    batches = demo.batched(windows, max(1, BATCH // team.size))
    for groups in demo.batched(batches, team.size):
        if not count:
            team.score(groups)  # first calls are slow: not timed
        spot = _spot(groups, done, token)
        steps = team.score(groups)
        if steps is None:
            continue
        _keep_the_slowest([step.calls for step in steps])
        if spot is not None:
            rank, row, what = spot
            pairs = zip(whole.moes, steps[rank].calls, strict=True)
            path = [follow(moe, call, row) for moe, call in pairs]
            traced = {"token": token, "what": what, "layers": path}
        for group, step in zip_longest(groups, steps):
            ids = demo.token_ids(group or ())
            for layer, call in zip(layers, step.calls, strict=True):
                layer.add(call, ids.flatten())
                traffic.add(call)
            done += sum(window.new for window in group or ())
            bits, count = bits + step.bits.sum().item(), count + len(group or ())
        if text.size > 20_000:
            progress.update(done, f"{bits / done:.3f} bits per byte")
    if not done:
        return None
    if text.size > 20_000:
        progress.close()
    if not bits / done < 1000:  # NaN and infinity too
        raise InputError(
            "the model's scores are no use: is it a trained one? Does --dtype suit it?"
        )
    return {
        "text": {
            "name": text.name,
            "size": text.size,
            "bytes": done,
            "windows": count,
            "truncated": done < text.size,
        },
        "score": {
            "bits": bits,
            "bits_per_byte": bits / done,
            "perplexity_per_byte": 2 ** (bits / done),
        },
        "ranks": team.size,
        "traffic": traffic.to_dict() if team.size > 1 else None,
        **_common(args, whole.config.dtype, team.backend, layers, traced),
    }


def _keep_the_slowest(calls: list[list[LayerCall]]) -> None:
    """Ranks work side by side: a stage took as long as on the rank where it took longest."""
    for first, *others in zip(*calls, strict=True):
        for call in others:
            for stage, seconds in call.stages.items():
                first.stages[stage] = max(first.stages.get(stage, 0.0), seconds)
            call.stages = {}


def _spot(groups: list[list[Window]], done: int, token: int | None) -> tuple[int, int, str] | None:
    """Where a byte of the text goes in this step: rank, row of its batch, and what it is."""
    for rank, group in enumerate(groups):
        for row, window in enumerate(group):
            if token is not None and done <= token < done + window.new:
                at = token - window.offset
                byte = window.text[at : at + 1]
                return rank, row * (1 + len(window.text)) + 1 + at, f"byte {byte[0]:#04x} {byte!r}"
            done += window.new
    return None


def _token_index(token: int | None, size: int, what: str) -> int | None:
    if token is None:
        return None
    if not -size <= token < size:
        raise InputError(
            f"--trace {token}: there are {size:,} {what}; use {-size} to {size - 1}"
            if size
            else f"--trace {token}: there are no {what}"
        )
    return token % size


def _common(
    args: argparse.Namespace,
    dtype: str,
    backend: dict[str, Any],
    layers: list[LayerReport],
    traced: dict[str, Any] | None,
) -> dict[str, Any]:
    shown = [layer.to_dict() for layer in layers]
    errors = [e for x in layers for e in (x.error, x.weight_error) if e is not None]
    worst = max(errors, default=None)
    return {
        "backend": backend,
        "dtype": dtype,
        "device": args.device,
        "layers": shown,
        "trace": traced,
        "worst_relative_error": worst if worst is not None and math.isfinite(worst) else None,
        "bound": layers[0].bound,
        "agrees": None if args.no_check else all(layer["agrees"] for layer in shown),
    }


# --------------------------------------------------------------------------------------- a layer


def _run_layer(args: argparse.Namespace) -> dict[str, Any]:
    config = MoEConfig.from_json(args.layer)
    if args.dtype:
        config = MoEConfig.from_dict(config.to_dict() | {"dtype": args.dtype})
    import torch

    from moe_core import MoELayer, trace
    from moe_core.cli.layer_check import LayerReport, follow
    from moe_core.contracts import Routing
    from moe_core.demo.model import read_tensors
    from moe_core.demo.team import describe

    tensors, _ = read_tensors(args.tensors)
    device = _device(args.device)
    _check_tensors(args.tensors, tensors, config)
    layer = MoELayer(config, backend=args.backend, device=device, inference=True)
    layer.name = "layer"
    _load(layer, tensors)
    hidden = tensors["hidden_states"].to(device, getattr(torch, config.dtype))
    input_ids = tensors.get("input_ids")
    input_ids = None if input_ids is None else input_ids.long().to(device)
    routing = None
    if "topk_ids" in tensors:
        wide = torch.float64 if config.dtype == "float64" else torch.float32
        routing = Routing(
            tensors["topk_ids"].long().to(device), tensors["topk_weights"].to(device, wide)
        )
    token = _token_index(args.trace, hidden[..., 0].numel(), "tokens in hidden_states")
    with torch.no_grad():
        layer(hidden, input_ids, routing=routing)  # first calls are slow: not timed
        with trace() as seen:
            out = layer(hidden, input_ids, routing=routing)
    report = LayerReport(layer, check=not args.no_check)
    flat = None if input_ids is None else input_ids.flatten()
    report.add(seen.calls[0], flat, routed_here=routing is None)
    traced = None
    if token is not None:
        path = [follow(layer, seen.calls[0], token)]
        traced = {"token": token, "what": None, "layers": path}
    if args.output:
        _write(args.output, {"output": out, **_routed(seen.calls[0].routing)})
    return _common(args, config.dtype, describe(layer.resolution), [report], traced)


def _routed(routing: Any) -> dict[str, Tensor]:
    ids, weights = routing.ids_and_weights()
    return {"topk_ids": ids, "topk_weights": weights}


def _write(path: str, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"--output {path} can't be written: {error}") from error


def _layer_shapes(config: MoEConfig) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Shapes of the weights: the experts' and the shared ones', then the router's."""
    experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    weights = {"w13": (experts, config.w13_rows, hidden), "w2": (experts, hidden, inner)}
    if config.bias:
        weights |= {"w13_bias": (experts, config.w13_rows), "w2_bias": (experts, hidden)}
    if config.num_shared_experts:
        shared = config.shared_size
        rows = shared * (2 if config.activation.gated else 1)
        weights |= {"shared_experts.w13": (rows, hidden), "shared_experts.w2": (hidden, shared)}
    router: dict[str, tuple[int, ...]] = {"router.weight": (experts, hidden)}
    if config.router.correction_bias:
        router["router.e_score_correction_bias"] = (experts,)
    if config.router.kind == "hash" and config.router.vocab_size is not None:
        router["router.tid2eid"] = (config.router.vocab_size, config.top_k)
    return weights, router


def _check_tensors(path: str, tensors: dict[str, Tensor], config: MoEConfig) -> None:
    """Raises ``InputError`` with everything that is missing, unknown, misshapen or no number."""
    import torch

    from moe_core.demo.model import shape_faults

    hidden = tensors.get("hidden_states")
    lead = tuple(hidden.shape[:-1]) if hidden is not None and hidden.ndim else (1,)
    needed, router = _layer_shapes(config)
    needed = {"hidden_states": (*lead, config.hidden_size), **needed}
    optional: dict[str, tuple[int, ...]] = {"input_ids": lead}
    route = {name: (math.prod(lead), config.top_k) for name in ("topk_ids", "topk_weights")}
    if route.keys() & tensors.keys():
        needed |= route
        optional |= router
    else:
        needed |= router
        if config.router.kind == "hash":
            needed["input_ids"] = optional.pop("input_ids")
        optional |= route
    faults = [shape_faults(tensors, needed, optional)]
    ids = {"input_ids": config.router.vocab_size, "topk_ids": config.num_experts}
    ids["router.tid2eid"] = config.num_experts
    for name, tensor in tensors.items():
        if name in ids:
            limit, first = ids[name], -1 if name == "topk_ids" else 0
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                faults.append(f"{name} holds {tensor.dtype} and must hold integers")
            elif limit and tensor.numel() and not first <= tensor.min() <= tensor.max() < limit:
                found = f"{tensor.min()} to {tensor.max()}"
                faults.append(f"{name} holds {found} and must lie in {first} to {limit - 1}")
        elif not tensor.is_floating_point():
            faults.append(f"{name} holds {tensor.dtype} and must hold floating point numbers")
        elif not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            faults.append(f"{name} holds {bad} numbers that are not finite")
    faults = [fault for fault in faults if fault]
    if faults:
        raise InputError(f"{path} doesn't fit the layer: {'; '.join(faults)}")


def _load(layer: MoELayer, tensors: dict[str, Tensor]) -> None:
    names = {"w13", "w2", "w13_bias", "w2_bias"}
    state = {
        f"experts.{name}" if name in names else name: tensor
        for name, tensor in tensors.items()
        if name in names or "." in name
    }
    layer.load_state_dict(layer.state_dict() | state)

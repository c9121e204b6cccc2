"""``moe-core bench``: how long a layer takes with each backend, one beside the other.

All have the same weights and inputs and take turns, so that whatever drifts drifts for all. Before
anything is timed, their outputs are compared. ``--tune`` measures instead which launch settings of
a backend are fastest for the layer and writes them to a file. Exit codes: 0 done, 1 a backend
refuses the layer or outputs differ by more than rounding explains, 2 a wrong flag or config.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_core import registry
from moe_core.cli import COMMANDS, NO, OK, bench_tune
from moe_core.cli.layer_check import error_bound, relative_error
from moe_core.cli.layer_flags import add_layer, layer_config
from moe_core.cli.report import Canvas, Progress
from moe_core.errors import ConfigError, Fault
from moe_core.layer import MoELayer
from moe_core.resolution import resolve
from moe_core.sizes import layer_sizes
from moe_core.timing import Spread, alternate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torch import Tensor

    from moe_core.config import MoEConfig

TOKENS = (1, 16, 256)
SAMPLES, WARMUP, LIMIT_S = 20, 3, 10.0


@dataclass(slots=True)
class Row:
    """``backend``: the spec that was asked for. ``difference``: of its output from the first
    backend's, relative to the largest; ``ratio``: its median over the first one's."""

    backend: str
    tokens: int
    seconds: Spread
    ratio: float
    difference: float
    tflops: float

    def to_dict(self) -> dict[str, Any]:
        told = {n: getattr(self, n) for n in ("backend", "tokens", "ratio", "difference", "tflops")}
        return {
            **told,
            **{f"{k}_s" if k[0] == "p" else k: v for k, v in self.seconds.to_dict().items()},
        }


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("bench", help=COMMANDS["bench"], description=__doc__)
    parser.add_argument(
        "--backend",
        action="append",
        metavar="SPEC",
        help="may be given again; the first is what the others are compared with "
        "(default: every installed backend that serves the layer)",
    )
    add_layer(parser)
    how = parser.add_argument_group("how it is timed")
    how.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    how.add_argument(
        "--tokens",
        action="append",
        type=int,
        metavar="T",
        help=f"tokens of a call; may be given again (default {', '.join(map(str, TOKENS))})",
    )
    how.add_argument("--backward", action="store_true", help="time forward and backward together")
    for name, value, what in (
        ("samples", SAMPLES, "timed calls of each backend"),
        ("warmup", WARMUP, "calls of each before that"),
        ("seed", 0, "of weights and inputs"),
    ):
        how.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default {value})")
    how.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"seconds after which no further sample is begun (default {LIMIT_S:g})",
    )
    parser.add_argument(
        "--tune",
        metavar="FILE",
        help="measure the launch settings of the one --backend instead, and add the best to FILE",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Raises ``ConfigError`` for flags and configs that can't be, or that a backend refuses."""
    config, device = layer_config(args), _device(args.device)
    tokens: list[int] = args.tokens or [*TOKENS]
    _check(args, tokens)
    if args.tune:
        return bench_tune.run(args, config, device, tokens, timed_call)
    with redirect_stdout(sys.stderr):  # backends are third-party code, and may print
        torch.manual_seed(args.seed)
        layers, left_out = _layers(args.backend, config, device, inference=not args.backward)
        rows = _measure(layers, config, device, tokens, args)
    report = {
        "config": config.to_dict(),
        "device": device_name(device),
        "pass": "forward and backward" if args.backward else "forward",
        "bound": 2 * error_bound(config),
        "parts": {spec: layer.describe()["parts"] for spec, layer in layers.items()},
        "left_out": left_out,
        "rows": [row.to_dict() for row in rows],
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, rows, Canvas(sys.stdout))
    return OK if all(row.difference <= report["bound"] for row in rows) else NO


def _check(args: argparse.Namespace, tokens: list[int]) -> None:
    least = (("--samples", args.samples, 1), ("--warmup", args.warmup, 0))
    numbers = [*least, *(("--tokens", t, 0) for t in tokens)]
    faults = [Fault(n, v, f"must be at least {low}") for n, v, low in numbers if v < low]
    if args.tune and len(args.backend or ()) != 1:
        faults.append(Fault("--tune", args.tune, "needs one --backend, whose settings are tried"))
    if faults:
        raise ConfigError(faults)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError([Fault("--device", name, "torch knows no such device")]) from error
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _layers(
    specs: list[str] | None, config: MoEConfig, device: torch.device, *, inference: bool
) -> tuple[dict[str, MoELayer], dict[str, list[str]]]:
    """A layer per backend, all with the first one's weights in memory once; and why not others."""
    left_out: dict[str, list[str]] = {}
    if specs is None:
        specs = []
        for info in registry.list_backends():
            if not {"runner", "fused"} & set(info.roles):
                if not info.roles:
                    left_out[info.name] = [info.reason]
                continue
            found = resolve(config, backend=info.name, device=device.type, autograd=not inference)
            if found.ok:
                specs.append(info.name)
            else:
                left_out[info.name] = [str(refusal) for refusal in found.refusals]
    layers: dict[str, MoELayer] = {}
    for spec in dict.fromkeys(specs):
        layer = MoELayer(config, backend=spec, device=device, inference=inference)
        if layers:
            layer.load_state_dict(next(iter(layers.values())).state_dict(), assign=True)
        layers[spec] = layer
    if not layers:
        message = f"no installed backend serves this layer: moe-core explain --device {device.type}"
        raise ConfigError([Fault("--backend", "", message)])
    return layers, left_out


def _measure(
    layers: dict[str, MoELayer],
    config: MoEConfig,
    device: torch.device,
    tokens: list[int],
    args: argparse.Namespace,
) -> list[Row]:
    rows: list[Row] = []
    first = next(iter(layers))
    progress = Progress(len(tokens), "timing")
    for done, count in enumerate(tokens):
        x = torch.randn(count, config.hidden_size, dtype=getattr(torch, config.dtype)).to(device)
        differences = _differences(layers, x)
        calls = {spec: timed_call(layer, x, args.backward) for spec, layer in layers.items()}
        times = alternate(
            calls, device, samples=args.samples, warmup=args.warmup, limit_s=args.limit
        )
        flops = layer_sizes(config).flops_per_token * count * (3 if args.backward else 1)
        rows += [
            Row(
                backend=spec,
                tokens=count,
                seconds=taken,
                ratio=taken.p50 / times[first].p50,
                difference=differences[spec],
                tflops=flops / taken.p50 / 1e12,
            )
            for spec, taken in times.items()
        ]
        progress.update(done + 1, f"{count} tokens")
    progress.close()
    return rows


def _differences(layers: dict[str, MoELayer], x: Tensor) -> dict[str, float]:
    """With one routing for all: a near tie that goes another way is no difference of numbers."""
    first = next(iter(layers.values()))
    with torch.no_grad():
        routing = first.router(x)
        outputs = {spec: layer(x, routing=routing) for spec, layer in layers.items()}
    wanted = next(iter(outputs.values()))
    return {spec: relative_error(out, wanted) for spec, out in outputs.items()}


def timed_call(layer: MoELayer, x: Tensor, backward: bool) -> Callable[[], object]:
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return layer(x)

        return forward
    into = [x.clone().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    upstream = torch.randn_like(x)

    def both() -> object:
        return torch.autograd.grad(layer(into[0]), into, upstream)

    return both


def _show(report: dict[str, Any], rows: list[Row], canvas: Canvas) -> None:
    c = report["config"]
    canvas.line(
        f"{report['pass']} on {report['device']}: hidden {c['hidden_size']:,}, intermediate "
        f"{c['intermediate_size']:,}, {c['num_experts']} experts, top {c['top_k']}, {c['dtype']}"
    )
    width = max(len("BACKEND"), *(len(row.backend) for row in rows))
    canvas.line(
        f"{'BACKEND':<{width}}  {'TOKENS':>7}  {'P20 MS':>9}  {'MEDIAN MS':>9}  {'P80 MS':>9}  "
        f"{'RATIO':>6}  {'TFLOP/S':>8}  DIFFERENCE"
    )
    for row in rows:
        s = row.seconds
        verdict = "" if row.difference <= report["bound"] else "  more than rounding explains"
        canvas.line(
            f"{row.backend:<{width}}  {row.tokens:>7,}  {s.p20 * 1e3:>9.3f}  {s.p50 * 1e3:>9.3f}  "
            f"{s.p80 * 1e3:>9.3f}  {row.ratio:>6.2f}  {row.tflops:>8.3g}  {row.difference:.1e}"
            f"{verdict}"
        )
    for name in report["left_out"]:
        canvas.line(f"left out: {name} (moe-core explain --backend {name} says why)")

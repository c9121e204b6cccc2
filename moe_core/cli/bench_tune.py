"""``moe-core bench --tune``: which launch settings of a backend are fastest for a layer.

A runner whose kernels can be launched in several ways has ``tuner(call)``; what that returns has
``space`` (name → settings to try, as JSON, the shipped one first), ``using(chosen)`` (a context;
numbers by name) and ``write(path, chosen)``. Names are tried one after the other, each with the
others as they are best so far; the settings of a name take turns.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_core.cli import NO, OK
from moe_core.cli.layer_check import error_bound, relative_error
from moe_core.cli.report import Canvas, Progress
from moe_core.errors import ConfigError, Fault
from moe_core.layer import MoELayer
from moe_core.timing import alternate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torch import Tensor

    from moe_core.config import MoEConfig

    TimedCall = Callable[[MoELayer, Tensor, bool], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Choice:
    """``tried``: settings that ran and were right, ``left_out``: those that weren't or didn't.
    ``before_s`` and ``after_s``: median of a call with the shipped setting and with ``setting``."""

    name: str
    tokens: int
    setting: Any
    changed: bool
    tried: int
    left_out: int
    before_s: float
    after_s: float

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def run(
    args: argparse.Namespace,
    config: MoEConfig,
    device: torch.device,
    tokens: list[int],
    timed_call: TimedCall,
) -> int:
    """``timed_call(layer, x, backward)`` makes the call that is timed. Raises ``ConfigError`` for a
    backend that has nothing to choose."""
    with redirect_stdout(sys.stderr):
        torch.manual_seed(args.seed)
        (spec,) = args.backend
        layer = MoELayer(config, backend=spec, device=device, inference=not args.backward)
        runner: Any = layer.experts.pipeline.runner
        if not hasattr(runner, "tuner"):
            named = layer.describe()["parts"].get("runner", spec)
            message = f"its runner {named} has no launch settings to choose from: drop --tune"
            raise ConfigError([Fault("--backend", spec, message)])
        choices: list[Choice] = []
        for count in tokens:
            if count:
                x = _inputs(config, count, device)
                call = timed_call(layer, x, args.backward)
                choices += _tune(config, runner, call, x, args)
    report = {"file": args.tune, "choices": [choice.to_dict() for choice in choices]}
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(choices, args.tune, Canvas(sys.stdout))
    return OK if choices else NO


def _inputs(config: MoEConfig, count: int, device: torch.device) -> Tensor:
    return torch.randn(count, config.hidden_size, dtype=getattr(torch, config.dtype)).to(device)


def _tune(
    config: MoEConfig, runner: Any, call: Callable[[], object], x: Tensor, args: argparse.Namespace
) -> list[Choice]:
    tuner = runner.tuner(call)
    wanted = _numbers(call())
    best: dict[str, int] = {}
    choices: list[Choice] = []
    progress = Progress(len(tuner.space), f"{x.shape[0]} tokens")
    for done, (name, settings) in enumerate(tuner.space.items()):
        calls: dict[str, Callable[[], object]] = {}
        for number in range(len(settings)):
            chosen = {**best, name: number}
            if _is_right(tuner, chosen, call, wanted, config):
                calls[str(number)] = _with(tuner, chosen, call)
        if not calls:  # the shipped ones at least ran before
            continue
        times = alternate(
            calls, x.device, samples=args.samples, warmup=args.warmup, limit_s=args.limit
        )
        fastest = min(times, key=lambda number: times[number].p50)
        best[name] = int(fastest)
        shipped = times.get("0", times[fastest])
        choices.append(
            Choice(
                name=name,
                tokens=x.shape[0],
                setting=settings[best[name]],
                changed=best[name] != 0,
                tried=len(calls),
                left_out=len(settings) - len(calls),
                before_s=shipped.p50,
                after_s=times[fastest].p50,
            )
        )
        progress.update(done + 1, name)
    progress.close()
    tuner.write(args.tune, best)
    return choices


def _with(tuner: Any, chosen: dict[str, int], call: Callable[[], object]) -> Callable[[], object]:
    def timed() -> object:
        with tuner.using(chosen):
            return call()

    return timed


def _is_right(
    tuner: Any,
    chosen: dict[str, int],
    call: Callable[[], object],
    wanted: list[Tensor],
    config: MoEConfig,
) -> bool:
    """Whether the call runs like this and gives what it gave as shipped, roundings aside. A setting
    that the chip has too little memory for raises, and is no candidate."""
    try:
        with tuner.using(chosen):
            found = _numbers(call())
    except Exception as error:
        print(f"{chosen}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return False
    pairs = zip(found, wanted, strict=True)
    return all(relative_error(a, b) <= 2 * error_bound(config) for a, b in pairs)


def _numbers(result: object) -> list[Tensor]:
    tensors = result if isinstance(result, tuple | list) else [result]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _show(choices: list[Choice], file: str, canvas: Canvas) -> None:
    for c in choices:
        gain = c.before_s / c.after_s
        setting = ", ".join(f"{k} {v}" for k, v in c.setting.items())
        state = f"{gain:.2f} times as fast" if c.changed else "as shipped"
        canvas.line(f"{c.name}  {c.after_s * 1e3:.3f} ms, {state} ({c.tried} tried): {setting}")
    canvas.line(f"written to {file}: MOE_TRITON_CONFIGS={file} makes layers use it")

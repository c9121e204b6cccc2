"""``moe-core doctor``: this machine, the environment, and whether each backend's code loads.

Every entry point is loaded in a child process with a time limit, then the target of each of its
parts is imported: a plugin that raises, hangs or dies shows as such. Exit codes: 0 all is well,
1 something can't be used on this machine, 2 a variable is wrong or a name is claimed twice,
3 a backend is broken or written for another version of the interface.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core import __version__, environment, registry
from moe_core.cli import BROKEN, COMMANDS, NO, OK, USAGE
from moe_core.cli.report import Canvas
from moe_core.errors import ConfigError, Fault, nearest
from moe_core.probe import probe_backend, probe_torch
from moe_core.spec import parse_spec

if TYPE_CHECKING:
    from moe_core.probe import Outcome
    from moe_core.registry import BackendInfo

LIMIT_S = 60.0
# From best to worst; a backend has the worst of what its manifest and parts have.
EXIT = {
    "ok": OK,
    "not allowed": OK,
    "refused": NO,
    "conflict": USAGE,
    "version": BROKEN,
    "raises": BROKEN,
    "hangs": BROKEN,
    "dies": BROKEN,
}
CPU_FLAGS = (
    *("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "bf16", "i8mm"),
)


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser("doctor", help=COMMANDS["doctor"], description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; NAME or dist:NAME")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=LIMIT_S,
        metavar="S",
        help=f"seconds for a manifest, and for each part (default {LIMIT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="for programs; holds tracebacks too")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Raises ``UnknownBackendError`` for a NAME that no entry point has."""
    claims = _selected(args.names)
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, _cores())) as pool:
        try:
            asked = pool.submit(probe_torch, max(args.timeout, LIMIT_S), stop)
            state, torch = asked.result()
            devices: list[str] | None = torch.get("devices")
            jobs = [
                (c, None)
                if c.status == "not allowed"
                else (c, pool.submit(probe_backend, c, devices, args.timeout, stop))
                for c in claims
            ]
            backends = [_judged(claim, job and job.result()) for claim, job in jobs]
        except BaseException:
            stop.set()  # the children are killed
            pool.shutdown(cancel_futures=True)
            raise
    faults = _faults()
    exits = [EXIT[b["status"]] for b in backends]
    exits += [USAGE] if faults else []
    exits += [NO if state.status == "refused" else BROKEN] if state.status != "ok" else []
    report: dict[str, Any] = {
        "exit_code": max(exits, default=OK),
        "machine": _machine(),
        "torch": torch or asdict(state),
        "variables": {n: os.environ[n] for n in sorted(os.environ) if _is_ours(n)},
        "faults": [f.to_dict() for f in faults],
        "backends": backends,
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, faults, Canvas(sys.stdout))
    return report["exit_code"]


def _selected(names: list[str]) -> list[BackendInfo]:
    if not names:
        return registry.installed()
    chosen: list[BackendInfo] = []
    for text in names:
        distribution, _, name = text.rpartition(":")
        found = registry.installed(name, distribution or None)
        if not found:
            registry.get(name, distribution or None)  # raises, and says what to do
        chosen += [c for c in found if c not in chosen]
    return sorted(chosen, key=lambda c: (c.name, c.distribution))


def _faults() -> list[Fault]:
    faults = environment.check_environment()
    try:
        known = registry.all_names()
    except ConfigError as error:  # MOE_PLUGINS has a name that nothing has
        return faults + list(error.faults)
    spec = environment.backend()
    if spec and not any(f.field == "MOE_BACKEND" for f in faults):
        for named in (n for a in parse_spec(spec).alternatives for n in a.names):
            if named.name not in known:
                message = f"no backend named {named.name!r}{nearest(named.name, known)}"
                faults.append(Fault("MOE_BACKEND", spec, message))
    return faults


def _is_ours(variable: str) -> bool:
    return variable.startswith(environment.PREFIX)


def _cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine() -> dict[str, Any]:
    try:
        triton: str | None = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        found = [line for line in lines if line.startswith(("flags", "Features"))][:1]
        flags: list[str] | None = [f for f in CPU_FLAGS if f in set(" ".join(found).split())]
    except OSError:  # not Linux
        flags = None
    return {
        "moe_core": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": f"{platform.system()} {platform.machine()}",
        "triton": triton,
        "cores": _cores(),
        "cpu_flags": flags,
    }


def _judged(claim: BackendInfo, probe: Any) -> dict[str, Any]:
    about = {n: getattr(claim, n) for n in ("name", "distribution", "version", "target")}
    if probe is None:
        reason = f"MOE_PLUGINS={os.environ.get('MOE_PLUGINS')!r} leaves it out, nothing was loaded"
        fix = f"add {claim.name} to MOE_PLUGINS to allow it"
        return about | {"status": "not allowed", "reason": reason, "fix": fix, "parts": []}
    statuses = [probe.manifest.status, *(p.outcome.status for p in probe.parts), claim.status]
    worst = max((s for s in statuses if s in EXIT), key=list(EXIT).index)
    told = asdict(probe.manifest) | {"status": worst, "fix": _fix(claim, probe.manifest)}
    if worst == "conflict":
        told["reason"] = f"{claim.name!r} is claimed by another distribution too"
        told["fix"] = f"write {claim.distribution}:{claim.name}, or uninstall one of them"
    parts = [
        {"role": p.role, "mode": p.mode, "target": p.target}
        | asdict(p.outcome)
        | {"fix": _fix(claim, p.outcome)}
        for p in probe.parts
    ]
    return about | told | {"parts": parts}


def _fix(claim: BackendInfo, outcome: Outcome) -> str:
    if outcome.status in ("ok", "refused", "version"):
        return ""  # the reason says what to do
    if claim.distribution == registry.CORE:
        return "install moe-core anew; if that doesn't help, report it with this text"
    away = f"upgrade {claim.distribution}, or uninstall it: pip uninstall {claim.distribution}"
    if outcome.missing:
        return f"install what has the module {outcome.missing!r}; else {away}"
    return f"{away}" + ("; --timeout gives it longer" if outcome.status == "hangs" else "")


_COLOURS = {"ok": 32, "refused": 33, "not allowed": 33, "conflict": 33}


def _show(report: dict[str, Any], faults: list[Fault], canvas: Canvas) -> None:
    machine, torch = report["machine"], report["torch"]
    python = (
        f"{machine['python']} ({machine['implementation']}, {machine['platform']}), "
        f"moe-core {machine['moe_core']}"
    )
    flags = machine["cpu_flags"]
    cpu = "flags unknown" if flags is None else ", ".join(flags) or "no vector flags of interest"
    lines = [("python", python), ("torch", _torch_line(torch))]
    lines += [("", f"at {torch['where']}")] if torch.get("where") else []
    lines += [("triton", machine["triton"] or "not installed")]
    lines += [("cpu", f"{machine['cores']} cores for this process; {cpu}")]
    shown = [f"{name}={value!r}" for name, value in report["variables"].items()]
    lines += [("variables" if not i else "", text) for i, text in enumerate(shown or ["none set"])]
    for name, text in lines:
        canvas.line(f"{name:<10} {text}".rstrip())
    for fault in faults:
        canvas.line(f"{'':<10} {canvas.paint(str(fault), 31)}")
    canvas.line()
    for b in report["backends"]:
        status = canvas.paint(b["status"], _COLOURS.get(b["status"], 31))
        roles = ", ".join(_label(p) for p in b["parts"] if p["status"] == "ok")
        head = f"{b['name']:<10} {b['distribution']} {b['version']}  {status}"
        canvas.line(f"{head}  {roles}".rstrip())
        _explain(canvas, b, "manifest")
        for part in b["parts"]:
            if part["status"] != "ok":
                _explain(canvas, part, f"{_label(part)} {part['status']}")
    counts = [f"{sum(b['status'] == s for b in report['backends'])} {s}" for s in EXIT]
    canvas.line()
    canvas.line("backends: " + (", ".join(c for c in counts if c[0] != "0") or "none installed"))


def _torch_line(torch: dict[str, Any]) -> str:
    if "version" not in torch:
        return f"{torch['status']}: {torch['reason']}"
    cuda, hip, names = torch["cuda"], torch["hip"], torch["device_names"]
    built = f"with CUDA {cuda}" if cuda else f"with ROCm {hip}" if hip else "for CPUs"
    cards = [f"{names.count(n)} x {n}" for n in dict.fromkeys(names)]
    gloo, nccl = "yes" if torch["gloo"] else "no", torch["nccl"] or "no"
    return (
        f"{torch['version']}, built {built}, runs on {', '.join(cards or torch['devices'])}; "
        f"gloo {gloo}, NCCL {nccl}; CPU kernels {torch['cpu_capability']}"
    )


def _label(part: dict[str, Any]) -> str:
    return part["role"] + (f"[mode={part['mode']}]" if part["mode"] else "")


def _explain(canvas: Canvas, told: dict[str, Any], what: str) -> None:
    if not told["reason"]:
        return
    first, *more = str(told["reason"]).splitlines()
    canvas.line(f"  {what}: {first}")
    for line in more:
        canvas.line(f"    {line}")
    if told.get("where"):
        canvas.line(f"    at {told['where']}")
    if told["fix"]:
        canvas.line(f"    {told['fix']}")

"""Loads a backend's code in a child process: one that hangs or dies takes nobody along.

The child tells what it does step by step, first the manifest, then the target of each part. Where
it falls silent for longer than the limit it is killed, and a new child goes on with the next part.
Nothing of torch or of a plugin is imported in the calling process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from moe_core import registry
from moe_core.environment import requirement_fault
from moe_core.errors import BackendLoadError, BackendVersionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from moe_core.registry import BackendInfo

    Steps: TypeAlias = Iterator[tuple[int, tuple["Outcome", Any] | None]]  # None: it begins

START = 30.0
"""Seconds that the interpreter itself gets to start, besides the limit."""
GRACE = 1.0
"""Seconds after the limit in which a hanging child writes down where it hangs."""
TAIL = 8192
"""Bytes of what a child wrote that are kept."""

_BOOT = (
    "import json, sys; job = json.loads(sys.argv[1]); sys.path[:] = job['path']; "
    "from moe_core.probe import child; child(job)"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What loading one thing came to.

    ``status``: ``ok``, ``refused`` (not on this machine), ``version``, ``raises``, ``hangs`` or
    ``dies``. ``where``: file, line and code; ``missing``: the module that an import didn't find;
    ``output``: the traceback, or the last of what the child wrote.
    """

    status: str
    reason: str = ""
    where: str = ""
    missing: str = ""
    output: str = ""


@dataclass(slots=True)
class PartOutcome:
    role: str
    mode: str
    target: str
    outcome: Outcome


@dataclass(slots=True)
class Probe:
    """``parts`` is empty where the manifest couldn't be loaded."""

    manifest: Outcome
    parts: list[PartOutcome] = field(default_factory=list[PartOutcome])


def probe_torch(limit: float, stop: threading.Event) -> tuple[Outcome, dict[str, Any]]:
    """What torch says of itself and of this machine; empty where it isn't ``ok``."""
    reports, end = _watch({"kind": "torch"}, limit, stop)
    if end is not None:
        return end, {}
    return Outcome(**reports[-1]["outcome"]), reports[-1]["data"]


def probe_backend(
    info: BackendInfo, devices: list[str] | None, limit: float, stop: threading.Event
) -> Probe:
    """Loads the manifest, then imports each part's target (and its check). ``devices``: types that
    this machine has, None = not known; a part that runs on none of them isn't imported."""
    probe, first = Probe(Outcome("ok")), 1
    job = {"kind": "backend", "name": info.name, "distribution": info.distribution}
    while True:
        reports, end = _watch({**job, "first": first, "devices": devices}, limit, stop)
        step = 0
        for report in reports:
            step = report["step"]
            if "outcome" not in report:
                continue
            outcome = Outcome(**report["outcome"])
            if step:
                probe.parts[step - 1].outcome = outcome
            elif not probe.parts:
                probe.manifest = outcome
                probe.parts = [PartOutcome(**part, outcome=outcome) for part in report["data"]]
        if end is None:
            return probe
        if not step:
            probe.manifest = end
            return probe
        probe.parts[step - 1].outcome = end
        first = step + 1


def _watch(
    job: dict[str, Any], limit: float, stop: threading.Event
) -> tuple[list[dict[str, Any]], Outcome | None]:
    """What the child reported, and how it ended unless it finished."""
    data = json.dumps({**job, "path": sys.path, "limit": limit})
    # The job is one backend that is allowed, so MOE_PLUGINS has been heeded.
    environment = {k: v for k, v in os.environ.items() if k != "MOE_PLUGINS"}
    environment["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, data],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # what it starts is killed with it, and Ctrl-C is ours
    )
    assert process.stdout is not None
    assert process.stderr is not None
    said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    tail = bytearray()
    threads = [
        threading.Thread(target=_read_lines, args=(process.stdout, said), daemon=True),
        threading.Thread(target=_read_tail, args=(process.stderr, tail), daemon=True),
    ]
    for thread in threads:
        thread.start()
    reports: list[dict[str, Any]] = []
    done = hung = False
    deadline = time.monotonic() + START + limit
    try:
        while not (done or hung):
            try:
                line = said.get(timeout=0.1)
            except queue.Empty:
                if stop.is_set():
                    return reports, Outcome("hangs", "interrupted")
                hung = time.monotonic() > deadline
                continue
            if line is None:
                break
            report = json.loads(line)
            done = "done" in report
            if not done:
                reports.append(report)
            deadline = time.monotonic() + limit + GRACE
    finally:
        _kill(process)
        for thread in threads:
            thread.join(GRACE)  # longer only where a grandchild has escaped with the pipe
    text = tail.decode(errors="replace").strip()
    if done:
        return reports, None
    if hung:
        reason = f"no end after {limit:g} s, killed"
        return reports, Outcome("hangs", reason, _frame(text, last_thread=True), output=text)
    reason = _death(process.returncode)
    fatal = re.search(r"^Fatal Python error: (.*)$", text, re.MULTILINE)
    said_last = text.splitlines()[-1] if text and not fatal else ""
    detail = fatal[1] if fatal else said_last
    reason += f": {detail}" if detail else ""
    return reports, Outcome("dies", reason, _frame(text) if fatal else "", output=text)


def _read_lines(stream: BinaryIO, said: queue.SimpleQueue[bytes | None]) -> None:
    with stream:
        for line in stream:
            said.put(line)
    said.put(None)


def _read_tail(stream: BinaryIO, tail: bytearray) -> None:
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            tail += chunk
            del tail[:-TAIL]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It has not been waited for yet, so its number is still its own."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _death(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code}"
    try:
        return f"the process died of {signal.Signals(-code).name}"
    except ValueError:
        return f"the process died of signal {-code}"


def _frame(text: str, last_thread: bool = False) -> str:
    """The innermost frame of a dump by ``faulthandler``, which ends with the main thread."""
    dump = text.rpartition("(most recent call first):")[2] if last_thread else text
    found = re.search(r'^  File "(.*)", line (\d+)', dump, re.MULTILINE)
    return _place(found[1], int(found[2])) if found else ""


def _place(file: str, line: int) -> str:
    code = ""
    with suppress(OSError, UnicodeDecodeError, IndexError):
        code = Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    return f"{file}, line {line}" + (f": {code}" if code else "")


# ------------------------------------------------------------------------------------- the child


def child(job: dict[str, Any]) -> None:
    """Runs the steps of a job and reports on what was standard output; never returns."""
    # Plugins print while they are imported; that goes to stderr.
    with open(os.dup(1), "w", encoding="utf-8") as reports:
        os.dup2(2, 1)
        faulthandler.enable(2, all_threads=False)

        def say(**report: Any) -> None:
            reports.write(json.dumps(report) + "\n")
            reports.flush()
            faulthandler.dump_traceback_later(job["limit"], file=2)

        for number, result in _torch() if job["kind"] == "torch" else _backend(job):
            if result is None:
                say(step=number)
            else:
                say(step=number, outcome=asdict(result[0]), data=result[1])
        say(done=True)
    os._exit(0)  # what a plugin does when the interpreter ends is not looked at


def _torch() -> Steps:
    yield 0, None
    fault = requirement_fault("torch")
    if fault:
        yield 0, (Outcome("refused", fault), {})
        return
    try:
        data = _ask_torch()
    except BaseException as error:
        yield 0, (_raised(error), {})
    else:
        yield 0, (Outcome("ok"), data)


def _ask_torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    on_cuda = torch.cuda.is_available()
    distributed = dist.is_available()
    has_nccl = distributed and dist.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": ["cpu", *([accelerator.type] if accelerator else [])],
        "device_names": [
            torch.cuda.get_device_name(i)
            for i in range(torch.cuda.device_count() if on_cuda else 0)
        ],
        "distributed": distributed,
        "gloo": distributed and dist.is_gloo_available(),
        "nccl": ".".join(map(str, nccl.version())) if has_nccl else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _backend(job: dict[str, Any]) -> Steps:
    yield 0, None
    try:
        parts = registry.get(job["name"], job["distribution"]).backend.parts
    except BaseException as error:
        yield 0, (_refused_to_load(error), [])
        return
    shown = [{"role": p.role, "mode": p.mode, "target": p.target} for p in parts]
    yield 0, (Outcome("ok"), shown)
    torch_fault = requirement_fault("torch")  # every part is made of it
    for number, part in enumerate(parts, 1):
        if number < job["first"]:
            continue
        yield number, None
        needs = [*part.needs, *(["torch"] if torch_fault else [])]
        faults = [f for f in map(requirement_fault, dict.fromkeys(needs)) if f]
        devices = job["devices"]
        if devices is not None and not set(devices) & set(part.offer.device):
            runs_on = ", ".join(map(str, part.offer.device))
            faults.append(f"runs on {runs_on}, and this machine has {', '.join(devices)}")
        if faults:
            yield number, (Outcome("refused", "; ".join(faults)), None)
            continue
        try:
            for target in (part.target, part.check):
                module, _, name = (target or "").partition(":")
                if module and not callable(getattr(import_module(module), name)):
                    raise TypeError(f"{target} is not callable")
        except BaseException as error:
            yield number, (_raised(error), None)
        else:
            yield number, (Outcome("ok"), None)


def _refused_to_load(error: BaseException) -> Outcome:
    if isinstance(error, BackendVersionError):
        return Outcome("version", str(error))
    if isinstance(error, BackendLoadError):
        cause = error.__cause__
        known = _raised(cause) if cause is not None else Outcome("raises")
        return Outcome("raises", error.reason, known.where, known.missing, known.output)
    return _raised(error)


def _raised(error: BaseException) -> Outcome:
    """KeyboardInterrupt too: nobody presses Ctrl-C here."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f.lineno and not f.filename.startswith("<frozen")]
    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    where = ""
    # A frame of ours only says that we imported it.
    if frames and frames[-1].filename != __file__:
        where = _place(frames[-1].filename, frames[-1].lineno or 0)
    text = "".join(traceback.format_exception(error))
    return Outcome("raises", reason, where, missing, text)

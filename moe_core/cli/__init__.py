"""``moe-core``: a module per command, each with ``register(subparsers)`` and ``run(args) -> int``.

Only the module of the command that was asked for is imported, so ``list`` needs no torch. A
``MoEError`` ends a command with its sentence on stderr and an exit code, never with a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING

from moe_core import __version__
from moe_core.environment import check_environment
from moe_core.errors import (
    BackendLoadError,
    BackendVersionError,
    ConfigError,
    HandleError,
    MoEError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# Exit codes; docs/cli.md says the same.
OK = 0
NO = 1  # the answer is no: a refusal, a check that failed
USAGE = 2  # what was typed, or a spec, config, file or variable, is wrong
BROKEN = 3  # a backend that was asked for can't be loaded
BUG = 4  # an error that nobody foresaw, with its traceback
INTERRUPTED = 130  # 128 + SIGINT, as a shell has it
BROKEN_PIPE = 141  # 128 + SIGPIPE

COMMANDS = {
    "list": "the installed backends",
    "doctor": "this machine, the environment, and whether each backend's code loads",
    "explain": "which backend would run a layer, and why not the others",
    "matrix": "which transport runs with which runner here, and through which converter",
    "run": "run the demo model through a backend",
    "plan-placement": "which rank should hold which expert, and how often, from tokens per expert",
    "bench": "how long a layer takes with each backend, and which launch settings are fastest",
    "simulate": "what a layer would send between ranks and nodes, and how even the load is",
    "conformance": "whether a backend keeps every contract that it claims to keep",
    "new-backend": "write a project with a backend of your own",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. ``argv`` is what follows ``moe-core``, by default the process's own."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except MoEError as error:
        print(f"moe-core: {error}", *getattr(error, "__notes__", ()), sep="\n  ", file=sys.stderr)
        if isinstance(error, BackendLoadError):
            print("  (moe-core list --json has the traceback)", file=sys.stderr)
        return _code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads on. Python would flush once more when it exits, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            print("moe-core: this needs torch: pip install torch", file=sys.stderr)
            return USAGE
        traceback.print_exc()
        return BUG


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="moe-core",
        description="One mixture-of-experts layer, every way of running it.",
        epilog="exit codes: 0 ok, 1 no, 2 bad input, 3 a broken backend, 4 an unforeseen error",
    )
    parser.add_argument("--version", action="version", version=f"moe-core {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    module = None
    for name, summary in COMMANDS.items():
        if name == asked:
            module = import_module(f"{__name__}.{name.replace('-', '_')}")
            module.register(commands)
        else:
            commands.add_parser(name, help=summary, add_help=False)
    own: Sequence[str] = argv  # not list(): `list` is a module of this package
    rest: Sequence[str] = ()
    if "--" in argv:  # what follows is for the program that the command runs
        end = argv.index("--")
        own, rest = argv[:end], argv[end + 1 :]
    try:
        args = parser.parse_args(own)
        args.rest = rest
        if rest and not getattr(args, "takes_rest", False):
            parser.error(f"{args.command} passes nothing on: {' '.join(rest)}")
    except SystemExit as done:  # --help and --version, or a usage error that it has printed
        return done.code if isinstance(done.code, int) else USAGE
    faults = check_environment()
    if faults and args.command != "doctor":  # which reports them among the rest
        raise ConfigError(faults)
    assert module is not None  # a command is required
    return module.run(args)


def _code(error: MoEError) -> int:
    if isinstance(error, ConfigError) and error.resolution is not None:
        return NO
    if isinstance(error, BackendLoadError | BackendVersionError):
        return BROKEN
    return BUG if isinstance(error, HandleError) else USAGE

"""The flags that describe a layer and where it runs, for the commands that take one."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from moe_core.config import DTYPES, ROWS, MoEConfig
from moe_core.errors import ConfigError, Fault

if TYPE_CHECKING:
    import argparse

DEFAULTS = {"hidden_size": 1024, "intermediate_size": 2048, "num_experts": 8, "top_k": 2}


def add_layer(parser: argparse.ArgumentParser) -> None:
    """What ``layer_config`` reads."""
    layer = parser.add_argument_group("the layer")
    layer.add_argument("--config", metavar="FILE", help="a MoEConfig as JSON")
    for name, value in DEFAULTS.items():
        flag = "--" + name.replace("_", "-")
        layer.add_argument(flag, type=int, metavar="N", help=f"without a file {value}")
    layer.add_argument("--dtype", choices=DTYPES)
    layer.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of MoEConfig, e.g. bias=true, router.scoring_func=sigmoid",
    )


def add_place(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What ``wants`` reads, and ``--rows``."""
    where = parser.add_argument_group("where it runs")
    where.add_argument("--rows", choices=ROWS, default="distinct", help="over the ep group")
    where.add_argument("--max-tokens-per-rank", type=int, metavar="N", help="if it is known")
    where.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    where.add_argument("--inference", action="store_true", help="no gradients wanted")
    where.add_argument("--compile", action="store_true", help="under torch.compile, full graph")
    where.add_argument("--cuda-graph", action="store_true", help="captured in a CUDA graph")
    return where


def wants(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``resolve`` and ``make_request``."""
    return {
        "device": args.device,
        "max_tokens_per_rank": args.max_tokens_per_rank,
        "autograd": not args.inference,
        "compile": args.compile,
        "cuda_graph": args.cuda_graph,
    }


def layer_config(args: argparse.Namespace) -> MoEConfig:
    """From the file and the flags, which win. Raises ``ConfigError``."""
    given = MoEConfig.from_json(args.config).to_dict() if args.config else DEFAULTS
    data: dict[str, Any] = deepcopy(given)
    for name in (*DEFAULTS, "dtype"):
        if getattr(args, name) is not None:
            data[name] = getattr(args, name)
    faults: list[Fault] = []
    for text in args.set:
        path, equals, value = text.partition("=")
        *parents, last = path.strip().split(".")
        place: Any = data
        for parent in parents:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else None
        if not equals or not isinstance(place, dict):
            faults.append(Fault("--set", text, "must look like bias=true or router.kind=hash"))
        else:
            place[last] = _value(value.strip())
    if faults:
        raise ConfigError(faults)
    return MoEConfig.from_dict(data)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # a bare word is a string

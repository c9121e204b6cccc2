"""moe-core: one mixture-of-experts layer, any backend by a string, the same numbers on all.

Importing this package imports no torch: names are looked up when first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moe_core.balance import plan_placement as plan_placement
    from moe_core.config import Activation as Activation
    from moe_core.config import MoEConfig as MoEConfig
    from moe_core.config import ParallelConfig as ParallelConfig
    from moe_core.config import RouterConfig as RouterConfig
    from moe_core.contracts import ExchangePlan as ExchangePlan
    from moe_core.contracts import Handle as Handle
    from moe_core.contracts import Routing as Routing
    from moe_core.errors import BackendConflictError as BackendConflictError
    from moe_core.errors import BackendLoadError as BackendLoadError
    from moe_core.errors import BackendVersionError as BackendVersionError
    from moe_core.errors import ConfigError as ConfigError
    from moe_core.errors import Fault as Fault
    from moe_core.errors import HandleError as HandleError
    from moe_core.errors import InputError as InputError
    from moe_core.errors import MoEError as MoEError
    from moe_core.errors import UnknownBackendError as UnknownBackendError
    from moe_core.experts import Experts as Experts
    from moe_core.functional import moe_forward as moe_forward
    from moe_core.interfaces import Combiner as Combiner
    from moe_core.interfaces import Dispatcher as Dispatcher
    from moe_core.interfaces import ExpertRunner as ExpertRunner
    from moe_core.interfaces import FusedPath as FusedPath
    from moe_core.interfaces import Router as Router
    from moe_core.interfaces import Transport as Transport
    from moe_core.layer import MoELayer as MoELayer
    from moe_core.manifest import Backend as Backend
    from moe_core.manifest import Offer as Offer
    from moe_core.manifest import Part as Part
    from moe_core.manifest import Range as Range
    from moe_core.manifest import Request as Request
    from moe_core.registry import list_backends as list_backends
    from moe_core.registry import register_backend as register_backend
    from moe_core.resolution import Resolution as Resolution
    from moe_core.resolution import resolve as resolve
    from moe_core.routing import route as route
    from moe_core.row_layouts import RowExchange as RowExchange
    from moe_core.row_layouts import RowLayout as RowLayout
    from moe_core.tracing import trace as trace
    from moe_core.traffic import simulate as simulate

_HOME = {
    "balance": ("plan_placement",),
    "config": ("Activation", "MoEConfig", "ParallelConfig", "RouterConfig"),
    "contracts": ("ExchangePlan", "Handle", "Routing"),
    "errors": (
        *("BackendConflictError", "BackendLoadError", "BackendVersionError", "ConfigError"),
        *("Fault", "HandleError", "InputError", "MoEError", "UnknownBackendError"),
    ),
    "experts": ("Experts",),
    "functional": ("moe_forward",),
    "interfaces": (
        *("Combiner", "Dispatcher", "ExpertRunner", "FusedPath", "Router", "Transport"),
    ),
    "layer": ("MoELayer",),
    "manifest": ("Backend", "Offer", "Part", "Range", "Request"),
    "registry": ("list_backends", "register_backend"),
    "resolution": ("Resolution", "resolve"),
    "routing": ("route",),
    "row_layouts": ("RowExchange", "RowLayout"),
    "tracing": ("trace",),
    "traffic": ("simulate",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})

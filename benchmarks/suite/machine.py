"""Where the suite runs: moe-core from this checkout, versions, and the machine's ceilings."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
MATRIX_SIDE = 8192
COPY_BYTES = 2**31


def use_checkout() -> None:
    """Makes this checkout's ``moe_core`` and ``backends/`` importable and their backends known.

    An installation has entry points for the backends. A plain checkout has none, so their manifests
    are handed to ``moe_core.register_backend``, which is public and meant for it.
    """
    for folder in (ROOT / "backends", ROOT):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from moe_core import register_backend, registry

    manifests = ["moe_core.reference_manifest", "moe_torch", "moe_triton"]
    for name in manifests:
        manifest: dict[str, Any] = import_module(name).BACKEND
        if manifest["name"] not in registry.all_names():
            register_backend(manifest)


def versions(device: torch.device) -> dict[str, str]:
    import torch
    import triton

    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else "none: tried on a CPU",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


def ceilings(device: torch.device) -> dict[str, tuple[float, str]]:
    """Name → value and unit, of what kernels are measured against: a dense bfloat16 product, a
    copy, a sum of two arrays into a third, and a graph with next to nothing in it.

    All on random numbers: products of zeros run faster than those of data.
    """
    import torch

    from moe_core.timing import alternate

    cuda = device.type == "cuda"
    side, size = (MATRIX_SIDE, COPY_BYTES) if cuda else (64, 2**12)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    a, b, c = draw(side, side), draw(side, side), draw(side, side)
    product = alternate({"": lambda: torch.mm(a, b, out=c)}, device, samples=20, warmup=5)[""]
    found = {"matrix": (2 * side**3 / product.p50 / 1e12, "TFLOP/s")}
    x, y, z = draw(size // 2), draw(size // 2), draw(size // 2)
    calls = {"copy": lambda: y.copy_(x), "stream": lambda: torch.add(x, y, out=z)}
    times = alternate(calls, device, samples=20, warmup=5)
    for name, arrays in (("copy", 2), ("stream", 3)):
        found[name] = (arrays * size / times[name].p50 / 1e12, "TB/s")
    if cuda:
        one = torch.zeros(1, device=device)
        graph = torch.cuda.CUDAGraph()
        one.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            one.add_(1)
        empty = alternate({"": graph.replay}, device, samples=50, warmup=5)[""]
        found["smallest graph"] = (empty.p50 * 1e6, "us")
    return found


class Before:
    """What runs ahead of a timed call, so that the call is queued before the device is free for it.

    For a decode step it also empties the L2 cache: the weights of the step before are never those
    of this one in a model of many layers.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.cuda = device.type == "cuda"
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size if self.cuda else 64
        self.flushed = torch.zeros(size // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """About 2 ms of work, the last of which writes through the whole cache."""
        import torch

        if self.cuda:
            torch.cuda._sleep(2_000_000)
        self.flushed.add_(1)

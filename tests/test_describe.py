"""``describe()`` and ``stats()`` never wait for a device, and what they say is JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_core import Experts, MoEConfig, MoELayer, RouterConfig

CONFIG = MoEConfig(
    hidden_size=8,
    intermediate_size=4,
    num_experts=3,
    top_k=2,
    num_shared_experts=1,
    bias=True,
    router=RouterConfig(kind="hash", vocab_size=10),
)
SPECS = ("torch", "reference", "torch+reference", "nccl[mode=all_to_all]", "nccl[mode=replicated]")
aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select}


class NoWaiting(TorchDispatchMode):
    """Refuses what has to know a tensor's values on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_the_guards_guard():
    counter = torch.zeros(())
    for read in (float, bool, torch.nonzero, lambda t: torch.equal(t, t + 1)):
        with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
            read(counter)
    for read in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
        with pytest.raises((NotImplementedError, TypeError)):
            read(counter.to("meta"))


# On a CPU numbers can be read behind the first guard's back (tolist, numpy, cpu). On the meta
# device there are none to read, so whatever reads them raises.
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_read(spec: str, device: str):
    layer = MoELayer(CONFIG, backend=spec, device=device)
    if device == "cpu":
        layer(torch.randn(4, 8), torch.arange(4))
    for built in (layer, layer.experts, Experts(CONFIG, backend=spec, device=device)):
        with NoWaiting():
            described, stats = built.describe(), built.stats()
        assert json.loads(json.dumps(described)) == described
        assert described["backend"].startswith(spec.partition("[")[0])
        assert stats
        for name, value in stats.items():
            assert isinstance(value, torch.Tensor), name
            assert value.device.type == device, name

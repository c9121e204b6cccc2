"""How much memory a call holds at its most."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Bytes of the tensors that ``call()`` made, where there were most of them, its result too.

    On CUDA as the allocator counts them; elsewhere those that operators return, so what one takes
    inside is not seen.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Peak() as seen:
        call()
    return seen.most


class _Peak(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for key, storage in _storages(out).items():
            if key not in given and key not in self.alive:
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
        self.most = max(self.most, sum(self.alive.values()))
        return out


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}

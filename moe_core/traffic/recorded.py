"""Routing that a run made, in a file: what ``trace()`` saw on all ranks, or one batch's ids.

A safetensors file. ``{call}.{part}.topk_ids`` int32 ``[T, K]``, -1 = no expert, and where padding
was masked ``{call}.{part}.token_mask`` bool ``[T]``. A part is the tokens of one rank; ranks that
hold the same tokens (tensor parallel, replicated rows) are one. The metadata's ``moe_core_routing``
lists the calls: name, num_experts, parts. A file with one ``topk_ids [T, K]``, as ``moe-core run
--layer`` writes it, is a call of one part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from moe_core.tracing import LayerCall

KEY = "moe_core_routing"


@dataclass(frozen=True)
class Recorded:
    """One layer call's choices, part by part in rank order: logical ids int64 ``[T, K]`` on the
    CPU, -1 = no expert, capacity applied; ``masks``: bool ``[T]`` True = a real token, None = all.
    ``num_experts`` None: the file doesn't say."""

    ids: tuple[Tensor, ...]
    masks: tuple[Tensor | None, ...]
    name: str = ""
    num_experts: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(part) for part in self.ids)

    def over(self, num_parts: int) -> Recorded:
        """The same tokens in the same order, cut into so many parts of (nearly) equal length."""
        if num_parts == len(self.ids):
            return self
        masks = [
            torch.ones(len(i), dtype=torch.bool) if m is None else m
            for i, m in zip(self.ids, self.masks, strict=True)
        ]
        return Recorded(
            torch.tensor_split(torch.cat(self.ids), num_parts),
            torch.tensor_split(torch.cat(masks), num_parts),
            self.name,
            self.num_experts,
        )


def save_routing(
    calls: Sequence[LayerCall], path: str | Path, group: ProcessGroup | None = None
) -> None:
    """Writes the routing of ``calls``. Where there is a process group (default: that of all ranks)
    this is collective, the group has to bring every rank of a layer once, and its first rank
    writes. Calls of layers on one rank are parts of one call, in the order of the group.

    Raises ``InputError``, on all ranks alike, for calls without ids or that don't belong together,
    and where the file can't be written.
    """
    everyone: list[Any] = [[_summary(call) for call in calls]]
    spans = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    if spans:
        mine, everyone = everyone[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    tensors, listed = _together(everyone)
    said: list[Any] = [None]
    if not spans or dist.get_rank(group) == 0:
        try:
            save_file(tensors, path, {KEY: json.dumps(listed)})
        except (OSError, SafetensorError) as error:
            said = [f"the routing can't be written to {path}: {error}"]
    if spans:
        dist.broadcast_object_list(said, group=group, group_src=0)
    if said[0] is not None:
        raise InputError(said[0])


def _summary(call: LayerCall) -> dict[str, Any]:
    ids = None if call.routing is None else call.routing.topk_ids
    mask = None if call.routing is None else call.routing.token_mask
    return {
        "name": call.name,
        "num_experts": call.num_experts,
        "world_size": call.world_size,
        "rank": call.rank,
        "counts": call.has_own_tokens,
        "ids": None if ids is None else ids.detach().cpu().to(torch.int32).contiguous(),
        "mask": None if mask is None else mask.detach().cpu().contiguous(),
    }


def _together(everyone: Sequence[Any]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    lengths = sorted({len(calls) for calls in everyone})
    if lengths == [0]:
        raise InputError("there is no routing to save: no layer was called")
    if len(lengths) > 1:
        raise InputError(f"ranks traced {lengths} calls: trace the same steps on all of them")
    tensors: dict[str, Tensor] = {}
    listed: list[dict[str, Any]] = []
    for index, same in enumerate(zip(*everyone, strict=True)):
        first, spanned = same[0], max(call["world_size"] for call in same)
        found = sorted(call["rank"] for call in same)
        if spanned > 1 and found != list(range(spanned)):
            raise InputError(
                f"call {index} ({first['name']!r}) spans ranks 0 to {spanned - 1}, and those who "
                f"brought theirs are its ranks {found}: save over the group that built the layer"
            )
        if any(call["ids"] is None for call in same):
            raise InputError(f"call {index} ({first['name']!r}) has no ids: its kernel routes")
        parts = [call for call in sorted(same, key=lambda call: call["rank"]) if call["counts"]]
        for part, call in enumerate(parts):
            tensors[f"{index}.{part}.topk_ids"] = call["ids"]
            if call["mask"] is not None:
                tensors[f"{index}.{part}.token_mask"] = call["mask"]
        about = {"name": first["name"], "num_experts": first["num_experts"], "parts": len(parts)}
        listed.append(about)
    return tensors, listed


def load_routing(path: str | Path) -> list[Recorded]:
    """The calls in a file. Raises ``InputError`` for one that can't be read or holds none."""
    try:
        open(path, "rb").close()  # its errors are clearer than those below
        with safe_open(str(path), "pt") as file:
            about = (file.metadata() or {}).get(KEY)
            tensors = {n: file.get_tensor(n) for n in file.keys() if n.endswith(_ENDINGS)}  # noqa: SIM118
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from error
    if about is None and "topk_ids" not in tensors:
        raise InputError(
            f"{path} holds no routing: neither what a trace saved nor topk_ids [T, top_k]"
        )
    if about is None:
        return [Recorded(*_parts(tensors, [""], path))]
    try:
        return [
            Recorded(
                *_parts(tensors, [f"{i}.{part}." for part in range(call["parts"])], path),
                name=str(call["name"]),
                num_experts=int(call["num_experts"]),
            )
            for i, call in enumerate(json.loads(about))
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(
            f"{path}: what it says about its calls can't be read: {error!r}"
        ) from error


_ENDINGS = ("topk_ids", "token_mask")


def _parts(
    tensors: dict[str, Tensor], prefixes: list[str], path: str | Path
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    ids = [tensors[f"{prefix}topk_ids"] for prefix in prefixes]
    masks = [tensors.get(f"{prefix}token_mask") for prefix in prefixes]
    for part, mask in zip(ids, masks, strict=True):
        if part.ndim != 2 or part.dtype not in (torch.int32, torch.int64):
            said = f"{part.dtype} {list(part.shape)}"
            raise InputError(f"{path}: topk_ids must be int32 or int64 [T, top_k], not {said}")
        if mask is not None and (mask.shape != part.shape[:1] or mask.dtype != torch.bool):
            said = f"{mask.dtype} {list(mask.shape)}"
            raise InputError(f"{path}: token_mask must be bool [{len(part)}], not {said}")
    return tuple(part.to(torch.int64) for part in ids), tuple(masks)

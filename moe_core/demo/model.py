"""A byte-level language model whose feed-forward layers are ``MoELayer``: DeepSeek-V4's in small.

Pre-norm blocks of causal attention (rotary positions) and MoE; the first MoE is routed by a hash
of the byte, the others are learned. A window is the byte 0, which stands for "start", and up to
``context - 1`` bytes of text, so that the first byte is predicted as well.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.resources import as_file, files
from io import BytesIO
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_core.activation import sum_dtype
from moe_core.config import Activation, MoEConfig, ParallelConfig, RouterConfig
from moe_core.errors import InputError, nearest
from moe_core.layer import MoELayer
from moe_core.tracing import trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

Item = TypeVar("Item")
START = 0


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """``context``: positions of a window, the start included. ``dropout``: in training only."""

    context: int = 256
    hidden_size: int = 128
    num_heads: int = 4
    num_layers: int = 4
    num_experts: int = 8
    top_k: int = 2
    intermediate_size: int = 48
    routed_scaling_factor: float = 1.5
    limit: float = 10.0
    dropout: float = 0.1
    dtype: str = "float32"

    def moe(self, layer: int) -> MoEConfig:
        """The config of layer ``layer``'s MoE; layer 0 is the hash-routed one."""
        router = RouterConfig(
            kind="topk" if layer else "hash",
            scoring_func="sqrtsoftplus",
            renormalize=True,
            routed_scaling_factor=self.routed_scaling_factor,
            correction_bias=layer > 0,
            vocab_size=None if layer else 256,
        )
        return MoEConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            router=router,
            activation=Activation(limit=self.limit),
            num_shared_experts=1,
            dtype=self.dtype,
        )


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + moe(norm(x))``; ``x`` ``[B, S, H]``."""

    def __init__(self, config: LMConfig, layer: int, **where: Any) -> None:
        super().__init__()
        size = config.hidden_size
        kw: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "device": where["device"]}
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.attention_norm = nn.RMSNorm(size, eps=1e-6, **kw)
        self.qkv = nn.Linear(size, 3 * size, bias=False, **kw)
        self.proj = nn.Linear(size, size, bias=False, **kw)
        self.moe_norm = nn.RMSNorm(size, eps=1e-6, **kw)
        self.moe = MoELayer(config.moe(layer), **where)
        self.moe.name = f"layer {layer}"

    def forward(self, x: Tensor, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, S, size of a head]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + F.dropout(self.moe(self.moe_norm(x), ids), self.dropout, self.training)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), first half of each head with the second."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class ByteLM(nn.Module):
    """``ids`` int64 ``[B, S]`` of bytes → float logits ``[B, S, 256]`` of the byte after each."""

    def __init__(
        self,
        config: LMConfig,
        backend: str | None = None,
        *,
        parallel: ParallelConfig | None = None,
        device: str = "cpu",
        inference: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        kw: dict[str, Any] = {"dtype": getattr(torch, config.dtype), "device": device}
        self.embedding = nn.Embedding(256, config.hidden_size, **kw)
        self.blocks = nn.ModuleList(
            Block(
                config,
                layer,
                backend=backend,
                parallel=parallel,
                device=device,
                inference=inference,
            )
            for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6, **kw)

    @property
    def moes(self) -> list[MoELayer]:
        return [block.moe for block in self.blocks]  # type: ignore[misc]

    def forward(self, ids: Tensor) -> Tensor:
        half = self.config.hidden_size // self.config.num_heads // 2
        x = self.embedding(ids)
        kw: dict[str, Any] = {"device": ids.device, "dtype": torch.float32}
        speed = 1e4 ** (-torch.arange(half, **kw) / half)
        angle = torch.outer(torch.arange(ids.shape[1], **kw), speed)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, ids, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight).to(sum_dtype(x.dtype))


def save(model: ByteLM, path: str | Path, facts: dict[str, Any]) -> None:
    """One safetensors file in float16, the config and ``facts`` (JSON data) in its metadata."""
    state = {
        name: (t.half() if t.is_floating_point() else t).contiguous()
        for name, t in model.state_dict().items()
    }
    metadata = {"config": json.dumps(asdict(model.config)), "facts": json.dumps(facts)}
    save_file(state, str(path), metadata)


def load(
    path: str | Path | None = None,
    *,
    backend: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    parallel: ParallelConfig | None = None,
) -> ByteLM:
    """The model in ``path`` (None: the one that ships), for inference; each rank takes its experts.

    Raises ``InputError`` for a file that isn't such a model and ``ConfigError`` for a backend that
    can't serve it.
    """
    with ExitStack() as stack:
        if path is None:
            path = stack.enter_context(as_file(files("moe_core.demo") / "byte_lm.safetensors"))
        state, metadata = read_tensors(path)
    try:
        config = LMConfig(**json.loads(metadata["config"]))
        config = replace(config, dtype=dtype or config.dtype)
        config.moe(0)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is not a byte-level model of moe-core: {type(error).__name__}: {error} in the "
            "config of its metadata"
        ) from error
    whole = ByteLM(config, "reference", device="meta").state_dict()
    faults = shape_faults(state, {name: tuple(tensor.shape) for name, tensor in whole.items()})
    if faults:
        raise InputError(f"{path} does not hold the model that its config describes: {faults}")
    model = ByteLM(config, backend, parallel=parallel, device=device, inference=True)
    for i, moe in enumerate(model.moes):
        parts = (state.pop(f"blocks.{i}.moe.experts.{name}") for name in ("w13", "w2"))
        moe.experts.load_full_weights(*parts)
    model.load_state_dict(state, strict=False)  # every name was looked at above
    return model.eval().requires_grad_(False)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; ``InputError`` if it isn't one."""
    try:
        open(path, "rb").close()  # its errors are clearer than those below
        with safe_open(str(path), "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from error


def shape_faults(
    tensors: Mapping[str, Tensor],
    needed: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """What is missing, unknown or of the wrong shape, all at once; empty if nothing is."""
    known = {**needed, **(optional or {})}
    faults = [f"{n} is missing, {list(needed[n])}" for n in needed if n not in tensors]
    for name, tensor in tensors.items():
        if name not in known:
            faults.append(f"{name} is unknown{nearest(name, known)}")
        elif tuple(tensor.shape) != known[name]:
            faults.append(f"{name} is {list(tensor.shape)} and must be {list(known[name])}")
    return "; ".join(faults)


class Window(NamedTuple):
    """Bytes that the model sees at once: ``text`` begins ``offset`` bytes into the whole; its last
    ``new`` bytes are the ones to score, those before are context."""

    offset: int
    text: bytes
    new: int


def windows(source: BinaryIO, size: int, limit: int | None = None) -> Iterator[Window]:
    """Cuts a text so that each byte is new once, with half a window before it where there is.

    Reads as it goes, at most ``limit`` bytes. All windows hold ``size`` bytes, but for a text
    shorter than that.
    """
    text, end = b"", 0
    while True:
        wanted = size if not end else max(1, size // 2)
        chunk = source.read(wanted if limit is None else min(wanted, limit - end))
        if not chunk:
            return
        text, end = (text + chunk)[-size:], end + len(chunk)
        yield Window(end - len(text), text, len(chunk))
        if len(chunk) < wanted:
            return


def token_ids(group: Sequence[Window]) -> Tensor:
    """int64 ``[B, 1 + size]``: the start, then the bytes, of windows of one size; ``[0, 1]`` of
    none."""
    ids = [[START, *window.text] for window in group]
    return torch.tensor(ids) if ids else torch.empty(0, 1, dtype=torch.int64)


def score(model: ByteLM, group: Sequence[Window]) -> Tensor:
    """Bits that each new byte takes, float64 ``[sum of new]``, in the order of the text."""
    ids = token_ids(group).to(model.embedding.weight.device)
    with torch.no_grad():
        logits = model(ids)[:, :-1]
    bits = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none") / math.log(2)
    new = [row[-window.new :] for row, window in zip(bits, group, strict=True)]
    return torch.cat(new or [bits.flatten()]).double()


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of ``size``, the last one shorter."""
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


def evaluate(model: ByteLM, text: bytes) -> tuple[float, list[list[int]]]:
    """Bits per byte of ``text``, and per layer the rows that each expert got."""
    bits = 0.0
    rows = [[0] * model.config.num_experts for _ in model.moes]
    for group in batched(windows(BytesIO(text), model.config.context - 1), 16):
        with trace() as seen:
            bits += score(model, group).sum().item()
        for total, call in zip(rows, seen.calls, strict=True):
            total[:] = map(add, total, call.rows_per_expert)
    return bits / len(text), rows

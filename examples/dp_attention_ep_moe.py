"""A decoder whose attention and MoE cut four ranks differently, against its twin in one process.

Attention: dp groups have sequences of their own; within a group the heads are cut over tp, and the
rows are equal there or, with sequence parallelism, spread. MoE: experts over ep, each expert's
width over tp, the whole set repeated over dp. ``RowExchange`` carries the rows between the two.
Each of the decoder's two layers has a shared expert beside its routed ones: it needs no exchange
and runs on the rows that a rank has. The first layer routes by token id, so ids travel too.

    python examples/dp_attention_ep_moe.py                        (starts four processes)
    torchrun --nproc-per-node 4 examples/dp_attention_ep_moe.py

Sequences have different lengths, rows are padded, and one group has no tokens at all. Every line is
one pair of layouts in float64: the largest difference from the twin, of outputs and of gradients
(of the input and of every parameter), and the bytes of hidden states that the MoE's exchanges sent,
of all ranks, against the least there can be: each row once to each rank that needs and lacks it,
and for a sum of parts (``summed``) each part once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from moe_core import (
    MoEConfig,
    MoELayer,
    ParallelConfig,
    RouterConfig,
    RowExchange,
    RowLayout,
)
from moe_core.shared_experts import SharedExperts
from moe_core.training import expert_parameter_names, sync_expert_gradients

WORLD, HIDDEN, HEADS, VOCABULARY = 4, 8, 4, 50
DTYPE = torch.float64
SEQUENCES = ((5, 3), (4, 1), (), (7,))
"""Lengths, by the attention's dp group; with fewer groups they are dealt out anew."""

MOE = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=8,
    num_experts=6,
    top_k=2,
    router=RouterConfig(scoring_func="sigmoid", renormalize=True),
    dtype="float64",
)
HASHED = replace(
    MOE, router=RouterConfig(kind="hash", vocab_size=VOCABULARY, softmax_before_topk=True)
)

ATTENTION = (
    RowLayout(dp_size=4),
    RowLayout(dp_size=2, tp_size=2),
    RowLayout(tp_size=4),
    RowLayout(dp_size=2, tp_size=2, sequence_parallel=True),
    RowLayout(tp_size=4, sequence_parallel=True),
)
WIDTHS = (
    ParallelConfig(ep_size=4),
    ParallelConfig(ep_size=2, tp_size=2),
    ParallelConfig(dp_size=2, ep_size=2),
    ParallelConfig(dp_size=2, tp_size=2),
    ParallelConfig(tp_size=4),
    ParallelConfig(ep_size=4, rows="replicated"),
    # the same, with the MoE's last sum left to the exchange
    ParallelConfig(ep_size=2, tp_size=2, final_sum="caller"),
    ParallelConfig(tp_size=4, final_sum="caller"),
    ParallelConfig(ep_size=4, rows="replicated", final_sum="caller"),
)


class Attention(nn.Module):
    """Causal, ``heads / tp`` of the heads. What it returns is this rank's part of a sum over tp."""

    def __init__(self, layout: RowLayout, tp_rank: int) -> None:
        super().__init__()
        self.heads = HEADS // layout.tp_size
        whole = torch.randn(4, HEADS, HIDDEN // HEADS, HIDDEN, dtype=DTYPE) / math.sqrt(HIDDEN)
        self.weights = nn.Parameter(whole.chunk(layout.tp_size, 1)[tp_rank].clone())

    def forward(self, rows: Tensor, sequence: Tensor) -> Tensor:
        """``rows [N, H]``, in order within each sequence; ``sequence [N]``: which it is."""
        q, k, v = torch.einsum("nh,pedh->pend", rows, self.weights[:3])
        seen = (sequence[:, None] == sequence).tril()
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
        return torch.einsum("end,edh->nh", scores.softmax(-1) @ v, self.weights[3])


class DecoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + shared(norm(x)) + routed(norm(x))``."""

    def __init__(
        self,
        config: MoEConfig,
        layout: RowLayout,
        parallel: ParallelConfig,
        backend: str,
        exchange: RowExchange,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        # Between norm and attention the same object does what sequence parallelism wants: gather
        # the rows of a tp group, and reduce-scatter what its heads add up to.
        inside = ParallelConfig(dp_size=layout.dp_size, tp_size=layout.tp_size, final_sum="caller")
        self.to_heads = RowExchange(layout, inside, gradient_sum="caller")
        tp_rank = dist.get_rank() % layout.tp_size
        self.attention = Attention(layout, tp_rank)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, dtype=DTYPE) for _ in range(2))
        self.moe = MoELayer(config, parallel, backend)
        self.shared = SharedExperts(replace(config, num_shared_experts=1), torch.device("cpu"))

    def forward(self, x: Tensor, sequence: Tensor, input_ids: Tensor, token_mask: Tensor) -> Tensor:
        here = self.to_heads.to_moe(self.norms[0](x), sequence, token_mask)
        assert here.input_ids is not None
        heads = self.attention(here.hidden_states, here.input_ids)
        x = x + self.to_heads.from_moe(heads, here.handle)
        rows = self.norms[1](x)
        there = self.exchange.to_moe(rows, input_ids, token_mask)
        routed = self.moe(there.hidden_states, there.input_ids, there.token_mask)
        shared = self.shared(rows.view(-1, HIDDEN)).view_as(rows)  # on local rows, in no sum
        return x + shared + self.exchange.from_moe(routed, there.handle)


class Decoder(nn.Module):
    """The rows of padding that come in are zeroed; what comes out there means nothing."""

    def __init__(self, layout: RowLayout, parallel: ParallelConfig, backend: str) -> None:
        super().__init__()
        torch.manual_seed(0)  # attention, router, experts: the same whole ones at any width
        self.exchange = RowExchange(layout, parallel)
        self.blocks = [
            DecoderLayer(config, layout, parallel, backend, self.exchange)
            for config in (HASHED, MOE)
        ]
        self.layers = nn.ModuleList(self.blocks)

    def forward(self, x: Tensor, sequence: Tensor, input_ids: Tensor, token_mask: Tensor) -> Tensor:
        x = torch.where(token_mask[..., None], x, 0)
        for layer in self.blocks:
            x = layer(x, sequence, input_ids, token_mask)
        return x


@dataclass(frozen=True)
class Batch:
    """``x [B, S, H]`` (or ``[N, H]``), and per token: number of its sequence (-1: padding), id."""

    x: Tensor
    sequence: Tensor
    input_ids: Tensor

    @property
    def token_mask(self) -> Tensor:
        return self.sequence >= 0

    def share(self, parts: int, part: int) -> Batch:
        """Rows one after the other, cut into nearly equal runs."""
        flat = (self.x.view(-1, HIDDEN), self.sequence.view(-1), self.input_ids.view(-1))
        return Batch(*(t.tensor_split(parts)[part].clone() for t in flat))


def batch_of(group: int, groups: int) -> Batch:
    """The sequences of one dp group, padded to the longest of them."""
    lengths = [n for g, ns in enumerate(SEQUENCES) if g * groups // WORLD == group for n in ns]
    shape = (len(lengths), max(lengths, default=0))
    generator = torch.Generator().manual_seed(17 + group)
    x = torch.randn(*shape, HIDDEN, dtype=DTYPE, generator=generator)
    input_ids = torch.randint(VOCABULARY, shape, generator=generator)
    real = torch.arange(shape[1]) < torch.tensor(lengths, dtype=torch.int64).view(-1, 1)
    sequence = torch.arange(shape[0])[:, None].expand(shape).masked_fill(~real, -1)
    return Batch(x.masked_fill(~real[..., None], 1e30), sequence, input_ids)


def loss_of(y: Tensor, batch: Batch) -> Tensor:
    return (y[batch.token_mask] - 1).square().sum()


@dataclass
class Line:
    """``bytes_sent``/``least_bytes``: of hidden states, forward, of all ranks; the backward sends
    the same. ``bytes_backward``."""

    attention: str
    moe: str
    case: str
    forward: float
    backward: float
    bytes_sent: int
    bytes_backward: int
    least_bytes: int


def measure(layout: RowLayout, parallel: ParallelConfig) -> Line:
    """One step of the decoder and of its twin, on every rank; the same line on all."""
    rank, tp, groups = dist.get_rank(), layout.tp_size, layout.dp_size
    mine = batch_of(rank // tp, groups)
    if layout.sequence_parallel:
        mine = mine.share(tp, rank % tp)
    replicated = parallel.rows == "replicated"
    spec = "nccl[mode=replicated]+torch" if replicated else "nccl+torch"
    decoder = Decoder(layout, parallel, spec)
    x = mine.x.requires_grad_()
    y = decoder(x, mine.sequence, mine.input_ids, mine.token_mask)
    loss_of(y, mine).backward()
    # As a training loop would: experts by moe_core.training, all else the mean over ranks (DDP).
    sync_expert_gradients(decoder)

    # The twin trains on the mean of the ranks' losses too. Groups whose rows are spread over tp
    # have one loss per rank, the others one per group.
    losses = WORLD // layout.copies
    twin = Decoder(RowLayout(), ParallelConfig(), "reference")
    batches = [batch_of(g, groups) for g in range(groups)]
    xs = [b.x.requires_grad_() for b in batches]
    ys = [twin(b.x, b.sequence, b.input_ids, b.token_mask) for b in batches]
    total = sum((loss_of(y, b) for y, b in zip(ys, batches, strict=True)), torch.zeros(()))
    (total / losses).backward()

    own = rank // tp
    whole = Batch(ys[own].detach(), batches[own].sequence, batches[own].input_ids)
    grad = xs[own].grad
    assert grad is not None
    assert x.grad is not None
    grad = Batch(grad * losses, whole.sequence, whole.input_ids)  # of its own loss, not the mean
    if layout.sequence_parallel:
        whole, grad = whole.share(tp, rank % tp), grad.share(tp, rank % tp)
    real = mine.token_mask
    forward = largest(y[real] - whole.x[real])
    backward = max(largest(x.grad - grad.x), parameter_error(decoder, twin, layout))
    errors = torch.tensor([forward, backward], dtype=DTYPE)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    sent = decoder.exchange.mover.sent_bytes
    counted = torch.tensor(
        [
            sum(n for kind, n in sent.items() if kind in ("to_moe", "from_moe")),
            sum(n for kind, n in sent.items() if kind.endswith("backward")),
            least_bytes(decoder, mine),
        ]
    )
    dist.all_reduce(counted)
    return Line(
        name_of(layout),
        name_of(parallel),
        decoder.exchange.case,
        *errors.tolist(),
        *counted.tolist(),
    )


def parameter_error(decoder: Decoder, twin: Decoder, layout: RowLayout) -> float:
    """Of all gradients; each parameter of the twin is whole."""
    worst, spread = 0.0, set(expert_parameter_names(decoder))
    wanted = {name: p.grad for name, p in twin.named_parameters()}
    for layer, other in zip(decoder.blocks, twin.blocks, strict=True):
        # cut the twin's gradients as the layer cuts weights
        experts, whole = layer.moe.experts, other.moe.experts
        assert whole.w13.grad is not None
        assert whole.w2.grad is not None
        experts.load_full_weights(whole.w13.grad, whole.w2.grad)
        for p in experts.parameters():
            assert p.grad is not None
            worst = max(worst, largest(p.grad - p.detach()))
    for name, p in decoder.named_parameters():
        if name in spread:
            continue
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        tp = layout.tp_size if "attention" in name else 1
        if tp > 1:  # heads: a share on each tp rank, so the mean is over dp only
            whole = grad.new_zeros(4, HEADS, *grad.shape[2:])
            whole.chunk(tp, 1)[dist.get_rank() % tp].copy_(grad * tp)
            grad = whole
        dist.all_reduce(grad)
        want = wanted[name]
        assert want is not None
        worst = max(worst, largest(grad / WORLD - want))
    return worst


def least_bytes(decoder: Decoder, batch: Batch) -> int:
    """What this rank has to be sent in the two layers of a forward: rows that it needs in the MoE
    and lacks, and those of its own that the MoE has elsewhere. Where the MoE returns parts, a sum
    of m of them takes m - 1, for each row once, and each of its other copies takes one more."""
    copies, parts = decoder.exchange.layout.copies, decoder.exchange.parallel.copies
    count = int(batch.token_mask.sum())
    holder = dist.get_rank() // copies
    names = torch.full_like(batch.sequence, -1)  # of rows: alike on the ranks that hold the same
    names[batch.token_mask] = torch.arange(count) + 1000 * holder
    there = decoder.exchange.to_moe(batch.x.detach(), names, batch.token_mask)
    assert there.input_ids is not None
    in_moe, in_attention = (set(ids.flatten().tolist()) - {-1} for ids in (there.input_ids, names))
    back = len(in_attention - in_moe)
    if decoder.exchange.parallel.final_sum == "caller":
        # of all ranks: its share of the sums is as good as any
        back = count * (parts - 1 + copies - 1) / copies
    rows = len(in_moe - in_attention) + back
    return round(2 * rows * HIDDEN * batch.x.element_size())


def largest(difference: Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0


def name_of(widths: RowLayout | ParallelConfig) -> str:
    if isinstance(widths, RowLayout):
        spread = " sp" if widths.sequence_parallel else ""
        return f"dp{widths.dp_size} tp{widths.tp_size}{spread}"
    more = " replicated" if widths.rows == "replicated" else ""
    more += " summed" if widths.final_sum == "caller" else ""
    return f"dp{widths.dp_size} ep{widths.ep_size} tp{widths.tp_size}{more}"


def table(lines: list[Line]) -> str:
    head = (
        f"{'attention':<12}{'MoE':<31}{'case':<9}{'forward':>9}{'backward':>10}"
        f"{'bytes':>8}{'least':>8}"
    )
    rows = [
        f"{n.attention:<12}{n.moe:<31}{n.case:<9}{n.forward:9.1e}{n.backward:10.1e}"
        f"{n.bytes_sent:8d}{n.least_bytes:8d}"
        for n in lines
    ]
    return "\n".join([head, *rows])


def run_rank(rank: int, store: str, as_json: bool) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    if store:
        files = dist.FileStore(store, WORLD)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=files, rank=rank, world_size=WORLD, timeout=limit)
    else:
        dist.init_process_group("gloo", timeout=limit)
    if dist.get_world_size() != WORLD:
        sys.exit(f"this example is about {WORLD} ranks, not {dist.get_world_size()}")
    lines = [measure(layout, parallel) for layout in ATTENTION for parallel in WIDTHS]
    if dist.get_rank() == 0:
        print(json.dumps([asdict(n) for n in lines]) if as_json else table(lines))
    dist.destroy_process_group()
    if max(max(n.forward, n.backward) for n in lines) > 1e-10:
        sys.exit("the decoder differs from its twin")


def main() -> None:
    parser = argparse.ArgumentParser(description="A decoder over four ranks and its twin")
    parser.add_argument("--json", action="store_true")
    as_json: bool = parser.parse_args().json
    if "RANK" in os.environ:  # torchrun started this process
        run_rank(0, "", as_json)
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (f"{folder}/store", as_json), nprocs=WORLD)


if __name__ == "__main__":
    main()

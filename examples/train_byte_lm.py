"""Trains the byte-level language model that ``moe-core run`` uses, from text that Python ships.

    python examples/train_byte_lm.py --out byte_lm.safetensors
    moe-core run --model byte_lm.safetensors

It takes 9 minutes of one core's time, less on two. Experts are balanced without a loss: after each
step every learned layer's correction bias moves a little towards experts that got too few tokens.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.cli.report import Progress
from moe_core.demo.corpus import Order2, corpus
from moe_core.demo.model import START, ByteLM, LMConfig, evaluate, load, save
from moe_core.routing import TopKRouter, tokens_per_expert, updated_correction_bias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_core.contracts import Routing

STEPS, BATCH = 1800, 8
LEARNING_RATE, WARM_UP, WEIGHT_DECAY = 3e-3, 60, 0.1
BIAS_RATE = 3e-3


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("byte_lm.safetensors"), metavar="FILE")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument(
        "--minutes", type=float, default=8, help="the learning rate falls to 0 by then (8)"
    )
    parser.add_argument("--backend", help="backend spec (default: MOE_BACKEND, else auto)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.steps < 1 or not args.minutes > 0:
        parser.error("--steps must be at least 1 and --minutes above 0")
    if not args.out.absolute().parent.is_dir():  # better now than after the training
        parser.error(f"--out {args.out}: there is no such folder")

    text, held_out = corpus()
    torch.manual_seed(args.seed)
    model = ByteLM(LMConfig(), args.backend)
    initialise(model)
    start, start_cpu = time.monotonic(), time.process_time()
    steps = train(model, text, args.steps, args.minutes * 60)
    took = [(time.monotonic() - start) / 60, (time.process_time() - start_cpu) / 60]

    facts = {"steps": steps, "seed": args.seed}
    facts |= {"minutes": round(took[0], 1), "cpu_minutes": round(took[1], 1)}
    save(model, args.out, facts)
    bits, rows = evaluate(load(args.out), held_out)  # what was written: float16 weights
    order2 = Order2(text).bits_per_byte(held_out)
    loads = [max(counts) * len(counts) / sum(counts) for counts in rows]
    facts |= {"held_out_bits_per_byte": bits, "order2_bits_per_byte": order2, "loads": loads}
    save(load(args.out), args.out, facts)

    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    print(f"{steps} steps in {took[0]:.1f} minutes ({took[1]:.1f} of CPU time)")
    print(f"held-out text: {bits:.3f} bits per byte; an order-2 model of bytes: {order2:.3f}")
    shown = ", ".join(f"{ratio:.2f}" for ratio in loads[1:])
    print(f"busiest expert / mean there: {shown} (learned), {loads[0]:.2f} (hash)")


def initialise(model: ByteLM) -> None:
    """Small weights, smaller still where a block adds to the residual stream."""
    into_residual = 0.02 / math.sqrt(2 * len(model.blocks))
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "router" not in name:
            nn.init.normal_(
                parameter, std=into_residual if "proj" in name or "w2" in name else 0.02
            )


def train(model: ByteLM, text: bytes, steps: int, seconds: float) -> int:
    """AdamW with a cosine over ``steps``, or over ``seconds`` where those run out; steps taken.

    The clock is only looked at once the steps fall well behind it: otherwise a seed would not
    give the same model twice.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    routings: dict[nn.Module, Routing] = {}  # what each learned router did last
    learned = [m for m in model.modules() if isinstance(m, TopKRouter)]

    def keep(module: nn.Module, _: object, routing: Routing) -> None:
        routings[module] = routing

    for router in learned:
        router.register_forward_hook(keep)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors}],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    progress, start = Progress(steps, "training"), time.monotonic()
    smooth, step = math.log(256), 0
    while step < steps and time.monotonic() - start < seconds:
        done, late = step / steps, (time.monotonic() - start) / seconds
        done = late if late > done + 0.05 else done
        rate = LEARNING_RATE * min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = windows_of(data, model.config.context)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for router in learned:
            bias = router.e_score_correction_bias
            assert bias is not None
            counts = tokens_per_expert(routings[router], model.config.num_experts)
            bias.copy_(updated_correction_bias(bias, counts, BIAS_RATE))
        step += 1
        smooth += (loss.item() - smooth) / min(step, 50)
        progress.update(step, f"step {step}, {smooth / math.log(2):.3f} bits per byte")
    progress.close()
    return step


def windows_of(data: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Random windows as the model sees them when it scores: ``[BATCH, context]`` twice."""
    first = torch.randint(0, len(data) - context + 1, (BATCH, 1))
    targets = data[first + torch.arange(context)]
    start = torch.full((BATCH, 1), START)
    return torch.cat([start, targets[:, :-1]], 1), targets


if __name__ == "__main__":
    main()

"""Checks of what routers and losses are handed. All faults go into one ``InputError``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_core.checks import values_are_checked
from moe_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moe_core.config import RouterConfig


def expect(
    faults: list[str], name: str, tensor: Tensor, shape: Sequence[int | str], kind: str
) -> bool:
    """Notes a wrong shape or kind (``"float"``, ``"integer"`` or ``"bool"``) of ``tensor``.

    A string in ``shape`` is a name for any size.
    """
    before = len(faults)
    fits = tensor.dim() == len(shape) and all(
        isinstance(want, str) or want == have
        for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape))
        faults.append(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype == torch.bool:
        have_kind = "bool"
    elif tensor.dtype.is_floating_point:
        have_kind = "float"
    else:
        have_kind = "complex" if tensor.dtype.is_complex else "integer"
    if have_kind != kind:
        faults.append(f"{name} must have a {kind} dtype, got {tensor.dtype}")
    return len(faults) == before


def settle(faults: list[str]) -> None:
    """Raises ``InputError`` with everything that was noted, if anything was."""
    if faults:
        raise InputError("; ".join(faults))


def check_route(
    router_logits: Tensor,
    top_k: int,
    config: RouterConfig,
    correction_bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    token_mask: Tensor | None,
) -> None:
    """The arguments of ``route``; raises ``InputError``."""
    faults: list[str] = []
    if not expect(faults, "router_logits", router_logits, ("T", "E"), "float"):
        settle(faults)
    num_tokens, num_experts = router_logits.shape
    if not 1 <= top_k <= num_experts:
        faults.append(f"top_k must be from 1 to the {num_experts} experts there are, got {top_k}")
    groups, chosen = config.num_expert_group, config.topk_group
    if groups is not None and chosen is not None:
        if num_experts % groups:
            faults.append(f"num_expert_group={groups} must divide the {num_experts} experts")
        elif top_k > chosen * (num_experts // groups):
            faults.append(f"topk_group={chosen} groups hold fewer experts than top_k={top_k}")
    if config.correction_bias and correction_bias is None:
        faults.append(f"correction_bias of shape [{num_experts}] is missing")
    elif correction_bias is not None and not config.correction_bias:
        faults.append("correction_bias was given but the config says correction_bias=False")
    elif correction_bias is not None:
        expect(faults, "correction_bias", correction_bias, (num_experts,), "float")
    if token_mask is not None:
        expect(faults, "token_mask", token_mask, (num_tokens,), "bool")
    if config.kind != "hash":
        if tid2eid is not None:
            faults.append(f"tid2eid was given but the config says kind={config.kind}")
        settle(faults)
        return
    vocab = config.vocab_size or 0
    if input_ids is None:
        faults.append(f"hash routing needs input_ids of shape [{num_tokens}]")
    else:
        expect(faults, "input_ids", input_ids, (num_tokens,), "integer")
    if tid2eid is None:
        faults.append(f"hash routing needs tid2eid of shape [{vocab}, {top_k}]")
    else:
        expect(faults, "tid2eid", tid2eid, (vocab, top_k), "integer")
    settle(faults)
    if input_ids is None or tid2eid is None or not values_are_checked(input_ids):
        return
    real = (input_ids if token_mask is None else input_ids[token_mask]).long()
    wrong = real[(real < 0) | (real >= vocab)]
    if wrong.numel():
        settle([f"input_ids must be from 0 to vocab_size - 1 = {vocab - 1}, got {int(wrong[0])}"])
    found = tid2eid[real].long()
    wrong = found[(found < -1) | (found >= num_experts)]
    if wrong.numel():
        settle([f"tid2eid must hold ids from -1 to {num_experts - 1}, got {int(wrong[0])}"])

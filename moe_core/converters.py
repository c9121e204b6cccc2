"""Converters between layouts, as a table: any transport runs with any runner.

A converter is a there-and-back pair: it turns what a dispatch gives into what a runner takes, and
the runner's result into what the combine takes. Part of the decision layer, so no torch here; the
code (``target``) is imported when a layer is built.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConverterSpec:
    """One converter.

    ``takes`` → ``gives`` on the way to the runner, ``back_takes`` → ``back_gives`` after it.
    ``target``: ``"module:Class"``, built with a ``BuildContext``; ``there(record)`` gives
    ``(record, state)``, ``back(record, state)`` a record.
    ``host_syncs``: how often the host waits for the device, per call, both ways together.
    ``graph_safe``: shapes and launches depend on shapes alone, never on values.
    """

    name: str
    takes: str
    gives: str
    back_takes: str
    back_gives: str
    target: str
    copies: bool = True
    host_syncs: int = 0
    graph_safe: bool = True
    summary: str = ""

    def bytes_moved(self, num_rows: int, top_k: int, hidden_size: int, element_size: int) -> int:
        """Bytes of rows read and written in one forward, there and back, ids not counted.

        ``num_rows`` rows of ``hidden_size`` elements with ``top_k`` slots each: every slot's row is
        read once and written once, each way. A converter that moves no rows has ``copies`` False.
        """
        return 4 * num_rows * top_k * hidden_size * element_size if self.copies else 0


CONVERTERS: tuple[ConverterSpec, ...] = (
    ConverterSpec(
        name="permute",
        takes="token_major",
        gives="expert_contiguous",
        back_takes="expert_contiguous",
        back_gives="slot_major",
        target="moe_core.convert:Permute",
        summary="copies each row once per slot, sorted by expert; results go back to their slots",
    ),
    ConverterSpec(
        name="index",
        takes="token_major",
        gives="indexed",
        back_takes="slot_major",
        back_gives="slot_major",
        target="moe_core.convert:Index",
        copies=False,
        summary="sorts the slots by expert and leaves the rows where they are",
    ),
    ConverterSpec(
        name="permute_received",
        takes="rank_grouped",
        gives="expert_contiguous",
        back_takes="expert_contiguous",
        back_gives="slot_list",
        target="moe_core.convert:PermuteReceived",
        summary="as permute, for received rows: only slots that live here take room",
    ),
)

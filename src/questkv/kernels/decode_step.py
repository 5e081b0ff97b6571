"""`DecodeStep`: one decode step of many layers, whose rows are checked once."""

from __future__ import annotations

from typing import Any

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.decode import check_budget
from questkv.kernels.types import NewTokens, Pages


class DecodeStep:
    """What the layers of one geometry share in a decode step: `decode` for each of them, without checking it again.

    The tensors must not change while the step is used. `page_table` and `lengths` can be read again.

    Args:
        pages: The pages of one of the layers; those of the others have the same segments, in memory of their own, and
            perhaps more behind them.
        page_table: As in `decode`.
        lengths: As in `decode`.
        slots: [n] int64 slots of the new tokens, as in `NewTokens`.
        sealed: [m] int64 pages that they seal, likewise.
        into: [m] int64 coded pages, or None, likewise.
        spans: [k, C] int64 pages of the spans that they complete, or None, likewise.
        backend: ``auto`` or a backend's name.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.
    """

    def __init__(
        self,
        pages: Pages,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        sealed: torch.Tensor,
        into: torch.Tensor | None,
        spans: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        checks.check_on_device("decode", pages)
        checks.check_table("decode", page_table, lengths, pages)
        checks.check_slots("decode", slots, pages)
        checks.check_sealed("decode", "sealed", sealed, into, pages)
        checks.check_new_spans("decode", spans, pages)
        self._layout = pages.layout
        self.page_table = page_table
        self.lengths = lengths
        self._new = slots, sealed, into, spans
        self._backend = dispatch.resolve(backend, pages.device)
        self._budgets: list[torch.Tensor] = []

    def decode(
        self,
        q: torch.Tensor,
        pages: Pages,
        num_selected: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        optimism: float,
        group: str,
        sink_pages: int,
        recent_pages: int,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        pages_read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`kernels.decode` of one layer, which writes the new keys and values [n, Hkv, D] first.

        Raises:
            ValueError: A shape or a value is wrong, or the layer's pages aren't laid out as the step's.
            TypeError: A dtype is wrong.
        """
        if pages.layout != self._layout and not _has_grown(pages.layout, self._layout):
            raise ValueError(f"[decode] pages: expected the layout that the step was made for, got {pages.layout}")
        lengths = self.lengths
        slots, sealed, into, spans = self._new
        # Sizes by `shape`: len() of a tensor costs ten times as much.
        rows = lengths.shape[0]
        checks.check_query("decode", q, pages)
        if q.shape[0] != rows:
            raise ValueError(f"[decode] q: expected [R={rows}, Hq, D], got {list(q.shape)}")
        checks.check_states("decode", pages, slots.shape[0], keys, values)
        checks.check_scale("decode", scale)
        checks.check_scoring("decode", optimism, group)
        checks.check_softmax("decode", softcap, sinks, q)
        if not any(num_selected is checked for checked in self._budgets):
            checks.check_forced("decode", sink_pages, recent_pages)
            checks.check_per_row("decode", "num_selected", num_selected, rows, pages)
            check_budget(num_selected, lengths, pages.page_size, sink_pages + recent_pages)
            self._budgets.append(num_selected)
        if pages_read is not None:
            checks.check_per_row("decode", "pages_read", pages_read, rows, pages)
        out: torch.Tensor = self._backend.decode(
            q,
            pages,
            self.page_table,
            lengths,
            num_selected,
            scale,
            optimism,
            group,
            sink_pages,
            recent_pages,
            softcap,
            sinks,
            pages_read,
            NewTokens(slots, keys, values, sealed, into, spans),
        )
        return out


def _has_grown(layout: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether pages of one layout are those of another and segments behind them, as a pool that grew has them."""
    return layout[1:] == before[1:] and layout[0][: len(before[0])] == before[0]

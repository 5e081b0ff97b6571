"""A decode step of a layer whose sealed pages lie in host memory: score them all, fetch the chosen, attend those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from questkv import kernels
from questkv.kernels import Rows, Scoring, Softmax
from questkv.pages.exclusive import exclusive
from questkv.pages.fetched import FetchedPages, first_of_each


@dataclass(frozen=True, eq=False)
class HostRows:
    """Rows of a decode step, and what the host knows of them: it need not wait for the device to tell.

    Attributes:
        rows: Page tables [R, P], lengths and K.
        lengths: Their lengths.
        num_selected: Their K.
    """

    rows: Rows
    lengths: list[int]
    num_selected: list[int]


# What is fetched must stay until it is read: a fork in another thread would fetch into the same places.
@exclusive
def decode(
    q: torch.Tensor,
    fetched: FetchedPages,
    rows: HostRows,
    softmax: Softmax,
    scoring: Scoring,
    *,
    pages_read: torch.Tensor,
    fetches: torch.Tensor,
    backend: str,
) -> torch.Tensor:
    """One decode step of every row, bit for bit what `kernels.decode` gives for the same pages on the device.

    Rows are taken together as far as their pages have room on the device, the others after them.

    Args:
        q: [R, Hq, D] queries; their own keys and values are in the pages already.
        fetched: The layer, and its copies on the device.
        rows: Page tables, lengths and K, and what the host knows of them.
        softmax: As in `kernels.decode`.
        scoring: As in `kernels.decode`.
        pages_read: [R] int64, written as by `kernels.decode`.
        fetches: [2] int64; what `FetchedPages.fetch` returns is added.
        backend: As in `kernels.decode`.

    Returns:
        [R, Hq, Dv] q's dtype.

    Raises:
        ValueError: A row reads more pages than have room on the device; the message says how many it needs.
    """
    pages = fetched.pages
    assert pages is not None
    kv_heads = pages.num_kv_heads
    on_device, wanted = rows.rows, rows.num_selected
    assert on_device.num_selected is not None
    num_sealed = torch.div(on_device.lengths - 1, pages.page_size, rounding_mode="floor")
    sealed = [(length - 1) // pages.page_size for length in rows.lengths]
    whole = [row for row, count in enumerate(sealed) if wanted[row] >= count]
    sparse = [row for row, count in enumerate(sealed) if wanted[row] < count]
    out = q.new_empty((*q.shape[:2], pages.value_dim))
    for piece in _together(whole, sealed, fetched.slots):
        here = _index(piece, q)
        table, count = on_device.page_table[here], num_sealed[here]
        behind = torch.arange(table.shape[1], device=q.device) >= count[:, None]
        named = table.masked_fill(behind, -1)[:, : max(sealed[row] for row in piece)]
        fetches += fetched.fetch(named.flatten().expand(kv_heads, -1), backend=backend)
        there = Rows(fetched.table(table), on_device.lengths[here])
        out[here] = kernels.dense(q[here], fetched.view, there, softmax, backend=backend)
        pages_read[here] = (count + 1) * kv_heads
    each_head = lists_a_kv_head(q, kv_heads, scoring.group)
    for piece in _together(sparse, [each_head * count for count in wanted], fetched.slots):
        here = _index(piece, q)
        table, lengths = on_device.page_table[here], on_device.lengths[here]
        scores = kernels.estimate(q[here], pages, Rows(table, lengths), softmax.scale, scoring, backend=backend)
        selection = kernels.select(scores, num_sealed[here], on_device.num_selected[here], scoring, backend=backend)
        fetches += fetched.fetch(_physical(selection, table, kv_heads), backend=backend)
        there = Rows(fetched.table(table), lengths)
        out[here] = kernels.attend(q[here], fetched.view, there, selection, softmax, backend=backend)
        pages_read[here] = _distinct(selection, kv_heads) + kv_heads
    return out


def lists_a_kv_head(q: torch.Tensor, kv_heads: int, group: str) -> int:
    """Query heads [R, Hq, D] of a KV head that select each for itself: G under ``per_head``, else one for all."""
    return q.shape[1] // kv_heads if group == "per_head" else 1


def _together(rows: list[int], needs: list[int], most: int) -> Iterator[list[int]]:
    """Consecutive rows that have room for their pages together, each counted as the one that needs most.

    Args:
        rows: Rows, ascending.
        needs: Pages of every row and KV head, by row.
        most: Places on the device.
    """
    piece: list[int] = []
    widest = 0
    for row in rows:
        if needs[row] > most:
            raise ValueError(
                f"[offload] slots: expected room on the device for the {needs[row]} pages that one row reads of each "
                f"KV head, got {most}"
            )
        if piece and (len(piece) + 1) * max(widest, needs[row]) > most:
            yield piece
            piece, widest = [], 0
        piece.append(row)
        widest = max(widest, needs[row])
    if piece:
        yield piece


def _index(rows: list[int], q: torch.Tensor) -> slice | torch.Tensor:
    """What picks these rows: nothing is copied where they are all."""
    return slice(None) if len(rows) == len(q) else torch.tensor(rows, device=q.device)


def _physical(selection: torch.Tensor, page_table: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[Hkv, n] physical pages behind a selection [R, H, K], those of all rows and of a group's heads; -1 is padding."""
    rows, heads, _ = selection.shape
    table = page_table[:, None].expand(rows, heads, page_table.shape[1])
    page_ids = table.gather(2, selection.clamp(min=0)).masked_fill(selection < 0, -1)
    return page_ids.view(rows, kv_heads, -1).transpose(0, 1).flatten(1)


def _distinct(selection: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[R] pages of a selection [R, H, K] summed over KV heads; those that heads of a group share count once."""
    chosen = selection.reshape(len(selection), kv_heads, -1).sort(dim=2).values
    return first_of_each(chosen).sum(dim=(1, 2))

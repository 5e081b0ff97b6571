"""Validation shared by the operators: the same error for the same mistake, whatever the backend."""

from __future__ import annotations

import torch

from questkv.errors import UnsupportedError
from questkv.kernels.rows import Rows
from questkv.kernels.softmax import Softmax
from questkv.kernels.types import Pages
from questkv.kernels.writes import Places


def check_on_device(op: str, pages: Pages) -> None:
    """Tokens that are read lie on the device."""
    if pages.host:
        raise UnsupportedError(
            f"[{op}] pages: expected keys and values on {pages.device}, got some in host memory; transfer the pages "
            "that are read to the device first"
        )


def check_read(op: str, q: torch.Tensor, pages: Pages, rows: Rows) -> None:
    """As `check_rows`, for operators that read tokens: on the device, where each KV head may have a page table."""
    check_on_device(op, pages)
    check_query(op, q, pages)
    table, heads = rows.page_table, pages.num_kv_heads
    if table.ndim == 2:
        check_rows(op, q, pages, rows)
        return
    if table.shape[1] != heads or table.shape[0] != q.shape[0]:
        raise ValueError(
            f"[{op}] page_table: expected [R={q.shape[0]}, P] or [R, Hkv={heads}, P], got {list(table.shape)}"
        )
    if not rows.fits(pages):
        # As rows of one head each.
        _check_table(op, table.flatten(0, 1), rows.lengths.repeat_interleave(heads), pages)
        rows.note(pages)


def check_rows(op: str, q: torch.Tensor, pages: Pages, rows: Rows) -> None:
    """There is a row for every query, and its page table and length are right for the pages."""
    table = rows.page_table
    if table.ndim != 2 or table.shape[0] != q.shape[0]:
        raise ValueError(f"[{op}] page_table: expected [R={q.shape[0]}, P], got {list(table.shape)}")
    if not rows.fits(pages):
        _check_table(op, table, rows.lengths, pages)
        rows.note(pages)


def check_budget(op: str, pages: Pages, rows: Rows, forced: int) -> None:
    """Every row may read its sink and recent pages."""
    wanted = rows.num_selected
    if wanted is None:
        raise ValueError(f"[{op}] num_selected: expected [R] in rows, got None")
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if rows.holds(forced) or wanted.device.type != "cpu":
        return
    for count, length in zip(wanted.tolist(), rows.lengths.tolist(), strict=True):
        if count < min((length - 1) // pages.page_size, forced):
            raise ValueError(
                f"[{op}] num_selected: expected at least the {forced} sink and recent pages, got {wanted.tolist()}"
            )
    rows.note_forced(forced)


def check_places(op: str, places: Places, pages: Pages) -> None:
    """Where new tokens go, and what they seal, are pages of the right kinds."""
    if places.fits(pages):
        return
    check_slots(op, places.slots, pages)
    check_sealed(op, "sealed", places.sealed, places.into, pages)
    if places.spans is not None:
        check_spans(op, "spans", places.spans, pages)
    elif pages.span_pages:
        raise ValueError(f"[{op}] spans: expected [k, C={pages.span_pages}], got None")
    places.note(pages)


def _check_table(op: str, page_table: torch.Tensor, lengths: torch.Tensor, pages: Pages) -> None:
    """The page table [R, P] and the lengths [R] of rows."""
    check_index(op, "page_table", page_table, pages)
    check_page_ids(op, "page_table", page_table, pages, lowest=-1)
    check_lengths(op, lengths, page_table.shape[1], pages)
    check_no_gaps(op, page_table, lengths, pages)
    if len(lengths) and pages.coded is not None:
        open_pages = torch.div(lengths - 1, pages.page_size, rounding_mode="floor")
        check_kind(op, "page_table", page_table.gather(1, open_pages[:, None]).squeeze(1), pages, coded=False)


def check_query(op: str, q: torch.Tensor, pages: Pages) -> None:
    """Q is [R, Hq, D] of the pages' dtype and device, Hq a multiple of Hkv."""
    if q.ndim != 3 or q.shape[2] != pages.head_dim or q.shape[1] == 0 or q.shape[1] % pages.num_kv_heads:
        raise ValueError(
            f"[{op}] q: expected [R, Hq, D={pages.head_dim}] with Hq a multiple of Hkv={pages.num_kv_heads}, "
            f"got {list(q.shape)}"
        )
    if q.dtype != pages.dtype:
        raise TypeError(f"[{op}] q: expected {pages.dtype} like the keys, got {q.dtype}")
    if q.device != pages.device:
        raise ValueError(f"[{op}] q: expected device {pages.device}, got {q.device}")


def check_index(op: str, name: str, index: torch.Tensor, pages: Pages) -> None:
    """Indices are int64 on the pages' device."""
    if index.dtype != torch.int64:
        raise TypeError(f"[{op}] {name}: expected int64, got {index.dtype}")
    if index.device != pages.device:
        raise ValueError(f"[{op}] {name}: expected device {pages.device}, got {index.device}")


def check_page_ids(op: str, name: str, ids: torch.Tensor, pages: Pages, lowest: int = 0) -> None:
    """Physical page ids lie in the pool; `lowest` = -1 lets padding pass."""
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < lowest or high >= pages.num_pages:
        raise ValueError(
            f"[{op}] {name}: expected physical pages 0 to {pages.num_pages - 1}, got {low if low < lowest else high}"
        )


def check_kind(op: str, name: str, page_ids: torch.Tensor, pages: Pages, *, coded: bool) -> None:
    """Pages [n] that are written or open are plain; those that `seal` codes into are coded."""
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if page_ids.device.type != "cpu" or not page_ids.numel():
        return
    is_coded = torch.zeros_like(page_ids, dtype=torch.bool) if pages.coded is None else pages.coded[page_ids]
    wrong = page_ids[is_coded != coded]
    if len(wrong):
        what, kind = ("coded pages", "plain") if coded else ("plain pages where tokens are written or open", "coded")
        raise ValueError(f"[{op}] {name}: expected {what}, got the {kind} page {int(wrong[0])}")


def check_per_row(op: str, name: str, value: torch.Tensor, rows: int, pages: Pages) -> None:
    """One int64 per row."""
    if list(value.shape) != [rows]:
        raise ValueError(f"[{op}] {name}: expected [R={rows}], got {list(value.shape)}")
    check_index(op, name, value, pages)


def check_lengths(op: str, lengths: torch.Tensor, table_pages: int, pages: Pages) -> None:
    """Every row sees at least its own token, and no more than its page table holds."""
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    low, high = int(lengths.min()), int(lengths.max())
    if low < 1 or high > table_pages * pages.page_size:
        raise ValueError(
            f"[{op}] lengths: expected 1 to {table_pages * pages.page_size} tokens (page_table has {table_pages} "
            f"pages of {pages.page_size}), got {low if low < 1 else high}"
        )


def check_no_gaps(op: str, page_table: torch.Tensor, lengths: torch.Tensor, pages: Pages) -> None:
    """Padding (-1) lies past the row's pages only."""
    # One sequence has no padding at all: the look at each row costs ten times as much.
    if page_table.device.type != "cpu" or not page_table.numel() or int(page_table.min()) >= 0:
        return
    used = torch.div(lengths - 1, pages.page_size, rounding_mode="floor") + 1
    gaps = (page_table < 0) & (torch.arange(page_table.shape[1]) < used[:, None])
    if bool(gaps.any()):
        row = int(gaps.any(dim=1).nonzero()[0])
        raise ValueError(
            f"[{op}] page_table: expected a physical page for each of the row's {int(used[row])} pages, "
            f"got {page_table[row].tolist()} in row {row}"
        )


def check_sinks(op: str, softmax: Softmax, q: torch.Tensor) -> None:
    """There is a sink for every query head, or none."""
    sinks = softmax.sinks
    if sinks is None:
        return
    if sinks.shape[0] != q.shape[1]:
        raise ValueError(f"[{op}] sinks: expected None or [Hq={q.shape[1]}], got {list(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"[{op}] sinks: expected device {q.device}, got {sinks.device}")


def check_pages(op: str, name: str, page_ids: torch.Tensor, pages: Pages) -> None:
    """A list of physical pages."""
    if page_ids.ndim != 1:
        raise ValueError(f"[{op}] {name}: expected [n], got {list(page_ids.shape)}")
    check_index(op, name, page_ids, pages)
    check_page_ids(op, name, page_ids, pages)


def check_sealed(op: str, name: str, page_ids: torch.Tensor, into: torch.Tensor | None, pages: Pages) -> None:
    """Plain pages [n] to seal, and as many coded pages that they are coded into, or None."""
    check_pages(op, name, page_ids, pages)
    check_kind(op, name, page_ids, pages, coded=False)
    if into is None:
        return
    check_pages(op, "into", into, pages)
    if into.shape != page_ids.shape:
        raise ValueError(f"[{op}] into: expected a page for each of the {len(page_ids)} in {name}, got {len(into)}")
    check_kind(op, "into", into, pages, coded=True)


def check_spans(op: str, name: str, page_ids: torch.Tensor, pages: Pages) -> None:
    """Spans [n, C] of physical pages, each with its last page where a span may end."""
    size = pages.span_pages
    if not size:
        raise ValueError(f"[{op}] pages: expected boxes for spans, [Hkv, N + N / C, 2, D], got none")
    if page_ids.ndim != 2 or page_ids.shape[1] != size:
        raise ValueError(f"[{op}] {name}: expected [n, C={size}], got {list(page_ids.shape)}")
    check_index(op, name, page_ids, pages)
    check_page_ids(op, name, page_ids, pages)
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if page_ids.device.type == "cpu" and bool((page_ids[:, -1] % size != size - 1).any()):
        raise ValueError(f"[{op}] {name}: expected last pages {size - 1} modulo {size}, got {page_ids[:, -1].tolist()}")


def check_new(op: str, pages: Pages, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Slots [n] in the pages, keys [n, Hkv, D] and values [n, Hkv, Dv] that fit them."""
    check_slots(op, slots, pages)
    check_states(op, pages, len(slots), keys, values)


def check_states(op: str, pages: Pages, tokens: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """New keys [n, Hkv, D] and values [n, Hkv, Dv]."""
    for name, tensor, dim in (("keys", keys, pages.head_dim), ("values", values, pages.value_dim)):
        expected = [tokens, pages.num_kv_heads, dim]
        if list(tensor.shape) != expected:
            raise ValueError(f"[{op}] {name}: expected {expected}, got {list(tensor.shape)}")
        if tensor.dtype != pages.dtype:
            raise TypeError(f"[{op}] {name}: expected {pages.dtype} like the pages, got {tensor.dtype}")
        if tensor.device != pages.device:
            raise ValueError(f"[{op}] {name}: expected device {pages.device}, got {tensor.device}")


def check_slots(op: str, slots: torch.Tensor, pages: Pages) -> None:
    """Slots [n] in plain pages."""
    check_index(op, "slots", slots, pages)
    if slots.ndim != 1:
        raise ValueError(f"[{op}] slots: expected [n], got {list(slots.shape)}")
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if slots.device.type != "cpu" or not slots.numel():
        return
    low, high, end = int(slots.min()), int(slots.max()), pages.num_pages * pages.page_size
    if low < 0 or high >= end:
        raise ValueError(f"[{op}] slots: expected slots 0 to {end - 1}, got {low if low < 0 else high}")
    if pages.coded is not None:
        page_ids = torch.div(slots, pages.page_size, rounding_mode="floor")
        check_kind(op, "slots", page_ids, pages, coded=False)


def check_linear_dtype(x: torch.Tensor) -> None:
    """`linear` multiplies floats of 16 or 32 bits."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"[linear] x: expected float32, bfloat16 or float16, got {x.dtype}")

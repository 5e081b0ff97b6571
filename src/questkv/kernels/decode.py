"""decode: estimate, select and attend in one call."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.types import NewTokens, Pages


def decode(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor,
    *,
    scale: float,
    optimism: float = 1.0,
    group: str = "mean",
    sink_pages: int = 1,
    recent_pages: int = 4,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    pages_read: torch.Tensor | None = None,
    new: NewTokens | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One decode step of every row: estimate, select, attend (paper, Algorithm 1 and figure 5).

    A row whose `num_selected` covers its sealed pages takes the dense path and gives bit for bit what `dense` gives.
    Where spans have boxes, the others score pages in two levels (`estimate` with `num_selected`).

    Args:
        q: [R, Hq, D] queries, the keys' dtype; their own keys and values are in the pages already, or in `new`.
        pages: The layer's pages.
        page_table: [R, P] int64 physical page of every logical page, -1 past the row's pages.
        lengths: [R] int64 tokens visible to the row, its own included.
        num_selected: [R] int64 sealed pages that the row may read (K, see `QuestConfig.pages_at`).
        scale: Softmax scale.
        optimism: As in `estimate`.
        group: As in `estimate`.
        sink_pages: As in `select`.
        recent_pages: As in `select`.
        softcap: As in `attend`.
        sinks: As in `attend`.
        pages_read: [R] int64, overwritten with the pages that the row read, the open page included, summed over the
            KV heads (a page that several heads of a group read counts once).
        new: Tokens that are appended, and pages that are sealed, before anything is read: one call a step where
            `append` and `seal` would be two more.
        backend: ``auto`` or a backend's name.

    Returns:
        [R, Hq, Dv] q's dtype.

    Raises:
        ValueError: A shape, a device or a value is wrong.
        TypeError: A dtype is wrong.
    """
    if torch.compiler.is_compiling():
        rows = (q, *pages.tensors(), page_table, lengths, num_selected, scale, softcap, sinks)
        rule = (optimism, group, sink_pages, recent_pages, pages_read)
        decoded: torch.Tensor
        if new is None:
            decoded = torch.ops.questkv.decode(*rows, *rule, backend)
        else:
            written = (new.slots, new.keys, new.values, new.sealed, new.into, new.spans)
            decoded = torch.ops.questkv.decode_new(*rows, *rule, *written, backend)
        return decoded
    checks.check_on_device("decode", pages)
    checks.check_rows("decode", q, pages, page_table, lengths)
    checks.check_per_row("decode", "num_selected", num_selected, q.shape[0], pages)
    checks.check_scale("decode", scale)
    checks.check_scoring("decode", optimism, group)
    checks.check_forced("decode", sink_pages, recent_pages)
    checks.check_softmax("decode", softcap, sinks, q)
    if pages_read is not None:
        checks.check_per_row("decode", "pages_read", pages_read, q.shape[0], pages)
    check_budget(num_selected, lengths, pages.page_size, sink_pages + recent_pages)
    if new is not None:
        checks.check_new("decode", pages, new.slots, new.keys, new.values)
        checks.check_sealed("decode", "sealed", new.sealed, new.into, pages)
        checks.check_new_spans("decode", new.spans, pages)
    out: torch.Tensor = dispatch.resolve(backend, pages.device).decode(
        q,
        pages,
        page_table,
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
        new,
    )
    return out


def check_budget(num_selected: torch.Tensor, lengths: torch.Tensor, page_size: int, forced: int) -> None:
    """Every row may read its sink and recent pages."""
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if num_selected.device.type != "cpu" or not num_selected.numel():
        return
    for wanted, length in zip(num_selected.tolist(), lengths.tolist(), strict=True):
        if wanted < min((length - 1) // page_size, forced):
            raise ValueError(
                f"[decode] num_selected: expected at least the {forced} sink and recent pages, "
                f"got {num_selected.tolist()}"
            )

"""The operators, as calls into the compiled module. Arguments have been validated by questkv.kernels.

The module has structs of the same names; what is made of one is kept with it, so that the layers of a step share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.dlpack

from questkv.errors import UnsupportedError
from questkv.kernels.native.module import instruction_set, load
from questkv.kernels.rows import Rows
from questkv.kernels.scoring import Scoring
from questkv.kernels.softmax import Softmax
from questkv.kernels.types import Pages
from questkv.kernels.writes import Writes

# A capsule made here costs a tenth of what the module would spend on asking the tensor for one.
lend: Callable[[torch.Tensor], Any] = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]

_GROUPS = {"mean": 0, "softmax_mean": 1, "per_head": 2}
_layers: WeakKeyDictionary[Pages, Any] = WeakKeyDictionary()


def append(pages: Pages, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """As `kernels.append`."""
    load().append(
        instruction_set(),
        _layer(pages),
        lend(slots.contiguous()),
        lend(keys.contiguous()),
        lend(values.contiguous()),
        torch.get_num_threads(),
    )


def seal(pages: Pages, page_ids: torch.Tensor, into: torch.Tensor | None = None) -> None:
    """As `kernels.seal`."""
    load().seal(
        instruction_set(), _layer(pages), lend(page_ids.contiguous()), _lend_some(into), torch.get_num_threads()
    )


def seal_spans(pages: Pages, page_ids: torch.Tensor) -> None:
    """As `kernels.seal_spans`."""
    load().seal_spans(instruction_set(), _layer(pages), lend(page_ids.contiguous()), torch.get_num_threads())


def estimate(q: torch.Tensor, pages: Pages, rows: Rows, scale: float, scoring: Scoring) -> torch.Tensor:
    """As `kernels.estimate`."""
    heads = q.shape[1] if scoring.group == "per_head" else pages.num_kv_heads
    scores = q.new_empty((q.shape[0], heads, rows.page_table.shape[1]), dtype=torch.float32)
    load().estimate(
        instruction_set(),
        _layer(pages),
        lend(q.contiguous()),
        _rows(rows),
        scale,
        _scoring(scoring),
        lend(scores),
        torch.get_num_threads(),
    )
    return scores


def select(scores: torch.Tensor, num_pages: torch.Tensor, num_selected: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """As `kernels.select`."""
    width = int(torch.minimum(num_pages, num_selected).max()) if len(scores) else 0
    selection = scores.new_empty((*scores.shape[:2], width), dtype=torch.int64)
    load().select(
        instruction_set(),
        lend(scores.contiguous()),
        lend(num_pages.contiguous()),
        lend(num_selected.contiguous()),
        _scoring(scoring),
        lend(selection),
        torch.get_num_threads(),
    )
    return selection


def attend(q: torch.Tensor, pages: Pages, rows: Rows, selection: torch.Tensor | None, softmax: Softmax) -> torch.Tensor:
    """As `kernels.attend`; without a selection, over everything."""
    if rows.page_table.ndim == 3:
        raise UnsupportedError(
            f"[attend] page_table: expected [R, P] with backend 'native', got {list(rows.page_table.shape)}"
        )
    out = torch.empty((*q.shape[:2], pages.value_dim), dtype=q.dtype)
    load().attend(
        instruction_set(),
        _layer(pages),
        lend(q.contiguous()),
        _rows(rows),
        _lend_some(selection),
        _softmax(softmax),
        lend(out),
        torch.get_num_threads(),
    )
    return out


def dense(q: torch.Tensor, pages: Pages, rows: Rows, softmax: Softmax) -> torch.Tensor:
    """As `kernels.dense`."""
    return attend(q, pages, rows, None, softmax)


def decode(
    q: torch.Tensor,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    scoring: Scoring,
    writes: Writes | None,
    pages_read: torch.Tensor | None,
) -> torch.Tensor:
    """As `kernels.decode`: estimate, select and attend for one (row, KV head) after another, in one call."""
    q = q.contiguous()
    out = torch.empty((*q.shape[:2], pages.value_dim), dtype=q.dtype)
    counts = None if pages_read is None else pages_read.contiguous()
    load().decode(
        instruction_set(),
        _layer(pages),
        lend(q),
        _rows(rows),
        _softmax(softmax),
        _scoring(scoring),
        None if writes is None else _writes(writes),
        _lend_some(counts),
        lend(out),
        torch.get_num_threads(),
    )
    if pages_read is not None and counts is not None and counts is not pages_read:
        pages_read.copy_(counts)
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None
) -> torch.Tensor:
    """As `kernels.linear`."""
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    load().linear(
        instruction_set(),
        lend(x),
        lend(weight),
        _lend_some(scales),
        _lend_some(bias),
        lend(out),
        torch.get_num_threads(),
    )
    return out


def _layer(pages: Pages) -> Any:
    """The compiled view of a layer's pages, made once for as long as the pages live."""
    layer = _layers.get(pages)
    if layer is None:
        layer = _layers[pages] = load().LayerPages(
            [segment.keys for segment in pages.segments],
            [segment.values for segment in pages.segments],
            [segment.boxes for segment in pages.segments],
            [segment.scales for segment in pages.segments],
            [segment.value_scales for segment in pages.segments],
        )
    return layer


def _rows(rows: Rows) -> Any:
    if rows.bound is not None:
        return rows.bound
    table, lengths = lend(rows.page_table.contiguous()), lend(rows.lengths.contiguous())
    return rows.bind(load().Rows(table, lengths, _lend_some(rows.num_selected)))


def _softmax(softmax: Softmax) -> Any:
    if softmax.bound is not None:
        return softmax.bound
    sinks = softmax.sinks
    lent = None if sinks is None else lend(sinks.detach().float().contiguous())
    return softmax.bind(load().Softmax(softmax.scale, softmax.softcap or 0.0, lent))


def _scoring(scoring: Scoring) -> Any:
    if scoring.bound is not None:
        return scoring.bound
    group = _GROUPS[scoring.group]
    return scoring.bind(load().Scoring(scoring.optimism, group, scoring.sink_pages, scoring.recent_pages))


def _writes(writes: Writes) -> tuple[Any, Any, Any]:
    places = writes.places
    bound = places.bound
    if bound is None:
        slots, sealed = lend(places.slots.contiguous()), lend(places.sealed.contiguous())
        bound = places.bind(load().Places(slots, sealed, _lend_some(places.into), _lend_some(places.spans)))
    return lend(writes.keys.contiguous()), lend(writes.values.contiguous()), bound


def _lend_some(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else lend(tensor.contiguous())

"""The operators, as calls into the compiled module. Arguments have been validated by questkv.kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.dlpack

from questkv.errors import UnsupportedError
from questkv.kernels.native.module import instruction_set, load
from questkv.kernels.types import NewTokens, Pages

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


def estimate(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor | None,
    scale: float,
    optimism: float,
    group: str,
) -> torch.Tensor:
    """As `kernels.estimate`."""
    heads = q.shape[1] if group == "per_head" else pages.num_kv_heads
    scores = q.new_empty((q.shape[0], heads, page_table.shape[1]), dtype=torch.float32)
    load().estimate(
        instruction_set(),
        _layer(pages),
        lend(q.contiguous()),
        lend(page_table.contiguous()),
        lend(lengths.contiguous()),
        _lend_some(num_selected),
        scale,
        optimism,
        _GROUPS[group],
        lend(scores),
        torch.get_num_threads(),
    )
    return scores


def select(
    scores: torch.Tensor, num_pages: torch.Tensor, num_selected: torch.Tensor, sink_pages: int, recent_pages: int
) -> torch.Tensor:
    """As `kernels.select`."""
    width = int(torch.minimum(num_pages, num_selected).max()) if len(scores) else 0
    selection = scores.new_empty((*scores.shape[:2], width), dtype=torch.int64)
    load().select(
        instruction_set(),
        lend(scores.contiguous()),
        lend(num_pages.contiguous()),
        lend(num_selected.contiguous()),
        sink_pages,
        recent_pages,
        lend(selection),
        torch.get_num_threads(),
    )
    return selection


def attend(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    selection: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `kernels.attend`; without a selection, over everything."""
    if page_table.ndim == 3:
        raise UnsupportedError(
            f"[attend] page_table: expected [R, P] with backend 'native', got {list(page_table.shape)}"
        )
    out = torch.empty((*q.shape[:2], pages.value_dim), dtype=q.dtype)
    load().attend(
        instruction_set(),
        _layer(pages),
        lend(q.contiguous()),
        lend(page_table.contiguous()),
        lend(lengths.contiguous()),
        _lend_some(selection),
        scale,
        softcap or 0.0,
        _sinks(sinks),
        lend(out),
        torch.get_num_threads(),
    )
    return out


def dense(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `kernels.dense`."""
    return attend(q, pages, page_table, lengths, None, scale, softcap, sinks)


def decode(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor,
    scale: float,
    optimism: float,
    group: str,
    sink_pages: int,
    recent_pages: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
    pages_read: torch.Tensor | None,
    new: NewTokens | None,
) -> torch.Tensor:
    """As `kernels.decode`: estimate, select and attend for one (row, KV head) after another, in one call."""
    q = q.contiguous()
    out = torch.empty((*q.shape[:2], pages.value_dim), dtype=q.dtype)
    counts = None if pages_read is None else pages_read.contiguous()
    load().decode(
        instruction_set(),
        _layer(pages),
        lend(q),
        lend(page_table.contiguous()),
        lend(lengths.contiguous()),
        lend(num_selected.contiguous()),
        scale,
        optimism,
        _GROUPS[group],
        sink_pages,
        recent_pages,
        softcap or 0.0,
        _sinks(sinks),
        _lend_some(counts),
        None if new is None else _new(new),
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


def _new(new: NewTokens) -> tuple[Any, ...]:
    keys, values = lend(new.keys.contiguous()), lend(new.values.contiguous())
    sealed, into, spans = lend(new.sealed.contiguous()), _lend_some(new.into), _lend_some(new.spans)
    return lend(new.slots.contiguous()), keys, values, sealed, into, spans


def _sinks(sinks: torch.Tensor | None) -> Any:
    return None if sinks is None else lend(sinks.detach().float().contiguous())


def _lend_some(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else lend(tensor.contiguous())

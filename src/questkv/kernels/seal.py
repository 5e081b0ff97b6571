"""seal, seal_spans: compute the boxes of full pages, and code their content; and those of spans of pages."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.types import Pages


def seal(pages: Pages, page_ids: torch.Tensor, into: torch.Tensor | None = None, *, backend: str = "auto") -> None:
    """Write the boxes of full pages: the lowest and highest value of every key channel, per KV head.

    Paper, section 3.4 (the metadata of Algorithm 1). Int8 boxes are rounded outward, so that
    ``code_lo * scale <= key <= code_hi * scale`` holds exactly for every key of the page. A page that holds a NaN or
    infinite key gets a box that scores +inf.

    With `into`, page i is coded in eight bits into page into[i], keys within the box and values within their token's
    range (docs/method.md), and is itself left as it is, its box too.

    Args:
        pages: The layer's pages. Written in place: boxes (and scales) of `page_ids`, or everything of `into`; nothing
            else.
        page_ids: [n] int64 plain physical pages, all S slots of each written.
        into: [n] int64 coded physical pages, all different; None writes the boxes of `page_ids` themselves.
        backend: ``auto`` or a backend's name.

    Raises:
        ValueError: A shape, a device, a page id or its kind is wrong.
        TypeError: A dtype is wrong.

    Example:
        >>> seal(pages, torch.tensor([0, 1]))  # two pages that are full
    """
    checks.check_sealed("seal", "page_ids", page_ids, into, pages)
    dispatch.resolve(backend, pages.device).seal(pages, page_ids, into)


def seal_spans(pages: Pages, page_ids: torch.Tensor, *, backend: str = "auto") -> None:
    """Write the boxes of spans: each the smallest that holds the boxes of its pages, in int8 rounded outward.

    Args:
        pages: The layer's pages, with boxes for spans of C pages. Written in place: the spans' boxes (and scales).
        page_ids: [n, C] int64 sealed physical pages, a span a row: C that follow one another in a sequence. The last
            one is C i + C - 1 for some i, which says where the span's box lies.
        backend: ``auto`` or a backend's name.

    Raises:
        ValueError: A shape, a device or a page id is wrong, or spans have no boxes.
        TypeError: A dtype is wrong.
        UnsupportedError: The backend has no spans.

    Example:
        >>> seal_spans(pages_with_spans, torch.arange(C)[None])  # physical pages 0 to C - 1, which `seal` has sealed
    """
    checks.check_spans("seal_spans", "page_ids", page_ids, pages)
    dispatch.resolve(backend, pages.device).seal_spans(pages, page_ids)

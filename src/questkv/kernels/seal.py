"""seal: compute the boxes of full pages."""

from __future__ import annotations

import torch

from questkv.kernels import checks, dispatch
from questkv.kernels.types import Pages


def seal(pages: Pages, page_ids: torch.Tensor, *, backend: str = "auto") -> None:
    """Write the boxes of full pages: the lowest and highest value of every key channel, per KV head.

    Paper, section 3.4 (the metadata of Algorithm 1). Int8 boxes are rounded outward, so that
    ``code_lo * scale <= key <= code_hi * scale`` holds exactly for every key of the page. A page that holds a NaN or
    infinite key gets a box that scores +inf.

    Args:
        pages: The layer's pages; boxes (and scales) of `page_ids` are written in place, nothing else is.
        page_ids: [n] int64 physical pages, all S slots of each written.
        backend: ``auto`` or a backend's name.

    Raises:
        ValueError: A shape, a device or a page id is wrong.
        TypeError: A dtype is wrong.
    """
    checks.check_pages("seal", "page_ids", page_ids, pages)
    dispatch.resolve(backend, pages.device).seal(pages, page_ids)

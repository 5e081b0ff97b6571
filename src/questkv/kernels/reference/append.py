"""append: write new tokens into their slots."""

from __future__ import annotations

import torch

from questkv.kernels.types import Pages


def append(pages: Pages, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """keys[h, slot // S, slot % S] = token's key, the same for values."""
    start = 0
    for segment in pages.segments:
        end = start + segment.keys.shape[1] * pages.page_size
        if segment.coded or segment.host:
            start = end
            continue
        here = slice(None) if len(pages.segments) == 1 else (slots >= start) & (slots < end)
        local = slots[here] - start
        for target, source in ((segment.keys, keys), (segment.values, values)):
            target.flatten(1, 2)[:, local] = source[here].transpose(0, 1)
        start = end

"""transfer: copy whole pages, head by head, between host memory and the device."""

from __future__ import annotations

import torch

from questkv.kernels.types import Pages

_TENSORS = ("keys", "values", "boxes", "scales", "value_scales")


def transfer(source: Pages, page_ids: torch.Tensor, target: Pages, into: torch.Tensor) -> None:
    """tensor[h, into[h, i]] = tensor[h, page_ids[h, i]], for every tensor that stores pages."""
    # On the CPU, where the tensors in host memory are; what was written there before is there once this waited.
    heads, place = (page_ids >= 0).cpu().nonzero().unbind(dim=1)
    page_ids, into = page_ids.cpu()[heads, place], into.cpu()[heads, place]
    for part, start in zip(source.segments, source.starts, strict=False):
        read = (page_ids >= start) & (page_ids < start + part.keys.shape[1])
        for other, first in zip(target.segments, target.starts, strict=False):
            here = read & (into >= first) & (into < first + other.keys.shape[1])
            for name in _TENSORS if bool(here.any()) else ():
                old, new = getattr(part, name), getattr(other, name)
                if old is not None:
                    head, page, to = heads[here], page_ids[here] - start, into[here] - first
                    copied = old[head.to(old.device), page.to(old.device)].to(new.device)
                    new[head.to(new.device), to.to(new.device)] = copied

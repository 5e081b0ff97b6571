"""What attention and boxes over lists of tokens must be; float64."""

from __future__ import annotations

import torch


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """[G, D] queries of one KV head over keys and values [T, D]; float64."""
    weights = (q.double() @ keys.double().T * scale).softmax(dim=-1)
    return weights @ values.double()


def tolerance(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, dtype: torch.dtype) -> float:
    """How far float32 attention over finite tokens [T, D] may be from the exact one.

    A dot product of D terms is off by D eps sum|q k|; a logit's error d changes a weight by a factor within exp(+-2d);
    the softmax and the weighted sum of T terms add T eps. The result is rounded once more, to `dtype`.
    """
    eps, tokens, dim = torch.finfo(torch.float32).eps, len(keys), keys.shape[-1]
    largest = float((q.double().abs() @ keys.double().abs().T).max()) * scale
    size = float(values.double().abs().max())
    return size * (2 * (dim + 4) * eps * largest + 2 * (tokens + 8) * eps + torch.finfo(dtype).eps)


def boxes(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest value of every channel of a page's keys [S, Hkv, D], each [Hkv, D]; float64."""
    stacked = keys.double()
    return stacked.min(dim=0).values, stacked.max(dim=0).values


def int8_boxes(lo: torch.Tensor, hi: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tightest whole codes around a box for the given scale [Hkv], as [Hkv, D] each; float64."""
    return torch.floor(lo / scale.double()[:, None]), torch.ceil(hi / scale.double()[:, None])

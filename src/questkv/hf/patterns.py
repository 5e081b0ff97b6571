"""Masks of paged layers: padding, and patterns in which a token sees other tokens than all before it.

Tokens of an image see one another (Gemma 3), and a caller may bring a mask of its own. Such a run of new tokens is
attended densely under its mask; the pages hold the same tokens as ever.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from questkv.errors import UnsupportedError
from questkv.hf.layer import PagedLayer
from questkv.hf.local_attention import local_attention
from questkv.kernels import Softmax


class PaddingMask(torch.Tensor):
    """[B, 1, 1, columns] bool that says which columns are real: a query sees those of them that lie before it.

    A part of it is one too, since a model may cut the queries of its masks (Gemma 4); what is computed from it isn't.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as with any tensor."""
        out = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        keeps = getattr(func, "__name__", "") in ("__getitem__", "to")
        return out if keeps or not isinstance(out, PaddingMask) else out.as_subclass(torch.Tensor)


def mark_padding(mask: torch.Tensor) -> PaddingMask:
    """Mark [B, 1, 1, columns] as a mask of padding."""
    return mask.as_subclass(PaddingMask)


def is_padding(mask: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether a mask says only which columns are real; if not, it is one of [B, 1, n, columns].

    Args:
        mask: [B, columns], or four dimensions: what `mark_padding` gave, or a row of columns for every query.
        query: [B, Hq, n, D].

    Raises:
        UnsupportedError: It's neither.
    """
    if mask.ndim == 2 or (isinstance(mask, PaddingMask) and mask.shape[1:3] == (1, 1)):
        return True
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != query.shape[2]:
        raise UnsupportedError(
            "[questkv] attention_mask: expected a 2-D padding mask, or bool [B, 1, n, columns] that all heads share, "
            f"got {mask.dtype} {list(mask.shape)}; run this model without questkv"
        )
    # One query: the columns that it sees are to be those that are real, which the cache checks.
    return query.shape[2] == 1


@torch.no_grad()
def attend_by_pattern(layer: Any, query: torch.Tensor, mask: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Write a layer's new tokens, and attend them densely, each query to the columns that its row of a mask names.

    Args:
        layer: What the new keys' handle leads to.
        query: [B, Hq, n, D].
        mask: [B, 1, n, columns] bool. A new column that doesn't see itself is padding.
        softmax: Scale, soft cap and sinks.

    Returns:
        [B, n, Hq, D]; a padding query's rows are of no use.

    Raises:
        UnsupportedError: Not a paged layer; or a token sees a column that is padding by the rule above.
    """
    if not isinstance(layer, PagedLayer):
        raise UnsupportedError("[policies] attention_mask: expected plain causal attention, got another pattern")
    past, pattern = mask.shape[-1] - query.shape[2], mask[:, 0]
    new = pattern[:, :, past:].diagonal(dim1=1, dim2=2)  # [B, n]
    if bool((pattern[:, :, past:] & ~new[:, None]).any()):
        raise UnsupportedError(
            "[questkv] attention_mask: expected every token to see itself, got one that doesn't and that others see; "
            "run this input without questkv"
        )
    known = layer.state.real
    real = torch.cat([torch.ones_like(pattern[:, 0, :past]) if known is None else known[:, :past], new], dim=1)
    fresh = layer.new
    out = layer.attend(query, real, softmax)  # as if it were causal: for what it writes
    for sequence, rows in enumerate(new):
        keys, values = layer.state.keys_values(layer.index, sequence)
        if fresh is not None:  # as they came, where pages hold them in eight bits
            held = keys.shape[1] - int(rows.sum())
            keys, values = (
                torch.cat([old[:, :held], tokens[sequence][:, rows]], dim=1)
                for old, tokens in zip((keys, values), fresh, strict=True)
            )
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[0], is_causal=False)
        seen = pattern[sequence, rows][:, real[sequence]]
        dense = query[sequence : sequence + 1, :, rows], keys[None], values[None]
        out[sequence, rows] = local_attention(module, *dense, seen[None, None], softmax)[0]
    return out

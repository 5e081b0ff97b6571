"""attend, dense, prefill: exact softmax attention over what is selected, over everything, and as one block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from questkv.kernels.reference.gather import gather_pairs, gather_run
from questkv.kernels.types import Pages

# Query tokens a block of `prefill`: bounds the mask and the scores, [block, length] each.
_BLOCK = 256


def attend(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    selection: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """out[r] = attention of q[r] over the pages of selection[r] and the open page of row r."""
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        sealed = (length - 1) // pages.page_size
        open_page, in_open_page = page_table[row, sealed : sealed + 1], length - sealed * pages.page_size
        chosen = selection[row][:, : int((selection[row, 0] >= 0).sum())]
        heads, page_ids, place = _distinct(page_table[row][chosen], pages.num_kv_heads)
        keys, values = (
            torch.cat(
                [
                    gather_pairs(parts, heads, page_ids)[place].flatten(1, 2),
                    gather_run(parts, open_page)[:, 0, :in_open_page].repeat_interleave(
                        len(place) // pages.num_kv_heads, dim=0
                    ),
                ],
                dim=1,
            )
            for parts in _keys_and_values(pages)
        )
        out[row] = softmax_attention(q[row], keys, values, scale, softcap, sinks)
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
    """out[r] = attention of q[r] over the first lengths[r] tokens of row r."""
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        keys, values = _tokens(pages, page_table[row], length)
        out[row] = softmax_attention(q[row], keys, values, scale, softcap, sinks)
    return out


def prefill(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    length: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """out[i] = attention of q[i] over the first length - n + i + 1 tokens."""
    keys, values = _tokens(pages, page_table, length)
    before = length - len(q)
    if not (keys[:, before:].isfinite().all() and values[:, before:].isfinite().all()):
        return _prefill_rows(q, keys, values, scale, softcap, sinks)
    if softcap is None and sinks is None:
        return _prefill_sdpa(q, keys, values, scale)
    out = torch.empty_like(q)
    for start in range(0, len(q), _BLOCK):
        block = q[start : start + _BLOCK]
        visible = length - len(q) + start + len(block)
        mask = _causal(len(block), visible, q.device)
        out[start : start + len(block)] = softmax_attention(
            block.transpose(0, 1), keys[:, :visible], values[:, :visible], scale, softcap, sinks, mask
        ).transpose(0, 1)
    return out


def softmax_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention in float32, the formula written out.

    Args:
        q: [Hq, D], or [Hq, n, D] with a mask.
        keys: [H, T, D], H a divisor of Hq.
        values: [H, T, D].
        scale: Softmax scale.
        softcap: As in `kernels.attend`.
        sinks: [Hq].
        mask: [n, T] bool, True where a query sees a token.

    Returns:
        Like q.
    """
    # Contiguous: the order of a product's sums, and so its last bits, would follow the strides.
    queries = q.float().contiguous().view(len(keys), -1, q.shape[-1]) * scale  # [H, G * n, D]
    logits = queries @ keys.float().transpose(1, 2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.unflatten(1, (-1, len(mask))).masked_fill(~mask, -torch.inf).flatten(1, 2)
    if sinks is not None:
        per_query = sinks.float().repeat_interleave(queries.shape[1] * len(keys) // len(sinks))
        logits = torch.cat([logits, per_query.view(*logits.shape[:2], 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., : keys.shape[1]]
    return (weights @ values.float()).view(q.shape).to(q.dtype)


def _prefill_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Token by token: a mask's weight of 0 doesn't hide a later token that is NaN or infinite, as 0 * NaN is NaN."""
    out = torch.empty_like(q)
    for i in range(len(q)):
        visible = keys.shape[1] - len(q) + i + 1
        out[i] = softmax_attention(q[i], keys[:, :visible], values[:, :visible], scale, softcap, sinks)
    return out


def _prefill_sdpa(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """PyTorch's fused attention, which never holds the scores of a whole prompt."""
    n, length = len(q), keys.shape[1]
    queries, keys, values = q.transpose(0, 1)[None], keys[None], values[None]
    if q.device.type == "cpu":
        # In a narrower type it would round the softmax's weights to it; float32 is no slower here.
        queries, keys, values = queries.float(), keys.float(), values.float()
    if n == length:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=n > 1, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).to(q.dtype)
    out = torch.empty_like(queries)
    for start in range(0, n, _BLOCK):
        block = queries[:, :, start : start + _BLOCK]
        visible = length - n + start + block.shape[2]
        out[:, :, start : start + _BLOCK] = F.scaled_dot_product_attention(
            block,
            keys[:, :, :visible],
            values[:, :, :visible],
            attn_mask=_causal(block.shape[2], visible, q.device),
            scale=scale,
            enable_gqa=True,
        )
    return out[0].transpose(0, 1).to(q.dtype)


def _causal(n: int, visible: int, device: torch.device) -> torch.Tensor:
    """[n, visible] bool: the last n of `visible` tokens, each seeing itself and what lies before it."""
    return torch.ones(n, visible, dtype=torch.bool, device=device).tril(visible - n)


def _keys_and_values(pages: Pages) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [segment.keys for segment in pages.segments], [segment.values for segment in pages.segments]


def _tokens(pages: Pages, page_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens' keys and values, [Hkv, length, D] each."""
    page_ids = page_table[: -(-length // pages.page_size)]
    keys, values = (gather_run(parts, page_ids).flatten(1, 2)[:, :length] for parts in _keys_and_values(pages))
    return keys, values


def _distinct(page_ids: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct (KV head, physical page) pairs behind page_ids [H, K], and [H, K] the place of each in them.

    Query heads of one group may choose the same page: it is read once and handed to each of them.
    """
    heads = torch.arange(len(page_ids), device=page_ids.device) // (len(page_ids) // kv_heads)
    pairs, place = torch.unique(heads[:, None] + page_ids * kv_heads, return_inverse=True)
    return pairs % kv_heads, pairs // kv_heads, place

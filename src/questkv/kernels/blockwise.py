"""Attention of a block of new tokens, and the softmax that it shares with single rows, in PyTorch.

The backends share it: a block of a prompt is bound by arithmetic, which PyTorch's own kernels do well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from questkv.kernels.gather import gather_tokens
from questkv.kernels.softmax import Softmax
from questkv.kernels.types import Pages

# Query tokens a block of `prefill`: bounds the mask and the scores, [block, length] each.
_BLOCK = 256
# Tokens of the past that are attended at once: bounds what is copied of it.
_PIECE = 2048


def prefill(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    length: int,
    softmax: Softmax,
) -> torch.Tensor:
    """out[i] = attention of q[i] over the first length - n + i + 1 tokens."""
    if not len(q):
        return q.new_empty((*q.shape[:2], pages.value_dim))
    new_keys, new_values = _tokens(pages, page_table, length - len(q), length)
    finite = _is_finite(new_keys) and _is_finite(new_values)
    plain = softmax.softcap is None and softmax.sinks is None
    if finite and plain and q.device.type == "cpu":
        return _prefill_merged(q, pages, page_table, length, softmax.scale)
    keys, values = tokens_of(pages, page_table, length)
    if not finite:
        return _prefill_rows(q, keys, values, softmax)
    if plain:
        return _prefill_sdpa(q, keys, values, softmax.scale)
    out = q.new_empty((*q.shape[:2], pages.value_dim))
    for start in range(0, len(q), _BLOCK):
        block = q[start : start + _BLOCK]
        visible = length - len(q) + start + len(block)
        mask = _causal(len(block), visible, q.device)
        out[start : start + len(block)] = softmax_attention(
            block.transpose(0, 1), keys[:, :visible], values[:, :visible], softmax, mask
        ).transpose(0, 1)
    return out


def softmax_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax: Softmax,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention in float32, the formula written out.

    Args:
        q: [Hq, D], or [Hq, n, D] with a mask.
        keys: [H, T, D], H a divisor of Hq.
        values: [H, T, Dv].
        softmax: How logits become weights.
        mask: [n, T] bool, True where a query sees a token.

    Returns:
        [Hq, Dv], or [Hq, n, Dv], of q's dtype.
    """
    # Contiguous: the order of a product's sums, and so its last bits, would follow the strides.
    queries = q.float().contiguous().view(len(keys), -1, q.shape[-1]) * softmax.scale  # [H, G * n, D]
    logits = queries @ keys.float().transpose(1, 2)
    if softmax.softcap is not None:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    if mask is not None:
        logits = logits.unflatten(1, (-1, len(mask))).masked_fill(~mask, -torch.inf).flatten(1, 2)
    sinks = softmax.sinks
    if sinks is not None:
        per_query = sinks.float().repeat_interleave(queries.shape[1] * len(keys) // len(sinks))
        logits = torch.cat([logits, per_query.view(*logits.shape[:2], 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., : keys.shape[1]]
    return (weights @ values.float()).view(*q.shape[:-1], -1).to(q.dtype)


def _prefill_rows(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Token by token: a mask's weight of 0 doesn't hide a later token that is NaN or infinite, as 0 * NaN is NaN."""
    out = q.new_empty((*q.shape[:2], values.shape[-1]))
    for i in range(len(q)):
        visible = keys.shape[1] - len(q) + i + 1
        out[i] = softmax_attention(q[i], keys[:, :visible], values[:, :visible], softmax)
    return out


def _prefill_merged(q: torch.Tensor, pages: Pages, page_table: torch.Tensor, length: int, scale: float) -> torch.Tensor:
    """The past piece by piece and then the new tokens, each attended by itself, merged by their log-sum-exps.

    No piece is larger than `_PIECE` tokens, so the past is never copied as a whole. Float32 inside: in a narrower type
    PyTorch's attention would round the softmax's weights to it.
    """
    n, heads, dim = q.shape
    queries = q.transpose(0, 1).float().contiguous().view(pages.num_kv_heads, -1, n, dim)  # [Hkv, G, n, D]
    keys, values = _tokens(pages, page_table, length - n, length)
    out, total = _flash(queries, keys.float(), values.float(), True, scale)
    # In the past every query sees every token, so a group's heads are more queries of one head.
    grouped = queries.view(pages.num_kv_heads, 1, -1, dim)
    for start in range(0, length - n, _PIECE):
        keys, values = _tokens(pages, page_table, start, min(start + _PIECE, length - n))
        part, part_total = (
            result.reshape(*queries.shape[:3], -1)
            for result in _flash(grouped, keys.float(), values.float(), False, scale)
        )
        both = torch.logaddexp(total, part_total)
        out = out * (total - both).exp() + part * (part_total - both).exp()
        total = both
    return out.view(heads, n, -1).transpose(0, 1).to(q.dtype)


def _flash(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's fused attention on the CPU of [H, G, n, D] queries over their heads' keys [H, T, D], values [H, T, Dv].

    Returns:
        [H, G, n, Dv] output and [H, G, n, 1] log-sum-exp of the logits.
    """
    width = values.shape[-1]
    q, keys, values = _of_one_width(q, keys, values)
    # Views that repeat a head for its group: the kernel goes by strides.
    keys, values = (part.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for part in (keys, values))
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, is_causal=causal, scale=scale
    )
    return out[..., :width], total.unsqueeze(-1)


def _of_one_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors [..., D or Dv] with zeros behind the channels of the narrower ones.

    PyTorch's fused attention takes one width only. Zeros change no logit, and give outputs of zero.
    """
    width = max(tensor.shape[-1] for tensor in tensors)
    return tuple(t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, in a tenth of the time of `isfinite().all()` on the CPU."""
    ends = torch.stack(torch.aminmax(tensor))  # both NaN if any element is
    return bool(ends.isfinite().all())


def _prefill_sdpa(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """PyTorch's fused attention, which never holds the scores of a whole prompt."""
    n, length, width = len(q), keys.shape[1], values.shape[2]
    queries, keys, values = _of_one_width(q.transpose(0, 1)[None].to(keys.dtype), keys[None], values[None])
    if n == length:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=n > 1, scale=scale, enable_gqa=True)
        return out[0, ..., :width].transpose(0, 1).to(q.dtype)
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
    return out[0, ..., :width].transpose(0, 1).to(q.dtype)


def _causal(n: int, visible: int, device: torch.device) -> torch.Tensor:
    """[n, visible] bool: the last n of `visible` tokens, each seeing itself and what lies before it."""
    return torch.ones(n, visible, dtype=torch.bool, device=device).tril(visible - n)


def tokens_of(pages: Pages, page_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens' keys and values, [Hkv, length, D or Dv]: float32 if a page among them is coded."""
    return _tokens(pages, page_table, 0, length)


def _tokens(pages: Pages, page_table: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens start to end - 1, [Hkv, end - start, D or Dv]; views where the pages are one plain run.

    Float32 where a page among them is coded.
    """
    first = start // pages.page_size
    page_ids = page_table[first : -(-end // pages.page_size)]
    here = slice(start - first * pages.page_size, end - first * pages.page_size)
    keys, values = gather_tokens(pages, page_ids)
    return keys.flatten(1, 2)[:, here], values.flatten(1, 2)[:, here]

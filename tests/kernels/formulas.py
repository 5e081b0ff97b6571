"""The formulas in float64, each with a bound on what float32 arithmetic may differ from it.

Unit roundoff: u = 2**-24 for float32. First order bounds, times 1.01 for the rest:

- dot product of D terms: (D + 1) u sum |a b|, whatever the order of the sum
- exp, tanh, a division: a few u relative; 4 u is granted to each
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

U = 2.0**-24
TINY = 2.0**-120  # underflow in float32: far below everything that is compared here


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: Sequence[Sequence[int]],
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one row over the tokens that each query head may see, and the bound on its error.

    Error of a logit: the query is scaled (1 u), the products are summed ((D + 1) u), so (D + 2) u scale sum |q k|;
    soft-capping has slope <= 1 and adds a division, a tanh and a product (10 u |logit|). An error e of every logit
    changes weights by at most exp(2 e) - 1 relatively. Subtracting the largest logit adds u * range, exp 4 u, their
    sum T u, the division 4 u; the weighted sum over T values (T + 1) u sum w |v|. Rounding to the query's type comes
    on top.

    Args:
        q: [Hq, D].
        keys: [Hkv, L, D].
        values: [Hkv, L, Dv].
        tokens: For each query head, positions it sees.
        scale: Softmax scale.
        softcap: As in `attend`.
        sinks: [Hq].

    Returns:
        [Hq, Dv] float64 twice: the output, and the bound.
    """
    out, bound = torch.empty(2, len(q), values.shape[2], dtype=torch.float64)
    group = len(q) // len(keys)
    for head, seen in enumerate(tokens):
        query, own = q[head].double(), keys[head // group, list(seen)].double()
        value = values[head // group, list(seen)].double()
        logits = own @ query * scale
        error = (q.shape[1] + 2) * U * float((own.abs() @ query.abs() * scale).max())
        if softcap is not None:
            error += 10 * U * float(logits.abs().max())
            logits = softcap * torch.tanh(logits / softcap)
        if sinks is not None:
            logits = torch.cat([logits, sinks[head].double()[None]])
        weights = torch.softmax(logits, dim=0)[: len(seen)]
        spread = float(logits.max() - logits.min())
        relative = math.expm1(2 * error) + (2 * len(seen) + spread + 10) * U
        out[head] = weights @ value
        bound[head] = 1.01 * relative * (weights @ value.abs()) + TINY
    info = torch.finfo(q.dtype)
    if q.dtype != torch.float32:
        bound = bound + (out.abs() + bound) * info.eps / 2 + info.smallest_normal * info.eps
    return out, bound


def head_scores(
    q: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, scale: float, optimism: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score = scale * (q . c + a |q| . r) of every query head and page, and the bound on its error.

    Scaling, the mean over the group (G terms) and U, V cost at most max(G, 8) + 6 u of the weights' size, which is
    (1 + a) / 2 |q| scale for each bound of the box; the product over 2 D terms and the box's scale (2 D + 2) u.

    Args:
        q: [Hq, D].
        lo: [Hkv, n, D] float64.
        hi: [Hkv, n, D] float64.
        scale: Softmax scale.
        optimism: a.

    Returns:
        [Hq, n] float64 twice.
    """
    group = len(q) // len(lo)
    scores, bounds = [], []
    for head, query in enumerate(q.double()):
        low, high = lo[head // group], hi[head // group]
        centre, half = (high + low) / 2, (high - low) / 2
        scores.append(scale * (centre @ query + optimism * (half @ query.abs())))
        size = scale * (1 + optimism) / 2 * ((low.abs() + high.abs()) @ query.abs())
        bounds.append(1.01 * (2 * q.shape[1] + max(group, 8) + 8) * U * size + TINY)
    return torch.stack(scores), torch.stack(bounds)


def group_scores(
    scores: torch.Tensor, bounds: torch.Tensor, kv_heads: int, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The group rule applied to [Hq, n] scores of one row, and the bound on the result's error."""
    if group == "per_head":
        return scores, bounds
    scores, bounds = scores.unflatten(0, (kv_heads, -1)), bounds.unflatten(0, (kv_heads, -1))
    if group == "mean":
        return scores.mean(dim=1), bounds.mean(dim=1)
    shares = scores.softmax(dim=-1)
    spread = scores.amax(dim=-1, keepdim=True) - scores.amin(dim=-1, keepdim=True)
    relative = torch.expm1(2 * bounds.amax(dim=-1, keepdim=True)) + (scores.shape[-1] + spread + 20) * U
    return shares.mean(dim=1), (1.01 * relative * shares).mean(dim=1) + TINY

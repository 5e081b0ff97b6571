"""Other implementations of one decode step on a GPU, over the same keys and values, or copies in their own layout."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from questkv.benchmark import peers
from questkv.benchmark.layers import Layer
from questkv.benchmark.peers import Step

_WORKSPACE = 128 * 2**20
PACKAGES = ("flashinfer", "vllm")


def available(
    layers: list[Layer], heads: int, copies: int, *, with_flex: bool
) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Names, and what makes each ready; that fails where its package or this GPU can't do it.

    Args:
        layers: The layers in turn.
        heads: Hq.
        copies: Layers to copy for those with a layout of their own.
        with_flex: Whether flex_attention is among them, whose compilation takes long.
    """
    grouped = heads > layers[0].keys.shape[1]
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        yield f"torch-sdpa-{name}", partial(on_backend, peers.sdpa, backend)
        if grouped:
            yield f"torch-sdpa-{name}-grouped", partial(on_backend, peers.sdpa_grouped, backend)
    yield "torch-matmul", lambda: peers.matmul
    if with_flex:
        yield "flex_attention", peers.flex
    if importlib.util.find_spec("flashinfer") is not None:
        yield "flashinfer", lambda: flashinfer(layers[:copies], heads)
    if importlib.util.find_spec("vllm") is not None:
        yield "vllm-flash", lambda: vllm_flash(layers[:copies])


def on_backend(step: Step, backend: Any) -> Step:
    """A step of PyTorch's attention with one of its backends, which fails where that can't do it."""

    def chosen(query: torch.Tensor, layer: Layer) -> torch.Tensor:
        with sdpa_kernel(backend):
            return step(query, layer)

    return chosen


def flashinfer(layers: list[Layer], heads: int) -> Step:
    """FlashInfer's batch decode over its paged layout [pages, Hkv, S, D], its plan made once."""
    import flashinfer as package

    pages, (batch, kv_heads, context, dim) = layers[0].plain, layers[0].keys.shape
    device, size, dtype = pages.device, pages.page_size, pages.dtype
    # Its tensor core kernel is the faster one for groups.
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE, dtype=torch.uint8, device=device), "HND", use_tensor_cores=heads >= 4 * kv_heads
    )
    held = context // size
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * held,
        torch.arange(batch * held, dtype=torch.int32, device=device),
        torch.full((batch,), size, dtype=torch.int32, device=device),
        heads,
        kv_heads,
        dim,
        size,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    turn = itertools.cycle([_paged(layer, (1, 0, 2, 3)) for layer in layers])

    def step(query: torch.Tensor, layer: Layer) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(query, next(turn))
        return out

    return step


def vllm_flash(layers: list[Layer]) -> Step:
    """VLLM's FlashAttention over its paged layout [pages, S, Hkv, D], version 3 where the GPU has it."""
    # vLLM writes its log to standard output, where a result may be wanted.
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

    version = 3 if is_fa_version_supported(3) else 2
    batch, _, context, dim = layers[0].keys.shape
    device, held = layers[0].plain.device, context // layers[0].plain.page_size
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    table = torch.arange(batch * held, dtype=torch.int32, device=device).view(batch, held)
    turn = itertools.cycle([_paged(layer, (1, 2, 0, 3)) for layer in layers])

    def step(query: torch.Tensor, layer: Layer) -> torch.Tensor:
        keys, values = next(turn)
        out: torch.Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=context,
            seqused_k=lengths,
            softmax_scale=dim**-0.5,
            causal=True,
            block_table=table,
            fa_version=version,
        )
        return out

    return step


def _paged(layer: Layer, order: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of keys and values [Hkv, N, S, D] in another order of these dimensions."""
    segment = layer.plain.segments[0]
    return segment.keys.permute(order).contiguous(), segment.values.permute(order).contiguous()

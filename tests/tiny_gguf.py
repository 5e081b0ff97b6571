"""GGUF files small enough to be written in a test, by the gguf package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PIECES = ["<s>", "</s>", *[chr(ord("a") + index) for index in range(26)], "Ġ", "he"]


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    architecture: str = "llama",
    context: int = 256,
    theta: float = 10_000.0,
    head: int = 8,
    dimensions: int | None = None,
    metadata: Callable[[Any], None] = lambda writer: None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a one-layer Llama, or one whose tensors are called the same, with random weights as a GGUF file.

    Args:
        path: Of the file.
        seed: Of its weights.
        architecture: Llama.cpp's name of it.
        context: Tokens it was made for.
        theta: Base of its rotary frequencies.
        head: Channels of a head.
        dimensions: Rotated channels; None for all.
        metadata: Adds more metadata.
        tensors: More tensors, or others in place of those there are, by their names.
    """
    gguf = pytest.importorskip("gguf")
    heads, kv_heads, inner = 4, 2, 64
    hidden = heads * head
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(dimensions or head)
    writer.add_vocab_size(len(PIECES))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(PIECES)
    writer.add_token_types([3, 3] + [1] * (len(PIECES) - 2))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    metadata(writer)
    kv = hidden * kv_heads // heads
    shapes = {
        "token_embd": (len(PIECES), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (kv, hidden),
        "blk.0.attn_v": (kv, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    made = {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, values in {**made, **(tensors or {})}.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""What is measured: one decode step of one layer of a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from questkv.config import QuestConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """One layer's attention.

    Attributes:
        heads: Hq.
        kv_heads: Hkv, a divisor of `heads`.
        head_dim: D.
        batch: Sequences, all of the same length.
        dtype: float32, bfloat16 or float16.
    """

    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"[bench] {name}: expected an int >= 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"[bench] heads: expected a multiple of {self.kv_heads} KV heads, got {self.heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"[bench] dtype: expected one of {', '.join(DTYPES)}, got {self.dtype}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of queries, keys and values."""
        return DTYPES[self.dtype]

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of `tokens` tokens in every sequence."""
        return 2 * self.batch * self.kv_heads * tokens * self.head_dim * self.torch_dtype.itemsize

    def coded_bytes(self, tokens: int) -> int:
        """Bytes of the codes of `tokens` tokens in every sequence, with each value's step and offset."""
        return self.batch * self.kv_heads * tokens * (2 * self.head_dim + 8)

    def box_bytes(self, config: QuestConfig, boxes: int) -> int:
        """Bytes of so many boxes, of pages or spans, in every sequence."""
        size = 2 * self.head_dim + 4 if config.box_dtype == "int8" else 2 * self.head_dim * self.torch_dtype.itemsize
        return self.batch * self.kv_heads * boxes * size


PRESETS = {
    "llama2-7b": Shape(heads=32, kv_heads=32, head_dim=128),
    "llama3-8b": Shape(heads=32, kv_heads=8, head_dim=128),
    "smollm2": Shape(heads=9, kv_heads=3, head_dim=64),
}

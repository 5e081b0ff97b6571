"""The native backend: compiled kernels for the CPU, one build for every instruction set, the best chosen at run time.

The environment variable ``QUESTKV_ISA`` forces one of `instruction_sets()`. Prefill is PyTorch's own attention.
"""

from questkv.kernels.blockwise import prefill
from questkv.kernels.native.module import instruction_set, instruction_sets, is_built, load
from questkv.kernels.native.operators import append, attend, decode, dense, estimate, linear, seal, seal_spans, select

__all__ = [
    "append",
    "attend",
    "decode",
    "dense",
    "estimate",
    "instruction_set",
    "instruction_sets",
    "is_built",
    "linear",
    "load",
    "prefill",
    "seal",
    "seal_spans",
    "select",
]

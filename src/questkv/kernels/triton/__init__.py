"""The Triton backend: kernels for GPUs. docs/triton.md tells how they work.

Prefill is PyTorch's own attention. With the environment variable ``TRITON_INTERPRET=1`` the kernels run on the CPU,
interpreted, which is how they are tested where there is no GPU.
"""

from questkv.kernels.blockwise import prefill
from questkv.kernels.triton.append import append
from questkv.kernels.triton.attend import attend, dense
from questkv.kernels.triton.decode import decode
from questkv.kernels.triton.estimate import estimate
from questkv.kernels.triton.launch import check_device
from questkv.kernels.triton.seal import seal, seal_spans
from questkv.kernels.triton.select import select
from questkv.kernels.triton.transfer import transfer

__all__ = [
    "append",
    "attend",
    "check_device",
    "decode",
    "dense",
    "estimate",
    "prefill",
    "seal",
    "seal_spans",
    "select",
    "transfer",
]

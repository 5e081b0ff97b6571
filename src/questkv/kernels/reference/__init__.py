"""The reference backend: the specification of every operator, in PyTorch, for any device.

It loops over rows, so what a row gives can't depend on its neighbours, and gathers the pages that a row reads and
nothing else.
"""

from questkv.kernels.blockwise import prefill
from questkv.kernels.reference.append import append
from questkv.kernels.reference.attention import attend, dense
from questkv.kernels.reference.boxes import estimate, seal, seal_spans
from questkv.kernels.reference.decode import decode
from questkv.kernels.reference.linear import linear
from questkv.kernels.reference.select import select
from questkv.kernels.reference.transfer import transfer

__all__ = [
    "append",
    "attend",
    "decode",
    "dense",
    "estimate",
    "linear",
    "prefill",
    "seal",
    "seal_spans",
    "select",
    "transfer",
]

"""The operators, for people who write engines: each documents, validates and dispatches to a backend.

Tensors and letters are defined in docs/layout.md, the maths in docs/method.md.
"""

from questkv.kernels.append import append
from questkv.kernels.attend import attend
from questkv.kernels.decode import decode
from questkv.kernels.dense import dense, prefill
from questkv.kernels.dispatch import available_backends
from questkv.kernels.estimate import estimate
from questkv.kernels.linear import linear
from questkv.kernels.rows import Rows
from questkv.kernels.scoring import Scoring
from questkv.kernels.seal import seal, seal_spans
from questkv.kernels.select import select
from questkv.kernels.softmax import Softmax
from questkv.kernels.transfer import transfer
from questkv.kernels.types import Pages, PageSegment
from questkv.kernels.writes import Places, Writes

__all__ = [
    "PageSegment",
    "Pages",
    "Places",
    "Rows",
    "Scoring",
    "Softmax",
    "Writes",
    "append",
    "attend",
    "available_backends",
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

"""Pages of the KV cache: allocation, sharing, copy on write. No attention maths here."""

from questkv.pages.batch import SequenceBatch, Step
from questkv.pages.geometry import PageGeometry
from questkv.pages.pool import PagePool
from questkv.pages.sequence import Sequence

__all__ = ["PageGeometry", "PagePool", "Sequence", "SequenceBatch", "Step"]

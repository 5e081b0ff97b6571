"""Pages of the KV cache: allocation, sharing, copy on write. No attention maths here."""

from questkv.pages.batch import BatchState, SequenceBatch
from questkv.pages.geometry import PageGeometry
from questkv.pages.pool import PagePool
from questkv.pages.sequence import Sequence
from questkv.pages.step import Step

__all__ = ["BatchState", "PageGeometry", "PagePool", "Sequence", "SequenceBatch", "Step"]

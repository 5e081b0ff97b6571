"""Pages that may end a span, and those that do."""

from __future__ import annotations

import pytest
import torch

from questkv.errors import PoolFullError
from questkv.pages import PageGeometry, PagePool

CPU = torch.device("cpu")


def spanned_pool(max_tokens: int | None = None, size: int = 3) -> PagePool:
    return PagePool(PageGeometry(2, 5, 4, torch.float32, CPU, span_pages=size), layers=1, max_tokens=max_tokens)


def test_pages_that_end_spans_are_every_cth():
    pool = spanned_pool()
    first = pool.allocate(7, ends={2, 5})
    assert first == [0, 1, 2, 3, 4, 5, 6]
    second = pool.allocate(3, ends={0, 2})
    assert [page % 3 for page in second][::2] == [2, 2]
    assert len({*first, *second}) == 10


def test_pages_that_may_end_spans_are_given_to_others_last():
    pool = spanned_pool(max_tokens=9 * 4)
    assert pool.allocate(7) == [0, 1, 3, 4, 6, 7, 2]
    assert pool.allocate(2, ends={1}) == [5, 8]
    with pytest.raises(PoolFullError, match="0 more fit"):
        pool.allocate(1)


def test_a_pool_grows_when_it_has_no_page_that_ends_a_span():
    pool = spanned_pool()
    pool.allocate(1)
    ends = pool.num_pages // 3
    assert all(page % 3 == 2 for page in pool.allocate(ends, ends=set(range(ends))))
    pages = pool.num_pages
    assert pool.allocate(1, ends={0})[0] >= pages
    assert pool.num_pages % 3 == 0


def test_a_limit_is_whole_spans():
    assert spanned_pool(max_tokens=47).max_pages == 9
    with pytest.raises(ValueError, match=r"max_tokens: expected at least one span \(12\), got 11"):
        spanned_pool(max_tokens=11)


def test_spans_add_their_share_to_the_boxes_bytes():
    one = PageGeometry(2, 128, 16, torch.bfloat16, CPU)
    spans = PageGeometry(2, 128, 16, torch.bfloat16, CPU, span_pages=8)
    assert one.box_bytes == 2 * 260
    assert spans.box_bytes == 2 * 260 + 65
    segment = spans.allocate(64)
    assert segment.boxes.nbytes + segment.scales.nbytes == 64 * spans.box_bytes

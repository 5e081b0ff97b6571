"""attend copies the selected pages and nothing that grows with the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.calls import attend, decode, dense, prefill
from kernels.cases import Case, Shape, build_case

pytestmark = pytest.mark.usefixtures("reference_backend")


class _CopiedBytes(TorchDispatchMode):
    """Bytes of the floating-point tensors that operations make, views left out: all together, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            new = isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in inputs
            if new and leaf.is_floating_point():
                size = leaf.numel() * leaf.element_size()
                self.total += size
                self.largest = max(self.largest, size)
        return result


def _case(pages: int) -> Case:
    return build_case(0, Shape(kv_heads=2, group=2, head_dim=64, page_size=16, dtype=torch.bfloat16), [pages * 16 + 5])


def _bytes_of(operator: Any, case: Case, *args: Any, **kwargs: Any) -> int:
    with _CopiedBytes() as copied:
        operator(*case.args, *args, scale=case.scale, **kwargs)
    return copied.total


def _spread(pages: int, count: int) -> torch.Tensor:
    """`count` pages, not neighbours, of `pages`; the KV heads' differ."""
    step = pages // count
    return torch.stack([torch.arange(count) * step, torch.arange(count) * step + 1])[None]


def _page_bytes(case: Case) -> int:
    return case.shape.page_size * case.shape.head_dim * 2 * 2  # keys and values, 2 bytes each, of one KV head


@pytest.mark.parametrize("count", [4, 16])
def test_attend_copies_as_much_from_a_context_16_times_as_long(count):
    short, long = _case(32), _case(512)
    assert _bytes_of(attend, short, _spread(32, count)) == _bytes_of(attend, long, _spread(512, count))


def test_attend_copies_in_proportion_to_the_selection():
    case = _case(512)
    few, many, most = (_bytes_of(attend, case, _spread(512, count)) for count in (4, 20, 36))
    assert many - few == most - many
    # For 16 more pages of each of 2 KV heads: taken out of their segment, put in order, handed to the heads, joined to
    # the open page, and as float32 (twice the bytes); a few float32 logits and weights for G = 2 query heads.
    per_page = (many - few) / 32
    assert _page_bytes(case) <= per_page <= 6 * _page_bytes(case) + 4 * (2 * 16 * 4)


def test_attend_copies_less_than_the_context_holds():
    case = _case(512)
    held = 512 * 2 * _page_bytes(case)
    assert _bytes_of(attend, case, _spread(512, 4)) < held / 16
    assert _bytes_of(dense, case) > held  # and the count does see what dense reads


@pytest.mark.parametrize("group", ["mean", "per_head"])
def test_decode_copies_boxes_of_all_pages_and_tokens_of_few(group):
    """What grows with the context is the estimate: boxes (2 D bytes and, as float32, 8 D) and scores."""
    counts = {"num_selected": torch.tensor([6]), "group": group, "sink_pages": 1, "recent_pages": 1}
    more = _bytes_of(decode, _case(512), **counts) - _bytes_of(decode, _case(256), **counts)
    per_page = more / 256 / 2
    # Boxes once as bytes and once as float32 (10 D), their float32 scale, and a handful of float32 scores.
    assert per_page <= 10 * 64 + 4 + 100
    assert per_page < _page_bytes(_case(2)) / 4


def test_query_heads_that_share_pages_do_not_take_them_twice_out_of_the_pool():
    case = _case(512)
    taken: list[int] = []

    class _Taken(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.index_select.default:
                taken.append(result.numel() * result.element_size())
            return result

    same = _spread(512, 8).repeat_interleave(2, dim=1)
    with _Taken():
        attend(*case.args, same, scale=1.0)
    assert sum(taken) == 2 * 8 * _page_bytes(case)


@pytest.mark.parametrize("pages", [256, 1024])
def test_a_later_chunk_of_a_prompt_copies_the_past_in_bounded_pieces(pages):
    case = _case(pages)
    q = case.q.expand(20, -1, -1)
    with _CopiedBytes() as copied:
        prefill(q, case.pages, case.page_table[0], pages * 16 + 5, scale=case.scale)
    piece = 2048 * 2 * 64 * 4  # tokens, KV heads, channels, float32
    assert 0 < copied.largest <= piece

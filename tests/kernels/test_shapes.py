"""Every group size, head dim and page size: a ragged batch in several segments through all operators, in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.all_operators import assert_all_operators_are_right
from kernels.cases import DTYPES, GROUP_RULES, Shape

pytestmark = pytest.mark.usefixtures("every_fast_backend")


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 17, 32, 64])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_every_group_size_with_every_page_size(group, page_size):
    shape = Shape(kv_heads=2, group=group, head_dim=40, page_size=page_size, dtype=torch.bfloat16)
    assert_all_operators_are_right(shape, [7 * page_size + 1, page_size, 4 * page_size], GROUP_RULES[group % 3])


@pytest.mark.parametrize("box_dtype", ["int8", "model"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 8, 33, 40, 64, 80, 96, 128, 256])
def test_every_head_dim_with_every_dtype(head_dim, dtype, box_dtype):
    shape = Shape(kv_heads=1, group=3, head_dim=head_dim, page_size=16, dtype=dtype, box_dtype=box_dtype)
    assert_all_operators_are_right(shape, [99, 16, 53], GROUP_RULES[head_dim % 3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 17])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (24, 16), (33, 8), (96, 64), (64, 80), (8, 256)])
def test_values_of_another_width_than_keys(head_dim, value_dim, page_size, dtype):
    shape = Shape(kv_heads=2, group=2, head_dim=head_dim, value_dim=value_dim, page_size=page_size, dtype=dtype)
    assert_all_operators_are_right(shape, [99, 16, 53], GROUP_RULES[value_dim % 3])

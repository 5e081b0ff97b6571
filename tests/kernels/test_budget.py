"""The budget counts every token that is read, at every length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.calls import decode, dense, select
from kernels.cases import GROUP_RULES
from questkv import QuestConfig
from questkv.kernels import Pages, PageSegment, seal

pytestmark = pytest.mark.usefixtures("every_fast_backend")

LENGTHS = range(1, 301)


@st.composite
def configs(draw: st.DrawFn) -> QuestConfig:
    size = draw(st.sampled_from([1, 3, 16, 17, 64]))
    sink, recent = draw(st.integers(0, 40)), draw(st.integers(0, 70))
    smallest = (-(-sink // size) + -(-recent // size) + 1) * size
    budget = draw(st.one_of(st.integers(smallest, smallest + 200), st.floats(0.01, 1.0)))
    return QuestConfig(token_budget=budget, page_size=size, sink_tokens=sink, recent_tokens=recent)


@given(config=configs(), seed=st.integers(0, 1000))
def test_selected_pages_and_open_page_stay_within_the_budget_and_use_it_up(config, seed):
    size = config.page_size
    sealed = [(length - 1) // size for length in LENGTHS]
    scores = torch.randn(len(LENGTHS), 1, max(sealed) + 1, generator=torch.Generator().manual_seed(seed))
    counts = [config.pages_at(length) for length in LENGTHS]
    selection = select(
        scores,
        torch.tensor(sealed),
        torch.tensor(counts),
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
    )
    for row, length in enumerate(LENGTHS):
        read = {t for page in selection[row, 0].tolist() if page != -1 for t in range(page * size, (page + 1) * size)}
        read |= set(range(sealed[row] * size, length))
        budget = config.budget_at(length)
        assert len(read) <= budget
        assert len(read) == length or len(read) + size > budget
        assert (len(read) == length) == (length <= budget)
        assert set(range(min(config.sink_tokens, length))) <= read
        # The open page is read besides the recent pages: at least the last recent_tokens + 1 tokens.
        assert set(range(max(0, length - config.recent_tokens - 1), length)) <= read


@pytest.mark.parametrize("group", GROUP_RULES)
@pytest.mark.parametrize(
    "config",
    [
        QuestConfig(token_budget=64, page_size=16, sink_tokens=16, recent_tokens=16),
        QuestConfig(token_budget=50, page_size=3, sink_tokens=4, recent_tokens=5),
        QuestConfig(token_budget=7, page_size=1, sink_tokens=1, recent_tokens=2),
        QuestConfig(token_budget=0.3, page_size=17, sink_tokens=1, recent_tokens=17),
    ],
    ids=["S=16", "S=3", "S=1", "S=17, share"],
)
def test_tokens_that_weigh_in_the_output_are_counted_by_the_budget(config, group):
    """All keys are 0, so every token read weighs 1 / n; the first token's value is 1, the others' are 0."""
    size, length = config.page_size, LENGTHS[-1]
    num_pages = -(-length // size)
    keys, values = torch.zeros(2, 1, num_pages, size, 8)
    values[0, 0, 0] = 1.0
    boxes = torch.zeros(1, num_pages, 2, 8, dtype=torch.int8)
    pages = Pages((PageSegment(keys, values, boxes, torch.zeros(1, num_pages)),))
    seal(pages, torch.arange(num_pages))
    lengths = torch.tensor(LENGTHS)
    args = (torch.randn(len(lengths), 2, 8), pages, torch.arange(num_pages).expand(len(lengths), -1), lengths)
    counted = torch.zeros_like(lengths)
    out = decode(
        *args,
        torch.tensor([config.pages_at(n) for n in LENGTHS]),
        scale=1.0,
        group=group,
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
        pages_read=counted,
    )
    read = (1 / out[..., 0]).round().long()
    full = dense(*args, scale=1.0)
    for row, length in enumerate(LENGTHS):
        budget = config.budget_at(length)
        for head in range(2):
            assert int(read[row, head]) <= budget
            assert int(read[row, head]) == length or int(read[row, head]) + size > budget
        sealed_tokens = (int(counted[row]) - 1) * size
        assert sealed_tokens + (length - 1) % size + 1 == int(read[row, 0])
        if length <= budget:
            assert torch.equal(out[row], full[row])

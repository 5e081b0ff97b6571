"""Sequences of one pool: sharing, copy on write, steps that are undone."""

from __future__ import annotations

import gc

import pytest
import torch

from questkv.errors import PoolFullError
from questkv.pages import PageGeometry, PagePool, Sequence, SequenceBatch
from questkv.pages import batch as batch_module

S = 3


def make_pool(max_tokens: int | None = None, layers: int = 2) -> PagePool:
    return PagePool(PageGeometry(1, 2, S, torch.float32, torch.device("cpu")), layers=layers, max_tokens=max_tokens)


def append(batch: SequenceBatch, counts: list[int], start: float = 0.0) -> None:
    """Token i of the step has keys start + i in layer 0, and that plus 1000 in layer 1."""
    batch.reserve(counts)
    total = sum(counts)
    tokens = (torch.arange(total) + float(start))[:, None, None].expand(total, 1, 2)
    for layer in range(batch.pool.num_layers):
        batch.write(layer, tokens + 1000 * layer, -(tokens + 1000 * layer))


def stored(batch: SequenceBatch, row: int, layer: int = 0) -> list[float]:
    sequence, segment = batch.sequences[row], batch.pool.layer(layer).segments[0]
    places = [(sequence.table[i // S], i % S) for i in range(sequence.length)]
    keys = [float(segment.keys[0, page, slot, 0]) for page, slot in places]
    assert [float(segment.values[0, page, slot, 1]) for page, slot in places] == [-key for key in keys]
    return keys


def test_a_fork_shares_every_page_and_only_the_open_one_is_copied_when_written() -> None:
    pool = make_pool()
    first = SequenceBatch(pool, 1)
    append(first, [2 * S + 1])
    second = first.fork()
    assert pool.num_held == 3
    shared = list(first.sequences[0].table)
    append(second, [1], start=50)
    assert pool.num_held == 4
    assert second.sequences[0].table[:2] == shared[:2]
    assert second.sequences[0].table[2] != shared[2]
    assert first.sequences[0].table == shared
    assert stored(first, 0) == [0, 1, 2, 3, 4, 5, 6]
    assert stored(second, 0, layer=1) == [1000, 1001, 1002, 1003, 1004, 1005, 1006, 1050]


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    pool = make_pool()
    first = SequenceBatch(pool, 1)
    append(first, [2 * S])
    second = first.fork()
    append(second, [1], start=50)
    append(first, [1], start=70)
    assert pool.num_held == 4
    assert first.sequences[0].table[:2] == second.sequences[0].table[:2]
    assert (stored(first, 0)[-1], stored(second, 0)[-1]) == (70, 50)


def test_the_last_holder_of_a_shared_page_keeps_it() -> None:
    pool = make_pool()
    batch = SequenceBatch(pool, 1)
    append(batch, [1])
    (page,) = batch.sequences[0].table
    batch.reorder([0, 0, 0])
    append(batch, [1, 1, 1], start=10)
    assert [page in sequence.table for sequence in batch.sequences] == [False, False, True]
    assert pool.num_held == 3
    assert [stored(batch, row) for row in range(3)] == [[0, 10], [0, 11], [0, 12]]


def test_beams_fit_in_a_pool_that_is_full_but_for_their_copies() -> None:
    pool = make_pool(max_tokens=2 * S)
    batch = SequenceBatch(pool, 1)
    append(batch, [1])
    batch.reorder([0, 0])
    append(batch, [1, 1], start=10)
    with pytest.raises(PoolFullError):
        batch.reserve([S, 0])
    assert [stored(batch, row) for row in range(2)] == [[0, 10], [0, 11]]


def test_a_cropped_sealed_page_is_written_as_a_copy_while_another_holds_it() -> None:
    pool = make_pool()
    first = SequenceBatch(pool, 1)
    append(first, [2 * S + 1])
    second = first.fork()
    second.crop([S + 2])
    append(second, [2], start=50)
    assert stored(first, 0) == [0, 1, 2, 3, 4, 5, 6]
    assert stored(second, 0) == [0, 1, 50, 51]
    second.free()
    first.crop([S + 2])
    table = list(first.sequences[0].table)
    append(first, [1], start=90)
    assert first.sequences[0].table == table  # nobody else holds it any more
    assert stored(first, 0) == [0, 1, 90]


def test_a_page_sealed_again_after_a_crop_gets_the_box_of_its_new_keys() -> None:
    pool = make_pool()
    batch = SequenceBatch(pool, 1)
    append(batch, [S + 1], start=100)
    batch.crop([2])
    append(batch, [2], start=-7)
    segment, page = pool.layer(0).segments[0], batch.sequences[0].table[0]
    box = segment.boxes[0, page].double() * segment.scales[0, page].double()
    assert float(box[0].max()) <= -7
    assert float(box[1].min()) >= 101


def test_pages_return_when_a_batch_is_garbage_collected() -> None:
    pool = make_pool()
    batch, other = SequenceBatch(pool, 2), SequenceBatch(pool, 1)
    append(batch, [4, 5])
    append(other, [1])
    fork = batch.fork()
    del batch
    gc.collect()
    assert pool.num_held == 2 + 2 + 1
    del fork
    gc.collect()
    assert pool.num_held == 1
    other.free()
    assert pool.num_held == 0


def test_pages_return_after_a_reorder_when_a_batch_is_garbage_collected() -> None:
    pool = make_pool()
    batch = SequenceBatch(pool, 2)
    append(batch, [4, 5])
    batch.reorder([1, 1, 0])
    del batch
    gc.collect()
    assert pool.num_held == 0


@pytest.mark.parametrize("written", [0, 1])
def test_a_step_that_not_every_layer_wrote_is_undone_by_the_next(written: int) -> None:
    pool = make_pool()
    batch = SequenceBatch(pool, 2)
    append(batch, [4, 2])
    batch.reserve([3, 5])
    for layer in range(written):
        batch.write(layer, torch.full((8, 1, 2), 99.0), torch.full((8, 1, 2), 99.0))
    append(batch, [1, 2], start=10)
    assert batch.lengths == [5, 4]
    assert stored(batch, 0) == [0, 1, 2, 3, 10]
    assert stored(batch, 1, layer=1) == [1004, 1005, 1011, 1012]
    assert pool.num_held == 4


def test_an_undone_step_leaves_a_fork_untouched() -> None:
    pool = make_pool()
    first = SequenceBatch(pool, 1)
    append(first, [S + 1])
    second = first.fork()
    second.reserve([4])
    second.write(0, torch.full((4, 1, 2), 99.0), torch.full((4, 1, 2), 99.0))
    second.undo()
    assert (stored(first, 0), stored(second, 0)) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert second.lengths == [S + 1]


def test_what_a_fork_writes_while_a_step_is_under_way_is_not_there_when_that_is_undone() -> None:
    pool = make_pool()
    first = SequenceBatch(pool, 1)
    append(first, [S + 2])
    second = first.fork()
    second.crop([1])
    first.reserve([1])  # leaves the page that both have
    append(second, [1], start=50)
    first.undo()
    assert (stored(first, 0), stored(second, 0)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 50])


def test_of_sequences_that_share_a_page_the_longest_writes_in_it_so_that_the_others_can_be_put_back() -> None:
    pool = make_pool()
    batch = SequenceBatch(pool, 1)
    append(batch, [2])
    batch.reorder([0, 0])
    batch.crop([0, 1])
    batch.reserve([1, 1])
    batch.write(0, torch.full((2, 1, 2), 99.0), torch.full((2, 1, 2), -99.0))
    batch.undo()
    assert [stored(batch, row) for row in range(2)] == [[0, 1], [0]]
    assert pool.num_held == 1


@pytest.mark.parametrize("where", ["describe", "allocate", "copy_page", "release", "share"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_anywhere_in_a_step_leaves_sequences_and_counts_as_they_were(
    monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    batch = int8_batch()
    append(batch, [2])
    batch.reorder([0, 0])
    batch.crop([0, 1])
    before = [list(sequence.table) for sequence in batch.sequences], batch.lengths, batch.pool.num_held
    owner = batch_module if where == "describe" else PagePool
    real = getattr(owner, where)

    def fail(*args: object, **kwargs: object) -> object:
        real(*args, **kwargs)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, fail)
        if where == "share":
            with pytest.raises(error):
                batch.reorder([1, 1, 0])
        else:
            with pytest.raises(error):
                batch.reserve([2 * S, 2 * S])
    assert ([list(s.table) for s in batch.sequences], batch.lengths, batch.pool.num_held) == before
    assert batch.pool.holders(before[0][0][0]) == 2
    append(batch, [1, 1], start=10)
    assert [stored(batch, row) for row in range(2)] == [[0, 1, 10], [0, 11]]


def test_a_step_without_a_token_is_complete_even_in_an_empty_pool() -> None:
    batch = SequenceBatch(make_pool(), 2)
    append(batch, [0, 0])
    append(batch, [2, 0])
    append(batch, [0, 1], start=5)
    assert batch.lengths == [2, 1]
    assert stored(batch, 1) == [5]


def test_a_step_names_rows_slots_and_sealed_pages() -> None:
    pool = make_pool()
    batch = SequenceBatch(pool, 3)
    append(batch, [S, 1, 0])
    step = batch.reserve([1, 0, 2 * S + 1])
    tables = [sequence.table for sequence in batch.sequences]
    assert step.row_lengths == [S + 1, *range(1, 2 * S + 2)]
    assert step.places.sealed.tolist() == [tables[0][0], tables[2][0], tables[2][1]]
    assert step.places.slots[0] == tables[0][1] * S
    assert step.places.slots[1:].tolist() == [tables[2][i // S] * S + i % S for i in range(2 * S + 1)]
    assert step.page_table.tolist() == [table + [-1] * (3 - len(table)) for table in tables]
    page_table, lengths = step.rows.page_table, step.rows.lengths
    assert lengths.tolist() == step.row_lengths
    assert page_table.tolist() == step.page_table[[0] + [2] * (2 * S + 1)].tolist()


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [1, -1]])
def test_counts_that_do_not_fit_the_batch_are_refused(counts: list[int]) -> None:
    batch = SequenceBatch(make_pool(), 2)
    with pytest.raises(ValueError, match=r"\[reserve\] counts: expected 2 numbers >= 0"):
        batch.reserve(counts)


@pytest.mark.parametrize("counts", [[1], [0, 3], [-1, 0]])
def test_a_wrong_crop_leaves_every_sequence_as_it_was(counts: list[int]) -> None:
    batch = SequenceBatch(make_pool(), 2)
    append(batch, [4, 2])
    with pytest.raises(ValueError, match=r"\[crop\] counts"):
        batch.crop(counts)
    assert batch.lengths == [4, 2]


@pytest.mark.parametrize("indices", [[2], [0, -1]])
def test_a_wrong_reorder_leaves_every_sequence_as_it_was(indices: list[int]) -> None:
    batch = SequenceBatch(make_pool(), 2)
    append(batch, [4, 2])
    with pytest.raises(ValueError, match=r"\[reorder\] indices: expected 0 to 1"):
        batch.reorder(indices)
    assert batch.lengths == [4, 2]


def test_a_sequence_refuses_to_forget_more_than_it_has() -> None:
    with pytest.raises(ValueError, match=r"\[crop\] tokens: expected 0 to 0, got 1"):
        Sequence(make_pool()).cropped(1)


# Pages in eight bits


def int8_batch(size: int = 1, layers: int = 2) -> SequenceBatch:
    geometry = PageGeometry(1, 2, S, torch.float32, torch.device("cpu"), kv_dtype="int8")
    return SequenceBatch(PagePool(geometry, layers=layers), size)


def test_a_row_sees_its_own_page_plain_and_the_pages_before_it_coded() -> None:
    batch = int8_batch(2)
    append(batch, [S + 1, 1])
    batch.settle()
    step = batch.reserve([2 * S, 1])
    tables = [sequence.table for sequence in batch.sequences]
    written = [sequence.written_table for sequence in batch.sequences]
    is_closed = batch.pool.is_closed
    assert [is_closed(page) for page in tables[0]] == [True] * 3 + [False]
    assert not any(is_closed(page) for page in written[0][1:])
    assert step.places.sealed.tolist() == written[0][1:3]
    assert step.places.into.tolist() == tables[0][1:3]
    page_table, lengths = step.rows.page_table, step.rows.lengths
    assert lengths.tolist() == [*range(S + 2, 3 * S + 2), 2]
    for row, length in zip(page_table.tolist()[:-1], lengths.tolist()[:-1], strict=True):
        own = (length - 1) // S
        assert row[: own + 1] == [*tables[0][:own], written[0][own]]
    assert page_table.tolist()[-1][0] == tables[1][0]
    assert step.run(0).tolist() == [tables[0][0], *written[0][1:]]


def test_plain_pages_come_back_when_a_step_is_settled_and_coded_ones_when_it_is_undone() -> None:
    batch = int8_batch()
    append(batch, [3 * S + 1])
    assert batch.pool.num_held == 3 + 3 + 1
    batch.settle()
    assert batch.pool.num_held == 3 + 1
    table = list(batch.sequences[0].table)
    batch.reserve([2 * S])
    assert batch.pool.num_held == 3 + 2 + 3
    batch.undo()
    assert (batch.pool.num_held, batch.sequences[0].table) == (4, table)


def test_undoing_a_step_that_opened_a_coded_page_puts_it_back() -> None:
    batch = int8_batch()
    append(batch, [2 * S + 1])
    batch.crop([S])
    table, before = list(batch.sequences[0].table), [batch.keys_values(layer, 0)[0] for layer in range(2)]
    assert batch.pool.is_closed(table[-1])
    batch.reserve([S])  # opens that page and seals it again
    batch.write(0, torch.full((S, 1, 2), 99.0), torch.full((S, 1, 2), 99.0))
    batch.undo()
    assert (batch.sequences[0].table, batch.pool.num_held) == (table, 2)
    assert all(torch.equal(batch.keys_values(layer, 0)[0], before[layer]) for layer in range(2))


def test_before_a_layer_has_written_it_holds_what_it_held() -> None:
    batch = int8_batch()
    append(batch, [S])
    batch.settle()
    before = [batch.keys_values(layer, 0)[0].clone() for layer in range(2)]
    batch.reserve([1])
    batch.write(0, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    assert torch.equal(batch.keys_values(1, 0)[0], before[1])
    assert batch.keys_values(0, 0)[0].shape[1] == S + 1


def test_a_coded_page_that_a_crop_left_full_is_not_sealed_again() -> None:
    batch = int8_batch()
    append(batch, [2 * S + 1])
    batch.crop([1])
    kept = list(batch.sequences[0].table)
    step = batch.reserve([1])
    assert step.places.sealed.tolist() == []
    assert batch.sequences[0].table[:2] == kept


def test_sequences_that_share_a_full_page_share_its_codes() -> None:
    batch = int8_batch()
    append(batch, [2 * S])
    batch.reorder([0, 0, 0])
    step = batch.reserve([1, 1, 1])
    assert len(step.places.sealed) == 1
    for layer in range(2):
        batch.write(layer, torch.ones(3, 1, 2), torch.ones(3, 1, 2))
    batch.settle()
    assert batch.pool.num_held == 2 + 3
    batch.free()
    assert batch.pool.num_held == 0


def test_pages_return_when_a_batch_is_collected_in_the_middle_of_a_step() -> None:
    batch = int8_batch()
    append(batch, [2 * S])
    batch.reserve([S])
    pool = batch.pool
    del batch
    gc.collect()
    assert (pool.num_held, pool.num_free) == (0, pool.num_pages)

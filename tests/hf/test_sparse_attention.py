"""The cache's attention at small budgets, against a float64 Quest written with loops (paper, Algorithm 1)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig

from questkv import QuestCache, QuestConfig
from questkv.hf.attention import questkv_attention

SPARSE = QuestConfig(
    token_budget=20, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0, box_dtype="model", sparse_prefill=64
)
SCALE = 0.6
EPS = torch.finfo(torch.float32).eps


@dataclass
class States:
    """Queries, keys and values of one sequence in one layer, [H, T, D] each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @staticmethod
    def random(length: int, kv_heads: int = 2, group: int = 3, dim: int = 8, seed: int = 0) -> States:
        generator = torch.Generator().manual_seed(seed)
        heads = (kv_heads * group, kv_heads, kv_heads)
        return States(*(torch.randn(h, length, dim, generator=generator) for h in heads))

    def part(self, start: int, end: int) -> States:
        return States(*(states[:, start:end] for states in (self.q, self.k, self.v)))


def attend(cache: QuestCache, layer: int, batch: list[States], mask: torch.Tensor | None = None) -> torch.Tensor:
    """One layer's part of a forward; returns [B, n, Hq, D]."""
    q, k, v = (torch.stack([getattr(states, name) for states in batch]) for name in "qkv")
    keys, values = cache.update(k, v, layer)
    return questkv_attention(torch.nn.Module().eval(), q, keys, values, mask, scaling=SCALE)[0]


def padded(states: States, width: int, at_left: bool = True) -> States:
    """With huge states where the padding is, so that reading any of it is loud."""
    missing = width - states.q.shape[1]

    def pad(x: torch.Tensor) -> torch.Tensor:
        filler = x.new_full((x.shape[0], missing, x.shape[2]), 1e9)
        return torch.cat([filler, x] if at_left else [x, filler], dim=1)

    return States(pad(states.q), pad(states.k), pad(states.v))


def new_cache(config: QuestConfig = SPARSE, layers: int = 1, **kwargs: int) -> QuestCache:
    return QuestCache(LlamaConfig(num_hidden_layers=layers), config, **kwargs)


def selected_pages(states: States, head: int, length: int, config: QuestConfig) -> list[int]:
    """Sealed pages that KV head `head` reads for the last of `length` tokens; optimism 1 is the paper's bound."""
    size, group = config.page_size, states.q.shape[0] // states.k.shape[0]
    sealed = (length - 1) // size
    budget = config.token_budget
    if isinstance(budget, float):
        smallest = math.ceil(config.sink_tokens / size) + math.ceil(config.recent_tokens / size) + 1
        budget = max(int(budget * length), smallest * size)
    if length <= budget:
        return list(range(sealed))
    count = min((budget - (length - sealed * size)) // size, sealed)
    sink = list(range(math.ceil(config.sink_tokens / size)))
    recent = list(range(sealed - math.ceil(config.recent_tokens / size), sealed))
    scores = {}
    for page in range(sealed):
        if page in sink or page in recent:
            continue
        keys = states.k[head, page * size : (page + 1) * size].double()
        lo, hi = keys.amin(dim=0), keys.amax(dim=0)
        heads = states.q[head * group : (head + 1) * group, length - 1].double()
        centre, radius, optimism = (lo + hi) / 2, (hi - lo) / 2, config.optimism
        scores[page] = sum(float(q @ centre + optimism * (q.abs() @ radius)) for q in heads) / group
    best = sorted(scores, key=lambda page: -scores[page])[: count - len(sink) - len(recent)]
    return sorted(sink + recent + best)


def expected_row(states: States, length: int, config: QuestConfig) -> tuple[torch.Tensor, int]:
    """[Hq, D] exact output for the last of `length` tokens, and the pages read over KV heads."""
    size, group = config.page_size, states.q.shape[0] // states.k.shape[0]
    out, pages = [], 0
    for head in range(states.k.shape[0]):
        chosen = selected_pages(states, head, length, config)
        pages += len(chosen) + 1
        read = [page * size + slot for page in chosen for slot in range(size)]
        read += range((length - 1) // size * size, length)
        for q in states.q[head * group : (head + 1) * group, length - 1].double():
            weights = (states.k[head, read].double() @ q * SCALE).softmax(dim=0)
            out.append(weights @ states.v[head, read].double())
    return torch.stack(out), pages


def error_allowed(states: States) -> float:
    """See `_tolerance` in tests/pages/test_cache_machine.py: 2 (D + 4) eps |q||k| for the logits, then T eps."""
    largest = float(states.q.norm(dim=-1).max() * states.k.norm(dim=-1).max()) * SCALE
    length, dim = states.k.shape[1:]
    return float(states.v.abs().max()) * EPS * (2 * (dim + 4) * largest + 2 * (length + 8))


def check_rows(out: torch.Tensor, states: States, first: int, config: QuestConfig = SPARSE) -> int:
    """Out [n, Hq, D] belongs to tokens first, first + 1, ...; returns the pages that had to be read."""
    pages = 0
    for i, row in enumerate(out):
        expected, read = expected_row(states, first + i + 1, config)
        assert (row.double() - expected).abs().max() <= error_allowed(states)
        pages += read
    return pages


def decode_all(cache: QuestCache, states: States, prompt: int, steps: list[int]) -> torch.Tensor:
    """Prefill `prompt` tokens, then feed runs of the given lengths; returns [sum(steps), Hq, D]."""
    attend(cache, 0, [states.part(0, prompt)])
    out, at = [], prompt
    for step in steps:
        out.append(attend(cache, 0, [states.part(at, at + step)])[0])
        at += step
    return torch.cat(out)


@pytest.mark.parametrize("page_size", [1, 3, 4, 7])
@pytest.mark.parametrize(("budget", "optimism"), [(24, 1.0), (0.4, 0.5), (0.4, 0.0)])
def test_each_step_reads_the_pages_of_highest_score_and_nothing_else(
    page_size: int, budget: float, optimism: float
) -> None:
    config = QuestConfig(
        token_budget=budget,
        page_size=page_size,
        sink_tokens=3,
        recent_tokens=4,
        dense_layers=0,
        box_dtype="model",
        optimism=optimism,
    )
    states, cache = States.random(90), new_cache(config)
    out = decode_all(cache, states, 40, [1] * 50)
    pages = check_rows(out, states, 40, config)
    report = cache.report()
    assert report.pages_read == pages
    assert report.pages_held == 2 * sum((length - 1) // page_size + 1 for length in range(41, 91))
    assert report.pages_read < report.pages_held
    assert report.layers[0].pages_read == pages
    assert report.tokens == (90,)


@pytest.mark.parametrize("run", [2, 5, 16, 64])
def test_a_run_of_new_tokens_is_decoded_as_single_steps(run: int) -> None:
    states = States.random(40 + run)
    one, many = new_cache(), new_cache()
    together = decode_all(one, states, 40, [run])
    singly = decode_all(many, states, 40, [1] * run)
    assert torch.equal(together, singly)
    check_rows(together, states, 40)
    assert one.report() == many.report()


def test_a_run_longer_than_sparse_prefill_is_dense() -> None:
    states = States.random(40 + 65)
    cache = new_cache()
    out = decode_all(cache, states, 40, [65])
    check_rows(out, states, 40, QuestConfig(token_budget=1.0, page_size=4, dense_layers=0))
    assert cache.report().pages_held == 0  # prefill is not counted


def test_a_prompt_of_one_token_and_then_runs() -> None:
    states = States.random(50)
    check_rows(decode_all(new_cache(), states, 1, [1, 3, 20, 1, 24]), states, 1)


def test_a_row_does_not_depend_on_its_neighbours_or_its_padding() -> None:
    lengths = (61, 9, 38)
    rows = [States.random(length + 6, seed=length) for length in lengths]
    mask = torch.zeros(3, 61, dtype=torch.bool)
    for i, length in enumerate(lengths):
        mask[i, 61 - length :] = True
    cache = new_cache()
    attend(cache, 0, [padded(r.part(0, n), 61) for r, n in zip(rows, lengths, strict=True)], mask)
    together = []
    for i in range(6):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.bool)], dim=1)
        together.append(
            attend(cache, 0, [r.part(n + i, n + i + 1) for r, n in zip(rows, lengths, strict=True)], mask)[:, 0]
        )
    pages = 0
    for row, (states, length) in enumerate(zip(rows, lengths, strict=True)):
        out = torch.stack([step[row] for step in together])
        assert torch.equal(out, decode_all(new_cache(), states, length, [1] * 6))
        pages += check_rows(out, states, length)
    assert cache.report().pages_read == pages
    assert cache.report().tokens == tuple(length + 6 for length in lengths)


def test_a_ragged_run_of_new_tokens_is_decoded_as_each_row_alone() -> None:
    past, new = (30, 45), (4, 7)
    rows = [States.random(p + n, seed=p) for p, n in zip(past, new, strict=True)]
    mask = torch.ones(2, 52, dtype=torch.bool)
    mask[0, :15] = False
    mask[0, 45 + 4 :] = False  # padding behind the shorter run
    cache = new_cache()
    attend(cache, 0, [padded(r.part(0, p), 45) for r, p in zip(rows, past, strict=True)], mask[:, :45])
    batch = [padded(r.part(p, p + n), 7, at_left=False) for r, p, n in zip(rows, past, new, strict=True)]
    out = attend(cache, 0, batch, mask)
    assert bool((out[0, 4:] == 0).all())
    for i, (states, p, n) in enumerate(zip(rows, past, new, strict=True)):
        check_rows(out[i, :n], states, p)


def test_the_output_does_not_depend_on_physical_pages_or_what_lay_in_them() -> None:
    states = States.random(80)
    fresh = decode_all(new_cache(), states, 50, [1] * 30)
    cache = new_cache()
    # Scatter the free pages and poison them: other sequences come, mix and go first.
    noise = [States.random(70, seed=seed) for seed in range(1, 4)]
    attend(cache, 0, noise)
    others = cache.fork()
    cache.batch_select_indices(torch.tensor([1]))
    cache.crop(-70)
    others.batch_select_indices(torch.tensor([0]))
    (group,) = cache.state.groups.values()
    for page in group.pool._free[False, False]:
        segment, at = group.pool._locate(0, page)
        segment.keys[:, at], segment.values[:, at] = torch.nan, torch.nan
        segment.boxes[:, at] = torch.nan
    group.pool._free[False, False].sort()
    del group.pool._free[False, False][::2]  # so that its pages are no run
    again = decode_all(cache, states, 50, [1] * 30)
    table = group.batch.sequences[0].table
    assert any(b != a + 1 for a, b in itertools.pairwise(table))
    # The same numbers summed in the same order: views and copies of pages may differ in the last bits only.
    assert (fresh - again).abs().max() <= error_allowed(states)


@pytest.mark.parametrize("dense_below", [0, 70])
def test_contexts_shorter_than_dense_below_are_dense_bit_for_bit(dense_below: int) -> None:
    values = SPARSE.to_dict() | {"dense_below": dense_below}
    states, cache = States.random(80), new_cache(QuestConfig.from_dict(values))
    dense = decode_all(new_cache(QuestConfig(token_budget=1.0, page_size=4, dense_layers=0)), states, 40, [1] * 40)
    out = decode_all(cache, states, 40, [1] * 40)
    same = [torch.equal(a, b) for a, b in zip(out, dense, strict=True)]
    assert same == [length < dense_below for length in range(41, 81)]


def test_a_context_within_its_budget_is_dense_bit_for_bit() -> None:
    values = SPARSE.to_dict() | {"token_budget": 60}
    states, cache = States.random(80), new_cache(QuestConfig.from_dict(values))
    dense = decode_all(new_cache(QuestConfig(token_budget=1.0, page_size=4, dense_layers=0)), states, 40, [1] * 40)
    out = decode_all(cache, states, 40, [1] * 40)
    same = [torch.equal(a, b) for a, b in zip(out, dense, strict=True)]
    assert same == [length <= 60 for length in range(41, 81)]


@pytest.mark.parametrize("dense_layers", [1, (0, 2), 3, ()])
def test_dense_layers_read_everything_and_the_others_their_budget(dense_layers: int | tuple[int, ...]) -> None:
    values = SPARSE.to_dict() | {"dense_layers": dense_layers}
    layers = [States.random(60, seed=seed) for seed in range(3)]
    cache = new_cache(QuestConfig.from_dict(values), layers=3)
    for layer, states in enumerate(layers):
        attend(cache, layer, [states.part(0, 40)])
    expected = [0, 0, 0]
    for at in range(40, 60):
        for layer, states in enumerate(layers):
            out = attend(cache, layer, [states.part(at, at + 1)])[0]
            dense = layer in dense_layers if isinstance(dense_layers, tuple) else layer < dense_layers
            config = QuestConfig(token_budget=1.0, page_size=4) if dense else SPARSE
            expected[layer] += check_rows(out, states, at, config)
    report = cache.report()
    assert [layer.pages_read for layer in report.layers] == expected
    assert report.pages_read == sum(expected)


def test_layers_of_two_geometries_keep_to_their_own() -> None:
    layers = [States.random(70, kv_heads=3, group=2, dim=4), States.random(70, seed=1), States.random(70, seed=2)]
    cache = new_cache(layers=3)
    for at, end in [(0, 50), *((i, i + 1) for i in range(50, 70))]:
        for layer, states in enumerate(layers):
            out = attend(cache, layer, [states.part(at, end)])[0]
            if at:
                check_rows(out, states, at)
    assert len(cache.state.groups) == 2
    report = cache.report()
    assert report.tokens == (70,)
    pages = 18  # ceil(70 / 4)
    assert report.bytes_held == pages * (3 * 4 + 2 * 2 * 8) * (2 * 4 * 4 + 2 * 4)
    assert report.box_bytes == pages * (3 * 4 + 2 * 2 * 8) * 2 * 4


def test_a_page_with_a_nan_or_infinite_key_is_always_read() -> None:
    for hidden in (torch.nan, torch.inf):
        states, cache = States.random(61), new_cache()
        states.k[1, 22, 3] = hidden
        out = decode_all(cache, states, 60, [1])[0]
        assert bool(out[3:].isnan().any())
        assert bool(out[:3].isfinite().all())

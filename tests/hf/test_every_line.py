"""An exception at every line of every operation on a cache: it leaves all layers as they were, and no page behind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf.every_line import stopped_at
from hf.tiny_models import pad_left, pair, tokens
from questkv import QuestCache, QuestConfig
from questkv.pages import geometry
from questkv.pages.exclusive import LOCK

# A fork that nobody wants any more gives its pages back as it goes, where an exception can't come out.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BASE: dict[str, Any] = {
    "token_budget": 16,
    "page_size": 4,
    "sink_tokens": 4,
    "recent_tokens": 4,
    "dense_layers": 1,
    "sparse_prefill": 3,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "coded": ("llama", {"kv_dtype": "int8"}),
    "spans": ("llama", {"span_pages": 2}),
    "two geometries": ("llama-mixed", {}),
    "sliding windows": ("gemma3", {}),
    "linear attention": ("lfm2", {"kv_dtype": "int8"}),
    "offload": ("llama", {"offload": "host", "backend": "reference"}),
}
HYBRIDS = ("sliding windows", "linear attention")


class Case:
    """A cache of two sequences, one of them padded, whose pages are of one kind."""

    def __init__(self, kind: str) -> None:
        self.name, own = KINDS[kind]
        self.kind, self.model = kind, pair(self.name).quest
        self.config = QuestConfig(**BASE, **own)
        feed(self.model, self.new(), tokens(2, 3))  # so that the model is watched
        self.template = self.fed()

    def new(self) -> QuestCache:
        return QuestCache(self.model.config, self.config)

    def fed(self) -> QuestCache:
        """Sequences of 23 and 17 tokens."""
        cache = self.new()
        if self.kind in HYBRIDS:
            cache.activate_past_recording()
        ids, mask = pad_left([tokens(21), tokens(15, seed=1)])
        with torch.no_grad():
            self.model(ids, attention_mask=mask, cache=cache)
        feed(self.model, cache, tokens(2, 2, seed=2))
        return cache


def feed(model: Any, cache: QuestCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of new tokens in one forward; the mask is that of what is cached, and ones."""
    past = cache.state.real
    if past is None:
        past = torch.ones(len(ids), cache.get_seq_length(), dtype=torch.bool)
    mask = torch.cat([past, torch.ones_like(ids, dtype=torch.bool)], dim=1).long()
    with torch.no_grad():
        logits: torch.Tensor = model(ids, attention_mask=mask, cache=cache).logits
    return logits


def fill(case: Case, cache: QuestCache) -> None:
    config = case.model.config
    new = torch.randn(2, config.num_key_value_heads, 6, config.head_dim, generator=torch.Generator().manual_seed(0))
    cache.fill([(new + layer, new - layer) for layer in range(config.num_hidden_layers)])


OPERATIONS: dict[str, Callable[[Case, QuestCache], Any]] = {
    "step": lambda case, cache: feed(case.model, cache, tokens(2, 1, seed=3)),
    "sparse run": lambda case, cache: feed(case.model, cache, tokens(2, 3, seed=3)),
    "prompt": lambda case, cache: feed(case.model, cache, tokens(2, 7, seed=3)),
    "crop": lambda case, cache: cache.crop(-1 if case.kind in HYBRIDS else -5),
    "reorder": lambda case, cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda case, cache: cache.batch_repeat_interleave(2),
    "select": lambda case, cache: cache.batch_select_indices(torch.tensor([False, True])),
    "fork": lambda case, cache: cache.fork(),
    "reset": lambda case, cache: cache.reset(),
    "fill": fill,
}
FORWARDS = ("step", "sparse run", "prompt")


def contents(cache: QuestCache) -> list[torch.Tensor]:
    """Everything that a cache holds and counts."""
    state = cache.state
    out = [torch.tensor([cache.get_seq_length(), *cache.report().tokens])]
    out += [torch.tensor([layer.pages_read, layer.pages_held]) for layer in cache.report().layers]
    if state.real is not None:
        out.append(state.real)
    for group in state.groups.values():
        out.append(torch.tensor([group.pool.num_held]))
        out.append(torch.tensor([group.pool.holders(page) for page in group.batch._kept.pages]))
        for layer in group.layers:
            for sequence in range(len(group.batch)):
                out += [part.clone() for part in cache.keys_values(layer, sequence)]
    for layer in state.own.layers:
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else [value]
            out += [part.clone() for part in parts if isinstance(part, torch.Tensor)]
            out += [torch.tensor(int(part)) for part in parts if isinstance(part, int)]
    return out


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def after(case: Case, cache: QuestCache) -> torch.Tensor:
    """Logits of what follows."""
    rows = cache.state.batch_size or 2
    return torch.cat([feed(case.model, cache, tokens(rows, n, seed=4 + n)) for n in (1, 2)], dim=1)


def is_free(lock: Any) -> bool:
    """Whether another thread could take it."""
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(lock.acquire, blocking=False).result()
        if taken:
            thread.submit(lock.release).result()
    return taken


def inject(case: Case, operation: str, lines: range) -> int:
    """Exceptions that came out of an operation, each at another line; all that must hold is asserted."""
    run = OPERATIONS[operation]
    expected = None
    count = finished = 0
    for line in lines:
        # A fork shares its pages, so that an operation copies; a cache of its own writes in place.
        cache = case.fed() if line % 3 == 0 else case.template.fork()
        before = contents(cache)
        ran, came_out = stopped_at(line, lambda cache=cache: run(case, cache))
        finished = 0 if ran else finished + 1
        if finished == 3:  # a fork and a cache of its own take different numbers of lines
            break
        assert is_free(LOCK), f"line {line}"
        if came_out:
            count += 1
        # After the last layer's tokens count, on the way out to the caller, the forward is whole.
        if came_out and (operation not in FORWARDS or cache.get_seq_length() == int(before[0][0])):
            assert cache.get_seq_length() == int(before[0][0]), f"line {line}"
            assert list(cache.report().tokens) == before[0][1:].tolist(), f"line {line}"
            cache.state.settle()
            assert same(contents(cache), before), f"line {line}"
            run(case, cache)
        if expected is None:
            whole = case.template.fork()
            run(case, whole)
            expected = after(case, whole)
        assert torch.equal(after(case, cache), expected), f"line {line}"
    return count


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_host_without_gpu", True)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_leaves_every_layer_as_it_was(host: None, kind: str, operation: str) -> None:
    if operation == "fill" and kind in (*HYBRIDS, "two geometries"):
        pytest.skip("not every layer of this model takes the same keys and values")
    case = Case(kind)
    start = 1 + (list(KINDS).index(kind) * 7 + list(OPERATIONS).index(operation) * 3) % 11
    assert inject(case, operation, range(start, 10_000, 149 if operation in FORWARDS else 41)) > 0


@pytest.mark.long
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_every_line_leaves_every_layer_as_it_was(host: None, kind: str, operation: str) -> None:
    if operation == "fill" and kind in (*HYBRIDS, "two geometries"):
        pytest.skip("not every layer of this model takes the same keys and values")
    count = inject(Case(kind), operation, range(1, 10_000))
    print(f"{kind}, {operation}: {count} exceptions")
    assert count > 20

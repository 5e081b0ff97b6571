"""What one layer is given and gives back, from the prompt through decode steps, and plain attention on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hf.tiny_models import build, tokens
from questkv import QuestCache, QuestConfig
from questkv.kernels import Softmax
from questkv.policies import Context, Policy, decode, prefill_context

EPS = torch.finfo(torch.float32).eps
# Small pages, so that a prompt of some dozens of tokens has many.
CONFIG = QuestConfig(
    token_budget=24, page_size=4, sink_tokens=4, recent_tokens=8, dense_layers=1, box_dtype="model", sparse_prefill=0
)


@dataclass
class Step:
    """One decode step of a layer: query, new key, new value and output [H, D], and the positions held after it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    positions: list[list[int]]
    tokens_read: int


@dataclass
class Trace:
    """One layer: the prompt's queries, keys and values [H, n, D], and its decode steps."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    softmax: Softmax
    steps: list[Step] = field(default_factory=list)

    @property
    def prompt(self) -> int:
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[0]

    @property
    def group(self) -> int:
        return self.queries.shape[0] // self.kv_heads

    def states(self, kv_head: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [T, D] up to a step's own, float64."""
        keys = [self.keys[kv_head], *(s.key[kv_head : kv_head + 1] for s in self.steps[: step + 1])]
        values = [self.values[kv_head], *(s.value[kv_head : kv_head + 1] for s in self.steps[: step + 1])]
        return torch.cat(keys).double(), torch.cat(values).double()

    def weights(self, head: int, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[T] softmax weights of one query head, float64."""
        logits = keys.double() @ query.double() * self.softmax.scale
        if self.softmax.softcap is not None:
            logits = self.softmax.softcap * torch.tanh(logits / self.softmax.softcap)
        if self.softmax.sinks is not None:
            logits = torch.cat([logits, self.softmax.sinks[head : head + 1].double()])
        return logits.softmax(dim=0)[: len(keys)]

    def prompt_mass(self, kv_head: int, first_query: int) -> torch.Tensor:
        """[n] mass of the prompt's queries from `first_query` on, the mean over the group, float64."""
        mass = torch.zeros(self.prompt, dtype=torch.float64)
        for head in range(kv_head * self.group, (kv_head + 1) * self.group):
            for i in range(max(first_query, 0), self.prompt):
                mass[: i + 1] += self.weights(head, self.queries[head, i], self.keys[kv_head, : i + 1]) / self.group
        return mass

    def mean_weights(self, kv_head: int, step: int, read: list[int]) -> torch.Tensor:
        """[len(read)] weights of a step's queries over the tokens at `read`, the mean over the group."""
        keys, _ = self.states(kv_head, step)
        heads = range(kv_head * self.group, (kv_head + 1) * self.group)
        return torch.stack([self.weights(h, self.steps[step].query[h], keys[read]) for h in heads]).mean(dim=0)

    def check_output(self, step: int, read: list[list[int]]) -> None:
        """The step's output is attention over the tokens at `read` (one list per KV head) and nothing else."""
        largest = float(self.steps[step].query.norm(dim=-1).max())
        largest *= max(float(s.norm(dim=-1).max()) for s in [self.keys, *(s.key for s in self.steps)])
        for head in range(self.kv_heads * self.group):
            keys, values = self.states(head // self.group, step)
            at = read[head // self.group]
            expected = self.weights(head, self.steps[step].query[head], keys[at]) @ values[at]
            # A logit is off by (D + 4) eps |q||k|, twice that in a weight's ratio; the sums add T eps.
            terms = 2 * (keys.shape[1] + 4) * largest * self.softmax.scale + 2 * (len(at) + 8)
            error = (self.steps[step].out[head].double() - expected).abs().max()
            assert error <= float(values.abs().max()) * EPS * terms


def prefilled(name: str, length: int, seed: int = 0) -> tuple[Any, Context]:
    """A tiny model and a random prompt's context."""
    model = build(name, "questkv")
    return model, prefill_context(model, tokens(1, length, seed=seed), CONFIG)


def traces(name: str, policy: Policy, length: int, steps: int) -> tuple[Any, Context, dict[int, Trace]]:
    """Prefill a prompt and decode random tokens under a policy: the cache, the context, and a trace of each layer."""
    model = build(name, "questkv")
    found: dict[int, Trace] = {}
    ids = tokens(1, length)

    context = prefill_context(model, ids, CONFIG, chunk_tokens=length)

    def begin(layer: int, query: torch.Tensor, softmax: Softmax) -> None:
        keys, values = context.cache.keys_values(layer)
        found[layer] = Trace(query[0].detach(), keys.clone(), values.clone(), softmax)

    # A second look at the same forward, for the prompt's queries.
    looked_at = QuestCache(model.config, context.cache.config)
    with torch.no_grad(), looked_at.observe(begin):
        model(ids, cache=looked_at, use_cache=True)
    cache = policy.decode_cache(context)
    for layer, held in cache.held_layers.items():
        _spy(held, found[layer])
    decode(model, cache, tokens(1, steps, seed=1))
    return cache, context, found


def _spy(layer: Any, trace: Trace) -> None:
    update, attend = layer.update, layer.attend
    new: list[torch.Tensor] = []

    def spied_update(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        new[:] = [keys[0, :, 0].detach(), values[0, :, 0].detach()]
        return update(keys, values, *args, **kwargs)

    def spied_attend(query: torch.Tensor, mask: torch.Tensor | None, softmax: Softmax) -> torch.Tensor:
        out = attend(query, mask, softmax)
        held = layer.tokens.positions.tolist()
        trace.steps.append(Step(query[0, :, 0].detach(), *new, out[0, 0], held, layer.tokens_read))
        return out

    layer.update, layer.attend = spied_update, spied_attend

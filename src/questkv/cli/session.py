"""A model, its paged cache and one conversation about one document.

Importing this module imports torch and transformers; the commands do it when they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, set_seed
from transformers.generation.streamers import BaseStreamer

from questkv.cli.prompt import Prompter
from questkv.config import QuestConfig
from questkv.errors import DocumentError
from questkv.hf import QuestCache, attach
from questkv.hf.prefill import cache_argument, prefill
from questkv.hf.rotary import reads_alike
from questkv.models import context_length, load_model


@dataclass(frozen=True)
class Answer:
    """One answer and what it cost.

    Attributes:
        text: The answer, the prefix it was given included.
        prompt_tokens: Tokens of context before the first generated one.
        generated_tokens: Tokens the model generated, an end-of-text token included.
        prefill_s: Seconds for the prompt: the document (first answer only) and the question.
        ms_per_token: Mean milliseconds from one generated token to the next; of the only one, if there is one.
        pages_read: Pages read, summed over decode steps, layers and KV heads.
        pages_held: Pages held at the same steps: what dense attention would have read.
        cache_bytes: Bytes of the pages that the cache holds after it, boxes included.
        host_bytes: Bytes of those that lie in host memory.
        device_bytes: Bytes of what lies with the model, copies of pages in host memory included.
    """

    text: str
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    ms_per_token: float
    pages_read: int
    pages_held: int
    cache_bytes: int
    host_bytes: int
    device_bytes: int

    def summary(self) -> str:
        """The line shown under the answer."""
        host = f", {self.device_bytes / 2**20:,.1f} MiB on the GPU" if self.host_bytes else ""
        share = f" ({self.pages_read / self.pages_held:.1%})" if self.pages_held else ""
        return (
            f"{self.prompt_tokens:,} tokens in context, {self.generated_tokens:,} generated, "
            f"{self.ms_per_token:.1f} ms per token, {self.pages_read:,} pages read of {self.pages_held:,} held{share}, "
            f"cache {self.cache_bytes / 2**20:,.1f} MiB{host}"
        )

    def as_json(self, config: QuestConfig) -> dict[str, Any]:
        """What ``--json`` writes."""
        return {
            "answer": self.text.strip(),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_s": self.prefill_s,
            "ms_per_token": self.ms_per_token,
            "pages_read": self.pages_read,
            "pages_held": self.pages_held,
            "cache_bytes": self.cache_bytes,
            "token_budget": config.token_budget,
            "kv_dtype": config.kv_dtype,
            "span_pages": config.span_pages,
            "offload": config.offload,
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
        }


@dataclass(frozen=True)
class Fitted:
    """A document's tokens, cut to the model's context only where that was asked for."""

    ids: list[int]
    left_out: int


class Session:
    """A conversation about one document, on one cache.

    `ids` holds every token of it; the cache holds all of them, or all but the last few, which the next run adds.
    """

    def __init__(self, model: Any, tokenizer: Any, config: QuestConfig, *, compile: bool = False) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.prompter = Prompter(tokenizer)
        self.cache = QuestCache(model.config, config)
        self.ids: list[int] = []
        self._read_as = 0  # tokens for which the rotary embedding chose the frequencies of the cached keys
        self._unreported_s = 0.0
        # For as long as the session lives, which the model was loaded for.
        self._attached = ExitStack()
        self._attached.enter_context(attach(model, config, fast_linear=True, compile=compile))

    @classmethod
    def open(
        cls,
        model: str,
        config: QuestConfig,
        *,
        dtype: str,
        rope_factor: float,
        threads: int | None,
        weights: str = "model",
        compile: bool = False,
        trust_remote_code: bool = False,
    ) -> Session:
        """Load a model with the paged attention and start an empty conversation."""
        if threads is not None:
            torch.set_num_threads(threads)
        loaded = load_model(
            model,
            dtype=dtype,
            rope_factor=rope_factor,
            attention="questkv",
            weights=weights,
            trust_remote_code=trust_remote_code,
        )
        return cls(loaded.model, loaded.tokenizer, config, compile=compile)

    def compile_step(self) -> None:
        """Compile the decode step now, on a cache of its own, so that the first answer doesn't wait for it."""
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.model.device)
        cache = {cache_argument(self.model): QuestCache(self.model.config, self.config)}
        # Two tokens: the first one comes out of the prompt's own, uncompiled forward.
        self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=2, max_new_tokens=2, **cache
        )

    def fit(self, before: int, document: list[int], question: int, answer: int, *, tail: bool) -> Fitted:
        """Check that a document fits the model's context with its question and answer, or cut its beginning.

        Args:
            before: Tokens that the template puts before it.
            document: Its ids.
            question: Tokens from its end to the answer.
            answer: Tokens of the longest answer.
            tail: Keep the last part that fits, instead of refusing.

        Raises:
            DocumentError: It doesn't fit, or not one token of it would.
        """
        limit = context_length(self.model.config)
        around = before + question + answer
        total = around + len(document)
        if limit is None or total <= limit:
            return Fitted(document, 0)
        if tail and limit > around:
            keep = limit - around
            return Fitted(document[-keep:], len(document) - keep)
        needs = f"{total:,} tokens ({len(document):,} of the document, {around:,} for the question and the answer)"
        if limit <= around:
            raise DocumentError(f"the model's context is {limit:,} tokens; the question and the answer fill it alone")
        raise DocumentError(
            f"the document is too long: {needs}, and the model's context is {limit:,}; stretch it with "
            f"--rope-factor {_factor_for(total, limit)}, or use the document's last part with --tail"
        )

    def room(self) -> int | None:
        """Tokens that still fit the model's context; None where its limit isn't known."""
        limit = context_length(self.model.config)
        return None if limit is None else limit - len(self.ids)

    def read(self, ids: list[int], on_progress: Callable[[int], None]) -> None:
        """Prefill the document, densely."""
        began = time.perf_counter()
        self.ids += ids
        self._read_as = len(self.ids)
        self._run(ids, on_progress)
        self._unreported_s += time.perf_counter() - began

    def answer(
        self,
        question: list[int],
        *,
        prefix: list[int],
        on_text: Callable[[str], None],
        max_new_tokens: int,
        temperature: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Feed a question behind what the cache holds and generate its answer, handing on each piece of text.

        Args:
            question: Ids from the end of the conversation so far to where the model takes over.
            prefix: The last of them that belong to the answer: its given beginning.
            on_text: Called with each new piece of the answer.
            max_new_tokens: Longest answer.
            temperature: 0 takes the likeliest token, above 0 samples.
            stop: Asked after each token; True ends the answer and leaves the conversation whole.
        """
        began = time.perf_counter()
        self.ids += question
        self._start_again_if_longer()
        before = self.cache.report()
        # all but the last token, so that every step of generate() is one token
        self._run(self.ids[self.cache.get_seq_length() : -1])
        prompt_tokens = len(self.ids)
        prefill_s = self._unreported_s + time.perf_counter() - began
        self._unreported_s = 0.0
        stream = _TextStream(self.tokenizer, prefix, on_text)
        self._generate(stream, max_new_tokens, temperature, stop)
        self.ids += stream.generated
        if stream.generated and self.ids[-1] in self._end_tokens():
            self.ids.pop()  # the template writes it again before the next question, and the cache hasn't got it yet
        after = self.cache.report()
        return Answer(
            text=stream.text,
            prompt_tokens=prompt_tokens,
            generated_tokens=len(stream.generated),
            prefill_s=round(prefill_s, 3),
            ms_per_token=round(stream.ms_per_token, 2),
            pages_read=after.pages_read - before.pages_read,
            pages_held=after.pages_held - before.pages_held,
            cache_bytes=after.bytes_held,
            host_bytes=after.host_bytes,
            device_bytes=after.device_bytes,
        )

    def _start_again_if_longer(self) -> None:
        """Forget the cached keys where the rotary embedding has other frequencies for a conversation of this length."""
        if not reads_alike(self.model, self._read_as, len(self.ids)):
            self.cache.reset()
        self._read_as = len(self.ids)

    def _run(self, ids: list[int], on_progress: Callable[[int], None] | None = None) -> None:
        if ids:
            tensor = torch.tensor([ids], device=self.model.device)
            prefill(self.model, self.cache, tensor, total_tokens=self._read_as, on_progress=on_progress)

    def _generate(self, stream: _TextStream, max_new_tokens: int, temperature: float, stop: Callable[[], bool]) -> None:
        if stop():
            return
        ids = torch.tensor([self.ids], device=self.model.device)
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling["temperature"] = temperature
        stream.start()
        self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=stream,
            stopping_criteria=StoppingCriteriaList([_Stop(stop)]),
            **sampling,
            **{cache_argument(self.model): self.cache},
        )

    def _end_tokens(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}


def seed(number: int) -> None:
    """Start the random numbers that sampling draws."""
    set_seed(number)


class _TextStream(BaseStreamer):
    """Hands on an answer's text as its tokens come, never half a character, and notes when they came."""

    def __init__(self, tokenizer: Any, prefix: list[int], on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._ids = list(prefix)
        self._shown = 0  # tokens whose text was handed on
        self._context = 0  # from here on tokens are decoded together: a token's text can depend on those before it
        self._times: list[float] = []
        self._saw_prompt = False
        self._prefix = len(prefix)
        self.text = ""
        if prefix:
            self._show(final=True)

    @property
    def generated(self) -> list[int]:
        """Ids that the model generated."""
        return self._ids[self._prefix :]

    @property
    def ms_per_token(self) -> float:
        """Mean time between tokens; the time to the only token, where there is one."""
        if len(self._times) < 2:
            return 0.0
        first = 1 if len(self._times) > 2 else 0  # the first step carries generate()'s own preparations
        return 1e3 * (self._times[-1] - self._times[first]) / (len(self._times) - 1 - first)

    def start(self) -> None:
        """Note the time at which generation begins."""
        self._times.append(time.perf_counter())

    def put(self, value: torch.Tensor) -> None:
        """Take what generate() gives: first the prompt, then each token."""
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self._ids += value.reshape(-1).tolist()
        self._times.append(time.perf_counter())
        self._show(final=False)

    def end(self) -> None:
        """Hand on what was held back as an unfinished character."""
        if self._shown < len(self._ids):
            self._show(final=True)

    def _show(self, *, final: bool) -> None:
        known = self._decode(self._ids[self._context : self._shown])
        text = self._decode(self._ids[self._context :])
        if text.endswith("\ufffd") and not final:
            return
        self._context, self._shown = self._shown, len(self._ids)
        piece = text[len(known) :]
        if not self.text:
            piece = piece.lstrip()  # the space that a first word carries in most vocabularies
        if piece:
            self.text += piece
            self._on_text(piece)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _Stop(StoppingCriteria):
    """Ends generation after the current token when asked to."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        asked = torch.full((input_ids.shape[0],), self._stop(), device=input_ids.device)
        return asked  # type: ignore[return-value]


def _factor_for(total: int, limit: int) -> int:
    """The smallest power of two that stretches a context to `total` tokens."""
    factor = 2
    while factor * limit < total:
        factor *= 2
    return factor

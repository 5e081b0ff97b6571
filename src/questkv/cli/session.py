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
from transformers import StoppingCriteriaList, set_seed

from questkv.cli.generation import Generation
from questkv.cli.long_document import advice
from questkv.cli.prompt import Conversation, Prompt, common
from questkv.cli.stream import StopWhenAsked, TextStream
from questkv.config import QuestConfig
from questkv.conversation.markup import text_ids
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
    """A document, cut to the model's context only where that was asked for.

    Attributes:
        text: What is used of it.
        tokens: Tokens of the whole document.
        left_out: Tokens of what was cut.
    """

    text: str
    tokens: int
    left_out: int


class Session:
    """A conversation about one document, on one cache.

    `ids` holds every token of it; the cache holds all of them, or all but the last few, which the next run adds. The
    next question's prompt may part from them, where the answer's text is tokenised in another way than it was generated
    or the template rewrites what was said: then the cache is cut back to that place.
    """

    def __init__(self, model: Any, tokenizer: Any, config: QuestConfig, *, compile: bool = False) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.conversation = Conversation(tokenizer)
        template = self.conversation.template
        self.generation = Generation.of(model, tokenizer, template.end_of_turn() if template is not None else None)
        # generate() fills every field that its argument leaves open from this one
        model.generation_config = self.generation.config()
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

    def fit(self, document: str, question: str, answer_prefix: str, room: int, *, tail: bool) -> Fitted:
        """Check that a document fits the model's context with its question and answer, or cut its beginning.

        Args:
            document: Its text.
            question: What is asked first.
            answer_prefix: The answer's given beginning.
            room: Tokens that must be left behind them: those of the longest answer, or of a longer question.
            tail: Keep the last part that fits, instead of refusing.

        Raises:
            DocumentError: It doesn't fit, or not one token of it would.
        """
        limit = context_length(self.model.config)
        total = self._tokens_with(document, question, answer_prefix) + room
        tokens = len(text_ids(self.tokenizer, document))
        if limit is None or total <= limit:
            return Fitted(document, tokens, 0)
        around = self._tokens_with("", question, answer_prefix) + room
        if limit <= around:
            raise DocumentError(f"the model's context is {limit:,} tokens; the question and the answer fill it alone")
        if not tail:
            raise DocumentError(
                f"the document is too long: {total:,} tokens ({tokens:,} of the document, {total - tokens:,} for the "
                f"question and the answer), and the model's context is {limit:,}; {advice(total, limit)}"
            )
        left_out = total - limit
        while left_out < tokens:
            rest = last_part(self.tokenizer, document, left_out)
            over = self._tokens_with(rest, question, answer_prefix) + room - limit
            if over <= 0:
                return Fitted(rest, tokens, left_out)
            left_out += over
        raise DocumentError(f"the model's context is {limit:,} tokens; the question and the answer fill it alone")

    def _tokens_with(self, document: str, question: str, answer_prefix: str) -> int:
        self.conversation.document = document
        return len(self.conversation.prompt(question, answer_prefix).ids)

    def room(self, prompt: Prompt) -> int | None:
        """Tokens that still fit the model's context behind a prompt; None where its limit isn't known."""
        limit = context_length(self.model.config)
        return None if limit is None else limit - len(prompt.ids)

    def read(self, ids: list[int], on_progress: Callable[[int], None]) -> None:
        """Prefill the document, densely."""
        began = time.perf_counter()
        self.ids = list(ids)
        self._read_as = len(self.ids)
        self._run(ids, on_progress)
        self._unreported_s += time.perf_counter() - began

    def answer(
        self,
        prompt: Prompt,
        *,
        on_text: Callable[[str], None],
        max_new_tokens: int,
        temperature: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Feed what the cache lacks of a prompt and generate its answer, handing on each piece of text.

        Args:
            prompt: What `conversation.prompt` gave.
            on_text: Called with each new piece of the answer.
            max_new_tokens: Longest answer.
            temperature: 0 takes the likeliest token, above 0 samples.
            stop: Asked after each token; True ends the answer and leaves the conversation whole.
        """
        began = time.perf_counter()
        self._keep_common(prompt.ids)
        self._start_again_if_longer()
        before = self.cache.report()
        # all but the last token, so that every step of generate() is one token
        self._run(self.ids[self.cache.get_seq_length() : -1])
        prompt_tokens = len(self.ids)
        prefill_s = self._unreported_s + time.perf_counter() - began
        self._unreported_s = 0.0
        stream = TextStream(self.tokenizer, prompt.begun_ids, prompt.begun, on_text)
        self._generate(stream, max_new_tokens, temperature, stop)
        self.ids += stream.generated
        if stream.generated and self.ids[-1] in self.generation.ends:
            self.ids.pop()  # the template writes it again before the next question, and the cache hasn't got it yet
        self.conversation.add(prompt, [stream.as_generated, stream.text, stream.text.strip()], self.ids)
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

    def _keep_common(self, ids: list[int]) -> None:
        """Make `ids` the conversation's, and forget what the cache holds from the first other token on."""
        held = self.cache.get_seq_length()
        kept = min(common(self.ids[:held], ids), len(ids) - 1)
        self.ids = list(ids)
        if kept == held:
            return
        try:
            self.cache.crop(kept - held)
        except RuntimeError:  # a full sliding window keeps no past to go back to
            self.cache.reset()

    def _start_again_if_longer(self) -> None:
        """Forget the cached keys where the rotary embedding has other frequencies for a conversation of this length."""
        if not reads_alike(self.model, self._read_as, len(self.ids)):
            self.cache.reset()
        self._read_as = len(self.ids)

    def _run(self, ids: list[int], on_progress: Callable[[int], None] | None = None) -> None:
        if ids:
            tensor = torch.tensor([ids], device=self.model.device)
            prefill(self.model, self.cache, tensor, total_tokens=self._read_as, on_progress=on_progress)

    def _generate(self, stream: TextStream, max_new_tokens: int, temperature: float, stop: Callable[[], bool]) -> None:
        if stop():
            return
        ids = torch.tensor([self.ids], device=self.model.device)
        stream.start()
        self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self.generation.config(temperature, max_new_tokens),
            streamer=stream,
            stopping_criteria=StoppingCriteriaList([StopWhenAsked(stop)]),
            tokenizer=self.tokenizer,  # which stop_strings need
            **{cache_argument(self.model): self.cache},
        )


def seed(number: int) -> None:
    """Start the random numbers that sampling draws."""
    set_seed(number)


def last_part(tokenizer: Any, text: str, tokens: int) -> str:
    """A text without so many of its first tokens; a character that holds several stays or goes as a whole."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        return text[encoded["offset_mapping"][tokens][0] :]
    wanted = len(text_ids(tokenizer, text)) - tokens
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        if len(text_ids(tokenizer, text[middle:])) > wanted:
            low = middle + 1
        else:
            high = middle
    return text[low:]

"""An answer's text as its tokens come, and the request to stop it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class TextStream(BaseStreamer):
    """Hands on an answer's text as its tokens come, never half a character, and notes when they came.

    Args:
        tokenizer: The model's.
        before: Ids before the first generated one that its text may depend on; their own text is not handed on.
        begun: The answer's given beginning, handed on at once.
        on_text: Called with each piece.

    Attributes:
        text: What was handed on.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int], begun: str, on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._ids = list(before)
        self._shown = len(before)  # tokens whose text was handed on
        self._context = 0  # from here on tokens are decoded together: a token's text can depend on those before it
        self._times: list[float] = []
        self._saw_prompt = False
        self._before = len(before)
        self._raw = begun
        self.text = ""
        if begun:
            self._hand_on(begun)

    @property
    def generated(self) -> list[int]:
        """Ids that the model generated."""
        return self._ids[self._before :]

    @property
    def as_generated(self) -> str:
        """The text with the blanks that it began with."""
        return self._raw

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
        self._raw += piece
        if not self.text:
            piece = piece.lstrip()  # the space that a first word carries in most vocabularies
        if piece:
            self._hand_on(piece)

    def _hand_on(self, piece: str) -> None:
        self.text += piece
        self._on_text(piece)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class StopWhenAsked(StoppingCriteria):
    """Ends generation after the current token when asked to."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        """Whether to end, for every sequence."""
        asked = torch.full((input_ids.shape[0],), self._stop(), device=input_ids.device)
        return asked  # type: ignore[return-value]

"""The paper's passkey task (section 4.2): a number hidden at evenly spaced places among repeated filler sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from questkv.conversation.markup import begin_ids, markup_ids, text_ids
from questkv.errors import ConfigError
from questkv.evaluate.chat import Chat
from questkv.evaluate.hidden_key import ANSWER_TOKENS, HiddenKeyTask, depths, fact, key, question_ids
from questkv.evaluate.task import Sample
from questkv.models import LoadedModel

_TASK = "There is a pass key hidden inside a lot of text. Find and memorize it. "
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class Passkey(HiddenKeyTask):
    """Keys in filler: lengths x positions prompts.

    Attributes:
        lengths: Tokens of filler, rounded down to whole repetitions.
        positions: Places of the key in each length, evenly spaced from the beginning to the end.
        seed: Which keys.
        prompt: ``plain``, one paragraph that ends as the paper's; or ``chat``, a turn of the model's chat template.

    Raises:
        ConfigError: Another prompt.
    """

    name: ClassVar[str] = "passkey"

    lengths: tuple[int, ...] = (3800,)
    positions: int = 8
    seed: int = 0
    prompt: str = "plain"

    def __post_init__(self) -> None:
        if self.prompt not in ("plain", "chat"):
            raise ConfigError(f"[passkey] prompt: expected plain or chat, got {self.prompt}")

    def samples(self, loaded: LoadedModel) -> Iterator[Sample]:
        """One prompt for each length and position.

        Raises:
            ConfigError: A length is too short for one repetition of the filler.
        """
        tokenizer = loaded.tokenizer
        chat = Chat.of(tokenizer) if self.prompt == "chat" else Chat()
        filler = text_ids(tokenizer, _FILLER)
        lead = markup_ids(tokenizer, chat.before) if chat.before else begin_ids(tokenizer)
        lead += text_ids(tokenizer, _TASK)
        question = question_ids(tokenizer, chat)
        for length in self.lengths:
            repeats = length // len(filler)
            if not repeats:
                raise ConfigError(f"[passkey] lengths: expected at least {len(filler)} tokens, got {length}")
            for position, depth in enumerate(depths(self.positions)):
                number = key(position, self.seed)
                before = round(depth * (repeats - 1))
                yield Sample(
                    id=f"{length}-{position}",
                    length=length,
                    ids=lead + filler * before + text_ids(tokenizer, fact(number)) + filler * (repeats - before),
                    data={"key": number, "depth": round(depth, 4), "question": question},
                    decoded=len(question) + ANSWER_TOKENS,
                )

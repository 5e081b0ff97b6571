"""A key hidden in a real text, at every depth of every length: a heat map of where it is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from questkv.conversation.markup import begin_ids, markup_ids, text_ids
from questkv.errors import ConfigError
from questkv.evaluate.chat import Chat
from questkv.evaluate.hidden_key import ANSWER_TOKENS, HiddenKeyTask, depths, fact, key, question_ids
from questkv.evaluate.task import Sample
from questkv.evaluate.text import Text
from questkv.models import LoadedModel

_TASK = "There is a pass key hidden inside a long text. Find and memorize it.\n\n"
# Where a sentence ends a key can stand; it is looked for so many tokens back.
_SENTENCE_END = (".", "!", "?", ".\n", '."', ".\u201d", "?\u201d", "!\u201d")
_LOOK_BACK = 200


@dataclass(frozen=True)
class Needle(HiddenKeyTask):
    """Keys in a text: lengths x depths prompts.

    Attributes:
        text: What the key is hidden in.
        lengths: Tokens of the whole prompt, the key's sentences included.
        depths: Places of the key in each length, evenly spaced from the beginning to the end.
        start: First token of the text that is used.
        seed: Which keys.
    """

    name: ClassVar[str] = "needle"

    text: Text
    lengths: tuple[int, ...] = (2000, 4000, 6000)
    depths: int = 8
    start: int = 0
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """The settings, with the text's identity in place of its content."""
        return {**super().settings(), "text": self.text.identity()}

    def samples(self, loaded: LoadedModel) -> Iterator[Sample]:
        """One prompt for each length and depth.

        Raises:
            ConfigError: A length leaves no room for the text.
            DocumentError: The text is shorter than the longest length.
        """
        tokenizer = loaded.tokenizer
        chat = Chat.of(tokenizer)
        lead = markup_ids(tokenizer, chat.before) if chat.before else begin_ids(tokenizer)
        lead += text_ids(tokenizer, _TASK)
        question = text_ids(tokenizer, "\n\n") + question_ids(tokenizer, chat)
        novel = self.text.tokens(tokenizer, self.start, max(self.lengths))
        for length in self.lengths:
            for position, depth in enumerate(depths(self.depths)):
                number = key(position, self.seed)
                needle = text_ids(tokenizer, f" {fact(number)}")
                room = length - len(lead) - len(needle)
                if room < 1:
                    raise ConfigError(
                        f"[needle] lengths: expected more than {len(lead) + len(needle)} tokens, got {length}"
                    )
                place = _sentence_end(tokenizer, novel, round(depth * room))
                yield Sample(
                    id=f"{length}-{position}",
                    length=length,
                    ids=lead + novel[:place] + needle + novel[place:room],
                    data={"key": number, "depth": round(depth, 4), "question": question},
                    decoded=len(question) + ANSWER_TOKENS,
                )


def _sentence_end(tokenizer: Any, ids: list[int], place: int) -> int:
    """The last place not behind `place` where a sentence has just ended; `place` itself where none is near."""
    for end in range(place, max(place - _LOOK_BACK, 0), -1):
        if tokenizer.decode([ids[end - 1]]).endswith(_SENTENCE_END):
            return end
    return place

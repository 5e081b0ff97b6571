"""From a document and questions to tokens, split where the document ends.

The document's part is prefilled once and kept; questions are short runs behind it. The document's own text never
counts as markup: a special token's name inside it is ordinary text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# stand-ins for the texts, found again in what the chat template makes of them
_FIRST, _REPLY, _NEXT = "questkv-slot-one", "questkv-slot-two", "questkv-slot-three"


@dataclass(frozen=True)
class Template:
    """What a chat template puts around a document, its questions and the answers.

    A conversation is ``before + document + between + question + after + answer``, and for each further turn
    ``turn + question + after + answer``.
    """

    before: str
    between: str
    after: str
    turn: str


PLAIN = Template(before="", between="\n\nQuestion: ", after="\nAnswer:", turn="\n\nQuestion: ")


class Prompter:
    """Turns texts into token ids for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.template = _read_template(tokenizer)

    def document(self, text: str) -> tuple[list[int], list[int]]:
        """Ids that come before the document, and the document's own."""
        before = self._markup(self.template.before)
        if self.template is PLAIN:
            before = self._begin_of_text()
        return before, self._text(text)

    def question(self, text: str, answer_prefix: str = "", *, first: bool = True) -> list[int]:
        """Ids from the end of the document, or of the last answer, to where the next answer begins."""
        lead = self.template.between if first else self.template.turn
        ids = self._markup(lead) + self._text(text) + self._markup(self.template.after)
        return ids + self.prefix(answer_prefix)

    def prefix(self, answer_prefix: str) -> list[int]:
        """Ids of the words the answer is made to begin with."""
        if not answer_prefix:
            return []
        # a model without a template continues "Answer:", and the space belongs to the next word
        return self._text(f" {answer_prefix.lstrip()}" if self.template is PLAIN else answer_prefix)

    def _markup(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _begin_of_text(self) -> list[int]:
        start = self._tokenizer.bos_token_id
        return [start] if start is not None and self._tokenizer("a")["input_ids"][0] == start else []


def _read_template(tokenizer: Any) -> Template:
    """Read a `Template` off a tokenizer's chat template; `PLAIN` where it has none that can be read."""
    if not getattr(tokenizer, "chat_template", None):
        return PLAIN
    messages = [
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _REPLY},
        {"role": "user", "content": _NEXT},
    ]
    one = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    three = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if one.count(_FIRST) != 1 or three.count(_REPLY) != 1 or three.count(_NEXT) != 1:
        return PLAIN
    before, after = one.split(_FIRST)
    turn = three.split(_REPLY)[1].split(_NEXT)[0]
    return Template(before=before, between="\n\n", after=after, turn=turn)

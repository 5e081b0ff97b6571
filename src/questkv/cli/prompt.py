"""From a document, questions and answers to the tokens of one conversation.

The tokens are those of the whole conversation, put into the model's chat form and tokenised at once. The document is
prefilled before the rest: as far as its tokens don't depend on the question behind it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from questkv.conversation.markup import Markup, begin_ids
from questkv.conversation.template import ChatTemplate, Message, TemplateError
from questkv.errors import ModelError

_QUESTION, _ANSWER = "\n\nQuestion: ", "\nAnswer:"  # around a question, for a model without a chat template


@dataclass(frozen=True)
class Prompt:
    """What the model reads before it answers a question.

    Attributes:
        question: The question.
        ids: Ids of the whole conversation up to the answer's first generated token.
        begun: The answer's given beginning.
        begun_ids: The last ids, which hold it; tokens before them may be among these where one spans the seam.
    """

    question: str
    ids: list[int]
    begun: str = ""
    begun_ids: tuple[int, ...] = ()


class Conversation:
    """A document, and the questions about it with their answers.

    Args:
        tokenizer: The model's, with its chat template. Without one, the prompt is a plain text that ends in a question.

    Attributes:
        document: The text that the first question follows.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.document = ""
        self._tokenizer = tokenizer
        self._template = ChatTemplate.or_plain(tokenizer)
        self._markup = Markup(tokenizer, self._template.source if self._template is not None else "")
        self._turns: list[tuple[str, str]] = []
        self._alone = False

    @property
    def template(self) -> ChatTemplate | None:
        """The chat template, None where there is none that can be used."""
        return self._template

    def prompt(self, question: str, answer_prefix: str = "") -> Prompt:
        """The conversation so far with another question behind it.

        Raises:
            ModelError: The chat template refuses it.
        """
        ids = self._ids(question, answer_prefix)
        begun: tuple[int, ...] = ()
        if answer_prefix:
            begun = tuple(ids[common(ids, self._ids(question, "")) :])
        return Prompt(question, ids, answer_prefix.lstrip(), begun)

    def document_ids(self, question: str = "") -> list[int]:
        """The ids at the beginning that stay as they are whatever is asked first, or as far as it is known."""
        # Words, digits and signs join with what is before them by different rules.
        asked = [question] if question else ["Why?", "1"]
        probes = [self._ids(text, "") for text in (*asked, "?")]
        if question.startswith("?"):
            probes.append(self._ids("Why?", ""))
        return probes[0][: min(common(probes[0], probe) for probe in probes[1:])]

    def add(self, prompt: Prompt, answers: Sequence[str], ids: list[int]) -> None:
        """Note how a question was answered.

        Args:
            prompt: What the model had read.
            answers: The answer as text, with or without the blanks around it. The one is kept whose tokens agree the
                longest with what was generated, so that little has to be read again.
            ids: The prompt's and the generated ids.
        """
        before = self._turns
        best, longest = before, -1
        for answer in dict.fromkeys(answers):
            self._turns = [*before, (prompt.question, answer)]
            length = common(self._ids("?", ""), ids) if len(set(answers)) > 1 else 0
            if length > longest:
                best, longest = self._turns, length
        self._turns = best

    def _ids(self, question: str, answer_prefix: str) -> list[int]:
        """Ids of the conversation; of the new question alone where the template takes one turn only."""
        if self._turns and self._template is not None and not self._alone:
            if not self._template.one_turn:
                try:
                    return self._whole(self._turns, question, answer_prefix)
                except TemplateError as error:
                    self._ask_alone(str(error))
            else:
                self._ask_alone(self._template.one_turn)
        try:
            return self._whole([] if self._alone else self._turns, question, answer_prefix)
        except TemplateError as error:
            raise ModelError(f"the model's chat template refuses the question: {error}") from error

    def _ask_alone(self, reason: str) -> None:
        self._alone = True
        warnings.warn(
            f"the model's chat template takes one turn only ({reason}); each question is asked without the ones before",
            stacklevel=2,
        )

    def _whole(self, turns: Sequence[tuple[str, str]], question: str, answer_prefix: str) -> list[int]:
        questions, replies = [*(asked for asked, _ in turns), question], [reply for _, reply in turns]
        texts = [self.document, *questions, answer_prefix]

        def render(text: Callable[[str], str], reply: Callable[[str], str]) -> str:
            document, *asked = [text(part) for part in (self.document, *questions)]
            answered = [reply(part) for part in replies]
            begun = text(answer_prefix)
            return (
                self._templated(document, asked, answered, begun)
                if self._template
                else _plain(document, asked, answered, begun)
            )

        ids = self._markup.ids(texts, replies, render)
        return ids if self._template is not None else begin_ids(self._tokenizer) + ids

    def _templated(self, document: str, questions: list[str], replies: list[str], begun: str) -> str:
        assert self._template is not None
        messages: list[Message] = [("user", f"{document}\n\n{questions[0]}")]
        for reply, question in zip(replies, questions[1:], strict=True):
            messages += [("assistant", reply), ("user", question)]
        return self._template.render(messages) + begun


def _plain(document: str, questions: list[str], replies: list[str], begun: str) -> str:
    """A text that ends in a question, for a model that continues texts."""
    answers = [*replies, f" {begun.lstrip()}" if begun else ""]  # the space belongs to the next word
    turns = (f"{_QUESTION}{question}{_ANSWER}{answer}" for question, answer in zip(questions, answers, strict=True))
    return document + "".join(turns)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids at the beginning are the same."""
    for index, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return index
    return min(len(one), len(other))

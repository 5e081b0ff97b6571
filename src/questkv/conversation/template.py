"""A tokenizer's chat template: whether it can be used, and what it makes of a conversation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from questkv.errors import ModelError

Message = tuple[str, str]
"""A role (``user`` or ``assistant``) and a text."""

# Two stand-ins for one text. A template that gives the same for both doesn't show the text.
_ONE, _OTHER = "qqonezz", "qqtwoyy"
_REPLY = "qqreplyzz"


class TemplateError(ModelError):
    """A chat template can't be used, or not for this conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template that was seen to work.

    Attributes:
        tokenizer: Whose it is.
        parts: Whether it takes a message's content as a list of parts instead of a text.
        one_turn: Why it takes no second turn; empty where it does.
    """

    tokenizer: Any
    parts: bool = False
    one_turn: str = ""

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate | None:
        """Try out a tokenizer's template; None where it has none.

        Raises:
            TemplateError: It raises, or shows nothing of what the user says.
        """
        if not getattr(tokenizer, "chat_template", None):
            return None
        reason = ""
        for parts in (False, True):
            template = cls(tokenizer, parts)
            try:
                shown = template._shows([("user", _ONE)], [("user", _OTHER)])
            except TemplateError as error:
                reason = reason or str(error)
                continue
            if shown:
                return cls(tokenizer, parts, template._why_one_turn())
            reason = reason or "it leaves out what the user says"
        raise TemplateError(reason)

    @classmethod
    def or_plain(cls, tokenizer: Any) -> ChatTemplate | None:
        """`of`, but None, after a warning, for a template that can't be used: the prompt is then a plain text."""
        try:
            return cls.of(tokenizer)
        except TemplateError as error:
            warnings.warn(
                f"the model's chat template can't be used ({error}); it gets a plain text that ends in a question, "
                "and a model made for chats answers that less well",
                stacklevel=2,
            )
            return None

    @property
    def source(self) -> str:
        """The template's text."""
        return str(self.tokenizer.get_chat_template(None, None))

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """The conversation as text, with the beginning of the next answer behind it if `answer`.

        Raises:
            TemplateError: The template raises; the message is what it said, in one line.
        """
        import jinja2

        conversation = [
            {"role": role, "content": [{"type": "text", "text": text}] if self.parts else text}
            for role, text in messages
        ]
        try:
            return str(self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=answer))
        # What a template's expressions raise comes through jinja as it is.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise TemplateError(said if len(said) <= 160 else f"{said[:159]}…") from error

    def around_reply(self) -> tuple[str, str] | None:
        """What stands between a user's text and the reply, and between the reply and the next user's text.

        None where the template takes one turn only, or changes these texts.
        """
        if self.one_turn:
            return None
        text = self.render([("user", _ONE), ("assistant", _REPLY), ("user", _OTHER)])
        if any(text.count(part) != 1 for part in (_ONE, _REPLY, _OTHER)):
            return None
        before, _, after = text.partition(_REPLY)
        return before.partition(_ONE)[2], after.partition(_OTHER)[0]

    def end_of_turn(self) -> int | None:
        """The token that the template writes behind a reply, where that is one of the added tokens."""
        around = self.around_reply()
        if around is None:
            return None
        added = {str(token): index for index, token in self.tokenizer.added_tokens_decoder.items()}
        follows = around[1].lstrip()
        names = [name for name in added if name.strip() and follows.startswith(name)]
        return added[max(names, key=len)] if names else None

    def _shows(self, one: Sequence[Message], other: Sequence[Message]) -> bool:
        return self.render(one) != self.render(other)

    def _why_one_turn(self) -> str:
        """Why a second question can't follow an answer; empty where it can."""
        turns = [("user", _ONE), ("assistant", _REPLY), ("user", _ONE)]
        try:
            shown = self._shows(turns, [("user", _OTHER), *turns[1:]]) and self._shows(
                turns, [*turns[:2], ("user", _OTHER)]
            )
        except TemplateError as error:
            return str(error)
        return "" if shown else "it leaves out the first or the last question"

"""A model's chat form around one user's turn, and the tokens that end an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from questkv.conversation.template import ChatTemplate, TemplateError
from questkv.errors import ModelError

# stand-ins for the texts, found again in what the template makes of them
_FIRST, _REPLY, _NEXT = "questkv-slot-one", "questkv-slot-two", "questkv-slot-three"


@dataclass(frozen=True)
class Chat:
    """What stands before and after one user's turn; both empty for a model without a chat template."""

    before: str = ""
    after: str = ""

    @classmethod
    def of(cls, tokenizer: Any) -> Chat:
        """Read it off a tokenizer's template, leaving out a system turn that the template adds of its own.

        The user's header is what a second turn adds after the end of the first reply.

        Raises:
            ModelError: The template can't be used.
        """
        try:
            template = ChatTemplate.of(tokenizer)
            if template is None:
                return cls()
            messages = [("user", _FIRST), ("assistant", _REPLY), ("user", _NEXT)]
            one = template.render(messages[:1])
            if one.count(_FIRST) != 1:
                raise TemplateError("it changes the user's text")
            before, _, after = one.partition(_FIRST)
            if template.one_turn:
                return cls(before, after)
            two, three = (template.render(messages[:count], answer=False) for count in (2, 3))
        except TemplateError as error:
            raise ModelError(f"the model's chat template can't be used: {error}") from error
        end = two.partition(_REPLY)[2]
        turn = three.partition(_REPLY)[2].partition(_NEXT)[0]
        header = turn.removeprefix(end)
        if not end or header == turn or not before.endswith(header):
            return cls(before, after)  # turns that aren't alike: take the template as it is
        begin = tokenizer.bos_token or ""
        if before.startswith(begin) and not header.startswith(begin):
            header = begin + header
        return cls(header, after)


def stop_ids(model: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])

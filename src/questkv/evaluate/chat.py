"""Text to tokens: a model's chat form around one user's turn, and text that never counts as markup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        """
        if not getattr(tokenizer, "chat_template", None):
            return cls()
        messages = [
            {"role": "user", "content": _FIRST},
            {"role": "assistant", "content": _REPLY},
            {"role": "user", "content": _NEXT},
        ]
        one = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        two = tokenizer.apply_chat_template(messages[:2], tokenize=False)
        three = tokenizer.apply_chat_template(messages, tokenize=False)
        before, _, after = one.partition(_FIRST)
        end = two.partition(_REPLY)[2]
        turn = three.partition(_REPLY)[2].partition(_NEXT)[0]
        header = turn.removeprefix(end)
        if not end or header == turn or not before.endswith(header):
            return cls(before, after)  # turns that aren't alike: take the template as it is
        begin = tokenizer.bos_token or ""
        if before.startswith(begin) and not header.startswith(begin):
            header = begin + header
        return cls(header, after)


def markup_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a template's text, whose special tokens count; nothing is added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of ordinary text: a special token's name inside it is spelled out; nothing is added."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]) if text else []


def begin_ids(tokenizer: Any) -> list[int]:
    """The begin-of-text token of a tokenizer that puts one before a plain text, else nothing."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and list(tokenizer("a")["input_ids"])[:1] == [begin] else []


def stop_ids(model: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])

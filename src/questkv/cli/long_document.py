"""A document that is far longer than the model's context: refused or cut before all of it is made into tokens."""

from __future__ import annotations

from typing import Any

from questkv.conversation.markup import text_ids
from questkv.errors import DocumentError
from questkv.evaluate.excerpt import Excerpt, beginning, ending

# The largest factor that YaRN's authors show (arXiv 2309.00071: 16 and 32); far beyond, no answer is right.
_MOST_STRETCH = 32


def shorten(text: str, limit: int | None, tokenizer: Any, *, tail: bool) -> Excerpt:
    """The part of a document that can matter: all of it where it may fit the context.

    What comes back is still to be fitted, by its exact tokens.

    Args:
        text: The document.
        limit: The model's context in tokens; None where it isn't known.
        tokenizer: The model's.
        tail: ``--tail``: an end longer than the context, in place of a refusal.

    Raises:
        DocumentError: It is longer than the context, and `tail` is False.
    """
    if limit is None:
        return Excerpt(text, None, None)
    part = (ending if tail else beginning)(text, limit, lambda words: text_ids(tokenizer, words))
    if part.estimate is not None and not tail:
        raise DocumentError(
            f"the document is too long: about {part.estimate:,} tokens, and the model's context is {limit:,}; "
            f"{advice(part.estimate, limit)}"
        )
    return part


def left_out(part: Excerpt, tokens: int, cut: int) -> str:
    """The line that says what ``--tail`` left out.

    Args:
        part: What `shorten` gave.
        tokens: Tokens of the part.
        cut: How many of them were left out.
    """
    if part.estimate is None:
        return f"--tail: the first {cut:,} of the document's {tokens:,} tokens were left out"
    kept = tokens - cut
    return f"--tail: all but the last {kept:,} of the document's about {part.estimate:,} tokens were left out"


def advice(total: int, limit: int) -> str:
    """What a user can do about a document that takes `total` tokens of a context of `limit`."""
    factor = 2
    while factor * limit < total:
        factor *= 2
    stretch = f", or stretch the context with --rope-factor {factor}" if factor <= _MOST_STRETCH else ""
    return f"use its last part with --tail{stretch}"

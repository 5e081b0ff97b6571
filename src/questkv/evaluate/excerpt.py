"""As much of a long text as can matter, so that what lies beyond a model's context is never made into tokens.

A text is tokenised in growing parts. A part has as many tokens as the whole has there, but for the few at its cut:
`SEAM` allows for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Tokens near a cut that may come out differently.
SEAM = 64
# Characters that a token has in most texts; a part that proves too short is doubled.
_CHARACTERS = 5

Tokenize = Callable[[str], Sequence[int]]


class Excerpt(NamedTuple):
    """A part of a text.

    Attributes:
        text: The part; all of it where it is short.
        tokens: How many tokens the part has; None where it is the whole text, which wasn't counted.
        estimate: About how many tokens the whole text has; None likewise.
    """

    text: str
    tokens: int | None
    estimate: int | None


def beginning(text: str, count: int, tokenize: Tokenize) -> Excerpt:
    """A beginning that has the text's first `count` tokens; the whole text where it is hardly longer than that.

    Args:
        text: A text.
        count: Tokens.
        tokenize: Gives a text's tokens.
    """
    return _grow(text, count, tokenize, lambda size: text[:size])


def ending(text: str, count: int, tokenize: Tokenize) -> Excerpt:
    """An end that has the text's last `count` tokens, as `beginning`."""
    return _grow(text, count, tokenize, lambda size: text[-size:])


def _grow(text: str, count: int, tokenize: Tokenize, part: Callable[[int], str]) -> Excerpt:
    wanted = count + SEAM
    size = _CHARACTERS * wanted
    while size < len(text):
        tried = part(size)
        tokens = len(tokenize(tried))
        if tokens >= wanted:
            return Excerpt(tried, tokens, round(tokens * len(text) / size))
        size *= 2
    return Excerpt(text, None, None)

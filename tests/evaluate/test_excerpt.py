"""A part of a long text: its tokens are the whole text's, and no more is tokenised than can matter."""

from __future__ import annotations

import pytest

from questkv.evaluate.chat import text_ids
from questkv.evaluate.excerpt import SEAM, beginning, ending
from questkv.evaluate.text import Text
from questkv.models import LoadedModel


class Words:
    """One token a word; counts the characters that it was given."""

    def __init__(self) -> None:
        self.characters = 0

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        return [hash(word) for word in text.split()]


def test_what_is_tokenised_grows_with_the_count_and_not_with_the_text() -> None:
    for pick in (beginning, ending):
        seen = []
        for repeats in (10_000, 1_000_000):
            words = Words()
            part = pick("a lamp stood " * repeats, 500, words)
            seen.append(words.characters)
            assert part.tokens is not None
            assert part.tokens >= 500 + SEAM
            assert part.estimate == pytest.approx(3 * repeats, rel=0.01)
        assert seen[0] == seen[1] < 20_000


def test_a_text_whose_tokens_are_long_is_tried_in_growing_parts() -> None:
    words = Words()
    text = "extraordinarily-long-words-and-blanks          " * 20_000
    part = beginning(text, 500, words)
    assert part.tokens is not None
    assert part.tokens >= 500 + SEAM
    assert len(part.text) < 100_000
    short = beginning(text[:20_000], 500, words)  # 425 words
    assert (short.text, short.tokens, short.estimate) == (text[:20_000], None, None)


@pytest.mark.slow
def test_the_tokens_of_a_part_are_the_whole_texts(smollm2: LoadedModel) -> None:
    text = "".join(f"{n}. The lamp, na\u00efvely \u2014 it stood;  there\n\n" for n in range(20_000))

    def tokenize(words: str) -> list[int]:
        return text_ids(smollm2.tokenizer, words)

    whole = tokenize(text)
    for count in (1, 100, 3_000):
        first, last = beginning(text, count, tokenize), ending(text, count, tokenize)
        assert max(len(first.text), len(last.text)) < len(text) // 2
        assert tokenize(first.text)[:count] == whole[:count]
        assert tokenize(last.text)[-count:] == whole[-count:]
    read = Text("a text", text).tokens(smollm2.tokenizer, 1_000, 2_000)
    assert read == whole[1_000:3_000]

"""Text to tokens, where only what a template wrote counts as markup.

A control token's name inside a document or a question is ordinary text, and yet the whole conversation is tokenised at
once, so that no seam between its parts is left in the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of ordinary text: a special token's name inside it is spelled out; nothing is added."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]) if text else []


def markup_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a template's text, whose special tokens count; nothing is added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def begin_ids(tokenizer: Any) -> list[int]:
    """The begin-of-text token of a tokenizer that puts one before a plain text, else nothing."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and list(tokenizer("a")["input_ids"])[:1] == [begin] else []


class Markup:
    """A tokenizer's control tokens, told apart from texts that hold their names.

    Args:
        tokenizer: A tokenizer of transformers.
        template: The chat template's source. Control tokens are the special tokens and the added tokens that it names.
    """

    def __init__(self, tokenizer: Any, template: str = "") -> None:
        self._tokenizer = tokenizer
        added = list(tokenizer.added_tokens_decoder.values())
        self._special = [str(token) for token in added if token.special]
        self._names = [str(t) for t in added if t.special or (str(t).strip() and str(t) in template)]

    def ids(self, texts: Iterable[str], replies: Iterable[str], render: Callable[[Mark, Mark], str]) -> list[int]:
        """Ids of a rendered conversation, tokenised at once.

        Args:
            texts: What came from outside: no name in it counts.
            replies: The model's own words, in which control tokens that aren't special do count.
            render: Puts the conversation together from its texts and replies, each handed through the first or the
                second function, and gives it as text.
        """
        texts, replies = list(texts), list(replies)
        if not self._named(texts, self._names) and not self._named(replies, self._special):
            return markup_ids(self._tokenizer, render(_as_it_is, _as_it_is))
        # Marks on both sides of a name survive whatever a template does to the text around it.
        used = set().union(*texts, *replies)
        start, end, *_ = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        rendered = render(_mark(self._names, start, end), _mark(self._special, start, end))
        if getattr(self._tokenizer, "is_fast", False):
            return self._ids_by_alias(rendered, start, end)
        return self._ids_by_stretch(rendered, start, end)

    def _named(self, texts: Iterable[str], names: list[str]) -> bool:
        """Whether a text holds a name, as it is written or as the tokenizer's normalizer writes it."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        normalizer = None if backend is None else backend.normalizer
        for text in texts:
            forms = [text] if normalizer is None else [text, normalizer.normalize_str(text)]
            if any(name in form for name in names for form in forms):
                return True
        return False

    def _ids_by_alias(self, rendered: str, start: str, end: str) -> list[int]:
        """Tokenise with every control token under another name, which the template's own occurrences get."""
        plain = rendered.replace(start, "").replace(end, "")
        aliases = _aliases(self._names, plain)
        text = _replace_unmarked(rendered, start, end, aliases)
        renamed = _renamed(self._tokenizer.backend_tokenizer, aliases)
        real = {renamed.token_to_id(alias): self._id(name) for name, alias in aliases.items()}
        return [real.get(index, index) for index in renamed.encode(text, add_special_tokens=False).ids]

    def _ids_by_stretch(self, rendered: str, start: str, end: str) -> list[int]:
        """Tokenise stretch by stretch between the template's control tokens: for tokenizers that can't be copied."""
        ids: list[int] = []
        at = 0
        for found in _pattern(self._names, start, end).finditer(rendered):
            if found["name"]:
                ids += self._stretch(rendered[at : found.start()], start, end)
                ids.append(self._id(found["name"]))
                at = found.end()
        return ids + self._stretch(rendered[at:], start, end)

    def _stretch(self, text: str, start: str, end: str) -> list[int]:
        return text_ids(self._tokenizer, text.replace(start, "").replace(end, ""))

    def _id(self, name: str) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(name))


Mark = Callable[[str], str]


def _as_it_is(text: str) -> str:
    return text


def _alternatives(names: Iterable[str]) -> str:
    """A regular expression for any of the names, the longest first as tokenizers match them."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


def _mark(names: list[str], start: str, end: str) -> Mark:
    pattern = re.compile(_alternatives(names))
    return lambda text: pattern.sub(lambda found: f"{start}{found.group()}{end}", text)


def _pattern(names: Iterable[str], start: str, end: str) -> re.Pattern[str]:
    either = _alternatives(names)
    return re.compile(f"{start}(?P<marked>{either}){end}|(?P<name>{either})|[{start}{end}]")


def _replace_unmarked(rendered: str, start: str, end: str, aliases: dict[str, str]) -> str:
    """Put aliases where a template wrote a name; take the marks away where a text did."""

    def instead(found: re.Match[str]) -> str:
        return aliases[found["name"]] if found["name"] else found["marked"] or ""

    return _pattern(aliases, start, end).sub(instead, rendered)


def _aliases(names: list[str], text: str) -> dict[str, str]:
    """Names of plain letters and digits, which normalizers leave alone, and of which the text holds nothing."""
    lowered, number = text.casefold(), 0
    while f"qkvname{number}n" in lowered:
        number += 1
    return {name: f"qkvname{number}n{index:05d}q" for index, name in enumerate(names)}


def _renamed(backend: Any, aliases: dict[str, str]) -> Any:
    """A copy of a tokenizer that knows its control tokens by other names, and no text by the old ones."""
    from tokenizers import Tokenizer

    spec = json.loads(backend.to_str())
    for token in spec["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    spec.update(post_processor=None, truncation=None, padding=None)
    model = spec["model"]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(piece, piece): index for piece, index in vocab.items()}
    else:  # Unigram: pieces with their scores
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        model["merges"] = [list(pair) for pair in pairs if not {*pair, "".join(pair)} & aliases.keys()]
    return Tokenizer.from_str(json.dumps(spec))

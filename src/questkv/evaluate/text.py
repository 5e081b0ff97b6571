"""A text that a task draws its prompts from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from questkv.errors import DocumentError
from questkv.evaluate.chat import text_ids
from questkv.evaluate.excerpt import beginning


@dataclass(frozen=True)
class Text:
    """A text and its name; what results hold of it is `identity`.

    Attributes:
        name: The file's name.
        content: All of it.
    """

    name: str
    content: str = field(repr=False)

    def identity(self) -> dict[str, Any]:
        """Name, characters and SHA-256 of the content, so that a resumed run is known to read the same text."""
        digest = hashlib.sha256(self.content.encode("utf-8", errors="surrogatepass")).hexdigest()
        return {"name": Path(self.name).name, "characters": len(self.content), "sha256": digest}

    def tokens(self, tokenizer: Any, start: int, count: int) -> list[int]:
        """Tokens `start` to `start + count` of the text, without a begin-of-text token.

        Raises:
            DocumentError: The text is too short.
        """
        part = beginning(self.content, start + count, lambda words: text_ids(tokenizer, words))
        ids = text_ids(tokenizer, part.text)
        if len(ids) < start + count:
            raise DocumentError(
                f"document {self.name}: expected at least {start + count:,} tokens (from token {start:,}), got "
                f"{len(ids):,}; give a longer text, or lower --lengths, --samples or --start"
            )
        return ids[start : start + count]

"""Foreign text on a screen: what would steer the terminal is shown and not obeyed."""

from __future__ import annotations

import re

# C0 but for tab and line feed, DEL, C1, what turns the direction of writing, lone surrogates (bytes that are no text)
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile("[\n\t]")


def shown(text: str) -> str:
    r"""A text with each control character as its escape: ESC as ``\x1b``; tabs and line breaks stay."""
    return _STEERING.sub(_escape, text)


def shown_line(text: str) -> str:
    r"""The same in one line: tabs and line breaks become ``\t`` and ``\n``."""
    return _BREAKS.sub(lambda found: {"\n": r"\n", "\t": r"\t"}[found[0]], shown(text))


def json_shown(text: str) -> str:
    r"""JSON with each control character that JSON leaves raw (DEL, C1 and others) as ``\u009b``: the same value."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

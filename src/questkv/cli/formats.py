"""Formats that are no plain text, told by their first bytes, and how to get the text out of them."""

from __future__ import annotations

import codecs
from typing import NamedTuple


class Format(NamedTuple):
    """What a file is, and what to do about it."""

    name: str
    advice: str


_UNPACK = "unpack it first"
_NO_TEXT = "it holds no text"
_PANDOC = "extract it first, for example with pandoc -t plain"
# Formats that are written in characters: what begins so is of them.
_WRITTEN: tuple[tuple[bytes, Format], ...] = (
    (b"{\\rtf", Format("an RTF document", _PANDOC)),
    (b"%!PS", Format("PostScript", "extract it first, for example with ps2ascii")),
)
# Of the others a mark at its offset tells, the first that fits; a text may well begin with "GGUF" or "ID3".
_SIGNATURES: tuple[tuple[int, bytes, Format], ...] = (
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", Format("an old Office document", "save it as plain text first")),
    (60, b"BOOKMOBI", Format("a Mobipocket book", "convert it first, for example with ebook-convert")),
    (0, b"AT&TFORM", Format("a DjVu document", "extract it first, for example with djvutxt")),
    (0, b"\x1f\x8b", Format("a gzip archive", "unpack it first, for example with gunzip -c")),
    (0, b"BZh", Format("a bzip2 archive", "unpack it first, for example with bunzip2 -c")),
    (0, b"\xfd7zXZ\0", Format("an xz archive", "unpack it first, for example with xz -dc")),
    (0, b"\x28\xb5\x2f\xfd", Format("a zstd archive", "unpack it first, for example with zstd -dc")),
    (0, b"7z\xbc\xaf\x27\x1c", Format("a 7z archive", _UNPACK)),
    (0, b"Rar!\x1a\x07", Format("a RAR archive", _UNPACK)),
    (257, b"ustar", Format("a tar archive", _UNPACK)),
    (0, b"\x89PNG\r\n\x1a\n", Format("a PNG image", _NO_TEXT)),
    (0, b"\xff\xd8\xff", Format("a JPEG image", _NO_TEXT)),
    (0, b"GIF8", Format("a GIF image", _NO_TEXT)),
    (0, b"II*\0", Format("a TIFF image", _NO_TEXT)),
    (0, b"MM\0*", Format("a TIFF image", _NO_TEXT)),
    (8, b"WEBP", Format("a WebP image", _NO_TEXT)),
    (8, b"WAVE", Format("a sound file", _NO_TEXT)),
    (0, b"ID3", Format("an MP3 file", _NO_TEXT)),
    (0, b"OggS", Format("an Ogg file", _NO_TEXT)),
    (4, b"ftyp", Format("an MP4 file", _NO_TEXT)),
    (0, b"SQLite format 3\0", Format("an SQLite database", "export its text first")),
    (0, b"GGUF", Format("a GGUF model", "a model is named by --model")),
    (0, b"\x7fELF", Format("a program", _NO_TEXT)),
    (0, b"\xff\xfe\0\0", Format("text in UTF-32", "convert it first, for example with iconv -f UTF-32 -t UTF-8")),
    (0, b"\0\0\xfe\xff", Format("text in UTF-32", "convert it first, for example with iconv -f UTF-32 -t UTF-8")),
    (0, b"\xff\xfe", Format("text in UTF-16", "convert it first, for example with iconv -f UTF-16 -t UTF-8")),
    (0, b"\xfe\xff", Format("text in UTF-16", "convert it first, for example with iconv -f UTF-16 -t UTF-8")),
)
# What a ZIP archive holds tells what it is; the names of its first members stand in its first bytes.
_IN_ZIP: tuple[tuple[bytes, Format], ...] = (
    (b"application/epub+zip", Format("an EPUB book", _PANDOC)),
    (b"application/vnd.oasis.opendocument", Format("an OpenDocument file", _PANDOC)),
    (b"word/", Format("a Word document", _PANDOC)),
    (b"xl/", Format("an Excel workbook", "save it as CSV first")),
    (b"ppt/", Format("a PowerPoint file", "save it as plain text first")),
)
_ZIP = Format("a ZIP archive", _UNPACK)
_PDF = Format("a PDF", "extract it first, for example with pdftotext")
# Readers of PDF look for its mark so far.
_PDF_WITHIN = 1024


def format_of(beginning: bytes) -> Format | None:
    """The format whose mark a file's first bytes bear; None for what may be text.

    Args:
        beginning: The first bytes, some 64 KiB or all.
    """
    beginning = beginning.removeprefix(codecs.BOM_UTF8)
    if beginning.startswith(b"PK\x03\x04"):
        return next((found for mark, found in _IN_ZIP if mark in beginning[: 64 << 10]), _ZIP)
    # A text may speak of the mark: that of a PDF stands at the beginning, or behind bytes that are no text.
    place = beginning.find(b"%PDF-", 0, _PDF_WITHIN)
    if place == 0 or (place > 0 and (not beginning[:place].strip() or not _is_text(beginning[:place]))):
        return _PDF
    for mark, written in _WRITTEN:
        if beginning.startswith(mark):
            return written
    if _is_text(beginning):
        return None
    return next((found for offset, mark, found in _SIGNATURES if beginning.startswith(mark, offset)), None)


def _is_text(raw: bytes) -> bool:
    """Whether bytes are UTF-8, the last character perhaps cut, without NUL."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    return b"\0" not in raw

"""Documents: other formats by name, and pipes, devices and sizes that don't end."""

from __future__ import annotations

import os
import pty
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from questkv.cli import document
from questkv.cli.document import read_document
from questkv.cli.formats import format_of
from questkv.cli.long_document import advice
from questkv.errors import DocumentError


def made(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "document"
    path.write_bytes(content)
    return str(path)


def zipped(tmp_path: Path, *members: str, content: bytes = b"x") -> bytes:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for member in members:
            archive.writestr(member, content)
    return (tmp_path / "archive.zip").read_bytes()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\n", "a PDF"),
        (b"\xef\xbb\xbf\n%PDF-1.4\n", "a PDF"),
        (b"junk\xff\0 \n%PDF-1.4\n", "a PDF"),
        (b"{\\rtf1\\ansi A letter.}", "an RTF document"),
        (b"%!PS-Adobe-3.0\n", "PostScript"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0\0", "an old Office document"),
        (b"\x1f\x8b\x08\0\0", "a gzip archive"),
        (b"BZh91AY&SY\xff\xfe", "a bzip2 archive"),
        (b"\xfd7zXZ\0\0", "an xz archive"),
        (b"\x28\xb5\x2f\xfd\x04", "a zstd archive"),
        (b"7z\xbc\xaf\x27\x1c\0", "a 7z archive"),
        (b"Rar!\x1a\x07\x01\0", "a RAR archive"),
        (b"\x89PNG\r\n\x1a\n\0\0", "a PNG image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
        (b"GIF89a\x01\0\x01\0", "a GIF image"),
        (b"RIFF\x24\0\0\0WEBPVP8 ", "a WebP image"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "a sound file"),
        (b"II*\0\x08\0", "a TIFF image"),
        (b"ID3\x04\0\0", "an MP3 file"),
        (b"OggS\0\x02", "an Ogg file"),
        (b"\0\0\0\x18ftypmp42", "an MP4 file"),
        (b"SQLite format 3\0\x10", "an SQLite database"),
        (b"GGUF\x03\0\0\0", "a GGUF model"),
        (b"\x7fELF\x02\x01\x01\0", "a program"),
        ("A lamp.".encode("utf-16"), "text in UTF-16"),
        ("A lamp.".encode("utf-32"), "text in UTF-32"),
        (b"x" * 60 + b"BOOKMOBI\0\xff", "a Mobipocket book"),
        (b"AT&TFORM\0\xff", "a DjVu document"),
    ],
)
def test_another_format_is_named_in_one_line(tmp_path: Path, content: bytes, name: str) -> None:
    with pytest.raises(DocumentError) as refused:
        read_document(made(tmp_path, content))
    line = str(refused.value)
    assert f"is {name}; expected UTF-8 text: " in line
    assert "\n" not in line


def test_what_a_zip_archive_holds_is_named(tmp_path: Path) -> None:
    odt = b"application/vnd.oasis.opendocument.text"
    for members, content, name in (
        (("[Content_Types].xml", "word/document.xml"), b"x", "a Word document"),
        (("[Content_Types].xml", "xl/workbook.xml"), b"x", "an Excel workbook"),
        (("[Content_Types].xml", "ppt/presentation.xml"), b"x", "a PowerPoint file"),
        (("mimetype", "OEBPS/content.opf"), b"application/epub+zip", "an EPUB book"),
        (("mimetype", "content.xml"), odt, "an OpenDocument file"),
        (("notes.txt",), b"x", "a ZIP archive"),
    ):
        found = format_of(zipped(tmp_path, *members, content=content))
        assert found is not None
        assert found.name == name


def test_a_tar_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes", encoding="utf-8")
    with tarfile.open(tmp_path / "notes.tar", "w") as archive:
        archive.add(tmp_path / "notes.txt", arcname="notes.txt")
    with pytest.raises(DocumentError, match="is a tar archive"):
        read_document(str(tmp_path / "notes.tar"))


@pytest.mark.parametrize(
    "text",
    [
        "GGUF is a format of llama.cpp.",
        "ID3 tags",
        "GIF89a",
        "BZhang wrote this",
        "The mark %PDF- stands first.",
        "<html><p>A lamp.</p></html>",
        "na\u00efve \U0001f600",
        "PK",
        "x" * (1 << 20) + "\u00e9",
        "x" * ((1 << 20) - 1) + "\u00e9",
    ],
)
def test_text_that_speaks_of_formats_is_text(tmp_path: Path, text: str) -> None:
    assert read_document(made(tmp_path, text.encode())) == text


def test_a_pipe_is_read_and_one_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write(count: int) -> None:
        with pipe.open("wb") as end:
            try:
                for _ in range(count):
                    end.write(b"a lamp\n" * 10_000)
            except BrokenPipeError:
                return

    writer = threading.Thread(target=write, args=(1,))
    writer.start()
    assert len(read_document(str(pipe))) == 70_000 - 1
    writer.join(60)
    monkeypatch.setattr(document, "MAX_BYTES", 2 << 20)
    endless = threading.Thread(target=write, args=(1 << 40,))
    endless.start()
    with pytest.raises(DocumentError, match="is larger than 2 MiB"):
        read_document(str(pipe))
    endless.join(60)
    assert not endless.is_alive()


def test_a_file_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DocumentError, match=r"is larger than 256 MiB.*tail -c"):
        read_document(str(path))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="the system has no /dev/zero")
def test_devices(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="document /dev/zero: is binary"):
        read_document("/dev/zero")
    with pytest.raises(DocumentError, match="document /dev/null: is empty"):
        read_document("/dev/null")


def test_a_terminal_is_no_document() -> None:
    ours, theirs = pty.openpty()
    try:
        with pytest.raises(DocumentError, match="is a terminal; expected a text file, or - for standard input"):
            read_document(os.ttyname(theirs))
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("name", ["~nosuchuser.txt", "~nosuchuser/a.txt", "a\0b", "x" * 5000, "[/x]", "-none"])
def test_odd_names_are_one_line(name: str) -> None:
    with pytest.raises(DocumentError, match=r"^document .*: (no such file|can't be read: .*)$") as refused:
        read_document(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("total", "stretch"), [(1025, 2), (32 * 1024, 32), (32 * 1024 + 1, None)])
def test_a_factor_is_advised_up_to_the_largest_that_anybody_shows(total: int, stretch: int | None) -> None:
    said = advice(total, 1024)
    assert said.startswith("use its last part with --tail")
    assert said.endswith("--tail" if stretch is None else f"--rope-factor {stretch}")

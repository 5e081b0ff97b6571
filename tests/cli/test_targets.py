"""Files that commands write: whole, beside what was there, and never onto what is read."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from questkv import files
from questkv.errors import OutputError

Run = Callable[..., Result]


def other_names(path: Path, folder: Path) -> list[Path]:
    """The same file: itself, a symbolic link, a hard link, another way to write its path."""
    (folder / "soft").symlink_to(path)
    os.link(path, folder / "hard")
    return [path, folder / "soft", folder / "hard", path.parent / "." / ".." / path.parent.name / path.name]


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_json_onto_the_document_is_refused_by_any_name(
    run: Run, tiny_model: str, document: Path, tmp_path: Path, command: str
) -> None:
    before = document.read_bytes()
    question = ["What?"] if command == "ask" else []
    for target in other_names(document, tmp_path):
        done = run(command, str(document), *question, "--model", tiny_model, "--json", str(target), stdin="One?\n")
        assert done.exit_code == 1, done.output
        assert f"--json {target}: is the document, which is read; choose another file" in done.stderr
        assert document.read_bytes() == before


@pytest.mark.parametrize("task", ["needle", "perplexity", "recall"])
@pytest.mark.parametrize("option", ["--json", "--markdown", "--plot"])
def test_no_file_of_an_evaluation_is_the_document(
    run: Run, tiny_model: str, tmp_path: Path, task: str, option: str
) -> None:
    text = tmp_path / "text.png"
    text.write_text("A lamp. " * 90, encoding="utf-8")
    done = run("eval", task, str(text), "--model", tiny_model, option, str(text), "--output", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert f"{option} {text}: is the document, which is read" in done.stderr
    assert text.read_text(encoding="utf-8") == "A lamp. " * 90


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("command", ["decode", "prefill"])
def test_no_file_of_a_benchmark_is_its_text(
    run: Run, tiny_model: str, tmp_path: Path, command: str, option: str
) -> None:
    text = tmp_path / "text.png"
    text.write_text("A lamp. " * 90, encoding="utf-8")
    done = run("bench", command, "--model", tiny_model, "--text", str(text), option, str(text))
    assert done.exit_code == 1
    assert f"{option} {text}: is --text, which is read" in done.stderr


def test_nothing_is_written_into_the_models_folder(run: Run, tiny_model: str, document: Path, tmp_path: Path) -> None:
    config = Path(tiny_model) / "config.json"
    before = config.read_bytes()
    (tmp_path / "model").symlink_to(tiny_model)
    os.link(config, tmp_path / "hard.json")
    targets = [
        config,
        Path(tiny_model) / "chat_template.new",
        tmp_path / "model" / "config.json",
        tmp_path / "hard.json",
    ]
    for target in targets:
        done = run("ask", str(document), "What?", "--model", tiny_model, "--json", str(target))
        assert done.exit_code == 1
        assert f"--json {target}: lies in the model, which is read" in done.stderr
    assert config.read_bytes() == before


def test_two_options_do_not_share_a_file_and_results_are_not_overwritten(
    run: Run, tiny_model: str, tmp_path: Path
) -> None:
    out, one = tmp_path / "out", tmp_path / "one"
    for files_of_it, says in (
        (("--json", f"{one}", "--markdown", f"{one}"), f"--markdown {one}: is the file of --json too"),
        (("--json", f"{out}/run.json"), "run.json: is a file of --output"),
        (("--markdown", f"{out}/rows.jsonl"), "rows.jsonl: is a file of --output"),
    ):
        out.mkdir(exist_ok=True)
        done = run("eval", "passkey", "--model", tiny_model, "--output", str(out), *files_of_it)
        assert done.exit_code == 1, done.output
        assert says in done.stderr
    assert list(out.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "answer.json"
    target.write_bytes(b"old")

    def full(*arguments: object) -> int:
        raise OSError(28, os.strerror(28))

    for name in ("write", "fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(
                OutputError, match=r"^--json .*answer\.json: can't be written: No space left on device$"
            ):
                files.write_whole(target, b"new", "--json")
        assert target.read_bytes() == b"old"
        assert [path.name for path in tmp_path.iterdir()] == ["answer.json"]
    files.write_whole(target, b"new", "--json")
    assert target.read_bytes() == b"new"


def test_links_permissions_and_odd_names_survive_a_write(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    files.write_whole(link, b"new", "--json")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        files.write_whole(tmp_path / "fresh", b"", "--json")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640
    odd = tmp_path / os.fsdecode(b"\xff.json")
    files.write_whole(odd, files.encoded(json.dumps({"name": odd.name}, ensure_ascii=False)), "--json")
    assert json.loads(odd.read_bytes())["name"] == odd.name
    with pytest.raises(OutputError, match="is no name of a file"):
        files.check_writable("a\0b", "--json")


def test_a_pipe_and_a_device_are_written_as_they_are(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    files.check_writable(pipe, "--json")
    files.write_whole(pipe, b"x" * 100_000, "--json")
    reader.join(60)
    assert got == [b"x" * 100_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    files.write_whole("/dev/null", b"x", "--json")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_chat_keeps_whole_lines_and_replaces_an_older_file(
    run: Run, tiny_model: str, document: Path, tmp_path: Path
) -> None:
    target = tmp_path / "answers.jsonl"
    target.write_text("older\n", encoding="utf-8")
    arguments = ["chat", str(document), "--model", tiny_model, "--max-new-tokens", "4", "--json", str(target)]
    done = run(*arguments, stdin=b"One?\n\xff\nThree?\n")
    assert done.exit_code == 1
    assert "the question is not valid utf-8 (byte 0xff at offset 0)" in done.stderr
    (line,) = target.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["question"] == "One?"


@pytest.mark.parametrize("command", ["attention", "decode", "prefill"])
def test_a_figure_of_another_format_is_refused_before_anything_is_timed(run: Run, tmp_path: Path, command: str) -> None:
    done = run("bench", command, "--plot", str(tmp_path / "figure.gif"))
    assert done.exit_code == 2
    assert "[bench] --plot: expected a file that ends in .png, .svg, .pdf, got" in done.stderr

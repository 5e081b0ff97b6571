"""``questkv ask`` on a tiny random model: what it prints, counts and refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from questkv.cli.session import Answer

Run = Callable[..., Result]
KEYS = ["answer", "prompt_tokens", "generated_tokens", "prefill_s", "ms_per_token", "pages_read", "pages_held"]


def error_line(result: Result, code: int = 1) -> str:
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("questkv: error: ")
    assert not result.stdout
    return lines[0]


def ask(run: Run, document: Path | str, model: str, *options: str, stdin: str | bytes | None = None) -> Result:
    return run("ask", str(document), "What is it?", "--model", model, "--max-new-tokens", "8", *options, stdin=stdin)


def test_answer_on_stdout_and_one_line_of_numbers_on_stderr(run: Run, tiny_model: str, document: Path) -> None:
    result = ask(run, document, tiny_model, "--budget", "112")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    (line,) = result.stderr.splitlines()
    for part in ("tokens in context", "8 generated", "ms per token", "pages read of", "held"):
        assert part in line


def test_json_dash_leaves_only_json_on_stdout(run: Run, tiny_model: str, document: Path) -> None:
    result = ask(run, document, tiny_model, "--budget", "112", "--json", "-")
    values = json.loads(result.stdout)
    assert list(values) == [
        *(*KEYS, "cache_bytes", "token_budget", "kv_dtype", "span_pages", "offload", "host_bytes", "device_bytes")
    ]
    assert (values["offload"], values["host_bytes"], values["device_bytes"]) == ("none", 0, values["cache_bytes"])
    assert values["generated_tokens"] == 8
    assert values["token_budget"] == 112
    assert values["prompt_tokens"] > 600
    assert 0 < values["pages_read"] < values["pages_held"]


def test_pages_in_eight_bits_hold_fewer_bytes(run: Run, tiny_model: str, document: Path) -> None:
    held = {}
    for kv_dtype in ("model", "int8"):
        options = ("--budget", "112", "--dtype", "float32", "--kv-dtype", kv_dtype, "--json", "-")
        result = ask(run, document, tiny_model, *options)
        assert result.exit_code == 0, result.output
        values = json.loads(result.stdout)
        assert values["kv_dtype"] == kv_dtype
        held[kv_dtype] = values["cache_bytes"]
        assert f"cache {values['cache_bytes'] / 2**20:.1f} MiB" in result.stderr
    # Hkv 2, S 16, D 8: a token costs 2 * 8 + 8 bytes instead of 64, a box 20; the open page stays as it is.
    plain, coded = 2 * (16 * 64 + 20), 2 * (16 * 24 + 20)
    pages = held["model"] // (3 * plain)
    assert (held["model"], held["int8"]) == (3 * pages * plain, 3 * ((pages - 1) * coded + plain))
    assert "--kv-dtype: expected 'model' or 'int8', got 'fp8'" in error_line(
        ask(run, document, tiny_model, "--kv-dtype", "fp8"), code=2
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to offload from")
def test_pages_in_host_memory_need_a_gpu(run: Run, tiny_model: str, document: Path) -> None:
    refused = ask(run, document, tiny_model, "--offload", "host")
    assert "--offload: expected a GPU for host, got none" in error_line(refused, code=1)
    wrong = ask(run, document, tiny_model, "--offload", "disk")
    assert "--offload: expected 'none' or 'host', got 'disk'" in error_line(wrong, code=2)


def test_what_lies_in_host_memory_is_said() -> None:
    values = {"text": "A lamp.", "prompt_tokens": 9, "generated_tokens": 2, "prefill_s": 1.0, "ms_per_token": 2.0}
    held = Answer(**values, pages_read=3, pages_held=6, cache_bytes=9 << 20, host_bytes=7 << 20, device_bytes=4 << 20)
    assert held.summary().endswith(", cache 9.0 MiB, 4.0 MiB on the GPU")


def test_json_file_holds_the_streamed_answer(run: Run, tiny_model: str, document: Path, tmp_path: Path) -> None:
    target = tmp_path / "answer.json"
    result = ask(run, document, tiny_model, "--json", str(target))
    assert json.loads(target.read_text(encoding="utf-8"))["answer"] == result.stdout.strip()


def test_pages_held_counts_every_layer_head_and_step(run: Run, tiny_model: str, document: Path) -> None:
    values = json.loads(ask(run, document, tiny_model, "--dense", "--json", "-").stdout)
    assert values["pages_read"] == values["pages_held"]
    # what follows the document and its two line ends, a short run, then the answer's steps: each over a growing number
    # of pages of 16 tokens
    asked = len("What is it?</s>\n<s>assistant\n") - len("</s>") - len("<s>") + 2
    first = values["prompt_tokens"] - asked + 1
    lengths = range(first, values["prompt_tokens"] + values["generated_tokens"])
    assert values["pages_held"] == 3 * 2 * sum(-(-length // 16) for length in lengths)


def test_budget_above_the_context_answers_as_dense(run: Run, tiny_model: str, document: Path) -> None:
    dense = ask(run, document, tiny_model, "--dense")
    assert ask(run, document, tiny_model, "--budget", "5000").stdout == dense.stdout
    assert ask(run, document, tiny_model, "--budget", "1.0").stdout == dense.stdout


def test_answer_begins_with_its_prefix(run: Run, tiny_model: str, document: Path) -> None:
    result = ask(run, document, tiny_model, "--answer-prefix", "The lamp")
    assert result.stdout.startswith("The lamp")


def test_document_from_stdin(run: Run, tiny_model: str, document: Path) -> None:
    from_file = ask(run, document, tiny_model)
    from_stdin = ask(run, "-", tiny_model, stdin=document.read_text(encoding="utf-8"))
    assert from_stdin.exit_code == 0
    assert from_stdin.stdout == from_file.stdout


def test_sampling_follows_the_seed(run: Run, tiny_model: str, document: Path) -> None:
    hot = ("--temperature", "5", "--seed")
    first, again, other = (ask(run, document, tiny_model, *hot, seed).stdout for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_special_tokens_in_the_document_are_ordinary_text(run: Run, tiny_model: str, tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text("a" * 300, encoding="utf-8")
    marked.write_text("a" * 296 + "</s>", encoding="utf-8")
    counts = [json.loads(ask(run, path, tiny_model, "--json", "-").stdout)["prompt_tokens"] for path in (plain, marked)]
    assert counts[0] == counts[1]


def test_too_long_a_document_names_both_numbers_and_what_to_do(run: Run, tiny_model: str, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("a" * 3000, encoding="utf-8")
    line = error_line(ask(run, long, tiny_model))
    for part in ("3,000", "1,024", "--rope-factor 4", "--tail"):
        assert part in line


def test_tail_uses_the_last_part_and_says_so(run: Run, tiny_model: str, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("a" * 3000, encoding="utf-8")
    result = ask(run, long, tiny_model, "--tail", "--json", "-")
    values = json.loads(result.stdout)
    assert values["prompt_tokens"] + 8 == 1024
    assert "of the document's 3,000 tokens were left out" in result.stderr


def test_rope_factor_makes_room(run: Run, tiny_model: str, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("a" * 1500, encoding="utf-8")
    assert ask(run, long, tiny_model, "--rope-factor", "2").exit_code == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n\n\t ", "is empty"),
        (b"text\0more", "is binary (a NUL byte at offset 4)"),
        (b"caf\xe9 au lait", "is not UTF-8 text (byte 0xe9 at offset 3)"),
    ],
)
def test_documents_that_are_no_text(run: Run, tiny_model: str, tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "document.txt"
    path.write_bytes(content)
    line = error_line(ask(run, path, tiny_model))
    assert says in line
    assert str(path) in line


def test_missing_document_folder_and_empty_stdin(run: Run, tiny_model: str, tmp_path: Path) -> None:
    assert "no such file" in error_line(ask(run, tmp_path / "none.txt", tiny_model))
    assert "is a folder" in error_line(ask(run, tmp_path, tiny_model))
    assert "standard input: is empty" in error_line(ask(run, "-", tiny_model, stdin=""))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_document(run: Run, tiny_model: str, document: Path) -> None:
    document.chmod(0)
    assert "can't be read" in error_line(ask(run, document, tiny_model))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--budget", "0"), "--budget"),
        (("--budget", "-5"), "--budget"),
        (("--budget", "0.0"), "--budget"),
        (("--budget", "1.5"), "--budget"),
        (("--budget", "nan"), "--budget"),
        (("--budget", "64"), "at least 96 tokens"),
        (("--page-size", "0"), "--page-size"),
        (("--span-pages", "1"), "--span-pages: expected 0 (no spans) or at least 2, got 1"),
    ],
)
def test_impossible_cache_options_are_bad_arguments(
    run: Run, tiny_model: str, document: Path, options: tuple[str, ...], names: str
) -> None:
    assert names in error_line(ask(run, document, tiny_model, *options), code=2)


@pytest.mark.parametrize(
    "options",
    [
        ("--budget", "many"),
        ("--dense", "--budget", "512"),
        ("--max-new-tokens", "0"),
        ("--threads", "0"),
        ("--dtype", "int3"),
        ("--rope-factor", "0.5"),
        ("--rope-factor", "nan"),
        ("--temperature", "-1"),
        ("--no-such-option",),
    ],
)
def test_bad_arguments_exit_with_two(run: Run, tiny_model: str, document: Path, options: tuple[str, ...]) -> None:
    result = ask(run, document, tiny_model, *options)
    assert result.exit_code == 2
    assert not result.stdout


def test_empty_question_is_a_bad_argument(run: Run, tiny_model: str, document: Path) -> None:
    assert run("ask", str(document), "  ", "--model", tiny_model).exit_code == 2


def test_json_target_is_checked_before_the_work(run: Run, document: Path, tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "none" / "answer.json"):
        assert str(target) in error_line(ask(run, document, "no-model-is-loaded", "--json", str(target)))


def test_unknown_model_path(run: Run, document: Path) -> None:
    assert "no such file or folder" in error_line(ask(run, document, "./no/such/model"))


def test_out_of_memory_is_one_line(run: Run, tiny_model: str, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from questkv.cli import session

    wanted = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    for error in (RuntimeError(wanted), MemoryError()):

        def fail(*args: object, error: Exception = error, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(session, "prefill", fail)
        assert "out of memory" in error_line(ask(run, document, tiny_model))


def test_a_model_without_a_template_answers_too(run: Run, base_model: str, document: Path) -> None:
    result = ask(run, document, base_model, "--answer-prefix", "It")
    assert result.exit_code == 0
    assert result.stdout.startswith("It")


@pytest.mark.slow
def test_compiled_tokens_give_the_same_answer(
    run: Run, tiny_model: str, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    plain = ask(run, document, tiny_model, "--budget", "112", "--dtype", "float32")
    compiled = ask(run, document, tiny_model, "--budget", "112", "--dtype", "float32", "--compile")
    assert compiled.exit_code == 0, compiled.output
    assert compiled.stdout == plain.stdout
    assert any((tmp_path / "compiled").iterdir())

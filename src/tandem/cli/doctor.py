"""``tandem doctor``: what this machine has, and what will make a run slow or fail."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

PACKAGES = (
    "tandem-rl",
    "torch",
    "transformers",
    "tokenizers",
    "tensordict",
    "safetensors",
    "peft",
    "datasets",
    "reasoning-gym",
)
OPTIONAL = ("gguf", "math-verify", "tensorboard", "wandb", "trackio")
BF16_PRODUCTS = {
    "tiles": "in tiles (AMX): faster than float32",
    "vectors": "as vectors: slower than float32, to train choose train.dtype=float32",
    "emulated": "emulated: many times slower than float32, to train choose train.dtype=float32",
}
_LOW_SPACE = 5 * 2**30
_LOW_SHARED_MEMORY = 2**30


def doctor() -> None:
    """Print versions, cores, threads, memory and free space, with warnings; exit code 0 or 1."""
    table = Table("", "", show_header=False)
    for name, value in facts():
        table.add_row(name, value)
    Console().print(table)
    found = list(problems())
    for line in found:
        typer.echo(f"problem: {line}")
    typer.echo("no problems found" if not found else f"{len(found)} problem(s) found")
    if found:
        raise typer.Exit(1)


def facts() -> Iterator[tuple[str, str]]:
    """What the machine has, as (name, value)."""
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    for name in (*PACKAGES, *OPTIONAL):
        yield name, _version(name) or "not installed"
    yield "cores", f"{_usable_cores()} usable of {os.cpu_count()}"
    yield "memory", _gib(_memory_bytes())
    yield "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "not set")
    yield "free space here", _gib(shutil.disk_usage(Path.cwd()).free)
    if shm := _shared_memory_bytes():
        yield "free shared memory", _gib(shm)
    if _version("torch"):
        import torch

        yield "torch threads", str(torch.get_num_threads())
        cuda = torch.cuda.is_available()
        yield "devices", f"cuda x {torch.cuda.device_count()}" if cuda else "cpu"
        from tandem.models.processor import bf16_products

        yield "bfloat16 on the CPU", BF16_PRODUCTS[bf16_products()]


def problems() -> Iterator[str]:
    """What to mend, one line each with the remedy."""
    for name in PACKAGES:
        if _version(name) is None:
            yield f"{name} is not installed; pip install tandem-rl"
    if shutil.disk_usage(Path.cwd()).free < _LOW_SPACE:
        yield "less than 5 GiB free here; checkpoints may not fit, set run.output_dir elsewhere"
    shm = _shared_memory_bytes()
    if shm is not None and shm < _LOW_SHARED_MEMORY:
        yield "less than 1 GiB of shared memory; use inference.transport=disk for large models"
    if not os.access(Path.cwd(), os.W_OK):
        yield "this directory cannot be written; set run.output_dir to one that can"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _shared_memory_bytes() -> int | None:
    path = Path("/dev/shm")
    return shutil.disk_usage(path).free if path.is_dir() else None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"

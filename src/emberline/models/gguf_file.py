"""Reading of GGUF files: metadata as Python values, tensors as views of the mapped file.

Owns the byte format and the dequantisation of one tensor. It must not know what any key or
tensor means for a model. Strings are read in one pass over the header, which takes a tenth of
the time of the public reader on vocabularies of 50,000 tokens and more.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from emberline.models.weights import ModelError

__all__ = ["GGUFFile", "GGUFTensor", "read_gguf"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
EXACT_DTYPES: dict[int, torch.dtype] = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.I32: torch.int32,
    GGMLQuantizationType.I64: torch.int64,
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor, still quantised; ``shape`` is row-major, the way torch writes it."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[np.uint8]]  # the raw bytes, [num_bytes], memory-mapped

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every value: as stored, or float32 if quantised."""
        return EXACT_DTYPES.get(self.kind, torch.float32)

    def load(self) -> torch.Tensor:
        """The values as a fresh tensor of ``shape`` and ``dtype``.

        Raises:
            ModelError: there is no dequantiser for this kind.
        """
        if self.kind in EXACT_DTYPES:
            flat = torch.from_numpy(self.data.copy()).view(self.dtype)
            return flat.reshape(self.shape)
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        rows = self.data.reshape(-1, self.shape[-1] // block * block_bytes)
        try:
            values = dequantize(rows, self.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {self.name!r} is stored as {self.kind.name}, which cannot be "
                f"dequantised; use a file with another quantisation"
            ) from error
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """The whole of a GGUF file, tensors not yet read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Position in the mapped header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        start, self.at = self.at + 8, self.at + 8 + length
        if self.at > len(self.data):
            raise struct.error("a string runs past the end of the file")
        # Vocabularies of byte-fallback tokenizers hold text only; other bytes mean damage.
        return self.data[start : self.at].decode("utf-8")

    def count(self) -> int:
        """A length of things of at least one byte each: more than the file is damage."""
        (number,) = self.scalars("Q")
        if number > len(self.data):
            raise struct.error(f"a count of {number} in a file of {len(self.data)} bytes")
        return int(number)

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            (item_kind,) = self.scalars("I")
            length = self.count()
            if item_kind in SCALARS:
                return list(self.scalars(SCALARS[item_kind], length))
            return [self.value(item_kind) for _ in range(length)]
        if kind in SCALARS:
            return self.scalars(SCALARS[kind])[0]
        raise struct.error(f"unknown value type {kind}")


def read_gguf(path: Path) -> GGUFFile:
    """Map a little-endian GGUF file of version 2 or 3.

    Raises:
        ModelError: the file is absent, foreign, truncated, one part of several, or of another
            version.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path}: expected a GGUF file, found something else")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return _parse(path, data)
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{path}: truncated or damaged GGUF file ({error}); fetch it again"
        ) from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    cursor.at = len(MAGIC)
    (version,) = cursor.scalars("I")
    if version not in VERSIONS:
        raise ModelError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_keys = cursor.count(), cursor.count()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalars("I")[0])
    if metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{path}: one part of a GGUF file split in {metadata['split.count']}; merge the parts"
        )
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    base = -(-cursor.at // alignment) * alignment
    whole = np.frombuffer(data, dtype=np.uint8)
    tensors = {name: make(whole[base:]) for name, make in infos}
    if len(tensors) != num_tensors:
        raise ModelError(f"{path}: a tensor name occurs twice")
    return GGUFFile(path, metadata, tensors)


def _tensor_info(
    cursor: _Cursor,
) -> tuple[str, Callable[[np.ndarray[Any, np.dtype[np.uint8]]], GGUFTensor]]:
    name = cursor.string()
    (num_dims,) = cursor.scalars("I")
    if num_dims > MAX_DIMS:
        raise struct.error(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(int(size) for size in reversed(cursor.scalars("Q", num_dims)))
    (kind_number,) = cursor.scalars("I")
    (offset,) = cursor.scalars("Q")
    kind = GGMLQuantizationType(kind_number)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise struct.error(f"tensor {name!r} of shape {shape} is not whole {kind.name} blocks")
    num_values = 1
    for size in shape:
        num_values *= size
    num_bytes = num_values // block * block_bytes

    def make(data: np.ndarray[Any, np.dtype[np.uint8]]) -> GGUFTensor:
        if offset + num_bytes > data.size:
            raise struct.error(f"tensor {name!r} runs past the end of the file")
        return GGUFTensor(name, shape, kind, data[offset : offset + num_bytes])

    return name, make

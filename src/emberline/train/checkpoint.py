"""The checkpoint of a run, and whether a run may go on from it.

Owns the file and what must not change between its making and its use: the draft's shape, the seed,
the kind of weights, the target and the training rows. Steps, rates and losses may.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from emberline.models.weights import read_json
from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import TokenRows

CHECKPOINT = "checkpoint.pt"
SAMPLE = 64  # bytes of a tensor that tell it from another
VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
REMEDY = "give the same again, or another folder for the run"
Origin = Mapping[str, str]
"""Digests of what a run is made from: "target" and "rows"."""


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write it, whole or not at all."""
    partial = folder / f"{CHECKPOINT}.partial"
    torch.save(dict(state), partial)
    partial.replace(folder / CHECKPOINT)


def read_checkpoint(folder: Path, device: torch.device | str) -> dict[str, Any] | None:
    """The checkpoint in a run's folder, its tensors on `device`; None without one.

    On "meta" tensors are not read at all.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as problem:  # of many kinds, by what is damaged
        raise ValueError(f"{path}: cannot be read: remove it to begin anew") from problem
    return state


def check_same(
    folder: Path, state: Mapping[str, Any], draft: DraftConfig, config: TrainConfig, origin: Origin
) -> None:
    """Refuse to go on with another draft, seed, target or other rows.

    Raises:
        ValueError: naming what differs.
    """
    path = folder / CHECKPOINT
    mine, theirs = draft.to_json(), state["draft"]
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            raise ValueError(
                f"{path}: belongs to a draft of another shape: {name} {theirs.get(name)!r} there, "
                f"{mine.get(name)!r} now; {REMEDY}"
            )
    seed = state["config"]["seed"]
    if seed != config.seed:
        raise ValueError(
            f"{path}: was made with train.seed {seed}, it is {config.seed} now (--seed); {REMEDY}"
        )
    if ("weights" in state) != bool(config.optim.ema):
        other = "with" if "weights" in state else "without"
        raise ValueError(
            f"{path}: was made {other} optim.ema, which cannot change in a run; {REMEDY}"
        )
    options = {"target": "another target (--model)", "rows": "other training rows (--data)"}
    for name, text in options.items():
        there = state.get("origin", {}).get(name)
        if there is not None and name in origin and there != origin[name]:
            raise ValueError(f"{path}: was made with {text}; {REMEDY}")


def rows_digest(rows: TokenRows) -> str:
    """Of all tokens and roles, and of their order."""
    digest = hashlib.blake2b(repr(tuple(rows.tokens.shape)).encode(), digest_size=16)
    for tensor in (rows.tokens.to(torch.int32), rows.roles.to(torch.uint8)):
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def target_digest(folder: Path) -> str:
    """Of a model folder: its config, and of every tensor name, shape, dtype and some bytes.

    It reads files, so that it is the same for every device and dtype that the model is loaded in,
    and follows no path: a copy of the folder, cut into other files, has the same digest.
    """
    config = {k: v for k, v in read_json(folder / "config.json").items() if k not in VOLATILE}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    for entry in sorted(_samples(folder)):
        digest.update(repr(entry).encode())
    return digest.hexdigest()


def _samples(folder: Path) -> Iterator[tuple[Any, ...]]:
    """Each tensor's name, dtype, shape and bytes from its middle; of other forms, each file's."""
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        with path.open("rb") as file:
            # The format: eight bytes of length, JSON with offsets into what follows.
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
            for name, entry in entries.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                file.seek(8 + size + max(begin, (begin + end - SAMPLE) // 2))
                sample = file.read(min(SAMPLE, end - begin))
                yield name, entry["dtype"], str(entry["shape"]), sample
    for path in () if paths else sorted(folder.glob("*.bin")):
        with path.open("rb") as file:
            file.seek(path.stat().st_size // 2)
            yield path.name, "", str(path.stat().st_size), file.read(SAMPLE)

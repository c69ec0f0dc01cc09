"""The target's states on disk: one pass of the target over the rows, then no more of it.

A folder holds `SPLIT_NNN.safetensors` with `tokens` [r, L] int32, `taps` [r, L, A] and `last`
[r, L, D] of consecutive rows, in the target's dtype: thousands of times the size of the tokens.
Worth it for small data, many epochs and a large target.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from emberline.train.dataset import TokenRows
from emberline.train.frozen import TrainingTarget
from emberline.train.parallel import World

SHARD_BYTES = 2**28
AGREEMENT = 0.05  # of the largest state: what another batch shape or kernel may change


class CachedFeatures:
    """Features of rows, read from shards: a `features.Features`."""

    def __init__(self, paths: Sequence[Path], per_shard: int, device: torch.device) -> None:
        self.files: list[Any] = [safe_open(path, "pt") for path in paths]
        self.per_shard, self.device = per_shard, device

    def __call__(self, index: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Taps [S, L, A] and last hidden states [S, L, D] of the rows at `index` [S]."""
        rows = index.tolist()
        taps, last = (torch.cat([self._row(name, row) for row in rows]) for name in STATES)
        return taps.to(self.device), last.to(self.device)

    def _row(self, name: str, row: int) -> Tensor:
        shard, at = divmod(row, self.per_shard)
        found: Tensor = self.files[shard].get_slice(name)[at : at + 1]
        return found


STATES = ("taps", "last")


def cache_features(
    target: TrainingTarget,
    taps: Sequence[int],
    rows: TokenRows,
    split: str,
    folder: Path,
    batch: int,
    world: World | None = None,
    say: Callable[[str], None] = print,
    shard_bytes: int = SHARD_BYTES,
) -> CachedFeatures:
    """Write the shards that are missing, and open them all.

    Args:
        taps: layers whose outputs are wanted.
        rows: of the split.
        batch: rows that go through the target at once.
        world: processes that share the writing.
        shard_bytes: about how large a file is.

    Raises:
        ValueError: the disk is too small, or shards there belong to other rows or another target.
    """
    world = world or World()
    folder.mkdir(parents=True, exist_ok=True)
    length, width = rows.tokens.shape[1], target.embedding.shape[1]
    row_bytes = length * (len(taps) + 1) * width * target.dtype.itemsize
    per_shard = max(1, shard_bytes // row_bytes)
    count = -(-rows.num_rows // per_shard)
    paths = [folder / f"{split}_{number:03d}.safetensors" for number in range(count)]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    world.wait()  # everyone has looked before anyone writes
    if missing:
        _check_space(folder, len(missing) * per_shard * row_bytes)
        if world.leads:
            size = rows.num_rows * row_bytes / 1e9
            say(f"{split}: states of {rows.num_rows:,} rows, {size:.1f} GB")
    for number in missing[world.rank :: world.size]:
        part = rows.tokens[number * per_shard : (number + 1) * per_shard]
        _write_shard(target, taps, part, paths[number], batch)
    world.wait()
    for number, path in enumerate(paths):
        part = rows.tokens[number * per_shard : (number + 1) * per_shard]
        _check_shard(target, taps, part, path, looks_inside=number == 0)
    return CachedFeatures(paths, per_shard, target.device)


def _write_shard(
    target: TrainingTarget, taps: Sequence[int], tokens: Tensor, path: Path, batch: int
) -> None:
    found = []
    for part in torch.split(tokens, batch):
        states = target.features(part.to(target.device, torch.int64), taps)
        found.append([state.cpu() for state in states])
    tensors = {"tokens": tokens.cpu().int().contiguous()}
    for name, column in zip(STATES, zip(*found, strict=True), strict=True):
        tensors[name] = torch.cat(column)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def _check_shard(
    target: TrainingTarget, taps: Sequence[int], tokens: Tensor, path: Path, looks_inside: bool
) -> None:
    remedy = "remove the folder, or give the data and target that it was made with"
    with safe_open(path, "pt") as shard:
        if not torch.equal(shard.get_tensor("tokens"), tokens.cpu().int()):
            raise ValueError(f"{path}: holds states of other rows; {remedy}")
        if not looks_inside:
            return
        first = tokens[:1].to(target.device, torch.int64)
        for name, fresh in zip(STATES, target.features(first, taps), strict=True):
            kept = shard.get_slice(name)[:1].float()
            fresh = fresh.cpu().float()
            if kept.shape != fresh.shape or _differ(kept, fresh):
                raise ValueError(f"{path}: holds states of another target or other taps; {remedy}")


def _differ(kept: Tensor, fresh: Tensor) -> bool:
    """Whether two versions of one row's states are more than roundings apart."""
    return bool((kept - fresh).norm() > AGREEMENT * fresh.norm())


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder}: cached features need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
            "set data.features to fresh"
        )

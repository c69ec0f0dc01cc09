"""States kept on disk: the same training as with states computed anew, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import TokenRows
from emberline.train.feature_cache import CachedFeatures, cache_features
from emberline.train.run_log import METRICS, read_lines
from emberline.train.target import FrozenTarget
from emberline.train.trainer import Trainer

TAPS = (0, 2)
SMALL_SHARD = 5 * 40 * 3 * 32 * 4  # bytes of five rows


def cached(
    target: FrozenTarget, rows: TokenRows, folder: Path, taps: tuple[int, ...] = TAPS
) -> CachedFeatures:
    said: list[str] = []
    return cache_features(
        target, taps, rows, "train", folder, 3, say=said.append, shard_bytes=SMALL_SHARD
    )


def test_rows_in_any_order_have_their_own_states(
    target: FrozenTarget, rows: TokenRows, tmp_path: Path
):
    features = cached(target, rows, tmp_path)
    assert len(list(tmp_path.glob("train_*.safetensors"))) == 4  # 16 rows, five a file
    index = torch.tensor([15, 0, 7, 4, 5])
    fresh = target.features(rows.tokens[index].long(), TAPS)
    for kept, wanted in zip(features(index, rows.tokens[index]), fresh, strict=True):
        torch.testing.assert_close(kept, wanted)


def test_only_missing_files_are_written(target: FrozenTarget, rows: TokenRows, tmp_path: Path):
    cached(target, rows, tmp_path)
    paths = sorted(tmp_path.glob("*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in paths}
    whole = paths[2].read_bytes()
    paths[2].unlink()
    cached(target, rows, tmp_path)
    after = {path: path.stat().st_mtime_ns for path in paths}
    assert [path for path in paths if before[path] != after[path]] == [paths[2]]
    assert paths[2].read_bytes() == whole


def test_training_is_the_same(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    config = TrainConfig(steps=6, seqs_per_step=4, anchors=8, log_every=1, eval_every=6)
    features = {
        split: cache_features(
            target, draft.target_layer_ids, rows, split, tmp_path / "states", 4, say=lambda _: None
        )
        for split in ("train", "held_out")
    }
    Trainer(target, draft, config, rows, rows, tmp_path / "fresh").run()
    Trainer(target, draft, config, rows, rows, tmp_path / "kept", features=features).run()
    curves = [read_lines(tmp_path / name / METRICS) for name in ("fresh", "kept")]
    assert len(curves[0]) == 7
    for left, right in zip(*curves, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)


def test_states_of_something_else_are_refused(
    target: FrozenTarget, rows: TokenRows, tmp_path: Path
):
    cached(target, rows, tmp_path)
    with pytest.raises(ValueError, match="another target or other taps; remove the folder"):
        cached(target, rows, tmp_path, taps=(0, 3))
    other = dataclasses.replace(rows, tokens=rows.tokens.flip(0))
    with pytest.raises(ValueError, match="holds states of other rows"):
        cached(target, other, tmp_path)


def test_too_small_a_disk_is_refused_with_both_numbers(
    target: FrozenTarget, rows: TokenRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Usage(NamedTuple):
        free: int = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(ValueError, match=r"need 0\.0 GB, 0\.0 GB are free; set data\.features"):
        cached(target, rows, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))

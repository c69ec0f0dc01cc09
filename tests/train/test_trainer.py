"""The loop: it learns, it resumes, it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from emberline.train.config import DraftConfig, LossConfig, OptimConfig, TrainConfig
from emberline.train.dataset import TokenRows
from emberline.train.optim import orthogonalise, rate_at
from emberline.train.run_log import METRICS
from emberline.train.target import FrozenTarget
from emberline.train.trainer import Trainer

SMALL = TrainConfig(steps=12, seqs_per_step=4, anchors=8, log_every=4, eval_every=6, save_every=6)


def build(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, folder: Path, **changes: object
) -> Trainer:
    config = dataclasses.replace(SMALL, **changes)
    return Trainer(target, draft, config, rows, rows, folder)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "dflash"])
def test_overfits_its_rows(
    head: str, target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    changes: dict[str, object] = {"markov_head_type": head}
    loss = LossConfig()
    if head == "dflash":
        changes = {"markov_rank": 0, "enable_confidence_head": False}
        loss = LossConfig(ce=1.0, l1=0.0, confidence=0.0)
    draft = dataclasses.replace(draft, **changes)
    few = TokenRows(rows.tokens[:4], rows.roles[:4])
    trainer = build(
        target,
        draft,
        few,
        tmp_path,
        steps=250,
        anchors=24,
        eval_every=250,
        save_every=250,
        loss=loss,
        optim=OptimConfig(adam_lr=1e-2),
    )
    before = trainer.evaluate()
    trainer.run()
    after = trainer.evaluate()
    assert before is not None
    assert after is not None
    assert before["length_t0"] < 3
    assert min(after["agreement"]) > 0.9
    assert after["length_t0"] > 4.5  # of 5


def test_resumed_run_ends_with_the_same_weights(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    whole = build(target, draft, rows, tmp_path / "whole")
    whole.run()
    build(target, draft, rows, tmp_path / "parts").run(until=6)
    resumed = build(target, draft, rows, tmp_path / "parts")
    assert resumed.step == 6
    resumed.run()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    steps = [
        [(line["split"], line["step"]) for line in map(json.loads, path.read_text().splitlines())]
        for path in (tmp_path / "whole" / METRICS, tmp_path / "parts" / METRICS)
    ]
    assert set(steps[0]) <= set(steps[1])  # the stop itself is reported once more


def test_lines_after_the_checkpoint_are_dropped(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    build(target, draft, rows, tmp_path).run(until=6)
    with (tmp_path / METRICS).open("a") as file:
        file.write(json.dumps({"split": "train", "step": 8}) + "\n")
    build(target, draft, rows, tmp_path)
    steps = [json.loads(line)["step"] for line in (tmp_path / METRICS).read_text().splitlines()]
    assert max(steps) == 6


def test_foreign_checkpoint_is_refused(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    build(target, draft, rows, tmp_path).run(until=1)
    with pytest.raises(ValueError, match="another shape"):
        build(target, dataclasses.replace(draft, markov_rank=4), rows, tmp_path)
    with pytest.raises(ValueError, match="seed 0"):
        build(target, draft, rows, tmp_path, seed=1)


def test_too_few_rows_are_refused(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    with pytest.raises(ValueError, match="16 training rows"):
        build(target, draft, rows, tmp_path, seqs_per_step=17)


@pytest.mark.parametrize("shape", [(3, 16, 8), (2, 8, 24)])
def test_orthogonalise_flattens_singular_values(shape: tuple[int, int, int]):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_rate_warms_up_and_decays():
    rates = [rate_at(step, 100, 10) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)

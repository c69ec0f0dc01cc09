"""The loop: it learns, it resumes, it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from emberline.train.config import DraftConfig, LossConfig, OptimConfig, TrainConfig
from emberline.train.dataset import TokenRows
from emberline.train.features import Plan
from emberline.train.metrics import BlockStats
from emberline.train.optim import orthogonalise, rate_at
from emberline.train.run_log import METRICS, read_lines
from emberline.train.target import FrozenTarget
from emberline.train.trainer import CHECKPOINT, Trainer

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


def test_a_resumed_run_counts_its_seconds_on(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    build(target, draft, rows, tmp_path).run(until=6)
    path = tmp_path / METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    aged = [{**line, "seconds": 1000.0} if "seconds" in line else line for line in lines]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in aged))
    build(target, draft, rows, tmp_path).run()
    last = [line for line in read_lines(path) if line["split"] == "train"][-1]
    assert last["seconds"] >= 1000.0
    assert last["steps_per_second"] > 0.05  # of this part of the run alone


@pytest.mark.parametrize("head", ["vanilla", "eagle3"])
def test_parts_of_a_step_add_up_to_it(
    head: str, target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    if head == "eagle3":
        draft = as_eagle(draft)
    whole = build(target, draft, rows, tmp_path / "whole", seqs_per_step=8, log_every=1)
    parts = build(
        target, draft, rows, tmp_path / "parts", seqs_per_step=8, log_every=1, accumulate=4
    )
    whole.run()
    parts.run()
    curves = [read_lines(tmp_path / name / METRICS) for name in ("whole", "parts")]
    for left, right in zip(*curves, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert left["acceptance"] == pytest.approx(right["acceptance"], abs=1e-5)


def test_parts_must_divide_the_step(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    with pytest.raises(ValueError, match="4 must be a multiple of 3: processes 1 x accumulate 3"):
        build(target, draft, rows, tmp_path, accumulate=3)


def test_weights_of_terms_follow_their_schedules(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    loss = LossConfig(
        ce=((0.0, 1.0), (0.5, 1.0), (0.5, 0.1)), l1=((0.0, 0.0), (1.0, 0.9)), confidence=0.0
    )
    trainer = build(target, draft, rows, tmp_path, log_every=1, eval_every=100, loss=loss)
    trainer.run()
    lines = [line for line in read_lines(tmp_path / METRICS) if line["split"] == "train"]
    assert [line["ce_weight"] for line in lines] == [1.0] * 6 + [0.1] * 6
    rising = [0.9 * done / 12 for done in range(12)]
    assert [line["l1_weight"] for line in lines] == pytest.approx(rising)
    # The trainer's losses are weighted by position, the lines' terms are not.
    for line in lines:
        mixed = line["ce_weight"] * line["ce"] + line["l1_weight"] * line["l1"]
        assert line["loss"] == pytest.approx(mixed, rel=0.1)


def test_moving_average_is_what_is_measured_and_exported(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    optim = OptimConfig(ema=0.5, warmup=2)
    trainer = build(target, draft, rows, tmp_path, optim=optim)
    by_hand = trainer.model.fc.weight.detach().clone()
    for step in range(1, 13):
        trainer.train_step()
        keep = min(0.5, (1 + step) / (10 + step))
        by_hand = keep * by_hand + (1 - keep) * trainer.model.fc.weight.detach()
    own = trainer.model.fc.weight.detach().clone()
    found = trainer.evaluate()
    assert torch.equal(trainer.model.fc.weight, own)  # put back
    trainer.save()
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    torch.testing.assert_close(state["model"]["fc.weight"], by_hand)
    assert torch.equal(state["weights"]["fc.weight"], own)
    trainer.model.load_state_dict(state["model"])
    trainer.average = None
    assert trainer.evaluate() == found
    with pytest.raises(ValueError, match=r"was made with optim\.ema"):
        build(target, draft, rows, tmp_path)


def test_bfloat16_is_an_option_on_every_device(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    plain = build(target, draft, rows, tmp_path / "plain").train_step().summary()
    half = build(target, draft, rows, tmp_path / "half", precision="bfloat16")
    found = half.train_step().summary()
    assert found["ce"] != plain["ce"]
    assert found["ce"] == pytest.approx(plain["ce"], rel=0.02)
    assert half.model.fc.weight.dtype == torch.float32


def test_tensorboard_has_every_number_of_the_lines(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Trainer(target, draft, SMALL, rows, rows, tmp_path, tensorboard=True).run()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for line in read_lines(tmp_path / METRICS):
        for tag, value in (("ce", line["ce"]), ("acceptance/2", line["acceptance"][1])):
            seen = {event.step: event.value for event in events.Scalars(f"{line['split']}/{tag}")}
            assert seen[line["step"]] == pytest.approx(value)


def as_eagle(draft: DraftConfig) -> DraftConfig:
    return dataclasses.replace(
        draft,
        algorithm="eagle3",
        num_hidden_layers=1,
        markov_rank=0,
        enable_confidence_head=False,
        mask_token_id=None,
    )


@pytest.mark.parametrize(
    ("what", "at", "step"),
    [("loss", 5, 5), ("gradient", 5, 5), ("weights", 5, 6), ("weights", 12, 12)],
)
def test_numbers_that_are_none_stop_the_run(
    what: str,
    at: int,
    step: int,
    target: FrozenTarget,
    draft: DraftConfig,
    rows: TokenRows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    trainer = build(target, draft, rows, tmp_path, save_every=2, log_every=100, eval_every=100)
    own = trainer._backward

    def spoil(plan: Plan) -> BlockStats:
        stats = own(plan)
        if trainer.step + 1 != at:
            return stats
        if what == "loss":
            return dataclasses.replace(stats, loss=stats.loss * torch.nan)
        if what == "gradient":
            trainer.model.fc.weight.grad[0, 0] = torch.inf
        else:
            trainer.model.fc.weight.data[0, 0] = torch.inf
        return stats

    monkeypatch.setattr(trainer, "_backward", spoil)
    kept = (at - 1) // 2 * 2
    said = rf"step {step}: .* the checkpoint of step {kept} stays: lower"
    with pytest.raises(ValueError, match=said):
        trainer.run()
    assert torch.load(tmp_path / CHECKPOINT, weights_only=True)["step"] == kept


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
    with pytest.raises(ValueError, match="block_size 39 needs rows of 41 tokens, these have 40"):
        build(target, dataclasses.replace(draft, block_size=39), rows, tmp_path)
    build(target, dataclasses.replace(draft, block_size=38), rows, tmp_path).train_step()


def test_another_order_of_rows_is_refused(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    build(target, draft, rows, tmp_path).run(until=1)
    turned = TokenRows(rows.tokens.flip(0), rows.roles)
    with pytest.raises(ValueError, match="other training rows"):
        build(target, draft, turned, tmp_path)


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

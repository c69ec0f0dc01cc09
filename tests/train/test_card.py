"""A model card says what the run's files say, and nothing that they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from emberline.cli.train import train
from emberline.train.dataset import log_round
from emberline.train.recipe import read_recipe, to_toml

EVALUATION = {
    "settings": {"prompts": {"riddles": 3}, "max_tokens": 32, "planner": "verify_all"},
    "drafts": {
        "mine": {
            "info": {},
            "T=0": {
                "macro": 2.5,
                "macro_standard_error": 0.125,
                "all": {"conditional_acceptance": [0.75, None], "ece": [0.01, None],
                        "auc": [0.8, None]},
                "sets": {"riddles": {"acceptance_length": 2.5}},
            },
        }
    },
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "draft").mkdir()
    (tmp_path / "data").mkdir()
    changes: dict[str, Any] = {
        "draft": {"target_layer_ids": [0, 2], "num_hidden_layers": 3, "block_size": 2},
        "data": {"seq_len": 100},
        "train": {"seqs_per_step": 4, "anchors": 5},
    }
    (tmp_path / "run.toml").write_text(to_toml(read_recipe(None, changes)))
    lines = [
        {"split": split, "step": 12, "epoch": 1.5, "seconds": 34.0, "ece": 0.004,
         "acceptance": [first, 0.5]}
        for split, first in (("train", 0.7), ("held_out", 0.65))
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path


def write(run: Path, *options: str) -> str:
    result = CliRunner().invoke(train, ["card", str(run), *options])
    assert result.exit_code == 0, result.output
    return (run / "draft" / "README.md").read_text()


def test_the_card_follows_the_runs_files(run: Path) -> None:
    log_round(run / "data", "train", 2000, 10.0)
    log_round(run / "data", "held_out", 50, 3.0)
    (run / "draft" / "calibration.json").write_text(
        json.dumps({"temperatures": [1.0, 0.5], "dataset": "riddles", "num_samples": 1234})
    )
    (run / "eval.json").write_text(json.dumps(EVALUATION))
    (run / "notes.md").write_text("## Limits\n\nShort riddles only.\n")
    text = write(run, "--title", "Mine", "--eval", str(run / "eval.json"),
                 "--notes", str(run / "notes.md"))  # fmt: skip
    assert text.startswith("# Mine\n")
    assert "2,000 rows of 100 tokens = 0.2 M, sampled from the target | 13 |" in text
    assert "12 steps of 4 rows x 5 blocks = 40 slots; 1.50 epochs" in text
    assert "| held-out rows | 0.650 | 0.500 | 0.004 |" in text
    assert "| T = 0 | 2.50 | 2.50 ± 0.12 |" in text
    assert "| T = 0 | 0.750 |  |" in text
    assert "survival was by position, raw confidences" in text
    assert "temperatures 1, 0.5, fitted to 1,234 blocks (riddles)" in text
    assert text.endswith("Short riddles only.\n")


def test_what_is_missing_is_not_spoken_of(run: Path) -> None:
    text = write(run)
    assert "| data |" not in text
    assert "hand-written" not in text
    assert "## Measured" not in text
    assert "calibration.json" not in text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(train, ["card", str(tmp_path)])
    assert result.exit_code == 2
    assert "needs run.toml and metrics.jsonl" in result.output


@pytest.mark.parametrize(
    "text", ["[1]", "{}", '{"a": 1}\n{"a": 2}', '{"drafts": {}, "settings": {}}']
)
def test_another_kind_of_evaluation_is_refused(run: Path, text: str) -> None:
    (run / "eval.json").write_text(text)
    words = ["card", str(run), "--eval", str(run / "eval.json")]
    result = CliRunner().invoke(train, words)
    assert result.exit_code == 2
    assert "eval.json: not what `emberline eval --json` writes" in result.output
    assert not (run / "draft" / "README.md").exists()

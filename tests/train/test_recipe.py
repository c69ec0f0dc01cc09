"""Recipes: what a file may say, what wins, what the shipped ones differ in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberline.cli import make_app
from emberline.train.config import LossConfig
from emberline.train.recipe import Recipe, merge, read_change, read_recipe, to_toml
from emberline.train.schedule import read_schedule, value_at

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = ["dflash", "dspark", "eagle3"]  # one an algorithm; the default draft has its own


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_dspark_and_dflash_differ_in_three_lines():
    dspark, dflash = (
        (RECIPES / f"{name}.toml").read_text().splitlines() for name in ("dspark", "dflash")
    )
    assert len(dspark) == len(dflash)
    pairs = zip(dspark, dflash, strict=True)
    assert [pair for pair in pairs if pair[0] != pair[1]] == [
        ('algorithm = "dspark"', 'algorithm = "dflash"'),
        ("ce = 0.1", "ce = 1.0"),
        ("l1 = 0.9", "l1 = 0.0"),
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_what_their_algorithm_implies(name: str):
    shipped = read_recipe(RECIPES / f"{name}.toml", {})
    assert shipped.training == read_recipe(None, {"draft": {"algorithm": name}}).training
    assert shipped.synthesis == Recipe().synthesis
    assert shipped.draft["block_size"] == 7


def test_every_recipe_can_be_read():
    paths = sorted(RECIPES.glob("*.toml"))
    assert [path.stem for path in paths] == [*SHIPPED, "smollm2"]
    for path in paths:
        read_recipe(path, {})


@pytest.mark.parametrize("name", SHIPPED)
def test_written_recipe_is_read_back(name: str, tmp_path: Path):
    change = merge(
        [
            read_change("loss.ce=[[0, 1.0], [0.4, 1.0], [0.4, 0.1]]"),
            read_change("draft.target_layer_ids=[1, 3]"),
            read_change("data.temperatures=[1, 0.5]"),
            read_change("data.temperature_weights=[0.5, 0.5]"),
        ]
    )
    recipe = read_recipe(RECIPES / f"{name}.toml", change)
    assert recipe.training.loss.ce == ((0.0, 1.0), (0.4, 1.0), (0.4, 0.1))
    assert recipe.draft["target_layer_ids"] == (1, 3)
    assert recipe.synthesis.temperatures == (1.0, 0.5)
    text = to_toml(recipe)
    assert read_recipe(write(tmp_path, text), {}) == recipe
    assert f'algorithm = "{name}"' in text
    assert "num_hidden_layers" in text


def test_later_layers_win(tmp_path: Path):
    path = write(tmp_path, '[draft]\nalgorithm = "dflash"\n[loss]\nce = 0.5\n[optim]\nema = 0.9\n')
    recipe = read_recipe(path, {"optim": {"ema": 0.99}})
    assert recipe.training.loss == LossConfig(ce=0.5, l1=0.0)
    assert recipe.training.optim.ema == 0.99
    assert recipe.draft["markov_rank"] == 0
    assert recipe.draft["enable_confidence_head"] is False
    assert read_recipe(None, {"draft": {"markov_rank": 8}}).draft["enable_confidence_head"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optim]\nlr = 1.0", "unknown key optim.lr: it is one of muon_lr"),
        ("[optimizer]\nema = 0.9", "unknown section optimizer: there are draft, data, loss"),
        ("steps = 3", "steps stands outside of a section"),
        ("[train]\nsteps = 2.5", "train.steps must be int, got 2.5"),
        ("[train]\nsteps = true", "train.steps must be int, got True"),
        ("[train]\nsteps = 0", "steps must be at least 1, got 0"),
        ('[train]\nprecision = "fp8"', "precision must be auto, float32 or bfloat16, got 'fp8'"),
        ("[draft]\ntarget_layer_ids = 3", "draft.target_layer_ids must be"),
        ("[draft]\nhidden_size = 64", "unknown key draft.hidden_size"),
        ('[draft]\nalgorithm = "medusa"', "draft.algorithm must be one of dspark, dflash, eagle3"),
        ('[draft]\nalgorithm = "dflash"\nmarkov_rank = 8', "draft.markov_rank is 0 with dflash"),
        (
            '[draft]\nalgorithm = "dflash"\n[loss]\nconfidence = 1.0',
            "loss.confidence: this draft has no confidence head",
        ),
        ("[loss]\nce = -1", "ce must not be negative, got -1"),
        ("[loss]\nce = [[0.5, 1], [0.2, 1]]", "loss.ce: fractions must rise from 0 to 1"),
        ('[loss]\nce = "much"', "loss.ce must be a finite number or a list of"),
        ("[optim]\nema = 1.0", "ema must be in [0, 1), got 1.0"),
        ('[data]\nfeatures = "disk"', "features must be fresh or cached, got 'disk'"),
        ("[loss\n", "recipe.toml: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, message: str, tmp_path: Path):
    words = ["train", str(tmp_path / "run"), "--config", str(write(tmp_path, text))]
    result = CliRunner().invoke(make_app("train"), words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


def test_changes_that_are_none_are_refused(tmp_path: Path):
    words = ["train", str(tmp_path / "run"), "--set", "ema"]
    result = CliRunner().invoke(make_app("train"), words)
    assert result.exit_code == 2
    assert "expected SECTION.KEY=VALUE" in result.output
    missing = CliRunner().invoke(make_app("train"), ["train", "out", "--config", "none.toml"])
    assert missing.exit_code == 2
    assert "none.toml: no such recipe" in missing.output


def test_help_is_that_of_a_run_and_names_the_other_command():
    result = CliRunner().invoke(make_app("train"), ["train", "--help"])
    text = re.sub(r"\s+", " ", result.output)
    assert result.exit_code == 0
    assert "--config" in text
    assert "`emberline train synthesize`" in text
    other = CliRunner().invoke(make_app("train"), ["train", "synthesize", "--help"])
    assert "--prompts" in other.output


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (0.5, [0.5, 0.5, 0.5, 0.5]),
        ([[0.0, 1.0], [0.4, 1.0], [0.4, 0.1]], [1.0, 1.0, 0.1, 0.1]),
        ([[0.2, 0.0], [0.6, 1.0]], [0.0, 0.25, 0.5, 1.0]),
    ],
)
def test_schedule_by_hand(schedule: object, values: list[float]):
    read = read_schedule("loss.ce", schedule)
    found = [value_at(read, progress) for progress in (0.0, 0.3, 0.4, 1.0)]
    assert found == pytest.approx(values)

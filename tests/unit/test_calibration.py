"""Sequential temperature scaling: the fit, the figures, the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberline.models.weights import ModelError
from emberline.verify.calibration import (
    CALIBRATION_FILE,
    GRID,
    Calibration,
    Samples,
    auc,
    by_position,
    calibrate,
    draft_calibration,
    ece,
    fit,
    log_loss,
    reliability,
    sigmoid,
    survival,
)

GRID_STEP = GRID[1] / GRID[0]


def made(temperatures: tuple[float, ...], num_blocks: int, seed: int = 0) -> Samples:
    """Blocks whose confidences come true with chance sigmoid(logit / t), one after the other."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 1.5, (num_blocks, len(temperatures)))
    stands = rng.random(logits.shape) < sigmoid(logits / np.array(temperatures))
    return Samples(logits, np.cumprod(stands, axis=1).astype(bool))


# The fit


def test_fit_finds_the_temperatures_that_made_the_samples() -> None:
    true = (0.5, 2.0, 1.0, 3.0)
    found = fit(made(true, 60_000))
    for ours, theirs in zip(found, true, strict=True):
        assert abs(math.log(ours / theirs)) < 2.5 * math.log(GRID_STEP)


def test_a_calibration_helps_on_blocks_it_has_not_seen() -> None:
    true = (0.4, 2.5, 0.4)
    found = calibrate(made(true, 20_000), made(true, 20_000, seed=1), "made")
    assert found.num_samples == 20_000
    assert found.dataset == "made"
    for before, after in zip(found.ece_before, found.ece_after, strict=True):
        assert after < 0.01
        assert after < before / 2


def test_a_position_is_fitted_after_those_before_it_and_never_moves_them() -> None:
    samples = made((0.5, 2.0, 1.0), 5_000)
    assert fit(Samples(samples.logits[:, :2], samples.survived[:, :2])) == fit(samples)[:2]


def test_the_mildest_of_equal_temperatures_wins() -> None:
    # A logit of 0 is a chance of one half at any temperature.
    survived = np.array([[True], [False]] * 10)
    assert fit(Samples(np.zeros((20, 1)), survived)) == (pytest.approx(1.0),)


def test_what_was_not_verified_does_not_count() -> None:
    samples = made((0.5, 2.0), 5_000)
    rest = made((3.0, 0.2), 5_000, seed=1)
    rest.logits[:, 1] = np.nan
    more = Samples(*(np.concatenate(pair) for pair in zip(
        (samples.logits, samples.survived), (rest.logits, rest.survived), strict=True
    )))  # fmt: skip
    temperatures = (0.5, 2.0)
    predicted = survival(more.logits, temperatures)
    for figure in (ece, auc):
        first, second = by_position(figure, predicted, more.survived)
        assert first != figure(predicted[:5_000, 0], samples.survived[:, 0])
        assert second == figure(predicted[:5_000, 1], samples.survived[:, 1])
    rest.logits[:] = np.nan
    more = Samples(np.concatenate((samples.logits, rest.logits)), more.survived)
    assert fit(more) == fit(samples)


def test_a_position_without_samples_is_refused() -> None:
    samples = made((1.0, 1.0), 10)
    samples.logits[:, 1] = np.nan
    with pytest.raises(ValueError, match=r"draft 2 of a block was never verified"):
        fit(samples)


def test_survival_is_the_product_of_the_confidences() -> None:
    logits = np.array([[math.log(3.0), math.log(9.0), 0.0]])
    assert survival(logits, (1.0, 2.0, 1.0))[0] == pytest.approx([0.75, 0.5625, 0.28125])


def test_sigmoid_does_not_overflow() -> None:
    assert sigmoid(np.array([-1e4, 0.0, 1e4])).tolist() == [0.0, 0.5, 1.0]


# The figures


def test_ece_of_a_case_by_hand() -> None:
    # Bins of 1/15. 0.10 and 0.12 share the second, the others have one each.
    predicted = np.array([0.10, 0.12, 0.52, 1.0])
    outcome = np.array([True, False, True, True])
    expected = (2 * abs(0.11 - 0.5) + abs(0.52 - 1.0) + 0.0) / 4
    assert ece(predicted, outcome) == pytest.approx(expected)


def test_ece_of_one_bin_is_the_bias() -> None:
    rng = np.random.default_rng(0)
    predicted, outcome = rng.random(100), rng.random(100) < 0.3
    assert ece(predicted, outcome, 1) == pytest.approx(abs(predicted.mean() - outcome.mean()))


def test_reliability_by_hand() -> None:
    predicted = np.array([0.0, 0.1, 0.6, 1.0, np.nan])
    bins = reliability(predicted, np.array([True, False, True, True, True]), num_bins=4)
    assert bins.count.tolist() == [2, 0, 1, 1]
    np.testing.assert_allclose(bins.confidence, [0.05, np.nan, 0.6, 1.0])
    np.testing.assert_allclose(bins.frequency, [0.5, np.nan, 1.0, 1.0])


def test_auc_counts_pairs_and_halves_of_ties() -> None:
    rng = np.random.default_rng(1)
    predicted = rng.integers(0, 6, 200) / 5
    outcome = rng.random(200) < 0.2 + 0.6 * predicted
    above = predicted[outcome][:, None] - predicted[~outcome]
    expected = np.mean((above > 0) + 0.5 * (above == 0))
    assert auc(predicted, outcome) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predicted", "outcome", "expected"),
    [
        ([0.9, 0.8, 0.2], [True, True, False], 1.0),
        ([0.1, 0.8, 0.2], [True, False, False], 0.0),
        ([0.5, 0.5, 0.5], [True, False, False], 0.5),
        ([0.5, np.nan, 0.4], [True, True, False], 1.0),
        ([0.5, 0.7], [True, True], math.nan),
        ([0.5, 0.7], [False, False], math.nan),
        ([], [], math.nan),
    ],
)
def test_auc_of_cases_by_hand(predicted: Any, outcome: Any, expected: float) -> None:
    found = auc(np.array(predicted), np.array(outcome, dtype=bool))
    assert found == pytest.approx(expected, nan_ok=True)


def test_log_loss_of_a_case_by_hand() -> None:
    found = log_loss(np.array([0.25, 0.9, np.nan]), np.array([True, False, True]))
    assert found == pytest.approx((math.log(4) + math.log(10)) / 2)
    assert math.isfinite(log_loss(np.array([0.0]), np.array([True])))


def test_no_samples_no_error() -> None:
    assert math.isnan(ece(np.array([]), np.array([], dtype=bool)))


# The file


def write(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps(fields))
    return path


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    saved = Calibration((0.5, 1.25), "d", 12, (0.1, 0.2), (0.01, math.nan), (0.9, 0.8))
    saved.save(tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "temperatures": [0.5, 1.25],
        "dataset": "d",
        "num_samples": 12,
        "ece_before": [0.1, 0.2],
        "ece_after": [0.01, None],
        "auc": [0.9, 0.8],
    }
    loaded = Calibration.load(tmp_path / "c.json")
    assert math.isnan(loaded.ece_after[1])
    assert (loaded.temperatures, loaded.num_samples) == (saved.temperatures, 12)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == text


def test_files_of_other_engines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    sglang = write(path, temperatures=[1, 0.5], dataset="x", num_samples=3, ece_before=[0.2, 0.1],
                   ece_after=[0.1, 0.1], gamma=2)  # fmt: skip
    assert Calibration.load(sglang).temperatures == (1.0, 0.5)
    bare = write(path, sts_temperatures=[2.0])
    assert Calibration.load(bare) == Calibration((2.0,))
    both = write(path, temperatures=[2.0], sts_temperatures=[2.0])
    assert Calibration.load(both) == Calibration((2.0,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "temperatures is missing"),
        ({"temperatures": []}, "temperatures is missing"),
        ({"temperatures": 1.0}, "temperatures must be a list of numbers"),
        ({"temperatures": [1.0, "1"]}, r"temperatures\[1\] must be a number, got '1'"),
        ({"temperatures": [True]}, r"temperatures\[0\] must be a number"),
        ({"temperatures": [1.0, 0.0]}, r"temperatures\[1\] must be finite and over 0"),
        ({"temperatures": [-1.0]}, r"temperatures\[0\] must be finite and over 0"),
        ({"temperatures": [math.inf]}, r"temperatures\[0\] must be finite"),
        ({"temperatures": [None]}, r"temperatures\[0\] must be finite"),
        ({"sts_temperatures": [0]}, r"temperatures\[0\] must be finite and over 0"),
        ({"temperatures": [1.0], "sts_temperatures": [2.0]}, "differ: keep one"),
        ({"temperatures": [1.0], "ece_after": [0.1, 0.2]}, "ece_after has 2 entries for 1"),
        ({"temperatures": [1.0], "num_samples": 1.5}, "num_samples must be a whole number"),
        ({"temperatures": [1.0], "num_samples": -1}, "num_samples must not be negative"),
        ({"temperatures": [1.0], "dataset": 3}, "dataset must be text"),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, fields: Any, message: str) -> None:
    path = write(tmp_path / "c.json", **fields)
    with pytest.raises(ModelError, match=message) as raised:
        Calibration.load(path)
    assert str(raised.value).startswith(str(path))


def test_the_file_in_the_draft_folder_unless_another_is_named(tmp_path: Path) -> None:
    draft, other = tmp_path / "draft", tmp_path / "other.json"
    draft.mkdir()
    assert draft_calibration(draft) is None
    write(draft / CALIBRATION_FILE, temperatures=[2.0])
    write(other, temperatures=[3.0])
    assert draft_calibration(draft) == Calibration((2.0,))
    assert draft_calibration(draft, other) == Calibration((3.0,))
    with pytest.raises(ModelError, match="cannot be read"):
        draft_calibration(draft, tmp_path / "missing.json")

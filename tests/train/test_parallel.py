"""Two processes and one see the same loss curve, and only one of them writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from emberline.cli import make_app
from emberline.train.dataset import TokenRows
from emberline.train.parallel import World
from emberline.train.run_log import METRICS, read_lines

STEPS = 8


def words(run: Path, target_folder: Path, data: Path, algorithm: str) -> list[str]:
    shape = ["--algorithm", algorithm, "--block-size", "4", "--device", "cpu"]
    if algorithm == "dspark":
        shape += ["--mask-token-id", "3", "--layers", "2", "--markov-rank", "8"]
    sizes = f"--steps {STEPS} --seqs 8 --anchors 8 --set train.log_every=1 --set optim.ema=0.9"
    options = ["--model", str(target_folder), "--data", str(data), *shape, *sizes.split()]
    return ["train", str(run), *options, "--set", f"train.eval_every={STEPS}"]


def curve(run: Path) -> list[dict[str, Any]]:
    lines = read_lines(run / METRICS)
    assert [line["step"] for line in lines if line["split"] == "train"] == [*range(1, STEPS + 1)]
    return lines


def flat(line: dict[str, Any]) -> list[float]:
    keys = ("loss", "ce", "l1", "confidence_bce", "length_t1", "length_t0", "ece")
    return [*(line[key] for key in keys), *line["acceptance"], *line["agreement"]]


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_two_processes_make_the_curve_of_one(
    algorithm: str, target_folder: Path, rows: TokenRows, tmp_path: Path
):
    data = tmp_path / "data"
    data.mkdir()
    rows.save(data / "train_000.safetensors")
    rows.save(data / "held_out_000.safetensors")
    alone = CliRunner().invoke(
        make_app("train"), words(tmp_path / "one", target_folder, data, algorithm)
    )
    assert alone.exit_code == 0, alone.output
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "-m", "emberline"]
    arguments = words(tmp_path / "two", target_folder, data, algorithm)
    done = subprocess.run(
        [*launcher, *arguments, "--accumulate", "2"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("draft written to") == 1
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == len(two) == STEPS + 1
    assert one[-1]["split"] == two[-1]["split"] == "held_out"
    for left, right in zip(one, two, strict=True):
        assert flat(left) == pytest.approx(flat(right), abs=1e-5), left["step"]
    assert one[0]["loss"] > one[STEPS - 1]["loss"]


def test_shares_are_disjoint_and_whole():
    shares = [World(rank, 3).shares(24, 2) for rank in range(3)]
    taken = [row for own in shares for share in own for row in range(24)[share]]
    assert taken == list(range(24))
    with pytest.raises(ValueError, match="seqs_per_step 8 must be a multiple of 6: processes 3"):
        World(0, 3).shares(8, 2)

"""A run that is killed, whenever it is, ends with the weights of one that was not: bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from emberline.train.dataset import TokenRows
from emberline.train.run_log import METRICS, read_lines
from emberline.train.trainer import CHECKPOINT

from support.killed_training import STEPS, trainer


def kill(folder: Path, run: Path, kind: str, at: int) -> None:
    """A process of its own trains until it dies."""
    words = [folder / "target", folder / "data", run, kind, at]
    command = [sys.executable, "-m", "support.killed_training", *map(str, words)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def finish(folder: Path, run: Path) -> dict[str, torch.Tensor]:
    """Train to the end; the weights then, those of the moving average too."""
    trainer(folder / "target", folder / "data", run).run()
    state: dict[str, Any] = torch.load(run / CHECKPOINT, weights_only=True)
    assert state["step"] == STEPS
    return {f"{part}.{name}": t for part in ("model", "weights") for name, t in state[part].items()}


def test_killed_run_ends_with_the_same_weights(
    tmp_path: Path, target_folder: Path, rows: TokenRows
):
    (tmp_path / "target").symlink_to(target_folder)
    (tmp_path / "data").mkdir()
    rows.save(tmp_path / "data" / "train_000.safetensors")
    whole = finish(tmp_path, tmp_path / "whole")
    assert not torch.equal(whole["model.fc.weight"], whole["weights.fc.weight"])

    run = tmp_path / "killed"
    kill(tmp_path, run, "save", 1)
    assert not (run / CHECKPOINT).exists()
    rng = random.Random(20)
    kill(tmp_path, run, "step", rng.randrange(4, STEPS))
    kill(tmp_path, run, "save", 1)  # of this process; there is a checkpoint from before
    assert (run / CHECKPOINT).exists()
    # A line that was being written when the process died.
    with (run / METRICS).open("a") as file:
        file.write('{"split": "train", "st')
    killed = finish(tmp_path, run)

    assert whole.keys() == killed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name
    keys = ("split", "step", "loss", "ce", "l1", "acceptance", "ce_weight")
    left, right = (
        [[line.get(key) for key in keys] for line in read_lines(path / METRICS)]
        for path in (tmp_path / "whole", run)
    )
    assert left == right

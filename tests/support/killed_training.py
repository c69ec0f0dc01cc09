"""A training run that kills itself: `python -m support.killed_training TARGET DATA RUN KIND AT`.

KIND `step`: SIGKILL after that many steps. KIND `save`: while that checkpoint of the process is
being written.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from emberline.train.config import DraftConfig, LossConfig, OptimConfig, TrainConfig
from emberline.train.dataset import load_rows
from emberline.train.target import FrozenTarget
from emberline.train.trainer import Trainer

STEPS = 14
CONFIG = TrainConfig(
    steps=STEPS,
    seqs_per_step=4,
    anchors=6,
    log_every=1,
    eval_every=5,
    save_every=3,
    accumulate=2,
    loss=LossConfig(ce=((0.0, 1.0), (0.4, 1.0), (0.4, 0.1)), l1=((0.0, 0.0), (1.0, 0.9))),
    optim=OptimConfig(ema=0.9, warmup=3),
)


def trainer(target_folder: Path, data: Path, run: Path) -> Trainer:
    torch.set_num_threads(1)
    target = FrozenTarget(target_folder, torch.device("cpu"))
    draft = DraftConfig.for_target(
        target.config, mask_token_id=3, block_size=4, num_hidden_layers=1, markov_rank=8
    )
    rows = load_rows(data, "train")
    return Trainer(target, draft, CONFIG, rows, rows, run)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(target_folder: str, data: str, run: str, kind: str, at: str) -> None:
    own = trainer(Path(target_folder), Path(data), Path(run))
    saves = 0
    whole_save = torch.save

    def cut_save(state: Any, path: Path) -> None:
        nonlocal saves
        saves += 1
        whole_save(state, path)
        if saves == int(at):
            os.truncate(path, path.stat().st_size // 2)
            kill()

    if kind == "save":
        torch.save = cut_save

    def report(line: dict[str, Any]) -> None:
        if kind == "step" and line["step"] == int(at):
            kill()

    own.run(report)


if __name__ == "__main__":
    main(*sys.argv[1:])

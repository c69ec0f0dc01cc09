"""What can be refused before the target's weights are loaded and before anything is written.

Owns the checks that need no more than settings, files' names and token rows.
"""

from __future__ import annotations

from pathlib import Path

import torch

from emberline.models.device import resolve_device
from emberline.models.weights import read_json
from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import Role, TokenRows


def read_device(text: str) -> torch.device:
    """The device that --device names; auto is a GPU if there is one.

    Raises:
        ValueError: there is no such device here.
    """
    try:
        return torch.device(resolve_device(text))
    except ValueError as problem:
        raise ValueError(f"--{problem}") from problem


def check_folder(out: Path) -> None:
    """Raises ValueError where the run's folder is something else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file: give the run a folder")


def check_context(model: Path, length: int, name: str) -> None:
    """Raises ValueError where rows of `length` tokens, a setting called `name`, are too long."""
    raw = read_json(model / "config.json")
    nested = raw.get("text_config")
    most = (nested if isinstance(nested, dict) else raw).get("max_position_embeddings")
    if isinstance(most, int) and length > most:
        raise ValueError(f"{name} {length}: the model's context is {most} tokens: use at most that")


def check_sizes(draft: DraftConfig, config: TrainConfig, num_rows: int, length: int) -> None:
    """Raises ValueError where rows of this number and length are too few or too short."""
    if num_rows < config.seqs_per_step:
        raise ValueError(
            f"{num_rows} training rows; a step needs {config.seqs_per_step}: make more rows, or "
            "lower train.seqs_per_step (--seqs)"
        )
    # The first token is no anchor: nothing of the target stands before it.
    if length < draft.block_size + 2:
        raise ValueError(
            f"draft.block_size {draft.block_size} needs rows of {draft.block_size + 2} tokens, "
            f"these have {length}: lower it, or make longer rows (data.seq_len)"
        )


def check_rows(rows: TokenRows, draft: DraftConfig, config: TrainConfig, split: str) -> None:
    """Refuse rows that a run cannot train on, or measure on.

    Args:
        rows: of the split.
        draft: its block has to fit, and its vocabulary is the target's.
        config: how many rows a step takes.
        split: "train" or "held_out", whose rows may be too few to be measured on.

    Raises:
        ValueError: they are too few, too short, of another vocabulary, or nobody's own words.
    """
    count, length = rows.tokens.shape
    check_sizes(draft, config, count if split == "train" else config.seqs_per_step, length)
    if not count:
        return
    least, most = int(rows.tokens.min()), int(rows.tokens.max())
    if least < 0 or most >= draft.vocab_size:
        raise ValueError(
            f"{split} rows hold token {least if least < 0 else most}, the model's ids are 0 to "
            f"{draft.vocab_size - 1}: give rows that were made with this model (--data)"
        )
    if int(rows.roles.max()) > max(Role):
        raise ValueError(
            f"{split} rows hold role {int(rows.roles.max())}: expected 0 to {max(Role)}"
        )
    if split == "train" and not bool((rows.roles[:, 1:] > 0).any()):
        raise ValueError("train rows have no token that the model wrote: make the rows again")

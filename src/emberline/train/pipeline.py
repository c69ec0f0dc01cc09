"""From a target folder to an exported draft: data, training, export, picture, in one call.

Everything lives in one folder, and every stage that is done is kept: call it again after an
interruption and it goes on.

    OUT/data/           token rows
    OUT/checkpoint.pt   draft, optimisers, step
    OUT/metrics.jsonl   one line a report
    OUT/metrics.png     if matplotlib is there
    OUT/draft/          the exported draft
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from emberline.hub import generation_stop_ids, load_tokenizer
from emberline.models.weights import read_json
from emberline.train.config import DraftConfig, SynthesisConfig, TrainConfig
from emberline.train.dataset import load_rows
from emberline.train.export import read_draft, write_full
from emberline.train.plot import plot_metrics
from emberline.train.synthesize import synthesize
from emberline.train.target import FrozenTarget
from emberline.train.trainer import CHECKPOINT, METRICS, Report, Trainer


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make of a target. `draft` overrides fields of `DraftConfig.for_target`."""

    draft: dict[str, Any] = field(default_factory=dict)
    synthesis: SynthesisConfig = field(default_factory=SynthesisConfig)
    training: TrainConfig = field(default_factory=TrainConfig)
    held_out_rows: int = 256


def train_draft(
    model: Path,
    out: Path,
    recipe: Recipe,
    device: torch.device,
    data: Path | None = None,
    say: Callable[[str], None] = print,
    report: Report | None = None,
) -> Path:
    """Train a draft for the target in `model` and export it.

    Args:
        model: the target's Hugging Face folder.
        out: where everything is kept.
        recipe: shapes, sizes and rates.
        device: "cuda" trains in minutes; a CPU is for trying things out.
        data: token rows made before; None makes them in `out`.
        say: told of every stage. report: given each line of the metrics.

    Returns:
        The folder of the exported draft.
    """
    compiled = device.type == "cuda"
    if data is None:
        data = out / "data"
        _make_data(model, data, recipe, device, say)
    target = FrozenTarget(model, device, compiled=compiled)
    draft = draft_config(model, recipe.draft)
    rows = load_rows(data, "train")
    has_held_out = any(data.glob("held_out_*.safetensors"))
    held_out = load_rows(data, "held_out") if has_held_out else None
    say(f"training on {rows.num_rows:,} rows of {rows.tokens.shape[1]} tokens")
    trainer = Trainer(target, draft, recipe.training, rows, held_out, out, compiled)
    if trainer.step:
        say(f"resuming at step {trainer.step}")
    trainer.run(report)
    folder = out / "draft"
    config, tensors = read_draft(out / CHECKPOINT)
    write_full(folder, config, tensors, target.embedding, target.head)
    if find_spec("matplotlib") is not None:
        plot_metrics(out / METRICS, out / "metrics.png")
    return folder


def draft_config(model: Path, changes: dict[str, Any]) -> DraftConfig:
    """The draft's shape for the target in `model`, with a mask token chosen if none is given."""
    if changes.get("mask_token_id") is None:
        stops = generation_stop_ids(model)
        changes = {**changes, "mask_token_id": choose_mask(load_tokenizer(model), stops)}
    return DraftConfig.for_target(read_json(model / "config.json"), **changes)


def choose_mask(tokenizer: Any, stop_ids: Collection[int]) -> int:
    """A special token that ordinary text and the chat template leave alone: the last such one.

    Raises:
        ValueError: there is none, so it has to be given.
    """
    template = tokenizer.chat_template or ""
    taken = {*stop_ids, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    free = [
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and index not in taken and token.content not in template
    ]
    if not free:
        raise ValueError("the tokenizer has no unused special token: give --mask-token-id")
    return int(max(free))


def _make_data(
    model: Path, data: Path, recipe: Recipe, device: torch.device, say: Callable[[str], None]
) -> None:
    # The sampler captures graphs of its own shapes: it gets its own copy of the target, which is
    # gone before training starts.
    target = FrozenTarget(model, device)
    stops = tuple(sorted(generation_stop_ids(model), reverse=True))
    rows = recipe.held_out_rows
    synthesize(target, load_tokenizer(model), data, recipe.synthesis, stops, rows, say)
    del target
    if device.type == "cuda":
        torch.cuda.empty_cache()

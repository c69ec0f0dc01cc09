"""From a target folder to an exported draft: data, training, export, picture, in one call.

Everything lives in one folder, and every stage that is done is kept: call it again after an
interruption and it goes on.

    OUT/run.toml        the recipe, with nothing left to defaults
    OUT/data/           token rows
    OUT/features/       the target's states, where the recipe keeps them
    OUT/checkpoint.pt   draft, optimisers, step
    OUT/metrics.jsonl   one line a report
    OUT/metrics.png     if matplotlib is there
    OUT/tensorboard/    events, if they are asked for
    OUT/draft/          the exported draft
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from emberline.hub import generation_stop_ids, load_tokenizer
from emberline.models.stock_load import read_config
from emberline.models.weights import read_json
from emberline.train.checkpoint import (
    CHECKPOINT,
    Origin,
    check_same,
    read_checkpoint,
    rows_digest,
    target_digest,
)
from emberline.train.config import DraftConfig
from emberline.train.dataset import TokenRows, load_rows
from emberline.train.export import read_draft, write_full
from emberline.train.feature_cache import cache_features
from emberline.train.features import Features
from emberline.train.frozen import TrainingTarget, load_frozen
from emberline.train.parallel import World, joined
from emberline.train.plot import plot_metrics
from emberline.train.preflight import check_context, check_folder, check_rows, check_sizes
from emberline.train.recipe import DRAFT_KEYS, Recipe, to_toml
from emberline.train.run_log import METRICS, Report, check_tensorboard
from emberline.train.synthesize import synthesize
from emberline.train.target import FrozenTarget, is_fast
from emberline.train.trainer import Trainer

RECIPE = "run.toml"
Say = Callable[[str], None]


def train_draft(
    model: Path,
    out: Path,
    recipe: Recipe,
    device: torch.device,
    data: Path | None = None,
    say: Say = print,
    report: Report | None = None,
    tensorboard: bool = False,
) -> Path:
    """Train a draft for the target in `model` and export it.

    Under `torchrun` every process calls it; they share the work, and the one that leads writes and
    reports.

    Args:
        model: the target's Hugging Face folder.
        out: where everything is kept.
        recipe: shapes, sizes and rates.
        device: "cuda" trains in minutes; a CPU is for trying things out.
        data: token rows made before; None makes them in `out`.
        say: told of every stage. report: given each line of the metrics.
        tensorboard: write TensorBoard's events into `out` too.

    Returns:
        The folder of the exported draft.
    """
    if tensorboard:
        check_tensorboard()
    with joined(device) as (world, own_device):
        if not world.leads:
            say, report = _silent, None
        run = _Run(model, out, recipe, own_device, world, say)
        return run.train(data, report, tensorboard)


@dataclasses.dataclass(frozen=True)
class _Run:
    """What all stages need."""

    model: Path
    out: Path
    recipe: Recipe
    device: torch.device
    world: World
    say: Say

    def train(self, data: Path | None, report: Report | None, tensorboard: bool) -> Path:
        """All stages; the folder of the draft."""
        out, compiled = self.out, self.device.type == "cuda"
        draft = self._checked_draft()
        digest = target_digest(self.model)
        self._check_checkpoint(draft, {"target": digest})
        if data is None:
            data = out / "data"
            self._make_data(data, draft)
        rows, held_out = self._rows(data, draft)
        self._check_checkpoint(draft, {"rows": rows_digest(rows)})
        target = load_frozen(self.model, self.device, compiled=compiled)
        self.say(f"training on {rows.num_rows:,} rows of {rows.tokens.shape[1]} tokens")
        self._say_what_is_measured(held_out)
        trainer = Trainer(
            target,
            draft,
            self.recipe.training,
            rows,
            held_out,
            out,
            compiled,
            world=self.world,
            features=self._cached(target, draft, rows, held_out),
            tensorboard=tensorboard,
            target_digest=digest,
        )
        if self.world.leads:
            self._write_recipe(draft)
        if trainer.step:
            self.say(f"resuming at step {trainer.step}")
        trainer.run(report)
        if self.world.leads:
            config, tensors = read_draft(out / CHECKPOINT)
            write_full(out / "draft", config, tensors, target.embedding, target.head)
            if find_spec("matplotlib") is not None:
                plot_metrics(out / METRICS, out / "metrics.png")
        self.say(f"draft written to {out / 'draft'}")
        return out / "draft"

    def _checked_draft(self) -> DraftConfig:
        """The draft's shape; ends here for what cannot be, whatever the rows are."""
        check_folder(self.out)
        training = self.recipe.training
        self.world.shares(training.seqs_per_step, training.accumulate)
        return draft_config(self.model, read_config(self.model).to_dict(), self.recipe.draft)

    def _check_checkpoint(self, draft: DraftConfig, origin: Origin) -> None:
        """Ends here where the folder holds another run."""
        if (kept := read_checkpoint(self.out, "meta")) is not None:
            check_same(self.out, kept, draft, self.recipe.training, origin)

    def _rows(self, data: Path, draft: DraftConfig) -> tuple[TokenRows, TokenRows | None]:
        """Rows to train on and rows to measure on, if there are any."""
        rows = load_rows(data, "train")
        has_held_out = any(data.glob("held_out_*.safetensors"))
        held_out = load_rows(data, "held_out") if has_held_out else None
        for split, part in (("train", rows), ("held_out", held_out)):
            if part is not None:
                check_rows(part, draft, self.recipe.training, split)
        return rows, held_out

    def _make_data(self, data: Path, draft: DraftConfig) -> None:
        if self.world.size > 1:
            if not data.is_dir():
                raise ValueError(
                    f"{data}: {self.world.size} processes need token rows to train on: make them "
                    "with `emberline train synthesize` and give --data"
                )
            return
        if not is_fast(read_json(self.model / "config.json")):
            raise ValueError(
                f"{self.model}: rows of this kind of target are sampled by the engine: make them "
                "with `emberline train synthesize` and give --data"
            )
        synthesis = self.recipe.synthesis
        if not any(data.glob("train_*.safetensors")):
            num_rows = synthesis.rounds * synthesis.batch_size
            check_sizes(draft, self.recipe.training, num_rows, synthesis.seq_len)
            check_context(self.model, synthesis.seq_len, "data.seq_len")
        # The sampler captures graphs of its own shapes: it gets its own copy of the target, which
        # is gone before training starts.
        target = FrozenTarget(self.model, self.device)
        stops = tuple(sorted(generation_stop_ids(self.model), reverse=True))
        tokenizer, held_out = load_tokenizer(self.model), self.recipe.held_out_rows
        synthesize(target, tokenizer, data, synthesis, stops, held_out, self.say)
        del target
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _cached(
        self,
        target: TrainingTarget,
        draft: DraftConfig,
        rows: TokenRows,
        held_out: TokenRows | None,
    ) -> Mapping[str, Features] | None:
        if self.recipe.features == "fresh":
            return None
        training = self.recipe.training
        batch = max(1, training.seqs_per_step // (self.world.size * training.accumulate))
        return {
            split: cache_features(
                target,
                draft.target_layer_ids,
                part,
                split,
                self.out / "features",
                batch,
                self.world,
                self.say,
            )
            for split, part in (("train", rows), ("held_out", held_out))
            if part is not None
        }

    def _say_what_is_measured(self, held_out: TokenRows | None) -> None:
        count = held_out.num_rows if held_out is not None else 0
        least = self.recipe.training.seqs_per_step
        if count < least:
            self.say(f"nothing is measured on {count} held-out rows: a measure takes {least}")

    def _write_recipe(self, draft: DraftConfig) -> None:
        """The recipe that the run follows, what was chosen for the target included."""
        chosen = {name: getattr(draft, name) for name in DRAFT_KEYS}
        whole = dataclasses.replace(self.recipe, draft=chosen)
        (self.out / RECIPE).write_text(to_toml(whole), encoding="utf-8")


def draft_config(model: Path, target: Mapping[str, Any], changes: dict[str, Any]) -> DraftConfig:
    """The draft's shape for the target in `model`, with a mask token chosen if it needs one.

    `target` is the target's config with all its defaults.

    Raises:
        ValueError: a value does not fit the target; the message names the recipe's key.
    """
    if changes.get("mask_token_id") is None and changes.get("algorithm") != "eagle3":
        stops = generation_stop_ids(model)
        changes = {**changes, "mask_token_id": choose_mask(load_tokenizer(model), stops)}
    try:
        return DraftConfig.for_target(target, **changes)
    except ValueError as problem:
        raise ValueError(f"draft.{problem}") from None


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


def _silent(_: str) -> None:
    """What the processes say that do not lead."""

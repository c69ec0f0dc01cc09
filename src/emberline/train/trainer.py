"""The training loop: batches, losses, optimisers, checkpoints, metrics.

Everything random in a step is drawn from a generator seeded by (seed, step), and the order of the
rows by (seed, epoch): an interrupted run that resumes from its checkpoint makes the same draws.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.train.backbone import DraftModel
from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import TokenRows
from emberline.train.features import Batch, GraphedFeatures, make_batch, tap_scale
from emberline.train.metrics import BlockStats, block_stats
from emberline.train.objectives import (
    Mix,
    Rule,
    confidence_loss,
    fused_loss,
    loss_and_gradient,
    position_weights,
)
from emberline.train.optim import make_optimisers, rate_at
from emberline.train.target import FrozenTarget

CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
HELD_OUT_BATCHES = 8
Report = Callable[[dict[str, Any]], None]


class Trainer:
    """One run in one folder.

    Args:
        target: the frozen target.
        draft: the draft's shape.
        config: steps, batch, losses, rates.
        train_rows, held_out: token rows, on any device.
        folder: where checkpoint and metrics are kept; a checkpoint found there is resumed.
        compiled: compile backbone and loss (CUDA; fixed shapes).
    """

    def __init__(
        self,
        target: FrozenTarget,
        draft: DraftConfig,
        config: TrainConfig,
        train_rows: TokenRows,
        held_out: TokenRows | None,
        folder: Path,
        compiled: bool = False,
    ) -> None:
        if train_rows.num_rows < config.seqs_per_step:
            raise ValueError(
                f"{train_rows.num_rows} training rows; a step needs {config.seqs_per_step}"
            )
        self.target, self.draft, self.config, self.folder = target, draft, config, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows = train_rows.to(target.device)
        self.held_out = held_out.to(target.device) if held_out is not None else None
        self.model = DraftModel(draft)
        self.model.initialise(target.embedding.cpu(), config.seed)
        self.model.to(target.device)
        self.optimisers = make_optimisers(self.model, config.optim)
        self.forward: Callable[..., Tensor] = self.model
        self.rule: Rule = loss_and_gradient
        if compiled:
            self.forward = torch.compile(self.model, dynamic=False)
        if target.device.type == "cuda":
            from emberline.train import kernels

            self.rule = kernels.loss_rows
        self.features: GraphedFeatures | None = None
        if compiled and target.device.type == "cuda":
            shape = torch.Size((config.seqs_per_step, self.rows.tokens.shape[1]))
            self.features = GraphedFeatures(target, draft.target_layer_ids, shape)
        self.angles = self.model.angles(self.rows.tokens.shape[1] + draft.block_size)
        self.step = 0
        self._order: tuple[int, Tensor] | None = None
        if not self._resume():
            self.model.tap_scale.copy_(tap_scale(self.rows, target, draft, config.seqs_per_step))
            (self.folder / METRICS).unlink(missing_ok=True)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every row once."""
        return self.rows.num_rows // self.config.seqs_per_step

    def run(self, report: Report | None = None, until: int | None = None) -> None:
        """Train up to `config.steps`, or up to step `until`, saving on the way and at the end.

        Args:
            report: called with each line of the metrics.
            until: stop here (the schedule still spans `config.steps`).
        """
        config = self.config
        last = min(until or config.steps, config.steps)
        stats: BlockStats | None = None
        started, first = time.perf_counter(), self.step
        while self.step < last:
            batch_stats = self.train_step()
            stats = batch_stats if stats is None else stats + batch_stats
            if self.step % config.log_every == 0 or self.step == last:
                line = self._progress(started, first) | stats.summary()
                stats = None
                self._write({"split": "train", **line}, report)
            if self.step % config.eval_every == 0 or self.step == last:
                found = self.evaluate()
                if found is not None:
                    self._write({"split": "held_out", "step": self.step, **found}, report)
            if self.step % config.save_every == 0 or self.step == last:
                self.save()

    def train_step(self) -> BlockStats:
        """One update of the weights."""
        config = self.config
        factor = rate_at(self.step, config.steps, config.optim.warmup)
        rates = (config.optim.muon_lr, config.optim.adam_lr)
        for optimiser, rate in zip(self.optimisers, rates, strict=True):
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
        rows = self._rows_of(self.step)
        batch = self._batch(rows, self._generator(self.step))
        loss, stats = self.losses(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        return stats

    def losses(self, batch: Batch) -> tuple[Tensor, BlockStats]:
        """Total loss of a batch, and what was measured on the way."""
        blocks, model, mix = batch.blocks, self.model, self.config.loss
        half = self.target.device.type == "cuda"
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=half):
            hidden = self.forward(
                batch.taps, batch.embedded, blocks.positions, self.angles, batch.mask
            )
            valid = blocks.valid.flatten(0, 1)  # [N, K]
            hidden = hidden.view(*valid.shape, -1)
            embedded = model.embed_previous(blocks.previous.view_as(valid))
            latent = w2 = None
            if model.markov_head is not None and embedded is not None:
                latent = model.markov_head.latent(hidden, embedded).flatten(0, 1)
                w2 = model.markov_head.markov_w2.weight
            confidence = None
            if model.confidence_head is not None:
                confidence = model.confidence_head(hidden, embedded).flatten()
        weights = position_weights(valid, mix.decay).flatten()
        loss, ce, l1, agree, _ = fused_loss(
            hidden.flatten(0, 1),
            latent,
            w2,
            self.target.head,
            batch.target_hidden,
            blocks.labels.flatten(),
            weights,
            Mix(mix.ce, mix.l1),
            mix.chunk_rows,
            self.rule,
        )
        bce = torch.zeros((), device=loss.device)
        if confidence is not None:
            bce = confidence_loss(confidence, l1, weights)
            loss = loss + mix.confidence * bce
        return loss, block_stats(ce, l1, agree, valid, confidence, bce)

    def evaluate(self) -> dict[str, Any] | None:
        """Measure held-out rows, always the same blocks. None without held-out rows."""
        # Gradients stay enabled, though none is asked for: the mode is part of what a compiled
        # backbone was compiled for.
        size = self.config.seqs_per_step
        if self.held_out is None or self.held_out.num_rows < size:
            return None
        total: BlockStats | None = None
        for index in range(min(HELD_OUT_BATCHES, self.held_out.num_rows // size)):
            part = slice(index * size, (index + 1) * size)
            rows = TokenRows(self.held_out.tokens[part], self.held_out.roles[part])
            generator = self._generator(-1 - index)
            batch = self._batch(rows, generator)
            _, stats = self.losses(batch)
            total = stats if total is None else total + stats
        return total.summary() if total is not None else None

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "draft": self.draft.to_json(),
            "config": asdict(self.config),
        }
        partial = self.folder / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        partial.replace(self.folder / CHECKPOINT)

    def _resume(self) -> bool:
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.target.device, weights_only=True)
        if state["draft"] != self.draft.to_json():
            raise ValueError(f"{path}: belongs to a draft of another shape")
        if state["config"]["seed"] != self.config.seed:
            raise ValueError(f"{path}: was made with seed {state['config']['seed']}")
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step = int(state["step"])
        metrics = self.folder / METRICS
        if metrics.is_file():
            lines = metrics.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= self.step]
            metrics.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        return True

    def _rows_of(self, step: int) -> TokenRows:
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.config.seed * 7_919 + epoch)
            order = torch.randperm(self.rows.num_rows, generator=generator)
            self._order = (epoch, order.to(self.target.device))
        size = self.config.seqs_per_step
        chosen = self._order[1][index * size : (index + 1) * size]
        return TokenRows(self.rows.tokens[chosen], self.rows.roles[chosen])

    def _batch(self, rows: TokenRows, generator: torch.Generator) -> Batch:
        return make_batch(rows, self.target, self.draft, self.config, generator, self.features)

    def _generator(self, step: int) -> torch.Generator:
        generator = torch.Generator(self.target.device)
        return generator.manual_seed((self.config.seed * 1_000_003 + step) % 2**63)

    def _progress(self, started: float, first: int) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        config = self.config
        rate = (self.step - first) / seconds
        slots = config.seqs_per_step * config.anchors * self.draft.block_size
        return {
            "step": self.step,
            "epoch": round(self.step / self.steps_per_epoch, 3),
            "lr_factor": rate_at(self.step, config.steps, config.optim.warmup),
            "seconds": round(seconds, 1),
            "steps_per_second": round(rate, 3),
            "slots_per_second": round(rate * slots),
        }

    def _write(self, line: dict[str, Any], report: Report | None) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if report is not None:
            report(line)

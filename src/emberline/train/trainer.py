"""The training loop: steps, optimisers, checkpoints, metrics.

Everything random in a step is drawn from a generator seeded by (seed, step), and the order of the
rows by (seed, epoch): an interrupted run that resumes from its checkpoint makes the same draws, and
so does a run on several processes or in several parts a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.train.checkpoint import (
    CHECKPOINT,
    Origin,
    check_same,
    read_checkpoint,
    rows_digest,
    save_checkpoint,
)
from emberline.train.config import SCHEDULED, DraftConfig, TrainConfig
from emberline.train.dataset import TokenRows
from emberline.train.ema import WeightAverage
from emberline.train.features import (
    Features,
    GraphedFeatures,
    Plan,
    fresh_features,
    make_batch,
    plan_step,
    tap_scale,
)
from emberline.train.frozen import TrainingTarget
from emberline.train.metrics import BlockStats
from emberline.train.model import build_model
from emberline.train.objective import Objective
from emberline.train.optim import make_optimisers, rate_at
from emberline.train.parallel import World, unsynchronised
from emberline.train.preflight import check_rows
from emberline.train.run_log import Report, RunLog
from emberline.train.schedule import value_at

__all__ = ["CHECKPOINT", "Trainer"]

HELD_OUT_BATCHES = 8
NEVER = 2**62  # a step that is not reached


class Trainer:
    """One run in one folder.

    Args:
        target: the frozen target.
        draft: the draft's shape.
        config: steps, batch, losses, rates.
        train_rows, held_out: token rows, on any device.
        folder: where checkpoint and metrics are kept; a checkpoint found there is resumed.
        compiled: compile the backbone and capture the target (CUDA; fixed shapes).
        world: the processes that share the work; each makes its own Trainer.
        features: by split ("train", "held_out"), where they do not come from the target.
        tensorboard: write TensorBoard's events too.
        target_digest: of the target's files; a checkpoint with another one is refused.

    Raises:
        ValueError: the rows do not do, or the checkpoint is of another run.
    """

    def __init__(
        self,
        target: TrainingTarget,
        draft: DraftConfig,
        config: TrainConfig,
        train_rows: TokenRows,
        held_out: TokenRows | None,
        folder: Path,
        compiled: bool = False,
        *,
        world: World | None = None,
        features: Mapping[str, Features] | None = None,
        tensorboard: bool = False,
        target_digest: str | None = None,
    ) -> None:
        check_rows(train_rows, draft, config, "train")
        self.origin: Origin = {"rows": rows_digest(train_rows)}
        if target_digest is not None:
            self.origin = {**self.origin, "target": target_digest}
        self.target, self.draft, self.config, self.folder = target, draft, config, Path(folder)
        self.world = world or World()
        self.shares = self.world.shares(config.seqs_per_step, config.accumulate)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows = train_rows.to(target.device)
        self.held_out = held_out.to(target.device) if held_out is not None else None
        self.model = build_model(draft)
        self.model.initialise(target.embedding.cpu(), config.seed)
        self.model.to(target.device)
        self.optimisers = make_optimisers(self.model, config.optim)
        self.average: WeightAverage | None = None
        if config.optim.ema:
            self.average = WeightAverage(self.model, config.optim.ema)
        self.step = 0
        self._broke_at = torch.tensor(NEVER, device=target.device)
        self._order: tuple[int, Tensor] | None = None
        self._read_checkpoint()
        per_share = config.seqs_per_step // (self.world.size * config.accumulate)
        if not self.step:
            self.model.tap_scale.copy_(tap_scale(self.rows, target, draft, per_share))
            if not bool(self.model.tap_scale.isfinite().all()):
                raise ValueError("the target's states are not finite: its weights are damaged")
        self.features = features or self._own_features(per_share, compiled)
        self.objective = Objective(
            self.model,
            target.head,
            target.logit_cap,
            config.loss,
            self.model.angles(self.rows.tokens.shape[1] + draft.block_size),
            bfloat16=_in_bfloat16(config, target.device),
            compiled=compiled,
        )
        self.wrapped = self.world.wrap(self.objective)
        self.log = RunLog(self.folder, self.step, tensorboard) if self.world.leads else None

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every row once."""
        return self.rows.num_rows // self.config.seqs_per_step

    @property
    def progress(self) -> float:
        """How much of the run is done before the next step, 0 .. 1."""
        return self.step / self.config.steps

    def run(self, report: Report | None = None, until: int | None = None) -> None:
        """Train up to `config.steps`, or up to step `until`, saving on the way and at the end.

        Args:
            report: called with each line of the metrics, in the process that leads.
            until: stop here (the schedules still span `config.steps`).

        Raises:
            ValueError: a loss or gradient was not finite. The last checkpoint stays.
        """
        config = self.config
        last = min(until or config.steps, config.steps)
        stats: BlockStats | None = None
        started, first = time.perf_counter(), self.step
        while self.step < last:
            step_stats = self.train_step()
            stats = step_stats if stats is None else stats + step_stats
            if self.step == last or any(
                self.step % every == 0
                for every in (config.log_every, config.eval_every, config.save_every)
            ):
                self._check_finite()
            if self.step % config.log_every == 0 or self.step == last:
                line = self._state(started, first) | self._summary(stats)
                stats = None
                self._write({"split": "train", **line}, report)
            if self.step % config.eval_every == 0 or self.step == last:
                found = self.evaluate()
                if found is not None:
                    self._write({"split": "held_out", "step": self.step, **found}, report)
            if self.step % config.save_every == 0 or self.step == last:
                self.save()

    def train_step(self) -> BlockStats:
        """One update of the weights. What was measured is of this process's rows."""
        config = self.config
        factor = rate_at(self.step, config.steps, config.optim.warmup)
        rates = (config.optim.muon_lr, config.optim.adam_lr)
        for optimiser, rate in zip(self.optimisers, rates, strict=True):
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
        index = self._rows_of(self.step)
        plan = plan_step(self.rows, index, self.draft, config, self._generator(self.step))
        stats = self._backward(plan)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip)
        # Noted on the device: asking for it at every step would make the host wait.
        broke = ~(norm.isfinite() & stats.loss.isfinite().all())
        self._broke_at = torch.where(broke, self._broke_at.clamp(max=self.step + 1), self._broke_at)
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        if self.average is not None:
            self.average.update(self.step)
        return stats

    def _backward(self, plan: Plan) -> BlockStats:
        """Gradients of this process's shares, summed over them and over the processes."""
        total: BlockStats | None = None
        for number, share in enumerate(self.shares, start=1):
            is_last = number == len(self.shares)
            with nullcontext() if is_last else unsynchronised(self.wrapped):
                batch = make_batch(
                    plan.part(share), self.target, self.draft, self.features["train"]
                )
                loss, stats = self.wrapped(batch, self.progress)
                # Gradients are averaged over the processes; the losses of their rows add up.
                (loss * self.world.size).backward()
            total = stats if total is None else total + stats
        assert total is not None
        return total

    def _check_finite(self) -> None:
        """Stop before anything is written that came from numbers which are none."""
        step = int(self.world.least(self._broke_at))
        weights = torch.stack(
            [weight.detach().isfinite().all() for weight in self.model.parameters()]
        )
        if step == NEVER and bool(weights.all()):
            return
        kept = read_checkpoint(self.folder, "meta")
        where = f"the checkpoint of step {kept['step']} stays" if kept else "nothing was saved"
        raise ValueError(
            f"step {min(step, self.step)}: the loss or its gradients are not finite any more; "
            f"{where}: lower optim.muon_lr and optim.adam_lr, or raise optim.warmup, and run it "
            "again"
        )

    def evaluate(self) -> dict[str, Any] | None:
        """Measure held-out rows, always the same blocks. None without held-out rows.

        With a moving average of the weights it is the average that is measured.
        """
        # Gradients stay enabled, though none is asked for: the mode is part of what a compiled
        # backbone was compiled for. The objective is not the wrapped one, which would wait for
        # a backward pass.
        size = self.config.seqs_per_step
        if self.held_out is None or self.held_out.num_rows < size:
            return None
        total: BlockStats | None = None
        with self.average.in_place() if self.average is not None else nullcontext():
            for number in range(min(HELD_OUT_BATCHES, self.held_out.num_rows // size)):
                index = torch.arange(number * size, (number + 1) * size, device=self.target.device)
                generator = self._generator(-1 - number)
                plan = plan_step(self.held_out, index, self.draft, self.config, generator)
                for share in self.shares:
                    part = plan.part(share)
                    batch = make_batch(part, self.target, self.draft, self.features["held_out"])
                    _, stats = self.objective(batch, self.progress)
                    total = stats if total is None else total + stats
        return self._summary(total) if total is not None else None

    def save(self) -> None:
        """Write the checkpoint, whole or not at all.

        `model` is what is exported: the average of the weights where one is kept, and then the
        weights themselves are under `weights`.
        """
        if not self.world.leads:
            return
        state: dict[str, Any] = {
            "step": self.step,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "draft": self.draft.to_json(),
            "config": asdict(self.config),
            "origin": dict(self.origin),
        }
        if self.average is None:
            state["model"] = self.model.state_dict()
        else:
            state["weights"] = self.model.state_dict()
            with self.average.in_place():
                state["model"] = {n: t.clone() for n, t in self.model.state_dict().items()}
        save_checkpoint(self.folder, state)

    def _read_checkpoint(self) -> None:
        state = read_checkpoint(self.folder, self.target.device)
        if state is None:
            return
        check_same(self.folder, state, self.draft, self.config, self.origin)
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load([tensor.detach() for tensor in self.model.parameters()])
            self.model.load_state_dict(state["weights"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step = int(state["step"])

    def _own_features(self, per_share: int, compiled: bool) -> dict[str, Features]:
        taps = self.draft.target_layer_ids
        if compiled and self.target.captures and self.target.device.type == "cuda":
            shape = torch.Size((per_share, self.rows.tokens.shape[1]))
            graphed = GraphedFeatures(self.target, taps, shape)
            return {"train": graphed, "held_out": graphed}
        fresh = fresh_features(self.target, taps)
        return {"train": fresh, "held_out": fresh}

    def _rows_of(self, step: int) -> Tensor:
        """The rows of a step, [S] int64."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.config.seed * 7_919 + epoch)
            order = torch.randperm(self.rows.num_rows, generator=generator)
            self._order = (epoch, order.to(self.target.device))
        size = self.config.seqs_per_step
        return self._order[1][number * size : (number + 1) * size]

    def _generator(self, step: int) -> torch.Generator:
        generator = torch.Generator(self.target.device)
        return generator.manual_seed((self.config.seed * 1_000_003 + step) % 2**63)

    def _summary(self, stats: BlockStats) -> dict[str, Any]:
        return stats.like(self.world.sum(stats.flat())).summary()

    def _state(self, started: float, first: int) -> dict[str, Any]:
        """Where the run is and how fast: step, rates, weights of the terms."""
        config = self.config
        rate = (self.step - first) / (time.perf_counter() - started)
        slots = config.seqs_per_step * config.anchors * self.draft.block_size
        last = self.step - 1  # rates and weights are those of the last step
        earlier = self.log.seconds if self.log is not None else 0.0
        factor = rate_at(last, config.steps, config.optim.warmup)
        weights = {
            f"{name}_weight": value_at(getattr(config.loss, name), last / config.steps)
            for name in SCHEDULED
        }
        return {
            "step": self.step,
            "epoch": round(self.step / self.steps_per_epoch, 3),
            "muon_lr": config.optim.muon_lr * factor,
            "adam_lr": config.optim.adam_lr * factor,
            **weights,
            "seconds": round(earlier + time.perf_counter() - started, 1),
            "steps_per_second": round(rate, 3),
            "slots_per_second": round(rate * slots),
        }

    def _write(self, line: dict[str, Any], report: Report | None) -> None:
        if self.log is not None:
            self.log.write(line)
            if report is not None:
                report(line)


def _in_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    """Whether the draft computes in bfloat16."""
    if config.precision == "auto":
        return device.type == "cuda"
    return config.precision == "bfloat16"

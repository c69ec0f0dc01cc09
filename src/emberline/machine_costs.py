"""Step costs of this machine: measured once for a model, its draft and settings, then kept.

Owns what the costs depend on, the cache's files and what is said of it. Must not know how a step
is measured or what its costs are for.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from emberline.config import usable_cores
from emberline.engine.engine import Engine
from emberline.engine.profile import Grid, Report, plan_grid, profile_steps
from emberline.hub import cache_home
from emberline.models.weights import ModelError
from emberline.verify.cost_files import load_profile, save_profile
from emberline.verify.cost_profile import CostProfile, MeasuredOn
from emberline.verify.step_cost import StepCosts

HEAD_BYTES = 2**20  # more than any config.json


def costs_for(
    engine: Engine, model: Path, draft: Path | None, *, progress: bool = True
) -> StepCosts:
    """The engine's step costs: those kept from an earlier start, or measured now and kept.

    A file that cannot be read is measured anew. A cache that cannot be written to is said, and is
    no failure. `emberline profile` measures again whatever is kept: after a start on a busy
    machine, for what was slow then stays slow in the table.

    Args:
        engine: one without requests.
        model: folder of its target.
        draft: folder of its draft checkpoint; None where there is none.
        progress: show a bar while measuring, and say in a line where the costs come from; both on
            standard error.

    Raises:
        ValueError: the engine has no room for a step to measure.
        RuntimeError: the engine has requests.
    """
    console = Console(stderr=True, quiet=not progress, highlight=False, soft_wrap=True)
    grid = plan_grid(engine.parts, engine.pool, engine.config.scheduler)
    facts = measured_on(engine, grid, model, draft)
    path = cache_file(facts)
    kept = _kept(path, facts)
    if kept is not None:
        console.print(f"Step costs: from {path}", markup=False)
        return kept.costs
    console.print("Measuring the costs of this machine's steps, once", markup=False)
    began = time.monotonic()
    profile = measure(engine, model, draft, progress=progress)
    took = f"Step costs: measured in {time.monotonic() - began:.1f} s"
    console.print(f"{took}, {keep(profile)}", markup=False)
    return profile.costs


def report_given(
    engine: Engine, file: Path, model: Path, draft: Path | None, *, progress: bool = True
) -> None:
    """Say that an engine's step costs are a given file's, and what it was measured on instead.

    Args: as `costs_for`; `file` has been read for the engine.
    """
    console = Console(stderr=True, quiet=not progress, highlight=False, soft_wrap=True)
    console.print(f"Step costs: from {file}", markup=False)
    try:
        theirs = load_profile(file).measured_on
        grid = plan_grid(engine.parts, engine.pool, engine.config.scheduler)
    except (ModelError, ValueError):  # another engine's file; no room for what is measured
        return
    others = differences(theirs, measured_on(engine, grid, model, draft))
    if others:
        console.print(
            f"Warning: {file} was measured with {', '.join(others)}: plans may be poor; measure "
            "here with `emberline profile`",
            markup=False,
        )


def differences(theirs: MeasuredOn, ours: MeasuredOn) -> list[str]:
    """What makes costs another engine's, each as "name value, not value"."""
    names = ("model", "draft", "dtype", "device", "processor", "num_cores", "threads", "layout")
    return [
        f"{name.replace('num_', '')} {getattr(theirs, name)}, not {getattr(ours, name)}"
        for name in names
        if getattr(theirs, name) != getattr(ours, name)
    ]


def measure(
    engine: Engine, model: Path, draft: Path | None, *, progress: bool = True
) -> CostProfile:
    """Measure an engine's step costs, whatever is kept of them. Raises as `costs_for` does."""
    if engine.has_work:
        raise RuntimeError("the engine has requests: measure its steps before it gets any")
    grid = plan_grid(engine.parts, engine.pool, engine.config.scheduler)
    with _bar(progress) as report:
        runner = engine.runner
        if runner is not None:  # these files load Triton
            from emberline.engine.device_profile import profile_device_steps
            from emberline.engine.device_runner import DeviceRunner

            assert isinstance(runner, DeviceRunner)
            costs = profile_device_steps(runner, engine.pool, engine.parts.kv_pools, report=report)
        else:
            costs = profile_steps(engine.parts, engine.pool, grid, report=report)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return CostProfile(costs, measured_on(engine, grid, model, draft), date)


def keep(profile: CostProfile) -> str:
    """Keep a profile for later starts; says where, or why not."""
    path = cache_file(profile.measured_on)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(path, profile)
    except OSError as error:
        reason = error.strerror or error
        return f"not kept: {path.parent} cannot be written ({reason}); set EMBERLINE_HOME"
    return f"kept in {path}"


def cache_file(facts: MeasuredOn) -> Path:
    """Where costs measured on this are kept."""
    digest = hashlib.sha256(json.dumps(asdict(facts), sort_keys=True).encode()).hexdigest()[:12]
    gpu = f" {facts.dtype} {facts.processor}" if facts.device == "cuda" else ""
    name = re.sub(r"[^\w.-]+", "-", facts.model + gpu)
    return cache_home() / "step-costs" / f"{name}-{digest}.json"


def measured_on(engine: Engine, grid: Grid, model: Path, draft: Path | None) -> MeasuredOn:
    """What the costs of an engine's steps depend on."""
    parts, device = engine.parts, engine.parts.history.device
    drafter = None if parts.drafter is None else type(parts.drafter).__name__
    return MeasuredOn(
        model=_shape_of(model, _target_name(engine, model)),
        draft=drafter if drafter is None or draft is None else _shape_of(draft, draft.name),
        dtype=str(engine.info.get("dtype", engine.config.dtype)),
        device=device.type,
        processor=_processor(device),
        num_cores=usable_cores(),
        threads=torch.get_num_threads(),
        layout=parts.layout,
        max_num_reqs=engine.config.scheduler.max_num_reqs,
        max_draft_tokens=grid.depths[-1],
        context_length=grid.context_length,
        torch=torch.__version__,
        emberline=version("emberline"),
    )


def _kept(path: Path, facts: MeasuredOn) -> CostProfile | None:
    try:
        profile = load_profile(path)
    except ModelError:  # absent, damaged, or of another version of the format
        return None
    return profile if profile.measured_on == facts else None


def _target_name(engine: Engine, model: Path) -> str:
    """The target's name, and what runs it where that is not the device's usual path."""
    name = str(engine.info.get("model") or model.name)
    if engine.config.batch_invariant and engine.config.device != "cpu":
        name = f"{name}, fixed order"
    return f"{name}, stock" if engine.info.get("target_backend") == "stock" else name


def _shape_of(path: Path, name: str) -> str:
    """A model's name and a digest of its config: what a step computes, not with which weights.

    A draft in one file has its config at the head of it.
    """
    with (path if path.is_file() else path / "config.json").open("rb") as file:
        digest = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()[:8]
    return f"{name} ({digest})"


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


@contextmanager
def _bar(show: bool) -> Iterator[Report]:
    """A bar on a terminal; nothing in a log."""
    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), TimeElapsedColumn())
    hidden = not (show and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("Measuring step costs", total=1.0)
        yield lambda share: progress.update(task, completed=share)

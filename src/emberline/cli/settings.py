"""Engine settings from options, and errors that a user can put right."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import typer

from emberline.config import (
    CacheConfig,
    DtypeName,
    EngineConfig,
    GrammarBackend,
    LayoutKind,
    PlannerName,
    SchedulerConfig,
    SlotRule,
    SpeculationConfig,
    TargetBackend,
)
from emberline.types import InvalidRequest

DrafterName = Literal["auto", "ngram", "none"]
OPTIONS = {
    "num_tokens": "--kv-tokens",
    "max_model_len": "--max-model-len",
    "max_num_reqs": "--max-num-reqs",
    "max_queue": "--max-queue",
    "num_draft_tokens": "--num-draft-tokens",
    "threads": "--threads",
    "threshold": "--threshold",
    "target_backend": "--target-backend",
    "device": "--device",
    "gpu_memory": "--gpu-memory",
}
"""What settings that users can give are called on the command line."""
PICTURES = (".png", ".svg", ".pdf", ".jpg")


def fail(message: str) -> NoReturn:
    """One line on standard error, exit code 2."""
    typer.echo(f"emberline: {message}", err=True)
    raise typer.Exit(2)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what the user can put right into one line: a model's files, a request's values."""
    try:
        yield
    except InvalidRequest as problem:
        fail(_one_line(problem))
    except Exception as problem:
        from emberline.models.weights import ModelError  # torch comes with it

        if isinstance(problem, ModelError):
            fail(_by_option(_one_line(problem)))
        raise


def check_outputs(plot: Path | None, **files: Path | None) -> None:
    """End the program now for what could not be written once the measuring is done.

    Args:
        plot: a picture, given as --plot.
        files: other files, by the name of their option.
    """
    for name, path in (*files.items(), ("plot", plot)):
        if path is None:
            continue
        option = f"--{name.replace('_', '-')} {path}"
        if path.is_dir():
            fail(f"{option}: is a folder: give a file in it")
        if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
            fail(f"{option}: its folder is missing or not writable: give another path")
    if plot is not None and plot.suffix.lower() not in PICTURES:
        fail(f"--plot {plot}: the suffix must be one of {', '.join(PICTURES)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        fail('--plot needs matplotlib: pip install "emberline[plot]"')
    given = [path.resolve() for path in (*files.values(), plot) if path is not None]
    if len(set(given)) < len(given):
        fail("two outputs have the same path: give each a file of its own")


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())


def _by_option(message: str) -> str:
    """A message about a setting, with the option's name where it begins with the setting's."""
    setting, space, rest = message.partition(" ")
    return OPTIONS.get(setting, setting) + space + rest


def engine_config(
    *,
    draft: str | None,
    dtype: DtypeName,
    max_model_len: int | None,
    kv_tokens: int | None,
    max_num_reqs: int | None = None,
    max_queue: int | None = None,
    threads: int | None = None,
    layout: LayoutKind = "compact",
    planner: PlannerName = "auto",
    threshold: float | None = None,
    calibration: str | None = None,
    step_costs: str | None = None,
    prefix_cache: bool = True,
    num_draft_tokens: int | None = None,
    draft_slot_rule: SlotRule | None = None,
    drafter: DrafterName = "auto",
    no_draft: bool = False,
    grammar_backend: GrammarBackend = "llguidance",
    target_backend: TargetBackend = "auto",
    device: str = "auto",
    gpu_memory: float | None = None,
    batch_invariant: bool = False,
    overlap: bool = True,
) -> EngineConfig:
    """The engine's settings; None keeps a default. Ends the program for what cannot be."""

    def given(**options: Any) -> dict[str, Any]:
        return {name: value for name, value in options.items() if value is not None}

    if no_draft:
        for option, contradicts in (
            ("--draft", draft not in (None, "none")),
            ("--drafter", drafter not in ("auto", "none")),
            ("--num-draft-tokens", num_draft_tokens is not None),
        ):
            if contradicts:
                fail(f"--no-draft and {option} contradict each other: give one")
    without = no_draft or drafter == "none" or (draft == "none" and drafter == "auto")
    if without and num_draft_tokens is not None:
        fail("--num-draft-tokens needs a drafter: leave it out, or the option that says none")
    if draft_slot_rule is not None and (without or drafter == "ngram"):
        fail("--draft-slot-rule is of a draft checkpoint's block: leave it out without one")
    if calibration not in (None, "none") and (without or drafter == "ngram"):
        fail("--calibration is of a draft checkpoint's confidences: leave it out without one")
    if step_costs is not None and without:
        fail("--step-costs plans drafts: leave it out without a drafter")
    if planner not in ("auto", "verify_all") and without:
        fail(f"--planner {planner} plans drafts: leave it out without a drafter")
    if threshold is not None and planner != "threshold":
        fail("--threshold needs --planner threshold")
    if step_costs is not None and planner in ("verify_all", "threshold"):
        fail(f"--planner {planner} reads no --step-costs: leave one out")
    if draft not in (None, "none") and drafter != "auto":
        fail(f"--draft names a checkpoint, --drafter {drafter} uses none: give one")
    try:
        return EngineConfig(
            dtype=dtype,
            device=device,
            batch_invariant=batch_invariant,
            overlap=overlap,
            threads=threads,
            grammar_backend=grammar_backend,
            target_backend=target_backend,
            cache=CacheConfig(
                prefix_cache=prefix_cache, **given(num_tokens=kv_tokens, gpu_memory=gpu_memory)
            ),
            scheduler=SchedulerConfig(
                **given(max_num_reqs=max_num_reqs, max_queue=max_queue, max_model_len=max_model_len)
            ),
            speculation=SpeculationConfig(
                drafter="none" if without else drafter,
                layout=layout,
                planner=planner,
                calibration=calibration,
                step_costs=step_costs,
                draft_slot_rule=draft_slot_rule,
                **given(threshold=threshold, num_draft_tokens=num_draft_tokens),
            ),
        )
    except ValueError as problem:
        fail(_by_option(_one_line(problem)))

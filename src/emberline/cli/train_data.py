"""`emberline train synthesize`: training rows that the target writes itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from emberline.cli.settings import engine_config, fail, one_line_errors
from emberline.config import CacheConfig, DtypeName, EngineConfig

if TYPE_CHECKING:
    from emberline.hub import ModelFolder
    from emberline.train.config import SynthesisConfig
    from emberline.train.regenerate import Advance
    from emberline.train.selection import Selection

Sampler = Literal["auto", "engine", "lockstep"]
DEFAULT_HELD_OUT = 1024  # of the lockstep sampler, whose rows are as many as wanted
BATCHES_A_ROUND = 16
"""Dialogues of a round over those that run together: at its end the batch runs empty."""


def synthesize(
    out: Annotated[Path, typer.Argument(help="Folder of the rows; what is there is kept.")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file or Hugging Face id; the embedded model if absent."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines of turns, messages or prompt; self-written if absent."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of the file.")] = None,
    sampler: Annotated[
        Sampler,
        typer.Option(help="engine, or lockstep: faster on a GPU, self-written prompts alone."),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: lockstep on a GPU if there is one, else cpu.")
    ] = "auto",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of self-written prompts; 8 if absent.")
    ] = None,
    sample_batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a round, which is saved as a whole.")
    ] = None,
    seq_len: Annotated[int, typer.Option(min=16, help="Tokens of a row.")] = 512,
    min_answer: Annotated[int, typer.Option(min=1, help="Least tokens of an answer.")] = 4,
    max_answer: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer; the row's if absent.")
    ] = None,
    same_tokens: Annotated[
        int, typer.Option(min=1, help="Answers that begin with so many same tokens are the same.")
    ] = 24,
    held_out: Annotated[
        int | None, typer.Option(min=0, help="Rows kept aside; a twentieth, or 1024, if absent.")
    ] = None,
    max_num_reqs: Annotated[
        int | None, typer.Option(min=1, help="Dialogues that run together; 32, on a GPU 256.")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Weights, KV and computation.")] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of the CPU's kernels; all cores but one if absent."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, answers and the split.")] = 0,
) -> None:
    """Write training rows: a target's own answers to given or self-written prompts."""
    with one_line_errors():
        from emberline.hub import resolve_model
        from emberline.models.weights import read_json
        from emberline.train.config import SynthesisConfig
        from emberline.train.preflight import check_folder, read_device
        from emberline.train.selection import Selection
        from emberline.train.target import is_fast

        if prompts is None and limit is not None:
            fail("--limit is of a file's prompts: give --prompts, or --rounds and --sample-batch")
        if prompts is not None and rounds is not None:
            fail("--rounds is of self-written prompts: a file's are all asked, or --limit of them")
        try:
            on_gpu = read_device(device).type == "cuda"
            check_folder(out)
        except ValueError as problem:
            fail(str(problem))
        folder = resolve_model(model)
        if sampler == "auto":
            can = on_gpu and prompts is None and is_fast(read_json(folder.path / "config.json"))
            sampler = "lockstep" if can else "engine"
        if device == "auto":
            device = "cuda" if on_gpu and sampler == "lockstep" else "cpu"
        together = max_num_reqs or (32 if device == "cpu" else 256)
        try:
            config = SynthesisConfig(
                rounds or 8,
                sample_batch or (4096 if sampler == "lockstep" else BATCHES_A_ROUND * together),
                seq_len,
                seed,
            )
            selection = Selection(min_answer, same_tokens, held_out)
            if sampler == "lockstep":
                _check_lockstep(prompts, max_answer)
                _lockstep(folder, out, config, device, held_out)
                return
            settings = _engine_config(dtype, device, together, seq_len, threads)
            _engine(folder, out, config, selection, settings, max_answer, prompts, limit)
        except (ValueError, OSError) as problem:
            fail(" ".join(str(problem).split()))


def _check_lockstep(prompts: Path | None, max_answer: int | None) -> None:
    for option, given in (("--prompts", prompts), ("--max-answer", max_answer)):
        if given is not None:
            fail(f"--sampler lockstep fills rows with self-written chats: leave {option} out")


def _lockstep(
    model: ModelFolder, out: Path, config: SynthesisConfig, device: str, held_out: int | None
) -> None:
    import torch

    from emberline.hub import generation_stop_ids, load_tokenizer
    from emberline.train.preflight import check_context
    from emberline.train.synthesize import synthesize as sample
    from emberline.train.target import FrozenTarget

    check_context(model.path, config.seq_len, "--seq-len")
    target = FrozenTarget(model.path, torch.device(device))
    stops = tuple(sorted(generation_stop_ids(model.path), reverse=True))
    aside = DEFAULT_HELD_OUT if held_out is None else held_out
    tokenizer = load_tokenizer(model.path)
    sample(target, tokenizer, out, config, stops, aside, lambda line: typer.echo(line, err=True))
    typer.echo(f"rows written to {out}")


def _engine_config(
    dtype: DtypeName, device: str, together: int, seq_len: int, threads: int | None
) -> EngineConfig:
    config = engine_config(
        draft="none",
        dtype=dtype,
        max_model_len=None,
        kv_tokens=None,
        max_num_reqs=together,
        max_queue=together,
        threads=threads,
    )
    # A page more for each, since rows need not end with one.
    cache = CacheConfig(num_tokens=together * (seq_len + config.cache.page_size))
    return replace(config, device=device, cache=cache)


def _engine(
    model: ModelFolder,
    out: Path,
    config: SynthesisConfig,
    selection: Selection,
    settings: EngineConfig,
    max_answer: int | None,
    prompts: Path | None,
    limit: int | None,
) -> None:
    from emberline.engine.build import build_engine
    from emberline.hub import generation_stop_ids, load_tokenizer
    from emberline.prompts import read_conversations
    from emberline.train.preflight import check_context
    from emberline.train.regenerate import Job, check_folder, regenerate
    from emberline.train.starts import GivenPrompts, SelfWritten, Source

    tokenizer = load_tokenizer(model.path)
    stops = generation_stop_ids(model.path)
    ordered = tuple(sorted(stops, reverse=True))
    source: Source
    if prompts is None:
        source = SelfWritten(tokenizer, ordered, config)
    else:
        asked = read_conversations(prompts, limit)
        source = given = GivenPrompts(tokenizer, ordered, config, asked, selection.min_answer)
        typer.echo(
            f"{len(asked):,} prompts: {given.num_starts:,} to ask; left out: {given.num_same:,} "
            f"that were there before, {given.num_too_long:,} too long for a row of "
            f"{config.seq_len} tokens",
            err=True,
        )
    job = Job(model.name, source, config, max_answer or config.seq_len, selection)
    check_context(model.path, config.seq_len, "--seq-len")
    check_folder(out, job)
    engine = build_engine(model.path, None, settings, eos_ids=stops, name=model.name)
    if engine.max_model_len < config.seq_len:  # less than its config says
        fail(f"--seq-len {config.seq_len}: the model's context is {engine.max_model_len} tokens")
    with _progress() as advance:
        counts = regenerate(engine, tokenizer, out, job, advance)
    typer.echo(counts.summary())
    typer.echo(f"rows written to {out}")


@contextmanager
def _progress() -> Iterator[Advance]:
    """A bar of dialogues on standard error, with the target's tokens a second.

    It appears once there is one to wait for.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("sampling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeLeft(),
    )
    began = time.monotonic()
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task("", total=None, rate="")

    def advance(done: int, total: int, tokens: int) -> None:
        rate = f"{tokens / max(time.monotonic() - began, 1e-6):,.0f} tokens/s" if tokens else ""
        progress.start()
        progress.update(task, completed=done, total=total, rate=rate)

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()

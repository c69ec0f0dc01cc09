"""`emberline audit`: a server's log-probabilities, proven from outside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from emberline.cli.settings import check_outputs, fail, one_line_errors

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from emberline.audit.checks import Check
    from emberline.audit.reference import Reference
    from emberline.audit.run import Audit, Observer, Result
    from emberline.audit.settings import AuditSettings


def audit(
    url: Annotated[str, typer.Argument(help="The server, with or without /v1.")],
    reference: Annotated[
        str | None, typer.Option(help="Folder or id of the model, scored by plain transformers.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="A second server with the same model: greedy equality.")
    ] = None,
    api: Annotated[
        Literal["auto", "openai", "native"], typer.Option(help="The dialect to speak.")
    ] = "auto",
    model: Annotated[str | None, typer.Option(help="Name; the first listed if absent.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    logprobs_mode: Annotated[
        Literal["raw", "processed"] | None,
        typer.Option(help="Sent with every request; absent: what the server does unasked."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Whose noise is forgiven; auto: as the server says."),
    ] = "auto",
    tolerance: Annotated[
        float | None, typer.Option(help="Largest difference forgiven, instead of the dtype's.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Forgive nothing.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run this check; repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this out; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    prompts: Annotated[int, typer.Option(help="Prompts a check, 2 to 8.")] = 4,
    top: Annotated[int, typer.Option(help="Alternatives a token.")] = 5,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    block: Annotated[
        int | None, typer.Option(help="Most drafts a step; as the server says if absent, else 8.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Continuations of the distribution check.")] = 1024,
    seed: Annotated[int, typer.Option(help="The first of the requests' seeds.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 300.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
) -> None:
    """Check that a server's log-probabilities are what they claim to be."""
    from emberline.audit import settings as audit_settings
    from emberline.audit.run import chosen

    check_outputs(None, json=json_file)
    try:
        audit_settings.require(
            not (exact and tolerance is not None), "--exact and --tolerance: give one"
        )
        checks = chosen(only or (), skip or ())
        settings = audit_settings.AuditSettings(
            url=url,
            compare=compare,
            api=api,
            model=model,
            api_key=api_key,
            dtype=dtype,
            mode=logprobs_mode,
            tolerance=tolerance,
            exact=exact,
            num_tokens=tokens,
            num_prompts=prompts,
            concurrency=concurrency,
            block=block,
            num_samples=samples,
            num_top=top,
            seed=seed,
            timeout=timeout,
        )
        result = _run(settings, checks, None if reference is None else _load(reference))
    except audit_settings.AuditError as problem:
        fail(str(problem))
    _report(result, json_file)
    if not result.passed:
        raise typer.Exit(1)


def _load(name: str) -> Reference:
    from emberline.audit.reference import Reference
    from emberline.hub import resolve_model

    with one_line_errors():
        folder = resolve_model(name)
    return Reference.load(folder.name, folder.path)


def _run(settings: AuditSettings, checks: tuple[Check, ...], reference: Reference | None) -> Audit:
    from emberline.audit.run import audit as run_audit

    with _progress() as observer:
        return asyncio.run(run_audit(settings, observer, checks=checks, reference=reference))


def _report(result: Audit, json_file: Path | None) -> None:
    from rich.console import Console

    from emberline import __version__
    from emberline.audit.report import as_json, table

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has no edge
    console.print(table(result), highlight=False)
    if json_file is None:
        return
    when = datetime.now(UTC).isoformat(timespec="seconds")
    figures = {"tool": "emberline audit", "version": __version__, "when": when, **as_json(result)}
    try:
        text = json.dumps(figures, indent=1, ensure_ascii=False, allow_nan=False)
        json_file.write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        fail(f"--json {json_file}: {problem.strerror}")


@contextmanager
def _progress() -> Iterator[Observer]:
    """A bar of checks on standard error, and the name of the one that runs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bar(progress)


class _Bar:
    """An observer that moves a bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None  # none until the first check: errors stand alone

    def begins(self, check: Check, number: int, total: int) -> None:
        """The next check."""
        if self._task is None:
            self._task = self._progress.add_task("", total=total)
        text = f"{check.name}: {check.proves}"
        self._progress.update(self._task, completed=number, description=text)

    def ends(self, result: Result) -> None:
        """One more."""
        if self._task is not None:
            self._progress.advance(self._task)
        outcome, console = result.outcome, self._progress.console
        if outcome.findings or not console.is_terminal:  # a file shows no bar
            console.print(f"{result.check.name}: {outcome.verdict}", markup=False, highlight=False)

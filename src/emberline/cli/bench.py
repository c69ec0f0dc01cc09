"""`emberline bench serve`: load on a server, and what it gives under it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from emberline.cli.settings import check_outputs, fail

if TYPE_CHECKING:
    from rich.progress import Progress

    from emberline.bench.client import RequestRecord
    from emberline.bench.metrics import LevelSummary, TokenCounter
    from emberline.bench.session import Observer, Plan
    from emberline.bench.settings import Level, LoadSettings, RandomPrompts

NUM_REQUESTS = 64  # a level, unless something else is said

bench = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@bench.callback()
def _bench() -> None:
    """Measure a server."""


class _Command(TyperCommand):
    """Lets the levels stand apart: --concurrency 1 2 4."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join what follows an option of levels, up to the next option."""
        joined: list[str] = []
        into: int | None = None  # where in `joined` the levels are
        for word in args:
            if word in ("--concurrency", "--request-rate"):
                into = len(joined) + 1
            elif word.startswith("-"):
                into = None
            if into is not None and into < len(joined):
                joined[into] += f",{word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)


@bench.command(cls=_Command)
def serve(
    base_url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = (
        "http://127.0.0.1:8000"
    ),
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="Which of OpenAI's two.")
    ] = "chat",
    model: Annotated[str | None, typer.Option(help="Name; the one listed if absent.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="'Name: value', sent with every request; repeatable.")
    ] = None,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(help="Closed loop: requests kept in flight. 1 2 4 gives a row each."),
    ] = None,
    request_rate: Annotated[
        list[str] | None,
        typer.Option(help="Open loop: Poisson arrivals a second, or inf. 1 2 4: a row each."),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help=f"Requests a level; {NUM_REQUESTS} if absent.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds a level in which requests begin.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Requests before each level, not counted.")] = 0,
    dataset: Annotated[
        Path | None, typer.Option(help="JSONL: turns, messages or prompt a line.")
    ] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="The dataset's lines.")] = False,
    random_input_len: Annotated[
        int | None, typer.Option(help="Random prompts of this many tokens.")
    ] = None,
    random_output_len: Annotated[
        int | None, typer.Option(help="Their max_tokens; --max-tokens if absent.")
    ] = None,
    random_range_ratio: Annotated[
        float | None, typer.Option(help="r: lengths from (1 - r) to (1 + r) times the given.")
    ] = None,
    random_id_range: Annotated[
        tuple[int, int] | None, typer.Option(help="LOW HIGH: token ids are drawn from these.")
    ] = None,
    shared_prefix_len: Annotated[
        int | None, typer.Option(help="Tokens that all random prompts begin with.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    request_seed: Annotated[int | None, typer.Option(help="The requests' seed.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers run to their limit.")
    ] = False,
    logprobs: Annotated[int | None, typer.Option(help="Alternatives a token.")] = None,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object of further fields of every request.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, random prompts and --shuffle.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 600.0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or id to count tokens where there is no usage.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write settings and figures here.")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Every request in --json.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw throughput and latency here.")] = None,
) -> None:
    """Put load on an OpenAI-compatible server and report throughput and latency."""
    from emberline.bench import prompts, settings
    from emberline.bench.session import Plan
    from emberline.bench.tokens import token_counter

    _check_files(json_file, details, plot)
    try:
        drawn = _random_prompts(
            random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            random_id_range=random_id_range,
            shared_prefix_len=shared_prefix_len,
            max_tokens=max_tokens,
        )
        if dataset is None:
            settings.require(not shuffle, "--shuffle needs --dataset")
            source = drawn or prompts.own_prompts()
        else:
            settings.require(drawn is None, "--dataset and --random-input-len: give one")
            source = prompts.dataset(dataset, endpoint, seed if shuffle else None)
        plan = Plan(
            server=settings.ServerSettings(
                base_url=base_url,
                endpoint=endpoint,
                model=model,
                api_key=api_key,
                headers=tuple(_header(text) for text in header or ()),
                timeout=timeout,
            ),
            request=settings.RequestSettings(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=request_seed,
                ignore_eos=ignore_eos,
                logprobs=logprobs,
                extra_body=_object(extra_body),
            ),
            load=settings.LoadSettings(
                levels=_levels(concurrency, request_rate),
                num_requests=NUM_REQUESTS if (num_requests, duration) == (None, None)
                else num_requests,
                duration=duration,
                warmup=warmup,
                seed=seed,
            ),
            prompts=source,
            keep_text=tokenizer is not None,
        )  # fmt: skip
        count = token_counter(tokenizer) if tokenizer is not None else None
        _run(plan, count, json_file, details, plot)
    except settings.BenchError as problem:
        fail(str(problem))


def _run(
    plan: Plan, count: TokenCounter | None, json_file: Path | None, details: bool, plot: Path | None
) -> None:
    from rich.console import Console

    from emberline import __version__
    from emberline.bench.metrics import summarize
    from emberline.bench.report import as_json, tables
    from emberline.bench.session import measure

    when = datetime.now(UTC).isoformat(timespec="seconds")
    with _progress() as observer:
        session = asyncio.run(measure(plan, observer))
    summaries = [summarize(run, count) for run in session.runs]
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no edge
    for line in (f"{session.model.name}, prompts: {session.prompts.kind}", *session.prompts.notes):
        console.print(line, markup=False, highlight=False)
    console.print(tables(summaries), highlight=False)
    if json_file is not None:
        provenance = {"tool": "emberline bench serve", "version": __version__, "when": when}
        figures = as_json(plan, session, summaries, details=details, provenance=provenance)
        _write(json_file, figures)
    if plot is not None:
        _draw(summaries, plot)
    if any(row.interrupted for row in summaries):
        raise typer.Exit(130)
    if any(row.failed for row in summaries):
        raise typer.Exit(1)


def _write(path: Path, figures: dict[str, Any]) -> None:
    try:
        text = json.dumps(figures, indent=1, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        fail(f"--json {path}: {problem.strerror}")


def _draw(summaries: Sequence[LevelSummary], path: Path) -> None:
    from emberline.bench.plot import plot_levels

    try:
        plot_levels(summaries, path)
    except OSError as problem:
        fail(f"--plot {path}: {problem.strerror}")


def _check_files(json_file: Path | None, details: bool, plot: Path | None) -> None:
    """What would fail once the measuring is done fails now."""
    if details and json_file is None:
        fail("--details needs --json: it says what the file holds")
    check_outputs(plot, json=json_file)


def _random_prompts(
    input_len: int | None, *, random_output_len: int | None, max_tokens: int, **given: Any
) -> RandomPrompts | None:
    from emberline.bench.settings import RandomPrompts, require

    chosen = {name: value for name, value in given.items() if value is not None}
    if input_len is None:
        others = [*(["random_output_len"] if random_output_len is not None else []), *chosen]
        options = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        require(not others, f"{options}: needs --random-input-len")
        return None
    return RandomPrompts(
        input_len=input_len,
        output_len=max_tokens if random_output_len is None else random_output_len,
        **{name.removeprefix("random_"): value for name, value in chosen.items()},
    )


def _levels(concurrency: list[str] | None, rates: list[str] | None) -> tuple[Level, ...]:
    from emberline.bench.settings import ClosedLoop, OpenLoop, require

    require(
        not (concurrency and rates),
        "--concurrency and --request-rate contradict each other: a loop is closed or open",
    )
    if rates:
        return tuple(OpenLoop(_number("--request-rate", word)) for word in _words(rates))
    closed = [_number("--concurrency", word) for word in _words(concurrency or ["1"])]
    require(
        all(value.is_integer() for value in closed), "--concurrency must be whole numbers: 1 2 4"
    )
    return tuple(ClosedLoop(int(value)) for value in closed)


def _words(values: Sequence[str]) -> list[str]:
    from emberline.bench.settings import require

    words = [word for value in values for word in value.replace(",", " ").split()]
    require(bool(words), "--concurrency and --request-rate want numbers: 1 2 4")
    return words


def _number(option: str, word: str) -> float:
    from emberline.bench.settings import BenchError

    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise BenchError(f"{option} wants numbers, got {word!r}")
    return value


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        fail(f"--header and --api-key want 'Name: value', got {text!r}")
    return name.strip(), value.strip()


def _object(text: str | None) -> dict[str, Any]:
    from emberline.bench.settings import BenchError

    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as problem:
        raise BenchError(f"--extra-body is no JSON: {problem.msg}") from None
    if not isinstance(value, dict):
        raise BenchError("--extra-body must be a JSON object")
    return value


@contextmanager
def _progress() -> Iterator[Observer]:
    """A bar a level on standard error, with the rate and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    # The display's thread takes turns with the client: twice a second is enough to look at.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        yield _Bar(progress)


class _Bar:
    """An observer that moves a bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def level_begins(self, level: Level, load: LoadSettings) -> None:
        """A bar of requests, or of seconds."""
        from emberline.bench.report import level_kind, level_name

        self._began = time.perf_counter()
        self._seconds = load.duration
        self._done = self._tokens = self._failed = 0
        self._task = self._progress.add_task(
            f"{level_kind(level)} {level_name(level)}",
            total=load.duration or load.num_requests,
            done="",
            rate="",
        )

    def request_ends(self, record: RequestRecord) -> None:
        """One more."""
        self._done += 1
        self._tokens += record.completion_tokens or 0
        self._failed += record.failure is not None
        seconds = max(time.perf_counter() - self._began, 1e-9)
        rate = f"{self._done / seconds:.2f} requests/s, {self._tokens / seconds:.0f} tokens/s"
        self._progress.update(
            self._task,
            completed=self._done if self._seconds is None else min(seconds, self._seconds),
            done=f"{self._done} done" + (f", {self._failed} failed" if self._failed else ""),
            rate=rate,
        )

"""Profiling: the steps that are measured are those asked for, and the engine is left as it was."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from emberline import machine_costs
from emberline.batch import CommittedTokens, DraftContext, DraftProposal
from emberline.cli import make_app
from emberline.config import (
    CacheConfig,
    EngineConfig,
    LayoutKind,
    SchedulerConfig,
    SpeculationConfig,
)
from emberline.drafters.ngram import NGramDrafter
from emberline.engine import profile
from emberline.engine.build import build_engine
from emberline.engine.engine import Engine
from emberline.engine.profile import LEAST_TURNS, Grid, plan_grid, profile_steps
from emberline.hub import resolve_draft, resolve_model
from emberline.types import Request, SamplingParams
from emberline.verify.cost_files import load_costs, load_profile
from emberline.verify.step_cost import StepCosts

from support.doubles import ScriptedDrafter
from support.engines import ask, make_engine
from support.paged import ConstantDrafter, PrefixDrafter, PrefixTarget

GOLDEN = Path(__file__).parents[1] / "golden"


def grid_of(engine: Engine, **changes: int) -> Grid:
    return plan_grid(engine.parts, engine.pool, engine.config.scheduler, **changes)


def profiled(engine: Engine, grid: Grid | None = None) -> StepCosts:
    return profile_steps(engine.parts, engine.pool, grid or grid_of(engine), budget_seconds=0.0)


# What is measured


def test_the_grid_doubles_up_to_the_limits() -> None:
    target = PrefixTarget(max_model_len=512, num_slots=8192)
    engine = make_engine(target, ConstantDrafter(0, 7), num_pages=512, max_num_reqs=12)
    grid = grid_of(engine, context_length=100)
    assert grid == Grid((1, 2, 4, 8, 12), (0, 1, 2, 3, 4, 7), 100, 100)
    assert grid_of(make_engine(PrefixTarget(), ConstantDrafter(0, 1))).depths == (0, 1)


def test_the_grid_fits_the_context_limit_and_the_pages() -> None:
    engine = make_engine(PrefixTarget(max_model_len=64, page_size=4), ConstantDrafter(0, 7))
    assert grid_of(engine).context_length == 64 - 1 - 7
    scarce = make_engine(PrefixTarget(page_size=4), ConstantDrafter(0, 7), num_pages=33)
    assert grid_of(scarce).request_counts == (1, 2, 4, 8)
    assert grid_of(scarce).context_length == 4 * 4 - 1 - 7
    tiny = make_engine(PrefixTarget(page_size=4), ConstantDrafter(0, 7), num_pages=7)
    assert grid_of(tiny).request_counts == (1, 2)  # of 8: there are pages for no more
    with pytest.raises(ValueError, match=r"the KV cache \(--kv-tokens\) has 8 free"):
        grid_of(make_engine(PrefixTarget(page_size=4), ConstantDrafter(0, 7), num_pages=2))


def test_steps_that_run_the_same_rows_cost_the_same() -> None:
    target = PrefixTarget(max_model_len=512, num_slots=8192)
    target.row_granule = 8
    engine = make_engine(target, ConstantDrafter(0, 7), num_pages=512)
    costs = profiled(engine, grid_of(engine, context_length=40))
    sizes = {r: [tokens for reqs, tokens, _ in costs.target if reqs == r] for r in (1, 2, 4, 8)}
    assert sizes == {1: [8, 40], 2: [8, 16, 48], 4: [8, 16, 24, 32], 8: [8, 16, 24, 32, 40, 64]}


@pytest.mark.parametrize("layout", ["compact", "static"])
def test_every_step_has_the_size_that_it_is_filed_under(layout: LayoutKind) -> None:
    target = PrefixTarget(max_model_len=512, num_slots=8192)
    engine = make_engine(target, ConstantDrafter(0, 7), num_pages=512, layout=layout)
    grid = grid_of(engine, context_length=40)
    costs = profiled(engine, grid)
    assert {(r, t) for r, t, _ in costs.target} == {
        *((r, r * n) for r in (1, 2, 4, 8) for n in (1, 2, 3, 4, 5, 8)),
        *((r, r - 1 + 40) for r in (1, 2)),
    }
    assert {(r, k) for r, k, _ in costs.draft} == set(
        itertools.product((1, 2, 4, 8), (1, 2, 3, 4, 7))
    )
    # In the order of the grid, turn by turn: the target saw just these tokens, and logits of all of
    # them but a prompt's.
    sizes = [point.num_tokens for point in grid.points()]
    assert target.num_tokens_run == sizes * LEAST_TURNS
    scored = [p.num_tokens - p.chunk + 1 for p in grid.points()]
    assert target.num_scored_run == scored * LEAST_TURNS


@pytest.mark.parametrize(
    "drafter",
    [
        NGramDrafter(4),
        ScriptedDrafter(4, None, lambda prefix: 0, goes_on=lambda prefix: False),
        ScriptedDrafter(4, lambda prefix: torch.zeros(32), confidence=lambda prefix: 0.0),
    ],
    ids=["ngram", "gives up", "no confidence"],
)
def test_blocks_are_whole_whatever_the_drafter_finds(drafter: Any) -> None:
    target = PrefixTarget()
    costs = profiled(make_engine(target, drafter, max_num_reqs=2), Grid((1, 2), (0, 1, 4), 20, 0))
    assert [(r, t) for r, t, _ in costs.target] == [(1, 1), (1, 2), (1, 5), (2, 2), (2, 4), (2, 10)]
    assert target.num_tokens_run[:6] == [1, 2, 5, 2, 4, 10]
    assert [(r, k) for r, k, _ in costs.draft] == [(1, 1), (1, 4), (2, 1), (2, 4)]


def test_without_a_drafter_verification_is_measured_alone() -> None:
    costs = profiled(make_engine(PrefixTarget(), max_num_reqs=2))
    assert costs.draft == ()
    assert {(2, 2), (2, 16)} <= {(r, t) for r, t, _ in costs.target}


class Clock:
    """Time that only moves when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, device: torch.device) -> float:
        return self.now


class PacedTarget(PrefixTarget):
    """Ten seconds a step and one a token, and what the machine loses in between."""

    def __init__(self, clock: Clock, lost: Any = lambda: 0.0) -> None:
        super().__init__()
        self.clock = clock
        self.lost = lost

    def forward(self, batch: Any) -> Any:
        self.clock.now += 10.0 + batch.layout.num_tokens + self.lost()
        return super().forward(batch)


class PacedDrafter(ConstantDrafter):
    """A second a draft of each request; half a second for what it observes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(0, 4)
        self.clock = clock

    def propose(self, context: DraftContext) -> DraftProposal:
        self.clock.now += 1.0 * context.num_drafts * len(context.anchors)
        return super().propose(context)

    def observe(self, committed: CommittedTokens) -> None:
        self.clock.now += 0.5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profile, "_now", clock)
    monkeypatch.setattr(profile, "LONG_SECONDS", 1e9)
    return clock


def test_drafting_is_told_apart_from_the_rest(clock: Clock) -> None:
    engine = make_engine(PacedTarget(clock), PacedDrafter(clock), max_num_reqs=4)
    costs = profiled(engine)
    for num_reqs, num_tokens, seconds in costs.target:
        assert seconds == pytest.approx(10.5 + num_tokens), num_reqs
    for num_reqs, num_drafts, seconds in costs.draft:
        assert seconds == pytest.approx(num_reqs * num_drafts)


def test_a_slow_moment_does_not_reach_the_table(clock: Clock) -> None:
    """Every step of the first turn, or of any one turn, is slow: the least is of the other."""
    for slow in (0, 1):
        calls = itertools.count()
        engine = make_engine(PacedTarget(clock), PacedDrafter(clock), max_num_reqs=2)
        size = len(list(grid_of(engine).points()))
        lost = lambda calls=calls, slow=slow, size=size: 50.0 * (next(calls) // size == slow)  # noqa: E731
        engine.parts.target.lost = lost  # type: ignore[attr-defined]
        for _, num_tokens, seconds in profiled(engine).target:
            assert seconds == pytest.approx(10.5 + num_tokens)


def test_short_steps_get_more_turns_of_the_budget(clock: Clock) -> None:
    target = PacedTarget(clock)
    engine = make_engine(target, max_num_reqs=2)
    grid = Grid((1, 2), (0, 7), 20, 0)  # steps of 11, 18, 12 and 26 s
    shares: list[float] = []
    profile_steps(engine.parts, engine.pool, grid, budget_seconds=240.0, report=shares.append)
    turns = [target.num_tokens_run.count(tokens) for tokens in (1, 8, 2, 16)]
    assert turns == [6, 4, 5, 3]  # the first that reach 60 s
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_a_point_goes_on_until_two_of_its_turns_agree(clock: Clock) -> None:
    losses = iter([20.0, 30.0, 0.0, 0.0])
    target = PacedTarget(clock, lambda: next(losses))
    grid = Grid((1,), (0,), 20, 0)  # a step of 11 s
    engine = make_engine(target, max_num_reqs=1)
    costs = profile_steps(engine.parts, engine.pool, grid, budget_seconds=50.0)
    assert costs.target == ((1, 1, pytest.approx(11.0)),)
    assert next(losses, None) is None


def test_long_steps_get_one_turn(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "LONG_SECONDS", 15.0)
    target = PacedTarget(clock)
    profiled(make_engine(target, max_num_reqs=1), Grid((1,), (0, 7), 20, 0))
    assert target.num_tokens_run == [1, 8, 1]


def test_a_gpu_has_finished_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    profile._now(torch.device("cuda", 1))
    profile._now(torch.device("cpu"))
    assert waited == [torch.device("cuda", 1)]


class SleepyTarget(PrefixTarget):
    """Waits, as a program does that has lost its core to another."""

    def forward(self, batch: Any) -> Any:
        time.sleep(0.2)
        return super().forward(batch)


@pytest.mark.parametrize(("threads", "counted"), [(1, False), (2, True)])
def test_one_thread_is_not_charged_for_others(
    monkeypatch: pytest.MonkeyPatch, threads: int, counted: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    costs = profiled(make_engine(SleepyTarget()), Grid((1,), (0,), 8, 0))
    assert (costs.target[0][2] >= 0.2) == counted


# What is left behind


def test_the_engine_is_left_as_it_was() -> None:
    target = PrefixTarget()
    engine = make_engine(target, PrefixDrafter(target), max_num_reqs=4)
    prompt = [3, 5, 7, 11]
    # A drafter that checks its history would fail on noise: the steps run with one that does not.
    borrowed = Engine(
        replace(engine.parts, drafter=ConstantDrafter(0, 7)), engine.pool, engine.config
    )
    parts, history = borrowed.parts, engine.parts.history.clone()
    profiled(borrowed)
    assert borrowed.parts is parts
    assert torch.equal(engine.parts.history, history)
    assert engine.pool.num_free == engine.pool.num_pages
    engine.pool.check([])
    assert ask(engine, prompt).token_ids == ask(make_engine(PrefixTarget()), prompt).token_ids


def test_pages_come_back_when_a_step_fails() -> None:
    class Broken(PrefixTarget):
        def forward(self, batch: Any) -> Any:
            raise RuntimeError("out of order")

    engine = make_engine(Broken(), ConstantDrafter())
    with pytest.raises(RuntimeError, match="out of order"):
        profiled(engine)
    assert engine.pool.num_free == engine.pool.num_pages


# Costs that are kept


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path / "home"))
    quick = partial(profile_steps, budget_seconds=0.0)
    monkeypatch.setattr(machine_costs, "profile_steps", quick)
    return tmp_path / "home"


def golden(drafter: str = "auto", name: str = "golden", **scheduler: int) -> Engine:
    config = EngineConfig(
        dtype="float32",
        threads=1,
        cache=CacheConfig(num_tokens=1024),
        scheduler=SchedulerConfig(**{"max_num_reqs": 2, **scheduler}),
        speculation=SpeculationConfig(drafter=drafter, planner="verify_all"),  # type: ignore[arg-type]
    )
    draft = GOLDEN / "vanilla" if drafter == "auto" else None
    return build_engine(GOLDEN / "target", draft, config, eos_ids=frozenset(), name=name)


def costs_of(engine: Engine, *, draft: str | None = "vanilla") -> StepCosts:
    folder = None if draft is None else GOLDEN / draft
    return machine_costs.costs_for(engine, GOLDEN / "target", folder)


def test_costs_are_measured_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = costs_of(golden())
    (path,) = home.rglob("*.json")
    said = capsys.readouterr()
    assert said.out == ""
    before, after = said.err.splitlines()
    assert before == "Measuring the costs of this machine's steps, once"
    assert after.startswith("Step costs: measured in ")
    assert said.err.endswith(f" s, kept in {path}\n")
    assert costs_of(golden()) == first
    assert capsys.readouterr().err == f"Step costs: from {path}\n"
    assert load_costs(path) == first
    facts = load_profile(path).measured_on
    assert (facts.dtype, facts.device, facts.threads, facts.layout) == (
        "float32",
        "cpu",
        1,
        "compact",
    )
    assert facts.model.startswith("golden (")
    assert facts.draft is not None
    assert facts.draft.startswith("vanilla (")


def test_a_given_file_is_named_and_so_is_what_it_was_measured_on(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs_of(golden())
    (path,) = home.rglob("*.json")
    capsys.readouterr()

    def said(engine: Engine) -> str:
        machine_costs.report_given(engine, path, GOLDEN / "target", GOLDEN / "vanilla")
        return capsys.readouterr().err

    assert said(golden()) == f"Step costs: from {path}\n"
    data = json.loads(path.read_text())
    data["measured_on"] |= {"dtype": "bfloat16", "model": "another (12345678)", "num_cores": 512}
    path.write_text(json.dumps(data))
    first, warning = said(golden()).splitlines()
    assert first == f"Step costs: from {path}"
    assert f"{path} was measured with model another (12345678), not golden (" in warning
    assert "dtype bfloat16, not float32" in warning
    assert "cores 512, not" in warning
    assert "threads" not in warning


def test_other_settings_have_other_costs(home: Path) -> None:
    costs_of(golden())
    costs_of(golden(max_num_reqs=1))
    costs_of(golden("none"), draft=None)
    costs_of(golden("ngram"), draft=None)
    found = [load_profile(path).measured_on for path in home.rglob("*.json")]
    assert len(set(found)) == 4
    assert {facts.draft for facts in found} >= {None, "NGramDrafter"}


def test_no_word_without_progress(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine_costs.costs_for(golden(), GOLDEN / "target", GOLDEN / "vanilla", progress=False)
    assert list(home.rglob("*.json"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("damage", ["{", "{}", "of another machine"])
def test_a_damaged_file_is_measured_anew(
    home: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    costs_of(golden())
    (path,) = home.rglob("*.json")
    if damage == "of another machine":
        data = json.loads(path.read_text())
        data["measured_on"]["processor"] = "another"
        damage = json.dumps(data)
    path.write_text(damage)
    capsys.readouterr()
    costs = costs_of(golden())
    assert "Step costs: measured in " in capsys.readouterr().err
    assert load_costs(path) == costs


def test_a_home_that_cannot_be_written_is_no_failure(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.write_text("in the way")
    assert costs_of(golden()).target
    said = capsys.readouterr().err
    assert f"not kept: {home / 'step-costs'} cannot be written" in said
    assert said.count("\n") == 2


def test_an_engine_with_requests_is_not_measured(home: Path) -> None:
    engine = golden()
    engine.add(Request("r", (1, 2, 3), SamplingParams(max_tokens=1)))
    with pytest.raises(RuntimeError, match="has requests"):
        costs_of(engine)
    assert not home.exists()


# The command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(make_app("profile"), ["profile", *arguments])


def test_the_command_measures_shows_writes_and_draws(home: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"{kind}.json" for kind in ("native", "sglang-additive")}
    options = [str(GOLDEN / "target"), "--draft", str(GOLDEN / "vanilla"), "--dtype", "float32"]
    options += ["--max-num-reqs", "2", "--threads", "1"]
    done = run(*options, "--out", str(files["native"]), "--plot", str(tmp_path / "costs.png"))
    assert done.exit_code == 0, done.output
    assert "ms, all but drafting, by tokens" in done.stdout
    assert "ms, drafting, by drafts" in done.stdout
    (kept,) = home.rglob("*.json")
    assert f"Step costs: kept in {kept}" in done.stdout
    assert load_profile(files["native"]) == load_profile(kept)
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    before = kept.read_text()
    done = run(
        *options, "--no-keep", "--out", str(files["sglang-additive"]), "--format", "sglang-additive"
    )
    assert done.exit_code == 0, done.output
    assert kept.read_text() == before
    assert load_costs(files["sglang-additive"]).draft == ()
    # What the command keeps is what a start with the same settings finds.
    assert costs_of(golden(name="target")) == load_costs(kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "sglang"], "give --out too"),
        (["--out", "/no/such/folder/x.json"], "its folder is missing or not writable"),
        (["--plot", "/no/such/folder/x.png"], "its folder is missing or not writable"),
        (["--out", "/tmp"], "is a folder"),
        (["--plot", "x.txt"], "the suffix must be one of"),
        (["--out", "x.png", "--plot", "x.png"], "have the same path"),
        (["--max-num-reqs", "0"], "--max-num-reqs must be at least 1"),
        (["/no/such/model"], "no such file or folder"),
    ],
)
def test_errors_come_before_the_measurement(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("emberline: ")


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "emberline[plot]" in run("--plot", "x.png").stderr


@pytest.mark.model
def test_the_default_model() -> None:
    folder = resolve_model(None)
    config = EngineConfig(
        threads=1,
        scheduler=SchedulerConfig(max_num_reqs=1),
        speculation=SpeculationConfig(planner="verify_all"),
    )
    engine = build_engine(
        folder.path, resolve_draft(None, folder), config, eos_ids=frozenset(), name=folder.name
    )
    costs = profiled(engine, Grid((1,), (0, 1), 64, 64))
    (least, chunk), (draft,) = costs.target, costs.draft
    assert [least[:2], chunk[:2]] == [(1, 4), (1, 64)]  # one token and two run four rows
    assert draft[:2] == (1, 1)
    assert chunk[2] > least[2]  # 64 rows over 4: not noise
    assert all(0.0 < point[2] < 60.0 for point in (least, chunk, draft))

"""What the GPU benchmarks of a whole engine run: prompts, settings, policies, one timed call.

Owns what a cell is (requests at once, policy, logprobs) and how it is timed. Must not know tables,
files of results or other engines.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from emberline.config import CacheConfig, EngineConfig, SchedulerConfig
from emberline.encoding import chat_ids
from emberline.engine.device_runner import DeviceRunner
from emberline.engine.engine import Engine
from emberline.llm import LLM
from emberline.types import Request, SamplingParams
from emberline.verify.planner import DevicePlanner, Planner, Threshold, VerifyAll

import prompts as prompt_sets

NO_DRAFT, VERIFY_ALL, THRESHOLD, SCHEDULED = "none", "verify_all", "threshold 0.5", "scheduled"
POLICIES = (NO_DRAFT, VERIFY_ALL, THRESHOLD, SCHEDULED)
LEAST_PROMPTS = 8
"""Prompts of every cell at least: fewer at once run in turns, for acceptance differs by prompt."""
GPU_STEP_TOKENS = 8192  # known tokens a step: a batch's prompts go in few steps
MOST_WARM_UPS = 4
"""Runs of a cell before it is timed."""
IDLE_SECONDS = 2.0
"""Between two of them, in which the engine does what a server's does while nothing runs."""
SPARE_TOKENS = 160  # of KV a request: a block past the last token, pages taken ahead


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a table."""

    concurrency: int  # requests at once
    policy: str  # of `POLICIES`
    logprobs: int  # alternatives asked for of every token; 0: none asked for


@dataclass(frozen=True, slots=True)
class Call:
    """What the calls of one cell took together."""

    seconds: float
    tokens: int  # emitted
    steps: int  # of the engine
    block_steps: int  # steps summed over requests, the prompts' left out
    drafts: int  # verified
    emitted: int  # by block steps
    captures: int = 0  # steps captured meanwhile: a call with any is no measurement

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def read_prompts(path: Path | None, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Prompts as token ids: a JSON list of ids a line, or the project's own as chat turns.

    Raises:
        SystemExit: a line is no list of token ids.
    """
    if path is None:
        texts = [text for group in prompt_sets.OWN.values() for text in group]
        return [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        row = json.loads(line)
        if not isinstance(row, list) or not row or not all(type(i) is int for i in row):
            raise SystemExit(f"--prompts: line {number} of {path.name} is no list of token ids")
        rows.append(tuple(row))
    return rows


def random_prompts(count: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of random ids: for cost, not for acceptance. The same in every run."""
    source = random.Random(1234)
    return [
        tuple(source.randrange(vocab_size // 100, vocab_size) for _ in range(length))
        for _ in range(count)
    ]


def batches(
    prompts: Sequence[tuple[int, ...]],
    concurrency: int,
    least: int = LEAST_PROMPTS,
    least_calls: int = 1,
) -> list[list[tuple[int, ...]]]:
    """The calls of a cell: the first prompts, over and over, `concurrency` a call."""
    calls = max(least_calls, least // concurrency)
    rows = [prompts[i % len(prompts)] for i in range(calls * concurrency)]
    return [rows[i * concurrency : (i + 1) * concurrency] for i in range(calls)]


def settings(
    device: str, dtype: str, concurrency: int, tokens_each: int, base: EngineConfig | None = None
) -> EngineConfig:
    """Settings under which `concurrency` requests of so many tokens run at once.

    Args:
        device: torch device.
        dtype: as in `EngineConfig`.
        concurrency: most requests at once.
        tokens_each: longest prompt and answer together.
        base: whatever else is to be set.

    Raises:
        SystemExit: the device is a GPU and there is none.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(f"--device {device}: no CUDA GPU is visible; say --device cpu to try it")
    most = max(16, concurrency)
    step_tokens = 1024 if device == "cpu" else GPU_STEP_TOKENS
    return replace(
        base or EngineConfig(),
        dtype=dtype,
        device=device,
        cache=CacheConfig(num_tokens=most * (tokens_each + SPARE_TOKENS)),
        scheduler=SchedulerConfig(
            max_num_reqs=most,
            max_num_tokens=max(step_tokens, most),
            max_verify_tokens=max(1024, 8 * most),
            max_queue=max(256, most),
        ),
    )


Generate = Callable[[Sequence[tuple[int, ...]], SamplingParams], int]
"""Answers prompts all at once, and says how many tokens came."""


def generate_text(llm: LLM) -> Generate:
    """The whole way, text included."""

    def run(prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> int:
        answers = llm.generate(prompts, params)
        return sum(len(choice.token_ids) for choices in answers for choice in choices)

    return run


def generate_ids(engine: Engine) -> Generate:
    """The engine alone: ids in, ids out. Request n has the seed n."""

    def run(prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> int:
        for index, ids in enumerate(prompts):
            engine.add(Request(f"{index}", ids, replace(params, seed=index)))
        tokens = 0
        while engine.has_work:
            tokens += sum(len(output.token_ids) for output in engine.step())
        return tokens

    return run


def use_planner(
    engine: Engine, planner: Planner, name: str, ahead: DevicePlanner | None = None
) -> None:
    """Plan by a policy. `ahead`: that of steps on the device; None: the same."""
    own = planner if ahead is None else ahead
    assert engine.runner is None or isinstance(own, DevicePlanner)
    engine.use_planner(planner, name, own if engine.runner is not None else None)


def stand_by(engine: Engine, seconds: float = IDLE_SECONDS) -> None:
    """Let an engine without requests capture steps, those that were missed first."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and engine.get_ready():
        pass


class Bench:
    """An engine, its prompts, and cells run on it.

    Args:
        engine: without requests.
        generate: the way to it.
        prompts: token ids.
        new_tokens: of every answer.
        temperature: of every draw.
        least_prompts: of a cell: see `batches`.
        least_calls: of a cell that is timed. A call ends with its slowest request, and which one
            that is depends on how near ties fall: a few calls say more of a policy than one.
    """

    def __init__(
        self,
        engine: Engine,
        generate: Generate,
        prompts: Sequence[tuple[int, ...]],
        new_tokens: int,
        temperature: float = 0.0,
        least_prompts: int = LEAST_PROMPTS,
        least_calls: int = 1,
    ) -> None:
        self.engine = engine
        self._generate = generate
        self._prompts = prompts
        self._new_tokens = new_tokens
        self._least = least_prompts
        self._least_calls = least_calls
        self._params = SamplingParams(temperature=temperature, ignore_eos=True)
        self._scheduled: Planner = engine.parts.planner
        self._scheduled_name = str(engine.info["planner"])
        runner = engine.runner
        self._ahead = runner.planner if isinstance(runner, DeviceRunner) else None

    def warm_up(self, cell: Cell) -> None:
        """Run a cell until it captures no step, with time to capture those that it missed."""
        for _ in range(MOST_WARM_UPS):
            self.run(cell, least_calls=1)
            stand_by(self.engine)
            if not self.run(cell, least_calls=1).captures:
                break

    def run(
        self, cell: Cell, new_tokens: int | None = None, least_calls: int | None = None
    ) -> Call:
        """Run a cell's calls and time them. Everything but the planner stays as it was."""
        new_tokens = new_tokens or self._new_tokens
        engine = self.engine
        if cell.policy == SCHEDULED:
            use_planner(engine, self._scheduled, self._scheduled_name, self._ahead)
        elif cell.policy == THRESHOLD:
            use_planner(engine, Threshold(0.5), "threshold")
        else:
            use_planner(engine, VerifyAll(), "verify_all")
        params = replace(
            self._params,
            max_tokens=new_tokens,
            logprobs=cell.logprobs or None,
            speculate=cell.policy != NO_DRAFT,
        )
        captured = self._num_captured()
        least_calls = least_calls or self._least_calls
        calls = batches(self._prompts, cell.concurrency, self._least, least_calls)
        before, tokens = engine.snapshot(), 0
        began = time.perf_counter()
        for rows in calls:
            tokens += self._generate(rows, params)
        seconds, after = time.perf_counter() - began, engine.snapshot()
        expected = len(calls) * cell.concurrency * new_tokens
        if tokens != expected:
            raise RuntimeError(f"{tokens} tokens came instead of {expected}")
        return Call(
            seconds=seconds,
            tokens=tokens,
            steps=after.num_engine_steps - before.num_engine_steps,
            block_steps=after.num_verify_steps - before.num_verify_steps,
            drafts=after.num_draft_tokens - before.num_draft_tokens,
            emitted=after.num_emitted_tokens - before.num_emitted_tokens,
            captures=self._num_captured() - captured,
        )

    def _num_captured(self) -> int:
        runner = self.engine.runner
        return runner.num_captured if isinstance(runner, DeviceRunner) else 0


def seconds_alive() -> float:
    """Seconds since this process was started, imports included; NaN where the system hides it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return float("nan")
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def machine(device: str) -> dict[str, object]:
    """What a figure was measured on, besides what every benchmark notes."""
    if device == "cpu":
        return {"device": device}
    return {"device": device, "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}

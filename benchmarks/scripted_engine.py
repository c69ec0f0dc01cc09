"""An engine without a model: a step takes a given time and gives every request the same tokens.

What is left of a server's work when the model costs nothing but time. Imports no PyTorch, so that a
process of its own is there at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from emberline.config import EngineConfig, SchedulerConfig
from emberline.engine.engine_child import TellFound
from emberline.engine.logprob_run import LogprobRun
from emberline.types import (
    EngineSnapshot,
    FinishReason,
    Grammar,
    InvalidRequest,
    QueueFull,
    Request,
    RequestOutput,
    SpeculationStats,
    StepCounts,
)

NAME = "scripted"
WORDS = [" quick", " brown", " fox", " jumps"]


class ScriptedText:
    """Stands where a tokenizer's text does; the engine writes its own."""

    def stream(self, params: object) -> None:
        """No text is kept by token."""


@dataclass
class _Running:
    request: Request
    num_output: int = 0
    aborted: bool = False
    steps: dict[StepCounts, int] = field(default_factory=dict)


class ScriptedEngine:
    """See the module's docstring.

    Args:
        step_seconds: how long a step takes, whatever is in it.
        tokens_per_step: that each request gets.
        max_num_reqs: requests that run at the same time.
        max_queue: requests that may wait.
        break_at: number of the step that raises.
    """

    vocab_size, max_draft_tokens = 256, 7
    max_model_len = max_request_tokens = 10**6

    def __init__(
        self,
        step_seconds: float = 0.002,
        tokens_per_step: int = 4,
        max_num_reqs: int = 256,
        max_queue: int = 1024,
        break_at: int | None = None,
    ) -> None:
        self.config = EngineConfig(
            scheduler=SchedulerConfig(max_num_reqs=max_num_reqs, max_queue=max_queue)
        )
        self.info: dict[str, object] = {"model": NAME}
        self._seconds, self._width, self._break_at = step_seconds, tokens_per_step, break_at
        self._requests: dict[str, _Running] = {}
        self._num_steps = self._num_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether there is a request."""
        return bool(self._requests)

    def compile(self, grammar: Grammar) -> Any:  # noqa: ARG002
        """There are none."""
        raise InvalidRequest("a script has no grammar", "grammar")

    def known_grammar(self, grammar: Grammar) -> None:
        """There are none."""

    def add(
        self,
        request: Request,
        text: object = None,  # noqa: ARG002
        compiled: object = None,  # noqa: ARG002
    ) -> None:
        """Queue a request."""
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        scheduler = self.config.scheduler
        if len(self._requests) >= scheduler.max_num_reqs + scheduler.max_queue:
            raise QueueFull(scheduler.max_queue)
        self._requests[request.request_id] = _Running(request)

    def abort(self, request_id: str) -> None:
        """End a request at the next step."""
        if request_id in self._requests:
            self._requests[request_id].aborted = True

    def get_ready(self) -> bool:
        """Nothing is captured here."""
        return False

    def step(self) -> list[RequestOutput]:
        """Wait, then give every running request its tokens."""
        self._num_steps += 1
        if self._num_steps == self._break_at:
            raise RuntimeError("boom")
        ends = time.perf_counter() + self._seconds
        running = list(self._requests.values())[: self.config.scheduler.max_num_reqs]
        outputs = [self._output(one) for one in running]
        for output in outputs:
            if output.finished:
                del self._requests[output.request_id]
        time.sleep(max(0.0, ends - time.perf_counter()))  # the device is at work
        return outputs

    def snapshot(self) -> EngineSnapshot:
        """Requests and tokens; there is no KV."""
        most = self.config.scheduler.max_num_reqs
        return EngineSnapshot(
            num_running=min(most, len(self._requests)),
            num_waiting=max(0, len(self._requests) - most),
            num_engine_steps=self._num_steps,
            generation_tokens=self._num_tokens,
        )

    def clear_prefix_cache(self) -> None:
        """There is none."""

    def _output(self, one: _Running) -> RequestOutput:
        params = one.request.params
        left = (params.max_tokens or self.max_model_len) - one.num_output
        width = 0 if one.aborted else min(self._width, left)
        ids = tuple(range(1, 1 + width))
        if width:
            kinds = (self.max_draft_tokens, width, width - 1, width, False)
            one.steps[kinds] = one.steps.get(kinds, 0) + 1
        one.num_output += width
        self._num_tokens += width
        output = RequestOutput(
            request_id=one.request.request_id,
            token_ids=ids,
            logprobs=None if params.logprobs is None else self._records(ids, params.logprobs),
            text="".join(WORDS[i % len(WORDS)] for i in range(width)),
            num_prompt_tokens=len(one.request.prompt_token_ids),
            num_output_tokens=one.num_output,
            stats=SpeculationStats(dict(one.steps)),
        )
        if one.aborted:
            return replace(output, finish_reason=FinishReason.ABORT)
        return replace(output, finish_reason=FinishReason.LENGTH) if width == left else output

    def _records(self, ids: tuple[int, ...], width: int) -> LogprobRun:
        """As tables, which is how they come from a GPU."""
        top_ids = np.tile(np.arange(1, 1 + width), (len(ids), 1))
        numbers = np.array(ids, dtype=np.int64)
        values = (-0.1 * top_ids).astype(np.float32)
        return LogprobRun.of(numbers, (-0.1 * numbers).astype(np.float32), numbers, top_ids, values)


@dataclass(frozen=True)
class Scripted:
    """What an engine's process needs of one that it builds."""

    engine: ScriptedEngine
    token_text: Any


def make_scripted(settings: dict[str, Any], found: TellFound) -> Scripted:
    """Runs in the engine's process."""
    found(Path("nowhere"), NAME)
    return Scripted(ScriptedEngine(**settings), ScriptedText())

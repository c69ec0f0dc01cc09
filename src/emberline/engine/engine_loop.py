"""Steps an engine while it has work, and does between two steps what came in meanwhile.

Owns the hand-over to the thread that runs it and what happens when a step fails. Must not know who
asks, where the outputs go, HTTP, text formats or tensors. Only that thread touches the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from emberline.config import EngineConfig
from emberline.engine.detokenizer import TextStream, TokenText
from emberline.engine.running_engine import EngineStopped, ShuttingDown
from emberline.types import (
    EngineSnapshot,
    Grammar,
    InvalidRequest,
    QueueFull,
    Request,
    RequestOutput,
)

if TYPE_CHECKING:
    from emberline.engine.grammar import Compiled  # PyTorch comes with it

logger = logging.getLogger(__name__)

PULSE_SECONDS = 0.1
"""After so long a step is told of even if it put nothing out."""
QUIET_SECONDS = 0.2
"""Without a request, after which the engine gets ready for some; who comes then waits for that."""

Decide = Callable[[Exception | None], None]
"""Told, by the engine's thread, that something has been done, or why not."""


class SteppingEngine(Protocol):
    """What is needed of an engine to run it."""

    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    max_draft_tokens: int
    config: EngineConfig
    info: dict[str, object]

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def compile(self, grammar: Grammar) -> Compiled:
        """A grammar, compiled now or before, from any thread; `InvalidRequest` if it is none."""
        ...

    def known_grammar(self, grammar: Grammar) -> Compiled | None:
        """A grammar that is compiled already, from any thread."""
        ...

    def add(
        self, request: Request, text: TextStream | None = None, compiled: Compiled | None = None
    ) -> None:
        """Queue a request, or raise `InvalidRequest` or `QueueFull`."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request at the next step."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step."""
        ...

    def get_ready(self) -> bool:
        """While there is no work, do one thing that steps would wait for; False: there is none."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counters since the start, and what is held now."""
        ...

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """Requests of one call, admitted together or not at all."""

    requests: Sequence[Request]
    compiled: Mapping[Grammar, Compiled]  # every grammar of theirs
    decide: Decide

    def grammar_of(self, request: Request) -> Compiled | None:
        """What binds one of the requests."""
        grammar = request.params.grammar
        return None if grammar is None else self.compiled[grammar]


@dataclass(frozen=True, slots=True)
class CacheClearing:
    """The prefix cache is to be emptied."""

    decide: Decide


Item = Arrival | CacheClearing | str
"""What comes in; a text is the id of a request to abort."""


class EngineLoop:
    """An engine that steps while it has work.

    Args:
        engine: touched by the thread in `run` and by nobody else from now on.
        token_text: text of its tokenizer.
        publish: called by that thread with what steps put out, and now and then with nothing, to
            show that they run; `latest` is the snapshot that goes with it.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        token_text: TokenText,
        publish: Callable[[Sequence[RequestOutput]], None],
    ) -> None:
        self._engine, self._token_text, self._publish = engine, token_text, publish
        self.changed = threading.Condition()  # held: nothing is taken out of the inbox
        self.failure: str | None = None
        self._inbox: deque[Item] = deque()
        self._stopping = False
        self._step_began: float | None = None
        self._quiet: float | None = QUIET_SECONDS  # to wait for; None: nothing to get ready for
        self.latest = engine.snapshot()  # as of the latest step, or of what was done since

    def send(self, item: Item) -> None:
        """Have something done before the next step, from any thread.

        Raises:
            EngineStopped: nothing is done any more; an abort is let pass.
        """
        with self.changed:
            if self._stopping and not isinstance(item, str):
                raise self._refusal()
            if not self._stopping:
                self._inbox.append(item)
                self.changed.notify()

    def stop(self) -> None:
        """Let `run` return after the current step, from any thread."""
        with self.changed:
            self._stopping = True
            self.changed.notify()

    def snapshot(self) -> EngineSnapshot:
        """The engine's counters as of its latest step; what has just come in is waiting."""
        with self.changed:
            arrivals = [item for item in self._inbox if isinstance(item, Arrival)]
        arriving = sum(len(arrival.requests) for arrival in arrivals)
        return replace(self.latest, num_waiting=self.latest.num_waiting + arriving)

    def seconds_in_step(self) -> float:
        """How long the current step has been running; 0.0: none is."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def run(self) -> None:
        """Step until stopped, or until a step fails: then `failure` says why.

        Who waits for something that will not be done hears of it.
        """
        pulse = 0.0
        try:
            while (items := self._next_items()) is not None:
                if items:
                    self._apply(items)
                    self.latest = self._engine.snapshot()
                elif not self._engine.has_work:
                    self._quiet = 0.0 if self._engine.get_ready() else None
                if self._engine.has_work:
                    self._quiet = QUIET_SECONDS
                    began = self._step_began = time.monotonic()
                    outputs = self._engine.step()
                    self._step_began = None
                    if outputs or began >= pulse or not self._engine.has_work:
                        pulse = began + PULSE_SECONDS
                        self.latest = self._engine.snapshot()
                        self._publish(outputs)
        except Exception as problem:  # whatever a step raises must reach those who wait for it
            logger.exception("the engine failed and takes no more requests")
            with self.changed:
                self.failure = f"the engine failed: {type(problem).__name__}: {problem}"
        self._step_began = None
        with self.changed:
            self._stopping = True
            left = [item for item in self._inbox if not isinstance(item, str)]
            self._inbox.clear()
        for item in left:
            item.decide(self._refusal())

    def _refusal(self) -> EngineStopped:
        return ShuttingDown() if self.failure is None else EngineStopped(self.failure)

    def _next_items(self) -> list[Item] | None:
        """What came in since the last step; sleeps while there is nothing to do. None: stop.

        Nothing: it has been quiet for long enough to get ready for what may come.
        """
        with self.changed:
            while not (self._inbox or self._stopping or self._engine.has_work):
                if not self.changed.wait(self._quiet):
                    break
            if self._stopping:
                return None
            items = list(self._inbox)
            self._inbox.clear()
            return items

    def _apply(self, items: Iterable[Item]) -> None:
        left = deque(items)
        try:
            while left:
                match left.popleft():
                    case Arrival() as arrival:
                        self._admit(arrival)
                    case CacheClearing() as clearing:
                        self._clear(clearing)
                    case str(request_id):
                        self._engine.abort(request_id)
        finally:
            if left:  # the engine failed: who came behind must hear of it, too
                with self.changed:
                    self._inbox.extendleft(reversed(left))

    def _admit(self, arrival: Arrival) -> None:
        taken: list[str] = []
        try:
            for request in arrival.requests:
                text = self._token_text.stream(request.params)
                self._engine.add(request, text, arrival.grammar_of(request))
                taken.append(request.request_id)
        except (InvalidRequest, QueueFull) as refusal:
            for request_id in taken:
                self._engine.abort(request_id)
            arrival.decide(refusal)
        except Exception as problem:
            arrival.decide(EngineStopped(f"the engine failed: {problem}"))
            raise
        else:
            self.latest = self._engine.snapshot()  # who is admitted finds itself counted
            arrival.decide(None)

    def _clear(self, clearing: CacheClearing) -> None:
        try:
            self._engine.clear_prefix_cache()
        except Exception as problem:
            clearing.decide(EngineStopped(f"the engine failed: {problem}"))
            raise
        clearing.decide(None)

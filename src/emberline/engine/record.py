"""Runs requests through an engine and keeps what speculation did with each.

Owns the loop. Must not know what is made of the traces, nor how they are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from emberline.engine.engine import Engine
from emberline.engine.trace import BlockTrace
from emberline.models.weights import ModelError
from emberline.types import FinishReason, Request, SpeculationStats


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request that an engine has finished: what it emitted, and how."""

    request: Request
    token_ids: tuple[int, ...]
    blocks: tuple[BlockTrace, ...]
    stats: SpeculationStats


def record(engine: Engine, requests: Sequence[Request]) -> Iterator[Recorded]:
    """Run requests, as many at a time as the engine takes; hand each over as it finishes.

    Closing the iterator aborts what still runs.

    Raises:
        InvalidRequest: a request can never run; nothing was started then.
        ModelError: a request ended in an error.
    """
    for request in requests:
        engine.validate(request, has_text=False)
    by_id = {request.request_id: request for request in requests}
    pending = deque(requests)
    token_ids: dict[str, list[int]] = {}  # of what runs
    blocks: dict[str, list[BlockTrace]] = {}

    def note(traces: Sequence[BlockTrace]) -> None:
        for trace in traces:
            blocks.setdefault(trace.request_id, []).append(trace)

    before, engine.observer = engine.observer, note
    try:
        while pending or token_ids:
            room = engine.config.scheduler.max_queue - engine.snapshot().num_waiting
            for _ in range(min(room, len(pending))):
                request = pending.popleft()
                engine.add(request)
                token_ids[request.request_id] = []
            for output in engine.step():
                key = output.request_id
                if key not in token_ids:  # of a recording that was given up
                    continue
                token_ids[key] += output.token_ids
                if output.finish_reason is FinishReason.ERROR:
                    raise ModelError(f"request {key}: {output.error}")
                if output.finished:
                    ids = tuple(token_ids.pop(key))
                    yield Recorded(by_id[key], ids, tuple(blocks.pop(key, ())), output.stats)
    finally:
        engine.observer = before
        for key in token_ids:
            engine.abort(key)

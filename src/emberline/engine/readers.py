"""Who reads along, and when they are told what their requests have added.

The first tokens are told at once, by whoever commits them; what follows is told to everybody
together, now and then: a message costs those who pass it on as much as a short step costs. Where
steps take longer than that, they are all told of. Must not know steps, or when requests end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from emberline.engine.outputs import delta
from emberline.engine.request_state import RequestState
from emberline.types import RequestOutput

LEAST_SECONDS = 0.005
"""Between two times that a reader is told."""
SECONDS_A_READER = 4e-4
"""The same for each of them: HTTP could pass on several times as many messages a second, and has to
have time for requests that come."""


class Readers:
    """The requests whose tokens are told as they come.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._tell_at = -math.inf

    def add(self, state: RequestState) -> None:
        """Tell of a request from now on, if it wants that."""
        if state.request.stream:
            self._states[state.request.request_id] = state

    def forget(self, state: RequestState) -> None:
        """Tell of it no more."""
        self._states.pop(state.request.request_id, None)

    @property
    def are_due(self) -> bool:
        """Whether it is time to tell them."""
        return bool(self._states) and self._clock() >= self._tell_at

    def tell(self) -> list[RequestOutput]:
        """What has been added to each request since its last output."""
        wait = max(LEAST_SECONDS, SECONDS_A_READER * len(self._states))
        self._tell_at = self._clock() + wait
        return [
            delta(state, self._clock)
            for state in self._states.values()
            if len(state.token_ids) > state.num_reported
        ]

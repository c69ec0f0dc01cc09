"""The garbage collector beside a batch that makes many records and hardly any cycle.

Walking through what is there and stays takes longer than a step, and comes the more often the more
records there are. Must not know what is made.
"""

from __future__ import annotations

import gc
import time
from types import TracebackType

LOOK_SECONDS = 30.0
"""Between two collections of everything: cycles of this program's other threads wait so long."""


class CollectorAside:
    """A context in which what is there is set aside now and then, and is not walked through.

    Reference counts free as ever. On leaving everything is the collector's again.
    """

    def __init__(self) -> None:
        self._look_at = time.monotonic() + LOOK_SECONDS

    def __enter__(self) -> CollectorAside:
        gc.freeze()
        return self

    def set_aside(self) -> None:
        """Whatever has been made so far. To be called often: it takes no time."""
        if time.monotonic() >= self._look_at:
            gc.unfreeze()
            gc.collect()
            self._look_at = time.monotonic() + LOOK_SECONDS
        gc.freeze()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.unfreeze()

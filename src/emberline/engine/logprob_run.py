"""Log-probabilities of consecutive tokens as two tables, until somebody looks at a token.

A record with its alternatives is a dozen objects: making them and letting go of them takes longer
than all else that a host does for a token. Here a request's records are cut from its steps' tables
and put together again as arrays. Must not know where numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, repeat
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from emberline.types import TokenLogprobs


@dataclass(slots=True, eq=False)  # not frozen: one is made a request and step
class LogprobRun(Sequence[TokenLogprobs]):
    """N records with L alternatives each, and nothing else in them. Reads as a tuple of them."""

    ints: NDArray[np.int64]  # [N, 2 + L]: token, rank, the likeliest ids
    floats: NDArray[np.float32]  # [N, 1 + L]: the token's log-probability, theirs

    @classmethod
    def of(
        cls,
        token_ids: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        ranks: NDArray[np.int64],
        top_ids: NDArray[np.int64],
        top_logprobs: NDArray[np.float32],
    ) -> LogprobRun:
        """Copies columns [N] and tables [N, L]."""
        count, width = top_ids.shape
        ints = np.empty((count, 2 + width), dtype=np.int64)
        ints[:, 0], ints[:, 1], ints[:, 2:] = token_ids, ranks, top_ids
        floats = np.empty((count, 1 + width), dtype=np.float32)
        floats[:, 0], floats[:, 1:] = logprobs, top_logprobs
        return cls(ints, floats)

    @property
    def width(self) -> int:
        """L."""
        return int(self.ints.shape[1]) - 2

    def __len__(self) -> int:
        return len(self.ints)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return iter(self._records())

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> LogprobRun: ...
    def __getitem__(self, at: int | slice) -> TokenLogprobs | LogprobRun:
        if isinstance(at, slice):
            return LogprobRun(self.ints[at], self.floats[at])
        token_id, rank, *top_ids = self.ints[at].tolist()
        logprob, *top_logprobs = self.floats[at].tolist()
        return TokenLogprobs(token_id, logprob, rank, tuple(top_ids), tuple(top_logprobs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._records() == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __repr__(self) -> str:
        return repr(self._records())

    def _records(self) -> tuple[TokenLogprobs, ...]:
        return make_records(
            self.ints[:, 0].tolist(),
            self.floats[:, 0].tolist(),
            self.ints[:, 1].tolist(),
            _rows(self.ints[:, 2:]),
            _rows(self.floats[:, 1:]),
        )


Run = Sequence[TokenLogprobs]
"""Records of consecutive tokens, however they are kept."""

Records = list[Run | None]
"""[B] what each request of a step is told of its tokens; None: it did not ask."""


@dataclass(frozen=True, slots=True)
class StepRecords:
    """Those of a step while they still are one table."""

    table: LogprobRun  # of all tokens, request-major, with as many alternatives as anybody wants
    start_loc: NDArray[np.int64]  # [B + 1]
    widths: Sequence[int | None]  # [B] alternatives; None: none of them is asked for

    def runs(self) -> Records:
        """Each request's."""
        bounds, ints, floats = self.start_loc.tolist(), self.table.ints, self.table.floats
        if all(width == self.table.width for width in self.widths):
            return [LogprobRun(ints[i:j], floats[i:j]) for i, j in pairwise(bounds)]
        return [
            None if width is None else LogprobRun(ints[i:j, : 2 + width], floats[i:j, : 1 + width])
            for width, (i, j) in zip(self.widths, pairwise(bounds), strict=True)
        ]


class Part(Protocol):
    """What adds tokens to an answer: an output, or what it travels as."""

    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None:
        """Their records, where asked for."""
        ...


def join_logprobs(parts: Sequence[Part]) -> Run | None:
    """What consecutive parts of an answer say; None where the last one was not asked for any."""
    runs = [part.logprobs for part in parts]
    return None if runs[-1] is None else join_runs([run for run in runs if run])


def join_runs(runs: Sequence[Run]) -> Run:
    """Records one behind the other. Tables are copied, so that no part keeps a whole step's."""
    tables = [run for run in runs if isinstance(run, LogprobRun)]
    if not runs or len(tables) < len(runs) or len({run.width for run in tables}) > 1:
        return runs[0] if len(runs) == 1 else tuple(chain.from_iterable(runs))
    return LogprobRun(
        np.concatenate([run.ints for run in tables]),
        np.concatenate([run.floats for run in tables]),
    )


def num_entries(run: Sequence[TokenLogprobs]) -> int:
    """Log-probabilities in records: one a token, and one an alternative."""
    if isinstance(run, LogprobRun):
        return len(run) * (1 + run.width)
    twins = (record.processed for record in run)
    return sum(1 + len(record.top_ids) for record in (*run, *twins) if record is not None)


def make_records(
    token_ids: Iterable[int],
    logprobs: Iterable[float],
    ranks: Iterable[int],
    top_ids: Iterable[tuple[int, ...]],
    top_logprobs: Iterable[tuple[float, ...]],
    chosen: Iterable[tuple[float, ...]] = repeat(()),
) -> tuple[TokenLogprobs, ...]:
    """Records of columns; the last three may go on without end."""
    rest = repeat(None)
    columns = zip(
        token_ids, logprobs, ranks, top_ids, top_logprobs, chosen, rest, rest, strict=False
    )
    return tuple(map(_make_record, columns))


_make_record = partial(tuple.__new__, TokenLogprobs)
"""Of all its fields: in a third of the time that calling the class takes."""


def _rows(numbers: NDArray[Any]) -> Iterable[tuple[Any, ...]]:
    """Those of a table as tuples; of an empty one without end."""
    return zip(*numbers.T.tolist(), strict=True) if numbers.shape[1] else repeat(())

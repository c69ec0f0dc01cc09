"""What the benchmark of policies under load counts."""

from __future__ import annotations

from emberline.bench.client import RequestRecord
from serving import length, while_all_ask


def test_what_comes_once_a_user_has_nothing_more_to_ask_does_not_count() -> None:
    """Two users: the second's last answer goes on alone for half of its six tokens."""

    def record(index: int, start: float, *chunks: float) -> RequestRecord:
        return RequestRecord(
            index=index, start=start, sent=start, end=chunks[-1], chunk_times=chunks,
            completion_tokens=2 * len(chunks),
        )  # fmt: skip

    records = [record(0, 1.0, 2.0, 3.0), record(1, 1.0, 2.0, 3.5), record(2, 3.0, 4.0, 5.0)]
    tokens, seconds = while_all_ask([*records, record(3, 3.5, 4.0, 5.5, 6.0)])
    assert (tokens, seconds) == (2 * 2 * 2 + 4 + 2, 4.0)
    assert while_all_ask(records[:1]) == (4.0, 2.0)


def test_answers_are_of_many_lengths() -> None:
    lengths = [length(i, 64) for i in range(65)]
    assert set(lengths) == set(range(32, 97))
    assert abs(sum(lengths[:24]) / 24 - 64) < 8

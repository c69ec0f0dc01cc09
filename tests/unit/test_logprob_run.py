"""Records kept as tables: they read as the tuples that they stand for, cut and joined as well."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from emberline.engine import messages
from emberline.engine.logprob_run import LogprobRun, join_logprobs, join_runs, num_entries
from emberline.engine.output_stream import merge_outputs, num_records
from emberline.types import EngineSnapshot, RequestOutput, TokenLogprobs


def records_of(first: int, count: int, width: int) -> tuple[TokenLogprobs, ...]:
    """Records that differ in every field. Halves are the same in float32."""
    return tuple(
        TokenLogprobs(
            token_id=7 + i,
            logprob=-i / 2,
            rank=1 + i % 3,
            top_ids=tuple(range(i, i + width)),
            top_logprobs=tuple(-(i + k) / 4 for k in range(width)),
        )
        for i in range(first, first + count)
    )


def run_of(records: tuple[TokenLogprobs, ...], width: int) -> LogprobRun:
    return LogprobRun.of(
        np.array([r.token_id for r in records], dtype=np.int64),
        np.array([r.logprob for r in records], dtype=np.float32),
        np.array([r.rank for r in records], dtype=np.int64),
        np.array([r.top_ids for r in records], dtype=np.int64).reshape(len(records), width),
        np.array([r.top_logprobs for r in records], dtype=np.float32).reshape(len(records), width),
    )


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_it_reads_as_the_tuple_of_its_records(count, width):
    records = records_of(3, count, width)
    run = run_of(records, width)
    assert tuple(run) == records
    assert list(reversed(run)) == list(reversed(records))
    assert len(run) == count
    assert bool(run) == bool(records)
    assert run == records
    assert records == run
    assert run == run_of(records, width)
    assert repr(run) == repr(records)
    assert [run[i] for i in range(-count, count)] == [records[i] for i in range(-count, count)]
    for cut in (slice(None), slice(1, 3), slice(0, 0), slice(-1, None), slice(None, None, 2)):
        assert run[cut] == records[cut]
    with pytest.raises(IndexError):
        run[count]
    assert num_entries(run) == num_entries(records) == count * (1 + width)


def test_numbers_are_pythons_own():
    """They go into JSON and into messages."""
    [record] = run_of(records_of(2, 1, 2), 2)
    assert [type(value) for value in record[:3]] == [int, float, int]
    assert {type(value) for value in record.top_ids} == {int}
    assert {type(value) for value in record.top_logprobs} == {float}
    assert isinstance(run_of(records_of(2, 1, 2), 2)[0], TokenLogprobs)


def test_other_records_are_not_equal():
    records = records_of(0, 2, 2)
    run = run_of(records, 2)
    assert run != records[:1]
    assert run != (records[0], records[1]._replace(rank=9))
    assert run != run_of(records_of(0, 2, 3), 3)
    assert run != 5


def test_it_does_not_change_with_the_tables_that_it_was_made_from():
    ids, values = np.array([1, 2]), np.array([-1.0, -2.0], dtype=np.float32)
    run = LogprobRun.of(ids, values, ids, ids[:, None], values[:, None])
    before = tuple(run)
    ids[:], values[:] = 0, 0
    assert tuple(run) == before


def test_tables_are_joined_as_tables_and_anything_else_as_a_tuple():
    one, two, three = (records_of(i, 2, 3) for i in (0, 2, 4))
    runs = [run_of(records, 3) for records in (one, two, three)]
    joined = join_runs(runs)
    assert isinstance(joined, LogprobRun)
    assert joined == one + two + three
    mixed = join_runs([runs[0], two, runs[2]])
    assert mixed == one + two + three
    assert not isinstance(mixed, LogprobRun)
    narrow = records_of(9, 1, 0)
    assert join_runs([runs[0], run_of(narrow, 0)]) == one + narrow
    assert join_runs([]) == ()
    assert join_runs([one]) is one
    part = join_runs([runs[0][:1]])  # of a step's table, which it is not to keep
    assert part == one[:1]
    assert not np.shares_memory(part.ints, runs[0].ints)
    assert not np.shares_memory(part.floats, runs[0].floats)


def test_outputs_are_joined_where_records_were_asked_for():
    one, two = records_of(0, 2, 1), records_of(2, 1, 1)
    outputs = [
        RequestOutput("a", (7, 8), run_of(one, 1)),
        RequestOutput("a", (), ()),
        RequestOutput("a", (9,), run_of(two, 1)),
    ]
    assert isinstance(join_logprobs(outputs), LogprobRun)
    merged = merge_outputs(outputs)
    assert merged.logprobs == one + two
    assert num_records(merged) == num_records(replace(merged, logprobs=one + two)) == 3 + 6
    assert join_logprobs([RequestOutput("a", (1,))]) is None
    assert join_logprobs([RequestOutput("a", (), ())]) == ()


SNAPSHOT = EngineSnapshot(
    **{
        name: 0
        for name, field in EngineSnapshot.__dataclass_fields__.items()
        if field.type in ("int", "float")
    }
)


@pytest.mark.parametrize("tables", [True, False])
def test_they_travel_and_merge_on_the_way(tables):
    parts = [records_of(0, 2, 2), records_of(2, 3, 2)]
    writer, reader = messages.DeltaWriter(3), messages.DeltaReader("a")
    outputs = [
        RequestOutput("a", tuple(r.token_id for r in part), run_of(part, 2) if tables else part)
        for part in parts
    ]
    step = messages.Step([writer.write(output) for output in outputs], SNAPSHOT)
    deltas = messages.from_engine.decode(messages.encode(step)).deltas
    merged = messages.merge_deltas(deltas)
    assert merged.logprobs == parts[0] + parts[1]
    assert isinstance(merged.logprobs, LogprobRun) == tables
    assert num_records(merged) == 5 + 15
    assert reader.read(merged).logprobs == parts[0] + parts[1]


def test_they_can_be_kept():
    records = records_of(0, 3, 2)
    assert pickle.loads(pickle.dumps(run_of(records, 2))) == records

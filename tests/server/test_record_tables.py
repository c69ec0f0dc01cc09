"""Records that came as tables are written as the same records one by one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from emberline.engine.detokenizer import TokenText
from emberline.engine.logprob_run import LogprobRun
from emberline.server.records import RecordFormat
from emberline.types import LOGPROB_FLOOR, SamplingParams

from support.serving import make_tokenizer

TEXT = TokenText(make_tokenizer())
VOCAB = 60


def any_run(count: int, width: int) -> LogprobRun:
    """Values fall, as alternatives' do; the last ones are below what JSON is told."""
    generator = np.random.default_rng(count + width)
    ids = generator.integers(0, VOCAB, (count, 1 + width))
    values = -np.sort(generator.random((count, 1 + width), dtype=np.float32) * 9, axis=1)
    values[:, -1] = -np.inf
    return LogprobRun.of(ids[:, 0], values[:, 0], ids[:, 0] + 1, ids[:, 1:], values[:, 1:])


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize(
    "options", [{}, {"as_ids": True}, {"with_ids": True}, {"as_ids": True, "with_ids": True}]
)
@pytest.mark.parametrize("stops", [(), tuple(range(0, VOCAB, 3))])
def test_tables_are_written_as_their_records(count, width, options, stops):
    params = SamplingParams(logprobs=width, stop_token_ids=stops)
    form, run = RecordFormat(TEXT, params, **options), any_run(count, width)
    records, ids = tuple(run), [record.token_id for record in run]
    entries = form.chat_entries(run)
    assert entries == form.chat_entries(records)
    assert len(entries) == count
    assert all(len(entry["top_logprobs"]) == width for entry in entries)
    arrays = form.completion_arrays(ids, run, range(count))
    assert arrays == form.completion_arrays(ids, records, range(count))
    json.dumps([entries, arrays], allow_nan=False)
    if count and width:
        assert entries[0]["top_logprobs"][-1]["logprob"] == LOGPROB_FLOOR


def test_a_table_with_a_value_that_is_none_is_refused():
    run = any_run(3, 2)
    run.floats[1, 1] = np.nan
    for records in (run, tuple(run)):
        with pytest.raises(ValueError, match="a log-probability is nan"):
            RecordFormat(TEXT, SamplingParams(logprobs=2)).chat_entries(records)

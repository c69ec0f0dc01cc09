"""Trace files: what is written is read, what is cut is left out, what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberline.engine.trace import (
    FORMAT,
    BlockTrace,
    RequestTrace,
    append_trace,
    read_traces,
    samples,
    write_traces,
)
from emberline.models.weights import ModelError

HEADER = {"num_draft_tokens": 3, "model": "m"}
TRACES = [
    RequestTrace("a", 0.0, (BlockTrace("a", (0.5, 0.25, 0.75), 3, 2),)),
    RequestTrace(
        "b", 1.0, (BlockTrace("b", (0.123456789, 1.0, 0.0), 2, 2), BlockTrace("b", (0.5,), 1, 0))
    ),
    RequestTrace("c", 1.0, ()),
]


def test_a_file_holds_what_was_written_and_added(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_traces(path, HEADER, TRACES[:1])
    for trace in TRACES[1:]:
        append_trace(path, trace)
    header, traces = read_traces(path)
    assert header == {"format": FORMAT, **HEADER}
    assert [(t.prompt, t.temperature, len(t.blocks)) for t in traces] == [
        (t.prompt, t.temperature, len(t.blocks)) for t in TRACES
    ]
    for ours, theirs in zip(traces[1].blocks, TRACES[1].blocks, strict=True):
        assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-8)
        assert (ours.num_verified, ours.num_accepted) == (theirs.num_verified, theirs.num_accepted)
    write_traces(tmp_path / "again.jsonl", HEADER, traces)
    assert (tmp_path / "again.jsonl").read_text() == path.read_text()


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_traces(path, HEADER, TRACES)
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    for end in (start, start + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert [trace.prompt for trace in read_traces(path)[1]] == ["a", "b"]


def test_samples_know_what_was_verified() -> None:
    found = samples(TRACES, 3)
    assert found.survived.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    chance = 1 / (1 + np.exp(-found.logits))
    expected = [[0.5, 0.25, 0.75], [0.123456789, 1, np.nan], [0.5, np.nan, np.nan]]
    np.testing.assert_allclose(chance, expected, atol=2e-7)
    assert np.isfinite(found.logits[1, 1])
    assert samples([], 3).logits.shape == (0, 3)


def line(**changes: Any) -> str:
    request = {
        "prompt": "a",
        "temperature": 0.0,
        "confidence": [[0.5, 0.5]],
        "num_verified": [2],
        "num_accepted": [1],
    }
    return json.dumps({k: v for k, v in {**request, **changes}.items() if v is not None})


HEAD = json.dumps({"format": FORMAT, **HEADER})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: expected a header"),
        (["no json"], "line 1: expected a header"),
        ([json.dumps({"format": "other-1", "num_draft_tokens": 3})], "line 1.*other-1"),
        ([json.dumps({"format": FORMAT})], "line 1.*num_draft_tokens"),
        ([json.dumps({"format": FORMAT, "num_draft_tokens": 0})], "line 1.*num_draft_tokens 0"),
        (["[]"], "line 1: expected a header"),
        ([HEAD, line(), "{"], "line 3: expected a request's trace"),
        ([HEAD, "[]"], "line 2: expected a request's trace"),
        ([HEAD, line(prompt=None)], "line 2.*prompt"),
        ([HEAD, line(num_accepted=[3])], "line 2.*3 accepted of 2 of 2"),
        ([HEAD, line(num_verified=[3])], "line 2.*1 accepted of 3 of 2"),
        ([HEAD, line(confidence=[[0.5] * 4])], "line 2.*of 4 drafts"),
        ([HEAD, line(confidence=[[0.5, 1.5]])], r"line 2.*outside \[0, 1\]"),
        ([HEAD, line(confidence=[[0.5, float("nan")]])], r"line 2.*outside \[0, 1\]"),
        ([HEAD, line(num_accepted=[1, 1])], "line 2"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(text + "\n" for text in lines))
    with pytest.raises(ModelError, match=message) as raised:
        read_traces(path)
    assert str(raised.value).startswith(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read as a trace file"):
        read_traces(tmp_path / "none.jsonl")

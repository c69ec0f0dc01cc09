"""Long answers are written in slices, and are the same text as in one go."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.server import stream
from emberline.server.stream import dump_json, dump_long_json

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers() | FINITE | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES, st.integers(0, 300))
@settings(deadline=None, max_examples=200)
def test_slices_say_what_the_whole_says(value: object, count: int) -> None:
    data = {"choices": [{"logprobs": {"content": [value] * count}, "é\n": [[]]}], "x": {}, "y": []}
    assert dump_long_json(data) == dump_json(data)
    assert json.loads(dump_long_json(data)) == data


@pytest.mark.parametrize("dump", [dump_json, dump_long_json])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_json_number_is_not_written(dump: object, number: float) -> None:
    for data in (number, [0.0] * 100 + [number], {"choices": [{"logprobs": [number]}]}):
        with pytest.raises(ValueError, match="not JSON compliant"):
            dump(data)  # type: ignore[operator]


def test_no_piece_holds_more_than_one_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    encode = stream._encode

    def measured(data: object) -> str:
        text = encode(data)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(stream, "_encode", measured)
    whole = {str(i): -1.0 for i in range(5000)}
    data = {"choices": [{"logprobs": {"top_logprobs": [None] + [whole] * 20}}]}
    assert json.loads(dump_long_json(data)) == data
    assert max(lengths) < 1.1 * len(encode(whole))

"""Long answers are written in slices, and are the same text as in one go."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.server import stream
from emberline.server.records import finite
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
def test_what_is_no_json_number_is_null(dump: Callable[[object], bytes], number: float) -> None:
    assert dump(number) == b"null"
    assert json.loads(dump([0.5] * 100 + [number])) == [0.5] * 100 + [None]
    assert dump({"choices": [{"x": [number]}]}) == b'{"choices":[{"x":[null]}]}'


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_logprob_is_a_number_or_an_error(number: float) -> None:
    """Never null: whoever asked for it would take that for "not asked for"."""
    with pytest.raises(ValueError, match=str(number)):
        finite(number)
    assert (finite(-0.25), finite(float("-inf")), finite(-1e9)) == (-0.25, -9999.0, -9999.0)


def test_no_piece_holds_more_than_one_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    encode = stream._encode

    def measured(data: object) -> bytes:
        text = encode(data)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(stream, "_encode", measured)
    whole = {str(i): -1.0 for i in range(5000)}
    data = {"choices": [{"logprobs": {"top_logprobs": [None] + [whole] * 20}}]}
    assert json.loads(dump_long_json(data)) == data
    assert max(lengths) < 1.1 * len(encode(whole))

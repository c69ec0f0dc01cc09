"""Events come out the same however the bytes of a stream are cut."""

from __future__ import annotations

import pytest

from emberline.bench.sse import EventParser

STREAM = (
    'data: {"text": "é€😀"}\n\n'
    ": a comment, as servers send to keep a connection\n\n"
    "event: message\r\nid: 3\r\ndata:no space\r\n\r\n"
    "data: two\ndata:  lines\n\n"
    "data:\n\n"
    "retry: 10\n\n\n\n"
    "data: [DONE]\n\n"
    "data: never ended"
).encode()
EVENTS = ['{"text": "é€😀"}'.encode(), b"no space", b"two\n lines", b"", b"[DONE]"]


def test_cut_anywhere() -> None:
    for cut in range(len(STREAM) + 1):
        parser = EventParser()
        assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == EVENTS, cut


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_in_small_pieces(size: int) -> None:
    parser = EventParser()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS


def test_an_event_comes_with_its_blank_line_and_not_before() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\r") == []
    assert parser.feed(b"\n") == [b"x"]

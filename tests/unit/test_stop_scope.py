"""Stop strings that count behind a marker only: nothing before it stops, nor its line breaks."""

from __future__ import annotations

import pytest

from emberline.engine.detokenizer import TextStream, TokenText
from emberline.types import InvalidRequest, SamplingParams

from support.serving import make_tokenizer

TOKENIZER = make_tokenizer()
TEXT = TokenText(TOKENIZER)


def stopped(text: str, stop: str, *, take_often: bool, **scope: str) -> tuple[str, bool]:
    """The text up to the stop, and whether there was one."""
    stream = TEXT.stream(SamplingParams(stop=[stop], **scope))
    shown = ""
    for token_id in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        found = stream.push(token_id)
        shown += stream.take() if take_often else ""
        if found is not None:
            return shown + stream.take(final=True), True
    return shown + stream.take(final=True), False


@pytest.mark.parametrize("take_often", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "opened", "expected"),
    [
        ("a. b</t>c. d", ".", None, "a. b</t>c"),
        ("a. b", ".", None, None),
        ("a</t>\n\nb\n\nc", "\n\n", None, "a</t>\n\nb"),
        ("a</t>\n\n", "\n", None, None),
        ("a t>x</t>bt>", "t>", None, "a t>x</t>b"),
        ("<t>a. b</t>c. d", ".", "<t>", "<t>a. b</t>c"),
        ("\n<t>a. b</t>c. d", ".", "<t>", "\n<t>a. b</t>c"),
        ("a. b</t>c. d", ".", "<t>", "a"),
        ("<b>. </t>", ".", "<t>", "<b>"),
    ],
)
def test_stops_count_behind_the_marker(
    text: str, stop: str, opened: str | None, expected: str | None, take_often: bool
) -> None:
    scope = {"stop_after": "</t>"} | ({"stop_opened_by": opened} if opened else {})
    shown, found = stopped(text, stop, take_often=take_often, **scope)
    assert (shown, found) == ((text, False) if expected is None else (expected, True))


def test_an_opening_needs_an_end() -> None:
    with pytest.raises(InvalidRequest, match="stop_after"):
        SamplingParams(stop=["x"], stop_opened_by="<t>")


@pytest.mark.parametrize("stop", ["\n", "<", "think", "nk>", "\n\n"])
@pytest.mark.parametrize(
    "whole",
    [
        "<think>a\nb</think>answer",
        "\n<think>a</think>answer",
        "\n\n<think>a</think>answer",
        "<thin\nno marker after all",
        "\n\nno marker at all",
    ],
)
def test_the_cut_into_tokens_decides_nothing(stop: str, whole: str) -> None:
    def read(pieces: list[str]) -> tuple[str, str | None]:
        params = SamplingParams(stop=stop, stop_after="</think>", stop_opened_by="<think>")
        stream = TextStream(Pieces(pieces), params)  # type: ignore[arg-type]
        text = ""
        for number in range(len(pieces)):
            found = stream.push(number)
            text += stream.take(final=found is not None)
            if found is not None:
                return text, found
        return text + stream.take(final=True), None

    assert read(list(whole)) == read([whole])


class Pieces:
    """Token i is the i-th piece."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def visible_bytes(self, token_id: int, _params: SamplingParams) -> bytes:
        return self.pieces[token_id].encode()

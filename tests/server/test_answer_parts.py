"""The part of every token: that of its first byte, however the answer came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.detokenizer import TokenText
from emberline.engine.output_stream import merge_outputs
from emberline.server.answer_parts import AnswerReader, AnswerSplitter, PartToken
from emberline.server.dialect import Dialect, dialect_of
from emberline.server.parts import Part
from emberline.server.reasoning import Thinking
from emberline.types import FinishReason, RequestOutput, SamplingParams

from support.serving import make_tokenizer
from support.talking import HERMES, LLAMA, MARKERS, MAYBE_THINKS, THINKS

PLAIN, MARKED = make_tokenizer(HERMES), make_tokenizer(HERMES, MARKERS)
PARAMS = SamplingParams()
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n", "Sunny", " the", "é", "好",
    '{"name": "f", "arguments": {"a": "', '"}}', "{}", "<", "<eos>", "<say>",
]  # fmt: skip


def outputs_of(
    tokenizer: Any, text: str, sizes: list[int]
) -> tuple[TokenText, list[RequestOutput]]:
    """The outputs of a request that says `text`, of so many tokens each."""
    token_text = TokenText(tokenizer)
    stream = token_text.stream(PARAMS)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    outputs = []
    while ids:
        size = sizes.pop() if sizes else len(ids)
        part, ids = ids[:size], ids[size:]
        for token_id in part:
            stream.push(token_id)
        reason = None if ids else FinishReason.STOP
        said = stream.take(final=not ids)
        outputs.append(RequestOutput("r", tuple(part), text=said, finish_reason=reason))
    return token_text, outputs


def reader(text: TokenText, thinking: Thinking) -> AnswerReader:
    calls = Dialect(tools="hermes")
    return AnswerReader(text, PARAMS, lambda: AnswerSplitter(thinking, calls.call_splitter(["f"])))


@given(
    st.booleans(),
    st.sampled_from(list(Thinking)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.lists(st.integers(1, 9), max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_tokens_belong_where_their_first_byte_stands(
    marked: bool, thinking: Thinking, fragments: list[str], sizes: list[int]
) -> None:
    text, outputs = outputs_of(MARKED if marked else PLAIN, "".join(fragments), sizes)
    streamed, whole = reader(text, thinking), reader(text, thinking)
    tokens: list[PartToken] = []
    for output in outputs:
        tokens += streamed.read(output).tokens
    everything = merge_outputs(outputs)
    reading = whole.read(everything)
    assert tokens == reading.tokens
    assert [token.token_id for token in tokens] == list(everything.token_ids)
    assert streamed.num_reasoning == whole.num_reasoning <= len(everything.token_ids)

    raw = b"".join(text.visible_bytes(i, PARAMS) for i in everything.token_ids).decode()
    splitter = AnswerSplitter(thinking, Dialect(tools="hermes").call_splitter(["f"]))
    pieces = [*splitter.feed(raw), *splitter.feed("", final=True)]
    characters = [piece.part for piece in pieces for _ in range(piece.size)]
    by_byte = [
        part
        for character, part in zip(raw, characters, strict=True)
        for _ in range(len(character.encode()))
    ]
    at = 0
    for token in tokens:
        expected = by_byte[at] if at < len(by_byte) else (by_byte or [Part.CONTENT])[-1]
        assert token.part is expected
        at += len(text.visible_bytes(token.token_id, PARAMS))


@pytest.mark.parametrize(
    ("template", "style", "thinks"),
    [
        (HERMES, "hermes", False),
        (LLAMA, "llama_json", False),
        (THINKS, "hermes", True),
        (MAYBE_THINKS, "hermes", True),
        ({"default": "x", "tool_use": HERMES}, "hermes", False),
        ("{{ tools }}<tool_call><function=f>arguments</tool_call>", "none", False),
        ('{{ tools }}[TOOL_CALLS] "name": "parameters":', "none", False),
        ("{{ messages }}", "none", False),
        (None, "none", False),
    ],
)
def test_templates_show_how_a_model_writes(template: object, style: str, thinks: bool) -> None:
    tokenizer: Any = SimpleNamespace(chat_template=template)
    dialect = dialect_of(tokenizer)
    assert (dialect.tools, dialect.thinks) == (style, thinks)
    told = dialect_of(tokenizer, "llama_json", "think")
    assert (told.tools, told.thinks) == ("llama_json", True)
    assert dialect_of(tokenizer, "none", "none").tools == "none"
    with pytest.raises(ValueError, match="no such parser"):
        dialect_of(tokenizer, "xml")  # type: ignore[arg-type]

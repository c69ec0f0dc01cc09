"""Text of token ids: equal to the tokenizer's own decoding, whole characters, exact stop cuts."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from emberline.engine.detokenizer import TokenText
from emberline.types import SamplingParams

WORDS = [" the", " cat", "Hello", " world", "\n\n", "st", "op", "ĠĠ"]


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = alphabet + [
        "".join(part for part, _ in splitter.pre_tokenize_str(word)) for word in WORDS
    ]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<bos>")])
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def sentencepiece(*, strip: bool) -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁Hello", "▁world", "▁", "lo", "é", "▁▁", "好", "wor", "a"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False
    )


BYTE_LEVEL = byte_level()
TEXT = TokenText(BYTE_LEVEL)
SIZE = len(BYTE_LEVEL)
ids_of = BYTE_LEVEL.encode


def run(
    ids: list[int], params: SamplingParams, *, cuts: set[int] | None = None, min_tokens: int = 0
) -> tuple[list[str], int, str | None]:
    """Deltas, tokens used, and the stop string; text is taken after the tokens in `cuts`."""
    stream = TEXT.stream(params)
    deltas: list[str] = []
    for i, token_id in enumerate(ids):
        stop = stream.push(token_id, check_stop=i + 1 > min_tokens)
        if stop is not None:
            return [*deltas, stream.take(final=True)], i + 1, stop
        if cuts is None or i in cuts:
            deltas.append(stream.take())
    return [*deltas, stream.take(final=True)], len(ids), None


def reference(raw: bytes) -> str:
    """The text of bytes, an unfinished last character dropped."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


token_ids = st.lists(st.integers(0, SIZE - 1), max_size=24)
texts = st.text(max_size=12)


@given(token_ids, st.booleans(), st.sets(st.integers(0, 23)))
def test_joined_deltas_are_the_tokenizers_own_text(
    ids: list[int], skip: bool, cuts: set[int]
) -> None:
    deltas, _, _ = run(ids, SamplingParams(skip_special_tokens=skip), cuts=cuts)
    joined = "".join(deltas)
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    # The tokenizer marks an unfinished last character; the stream drops it.
    assert joined == whole or joined == whole.removesuffix("�")
    assert all("�" not in delta or "�" in whole for delta in deltas)


@given(token_ids, st.booleans(), st.booleans(), st.sets(st.integers(0, SIZE - 1)), st.data())
def test_several_tokens_add_what_each_adds_by_itself(
    ids: list[int], skip: bool, shown: bool, stops: set[int], data: st.DataObject
) -> None:
    stops |= set(data.draw(st.lists(st.sampled_from(ids), max_size=2)) if ids else ())
    params = SamplingParams(
        skip_special_tokens=skip,
        include_stop_str_in_output=shown,
        stop_token_ids=tuple(stops),
    )
    at_once, cut = TEXT.stream(params), data.draw(st.integers(0, len(ids)))
    at_once.extend(ids[:cut])
    first = at_once.take()
    at_once.extend(ids[cut:])
    deltas, _, _ = run(ids, params)
    assert first + at_once.take(final=True) == "".join(deltas)


@given(texts)
def test_any_text_round_trips_byte_by_byte(text: str) -> None:
    ids = ids_of(text)
    deltas, _, _ = run(ids, SamplingParams())
    assert "".join(deltas) == text
    assert b"".join(map(TEXT.bytes_of, ids)) == text.encode()
    assert all(not delta or delta in text for delta in deltas)


@given(
    token_ids,
    st.lists(st.sampled_from(["st", "stop", "op", "é", " the c", "\n", "好", "aa"]), max_size=3),
    st.booleans(),
    st.sets(st.integers(0, 23)),
    st.integers(0, 6),
)
@settings(max_examples=300)
def test_stop_strings_cut_where_the_bytes_first_complete_one(
    ids: list[int], stops: list[str], include: bool, cuts: set[int], min_tokens: int
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    deltas, used, stop = run(ids, params, cuts=cuts, min_tokens=min_tokens)
    raw, ends = b"", []
    for token_id in ids:
        raw += TEXT.visible_bytes(token_id, params)
        ends.append(len(raw))
    unchecked = ends[min(min_tokens, len(ids)) - 1] if ids and min_tokens else 0
    hits = [
        (end, end - len(text.encode()), text)
        for text in stops
        for end in range(max(unchecked + 1, len(text.encode())), len(raw) + 1)
        if raw[:end].endswith(text.encode())
    ]
    if not hits:
        assert (used, stop) == (len(ids), None)
        expected = raw
    else:
        end, begin, text = min(hits)
        assert stop == text
        assert ends[used - 1] >= end > (ends[used - 2] if used > 1 else 0)
        expected = raw[: end if include else begin]
    assert "".join(deltas) == reference(expected)


def test_nothing_is_released_that_may_begin_a_stop_string() -> None:
    stream = TEXT.stream(SamplingParams(stop=["STOP!"]))
    shown = []
    for token_id in ids_of("a STO b STOP"):
        assert stream.push(token_id) is None
        shown.append(stream.take())
    assert "".join(shown) == "a STO b "
    assert stream.push(ids_of("!")[0]) == "STOP!"
    assert stream.take(final=True) == ""
    with pytest.raises(ValueError, match="already ended"):
        stream.push(0)


def test_an_unfinished_stop_string_is_released_at_the_end() -> None:
    deltas, _, stop = run(ids_of("Sunny"), SamplingParams(stop=["Sunnyqq"]))
    assert (deltas, stop) == ([""] * 5 + ["Sunny"], None)


def test_an_emoji_is_released_whole_or_not_at_all() -> None:
    ids = ids_of("a🙂b")
    assert len(ids) == 6
    deltas, _, _ = run(ids, SamplingParams())
    assert deltas == ["a", "", "", "", "🙂", "b", ""]
    for length in range(1, 6):
        deltas, _, _ = run(ids[:length], SamplingParams())
        assert "".join(deltas) == ("a🙂" if length == 5 else "a")


def test_special_tokens_are_named_and_hidden_by_option() -> None:
    eos = BYTE_LEVEL.eos_token_id
    assert TEXT.token_str(eos) == "<eos>"
    assert TEXT.visible_bytes(eos, SamplingParams()) == b""
    assert TEXT.visible_bytes(eos, SamplingParams(skip_special_tokens=False)) == b"<eos>"
    tool = BYTE_LEVEL.convert_tokens_to_ids("<tool call>")
    assert TEXT.visible_bytes(tool, SamplingParams()) == b"<tool call>"


def test_tokens_that_mark_reasoning_and_calls_are_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "<tool_call>", "<x>"]})
    text = TokenText(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["<think>", "<tool_call>", "<x>"])
    shown = [text.visible_bytes(i, SamplingParams()) for i in ids]
    assert shown == [b"<think>", b"<tool_call>", b""]


def test_a_stop_token_adds_no_text_unless_included() -> None:
    a = ids_of("a")[0]
    hidden = SamplingParams(stop_token_ids=[a])
    shown = SamplingParams(stop_token_ids=[a], include_stop_str_in_output=True)
    assert (TEXT.visible_bytes(a, hidden), TEXT.visible_bytes(a, shown)) == (b"", b"a")


def test_partial_bytes_and_unknown_ids_have_a_name() -> None:
    first = ids_of("🙂")[0]
    assert (TEXT.bytes_of(first), TEXT.token_str(first)) == (b"\xf0", "�")
    assert (TEXT.bytes_of(SIZE + 7), TEXT.token_str(SIZE + 7)) == (b"", f"token_id:{SIZE + 7}")
    assert TEXT.text_of([*ids_of("hi"), SIZE + 7]) == "hi"


@pytest.mark.parametrize("strip", [True, False])
@given(data=st.data())
@settings(max_examples=60)
def test_sentencepiece_pieces_continue_a_text(strip: bool, data: st.DataObject) -> None:
    tokenizer = sentencepiece(strip=strip)
    text = TokenText(tokenizer)
    plain = st.integers(259, len(tokenizer) - 1)
    accent = st.just([3 + byte for byte in "ü🙂".encode()])
    runs = data.draw(st.lists(st.one_of(plain.map(lambda i: [i]), accent), max_size=8))
    ids = [i for run_ids in runs for i in run_ids]
    anchor = tokenizer.convert_tokens_to_ids("a")
    stream = text.stream(SamplingParams())
    shown = []
    for token_id in ids:
        stream.push(token_id)
        shown.append(stream.take())
    joined = "".join(shown) + stream.take(final=True)
    assert "a" + joined == tokenizer.decode([anchor, *ids])
    assert joined == text.text_of(ids)


def test_sentencepiece_bytes_and_specials() -> None:
    text = TokenText(sentencepiece(strip=True))
    assert text.bytes_of(3 + 0xE2) == b"\xe2"
    assert text.token_str(2) == "</s>"
    assert text.bytes_of(259) == b" Hello"


def test_tokenizers_without_a_decoder_or_with_another_are_followed() -> None:
    backend = Tokenizer(models.WordPiece({"a": 0, "cat": 1, "##s": 2, "[UNK]": 3}))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    pieces = TokenText(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [pieces.bytes_of(i) for i in (1, 2)] == [b" cat", b"s"]
    words = Tokenizer(models.WordLevel({"a": 0, "cat": 1}, unk_token="a"))
    plain = TokenText(PreTrainedTokenizerFast(tokenizer_object=words))
    assert plain.bytes_of(1) == b" cat"

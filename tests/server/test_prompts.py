"""Prompts without a server: who made a template fail, and which tokenizers bound a text."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from emberline.engine.detokenizer import TokenText
from emberline.server.chat_body import Message
from emberline.server.prompt_limit import TextBound, text_bound
from emberline.server.prompts import PromptEncoder
from emberline.server.turns import LONG_WORK
from emberline.types import InvalidRequest

from support.serving import make_tokenizer

V = 270  # a vocabulary with padding


@pytest.mark.parametrize("said", ["", ": too loud"])
def test_arguments_that_a_template_fails_on_are_not_blamed_on_the_messages(said: str) -> None:
    tokenizer = copy.copy(make_tokenizer())
    fails = "raise_exception('too loud')" if said else "loud + 1"
    tokenizer.chat_template = "{% if loud %}{{ " + fails + " }}{% endif %}{{ messages[0].content }}"
    encoder = PromptEncoder(tokenizer, TokenText(tokenizer), vocab_size=V, max_model_len=64)
    messages = [Message(role="user", content="ab")]

    def encode(**arguments: object) -> int:
        prompt = encoder.chat(messages, add_generation_prompt=True, template_kwargs=arguments)
        return len(asyncio.run(prompt).token_ids)

    assert encode() == encode(loud="") == 2
    with pytest.raises(InvalidRequest, match=f"refused these chat_template_kwargs{said}$") as seen:
        encode(loud="yes")
    assert seen.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "lossy",
    [
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.Replace("  ", " ")},
        {"normalizer": normalizers.Replace(Regex(" +"), " ")},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    ],
    ids=["lowercase", "replace", "regex", "spaces", "split"],
)
def test_no_bound_where_text_can_vanish(lossy: dict[str, Any]) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(make_tokenizer().backend_tokenizer.to_str())
    )
    backend = tokenizer.backend_tokenizer

    def bound() -> TextBound | None:
        return text_bound(tokenizer, TokenText(tokenizer), V)

    assert bound() == TextBound(len("<assistant>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "_")])
    assert bound() == TextBound(3 * len("<assistant>"))
    for part, value in lossy.items():
        setattr(backend, part, value)
    assert bound() is None


def test_bytes_without_a_token_do_not_count() -> None:
    state = json.loads(make_tokenizer().backend_tokenizer.to_str())
    del state["model"]["vocab"]["x"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    bound = text_bound(tokenizer, TokenText(tokenizer), V)
    assert bound == TextBound(len("<assistant>"), b"x")
    assert len(tokenizer("axxb")["input_ids"]) == bound.num_bytes("axxb") == 2


@pytest.mark.parametrize("special", [True, False])
def test_short_and_long_texts_are_encoded_alike_whatever_a_file_cuts(special: bool) -> None:
    """Its file cuts and pads, and begins each text with a token: `__call__` does the last only."""
    backend = Tokenizer.from_str(make_tokenizer().backend_tokenizer.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=12)
    backend.post_processor = processors.TemplateProcessing(
        single="[A] $A", special_tokens=[("[A]", 7)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    encoder = PromptEncoder(tokenizer, TokenText(tokenizer), vocab_size=V, max_model_len=64)
    texts = ["", "ab", " a b\n\tc", "\u00e9\U0001f600" * 9, "x" * LONG_WORK, "x" * (LONG_WORK + 1)]
    found = [encoder.encode(text, special) for text in texts]
    assert found == [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
    assert [len(ids) for ids in found] == [special + len(text.encode()) for text in texts]

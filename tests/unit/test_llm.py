"""The offline front door refuses what it would otherwise misread. No model is loaded."""

from __future__ import annotations

import pytest

from emberline.llm import LLM
from emberline.types import InvalidRequest


@pytest.fixture()
def llm():
    return LLM.__new__(LLM)  # nothing may be touched before the refusal


@pytest.mark.parametrize("verb", ["generate", "score"])
@pytest.mark.parametrize("text", ["Hello", ""])
def test_a_lone_string_is_not_a_list_of_prompts(llm, verb, text):
    with pytest.raises(InvalidRequest, match="wrap one") as caught:
        getattr(llm, verb)(text)
    assert caught.value.param == "prompts"


def test_a_conversation_has_a_message(llm):
    with pytest.raises(InvalidRequest, match="messages is empty"):
        llm.chat([])

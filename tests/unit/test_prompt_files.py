"""Prompt files: the forms of a line, and what is refused by name."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path

import pytest

from emberline.prompts import Conversation, Message, conversation_ids, read_conversations
from emberline.types import InvalidRequest

from support.serving import make_tokenizer


def test_every_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "Hello", "id": 3},
        {"turns": ["Tell me\u2028more", "And then?", "Why?"]},
        {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "x"}]},
    ]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text(text, encoding="utf-8")
    hello, told, brief = read_conversations(path)
    assert hello == Conversation((Message("user", "Hello"),))
    assert told.text == "Tell me\u2028more"
    assert told.later == ("And then?", "Why?")
    assert brief.opening == (Message("system", "Be brief"), Message("user", "x"))
    assert brief.text == "Be brief\nx"
    assert read_conversations(path, 2) == [hello, told]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\n\n{"text": "b"}\n', "line 3 must be .*: got none of them"),
        ('{"prompt": "a", "turns": ["b"]}', "got turns and prompt"),
        ('{"turns": []}', "line 1 must be .*: turns is empty"),
        ('{"turns": ["a", ""]}', "turns holds what is no text, or an empty one"),
        ('{"prompt": 3}', "prompt holds what is no text"),
        ('{"messages": [{"role": "user"}]}', "a message needs a role and a content"),
        ('{"messages": ["a"]}', "a message needs a role"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "must be the user's, not the as"),
        ("hello", "line 1 must be .*: no JSON"),
        ("[1]", "line 1 must be .*: got list"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message) as raised:
        read_conversations(path)
    assert str(path) in str(raised.value)
    assert raised.value.param == "prompts"


def test_the_template_is_used_where_there_is_one() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer = make_tokenizer(template)
    ids = conversation_ids(tokenizer, Conversation((Message("system", "s"), Message("user", "u"))))
    assert tokenizer.decode(ids) == "<system>s<user>u<assistant>"
    tokenizer = copy(tokenizer)  # others share it
    tokenizer.chat_template = None
    assert tokenizer.decode(conversation_ids(tokenizer, Conversation.of("u"))) == "u"
    with pytest.raises(InvalidRequest, match="no chat template"):
        conversation_ids(tokenizer, Conversation((Message("system", "s"), Message("user", "u"))))


def test_a_template_that_refuses_is_quoted() -> None:
    tokenizer = make_tokenizer("{{ raise_exception('no systems here') }}")
    with pytest.raises(InvalidRequest, match="no systems here"):
        conversation_ids(tokenizer, Conversation.of("u"))

"""Tool calls in a model's text, told apart from its content piece by piece.

Owns two ways of writing a call: JSON between <tool_call> and </tool_call> (Hermes, Qwen), and bare
JSON at the start of the answer (Llama). Must not know reasoning, records, grammars or HTTP.

A call begins as soon as its name is known; its arguments are handed on as they are written, as raw
text. What only looks like a call is content, to the letter. Whatever pieces the text comes in, the
result is the same: every decision waits for the character that settles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

from emberline.server.parts import Part, Piece, Skip, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_NAME = r'[^"\\<]{1,64}'
_MARKED_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<]+)"\s*,\s*"arguments"\s*:\s*(?=\S)')
_MARKED_TAIL = re.compile(r"\s*(?:,[^<]*)?\}?\s*")
_BARE_TAIL = re.compile(r"\s*\}?\s*(?:;\s*)?")
_STRUCTURE = re.compile(r'["\\{}\[\]<]')
_SCALAR_END = re.compile(r"[\s,}\]<]")


class _State(Enum):
    TEXT = auto()  # content, or the marker of a call
    HEAD = auto()  # a call's name
    ARGUMENTS = auto()
    TAIL = auto()  # from the arguments to the end of the call


class JsonValue:
    """Finds the end of a JSON value in a text that comes in pieces.

    A "<" outside of strings is no JSON and ends the value: a marker follows one that is not whole.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = -1  # where a character that a backslash precedes will stand
        self._seen = 0  # characters so far
        self._scalar = False

    def end(self, text: str) -> int | None:
        """How many characters of the next piece belong to the value; None if all and more."""
        start, self._seen = self._seen, self._seen + len(text)
        if start == 0 and text and text[0] not in '{["<':
            self._scalar = True
        if self._scalar:
            found = _SCALAR_END.search(text)
            return found.start() if found else None
        for match in _STRUCTURE.finditer(text):
            end = self._structure(match[0], start + match.start())
            if end is not None:
                return end - start
        return None

    def _structure(self, character: str, at: int) -> int | None:
        """Where the value ends, if it ends with this character."""
        if self._in_string:
            if at == self._escaped:
                return None
            if character == "\\":
                self._escaped = at + 1
            elif character == '"':
                self._in_string = False
                return at + 1 if not self._depth else None
        elif character == '"':
            self._in_string = True
        elif character == "<":
            return at
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return at + 1 if self._depth <= 0 else None
        return None


class _CallSplitter:
    """What the two ways share: the text not told yet, and the calls' arguments."""

    def __init__(self) -> None:
        self._held = ""
        self._state = _State.TEXT
        self._num_calls = 0
        self._value = JsonValue()

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """See `Splitter`."""
        self._held += text
        pieces: list[Piece] = []
        while True:
            state, length = self._state, len(self._held)
            if self._held or final:
                pieces += self._advance(final)
            if (self._state, len(self._held)) == (state, length):
                return pieces

    def _advance(self, final: bool) -> list[Piece]:
        """One step in the present state; no change of state and text means to wait for more."""
        match self._state:
            case _State.TEXT:
                return self._text(final)
            case _State.HEAD:
                return self._head(final)
            case _State.ARGUMENTS:
                return self._arguments()
            case _State.TAIL:
                return self._tail(final)

    def _text(self, final: bool) -> list[Piece]:
        raise NotImplementedError

    def _head(self, final: bool) -> list[Piece]:
        raise NotImplementedError

    def _tail(self, final: bool) -> list[Piece]:
        raise NotImplementedError

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _content(self, size: int) -> list[Piece]:
        return [Piece(Part.CONTENT, size, self._take(size))] if size else []

    def _marker(self, size: int) -> list[Piece]:
        self._take(size)
        return [Piece(Part.TOOL_CALL, size)] if size else []

    def _begin(self, size: int, name: str) -> list[Piece]:
        """A call whose head is `size` long."""
        self._take(size)
        self._state, self._value = _State.ARGUMENTS, JsonValue()
        self._num_calls += 1
        return [Piece(Part.TOOL_CALL, size, call=self._num_calls - 1, name=name)]

    def _arguments(self) -> list[Piece]:
        end = self._value.end(self._held)
        if end is not None:
            self._state = _State.TAIL
        text = self._take(len(self._held) if end is None else end)
        return [Piece(Part.TOOL_CALL, len(text), text, self._num_calls - 1)] if text else []


class MarkedCalls(_CallSplitter):
    """Calls between <tool_call> and </tool_call>, anywhere in the content.

    Line breaks beside a marker belong to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._skip = Skip()
        self._prefix = 0  # characters of a call's marker, line breaks before it included

    def _text(self, final: bool) -> list[Piece]:
        skipped = self._skip.take(self._held)
        if skipped:
            return self._marker(skipped)
        start = self._held.find(OPEN)
        if start < 0:
            hold = 0 if final else held_back(self._held, OPEN)
            return self._content(len(self._held) - hold)
        self._state = _State.HEAD
        said = len(self._held[:start].rstrip("\n"))
        self._prefix = start + len(OPEN) - said
        return self._content(said)

    def _head(self, final: bool) -> list[Piece]:
        head = _MARKED_HEAD.match(self._held, self._prefix)
        if head:
            return self._begin(head.end(), head[1])
        end = self._held.find(CLOSE, self._prefix)
        if end < 0 and not final:
            return []
        block = self._held[self._prefix :] if end < 0 else self._held[self._prefix : end]
        size = len(self._held) if end < 0 else end + len(CLOSE)
        self._state = _State.TEXT
        return self._whole(block, size) or self._content(size)

    def _whole(self, block: str, size: int) -> list[Piece]:
        """A call whose keys stand in another order; nothing if it is none."""
        try:
            call = json.loads(block)
        except ValueError:
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        self._take(size)
        self._skip.on = True
        self._num_calls += 1
        text = json.dumps(arguments, ensure_ascii=False)
        return [Piece(Part.TOOL_CALL, size, text, self._num_calls - 1, call["name"])]

    def _tail(self, final: bool) -> list[Piece]:
        match = _MARKED_TAIL.match(self._held)
        size = match.end() if match else 0
        rest = self._held[size : size + len(CLOSE)]
        closing = CLOSE.startswith(rest)
        if closing and rest != CLOSE and not final:
            return []
        self._state, self._skip.on = _State.TEXT, True
        return self._marker(size + len(rest) if closing else size)


class BareCalls(_CallSplitter):
    """Calls as bare JSON at the start of the answer, separated by semicolons or spaces.

    Nothing marks them but their form: JSON that is no call of a known function is content.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._state = _State.HEAD
        self._over = False  # what follows is content

    def _text(self, final: bool) -> list[Piece]:  # noqa: ARG002
        return self._content(len(self._held))

    def _head(self, final: bool) -> list[Piece]:
        start = len(self._held) - len(self._held.lstrip())
        if self._held.startswith(PYTHON_TAG, start):
            start += len(PYTHON_TAG)
        for head in _BARE_HEADS:
            match = head.match(self._held, start)
            if match and match[1] in self._names:
                return self._begin(match.end(), match[1])
        if not final and any(begun.fullmatch(self._held) for begun in _BARE_BEGUN):
            return []
        self._state = _State.TEXT
        return []

    def _tail(self, final: bool) -> list[Piece]:
        match = _BARE_TAIL.match(self._held)
        size = match.end() if match else 0
        if size == len(self._held) and not final:
            return []
        rest = self._held[size:]
        another = rest.startswith("{") or PYTHON_TAG.startswith(rest[: len(PYTHON_TAG)])
        self._state = _State.HEAD if another and rest else _State.TEXT
        return self._marker(size)


def _begun(atoms: list[str]) -> re.Pattern[str]:
    """What matches every beginning of the atoms' concatenation."""
    pattern = ""
    for atom in reversed(atoms):
        pattern = f"(?:{atom}{pattern}|\\Z)"
    return re.compile(pattern)


def _bare_head(kind: bool, arguments: str) -> list[str]:
    """The atoms of a call's head: `{"name": "...", "parameters": `, the type before it or not."""

    def text(literal: str) -> list[str]:
        atoms: list[str] = []
        for character in literal:
            atoms += [re.escape(character), *([r"\s*"] if character in "{:," else [])]
        return atoms

    kinds = text('"type":"function",') if kind else []
    return [
        *text("{"),
        *kinds,
        *text('"name":"'),
        _NAME,
        *text('",'),
        *text(f'"{arguments}":'),
    ]


def _compile_bare() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    heads, begun = [], []
    for kind in (False, True):
        for arguments in ("parameters", "arguments"):
            atoms = _bare_head(kind, arguments)
            name = atoms.index(_NAME)
            named = [*atoms[:name], f"({atoms[name]})", *atoms[name + 1 :]]
            heads.append(re.compile("".join(named) + r"(?=\S)"))
            begun.append(_begun([r"\s*", *atoms]))
            begun.append(_begun([r"\s*", *map(re.escape, PYTHON_TAG), *atoms]))
    return heads, begun


_BARE_HEADS, _BARE_BEGUN = _compile_bare()

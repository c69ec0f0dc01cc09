"""The choices of a chat: messages and deltas, with one record a token.

Owns their shape. Must not know how an answer is told apart.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from emberline.server.answer_parts import AnswerReader, Reading
from emberline.server.call import AnswerFacts
from emberline.server.chat_body import ChatBody
from emberline.server.parts import Part, Piece
from emberline.server.prompts import EncodedPrompt
from emberline.server.records import Json, RecordFormat
from emberline.types import RequestOutput, TokenLogprobs


class ChatFormat:
    """A choice whose text is all content."""

    def __init__(
        self, index: int, prompt: EncodedPrompt, body: ChatBody, form: RecordFormat
    ) -> None:
        self._index, self._prompt, self._body, self._form = index, prompt, body, form
        self._first = True

    @property
    def facts(self) -> AnswerFacts:
        """See `ChoiceFormat`."""
        return AnswerFacts()

    def whole(self, output: RequestOutput) -> Json:
        """The choice of an answer that is not streamed."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return self._choice({"message": message}, output)

    def deltas(self, output: RequestOutput) -> list[Json]:
        """The role before anything else, then what there is of text and records."""
        choice = self._choice({"delta": {"content": output.text}}, output)
        return [*self._opening(), *([choice] if output.text or _has_records(choice) else [])]

    def end(self) -> Json:
        """The choice of the last chunk."""
        return {"index": self._index, "delta": {}, "logprobs": None}

    def root(self, output: RequestOutput) -> Json:
        """What is asked about the prompt, which all choices share."""
        root: Json = {}
        if self._body.return_token_ids:
            root["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._body.prompt_logprobs is not None:
            root["prompt_logprobs"] = self._form.prompt_entries(output.prompt_logprobs)
        return root

    def _opening(self) -> list[Json]:
        """The choice that says the role, once."""
        if not self._first:
            return []
        self._first = False
        opening = {"role": "assistant", "content": ""}
        return [{"index": self._index, "delta": opening, "logprobs": None}]

    def _choice(self, said: Json, output: RequestOutput) -> Json:
        return self._with_records(said, output.token_ids, output.logprobs or ())

    def _with_records(
        self, said: Json, token_ids: Iterable[int], records: Iterable[TokenLogprobs]
    ) -> Json:
        logprobs = None
        if self._body.logprobs:
            logprobs = {"content": self._form.chat_entries(records), "refusal": None}
        choice = {"index": self._index, **said, "logprobs": logprobs}
        if self._body.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice


class PartsFormat(ChatFormat):
    """A choice with reasoning or calls beside its content; records say which they belong to.

    Records and token ids come as soon as it is certain where they belong: a token that may begin a
    marker waits for the next.
    """

    def __init__(
        self,
        index: int,
        prompt: EncodedPrompt,
        body: ChatBody,
        form: RecordFormat,
        reader: AnswerReader,
        *,
        thinks: bool,
    ) -> None:
        super().__init__(index, prompt, body, form)
        self._reader, self._thinks = reader, thinks
        self._num_calls = 0

    @property
    def facts(self) -> AnswerFacts:
        """See `ChoiceFormat`."""
        return AnswerFacts(self._reader.num_reasoning, self._num_calls)

    def whole(self, output: RequestOutput) -> Json:
        """The choice of an answer that is not streamed."""
        reading = self._reader.read(output)
        calls = self._calls(reading.pieces)
        content = _text(reading.pieces, Part.CONTENT)
        message: Json = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
        }
        if self._thinks:
            thoughts = _text(reading.pieces, Part.REASONING) or None
            message |= {"reasoning": thoughts, "reasoning_content": thoughts}
        if calls:
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in calls
            ]
        return self._read_choice({"message": message}, reading)

    def deltas(self, output: RequestOutput) -> list[Json]:
        """The role before anything else, then what there is of the parts and of records."""
        reading = self._reader.read(output)
        delta: Json = {}
        thoughts = _text(reading.pieces, Part.REASONING)
        if thoughts:
            delta |= {"reasoning": thoughts, "reasoning_content": thoughts}
        content = _text(reading.pieces, Part.CONTENT)
        if content:
            delta["content"] = content
        calls = self._calls(reading.pieces)
        if calls:
            delta["tool_calls"] = calls
        choice = self._read_choice({"delta": delta}, reading)
        return [*self._opening(), *([choice] if delta or _has_records(choice) else [])]

    def _calls(self, pieces: Iterable[Piece]) -> list[Json]:
        """What the pieces add to calls: an entry a call, with its name where it begins."""
        entries: dict[int, Json] = {}
        for piece in pieces:
            if piece.call is None:
                continue
            if piece.name is not None:
                self._num_calls += 1
                entries[piece.call] = {
                    "index": piece.call,
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            entry = entries.setdefault(
                piece.call, {"index": piece.call, "function": {"arguments": ""}}
            )
            entry["function"]["arguments"] += piece.text
        return list(entries.values())

    def _read_choice(self, said: Json, reading: Reading) -> Json:
        tokens = reading.tokens
        records = [token.record for token in tokens if token.record is not None]
        choice = self._with_records(said, [token.token_id for token in tokens], records)
        if choice["logprobs"]:
            for entry, token in zip(choice["logprobs"]["content"], tokens, strict=True):
                entry["part"] = token.part
        return choice


def _text(pieces: Iterable[Piece], part: Part) -> str:
    return "".join(piece.text for piece in pieces if piece.part is part)


def _has_records(choice: Json) -> bool:
    records = choice["logprobs"] and choice["logprobs"]["content"]
    return bool(records or choice.get("token_ids"))

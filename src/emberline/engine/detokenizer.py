"""Token ids to text, one token at a time: bytes, whole characters, stop strings.

Owns what a token adds to the text and where a stop string cuts it. Works on bytes, so that a
character split over tokens, a token inside a character and a stop string inside a token are no
special cases. Must not know the engine, requests or HTTP.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from emberline.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKERS = frozenset(["<think>", "</think>", "<tool_call>", "</tool_call>"])
_CONTEXT = "a"  # any plain piece: what follows it is decoded as a continuation


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes (GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(own)]
    stand_ins = {chr(byte): byte for byte in own}
    return stand_ins | {chr(256 + i): byte for i, byte in enumerate(rest)}


class TokenText:
    """What every token id of one tokenizer adds to a text, built once.

    Text is always the *continuation* of something: a leading space that a sentencepiece decoder
    would strip from the start of a whole text is kept. Ids that the tokenizer does not know (a
    model's vocabulary may be padded) add no text. Tokens that mark reasoning and calls are text,
    even where the tokenizer has them as special. Safe to use from several threads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = tokenizer.backend_tokenizer
        self._pieces: dict[int, str] = {i: piece for piece, i in tokenizer.get_vocab().items()}
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {i: str(token.content) for i, token in added.items()}
        special = [i for i, token in added.items() if token.special]
        self.special_ids: frozenset[int] = frozenset(
            i
            for i in special + list(tokenizer.all_special_ids)
            if self._added.get(i) not in _MARKERS
        )
        self._decoder = backend.decoder
        kinds = _decoder_kinds(self._decoder)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self._visible = {skips: _Pieces(self, skips) for skips in (False, True)}
        self._written = {skips: _Written(self, skips) for skips in (False, True)}

    def bytes_of(self, token_id: int) -> bytes:
        """The raw bytes of a token, special tokens as their text; possibly part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute(token_id)
        return found

    def pieces(self, *, skip_special: bool) -> Mapping[int, bytes]:
        """The bytes of every token by its id, nothing for special ones if they are skipped."""
        return self._visible[skip_special]

    def visible_bytes(self, token_id: int, params: SamplingParams) -> bytes:
        """The bytes that an emitted token adds to the text of a request with these options.

        Nothing for a special token under `skip_special_tokens`, and nothing for a token of
        `stop_token_ids` unless `include_stop_str_in_output`.
        """
        if token_id in params.stop_token_ids and not params.include_stop_str_in_output:
            return b""
        return self._visible[params.skip_special_tokens][token_id]

    def written(self, *, skip_special: bool) -> Mapping[int, tuple[str, list[int]]]:
        """By a token's id: `token_str`, and the bytes that it adds to a text, not to be changed."""
        return self._written[skip_special]

    def token_str(self, token_id: int) -> str:
        """A token as text: U+FFFD for partial characters, never empty, special tokens by name."""
        text = self.bytes_of(token_id).decode("utf-8", "replace")
        return text or self._pieces.get(token_id) or f"token_id:{token_id}"

    def text_of(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """The text of whole ids, special tokens included, U+FFFD where bytes are no character."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    def stream(self, params: SamplingParams) -> TextStream:
        """The text of one request, to be fed token by token."""
        return TextStream(self, params)

    def _compute(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            return b""
        if token_id in self.special_ids:
            return self._added.get(token_id, piece).encode()
        if self._byte_level:
            # A piece with a character outside the alphabet was added as plain text.
            stand_ins = [self._alphabet.get(character) for character in piece]
            known = [byte for byte in stand_ins if byte is not None]
            return bytes(known) if len(known) == len(piece) else piece.encode()
        byte = _BYTE_PIECE.fullmatch(piece) if self._byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        if self._decoder is None:
            return b" " + piece.encode()  # the tokenizer joins its pieces with spaces
        before: str = self._decoder.decode([_CONTEXT])
        after: str = self._decoder.decode([_CONTEXT, piece])
        return after.removeprefix(before).encode()


class _Pieces(dict[int, bytes]):
    """Bytes of tokens, each worked out when it is first asked for."""

    def __init__(self, tokens: TokenText, skip_special: bool) -> None:
        super().__init__()
        self._tokens, self._skip_special = tokens, skip_special

    def __missing__(self, token_id: int) -> bytes:
        skipped = self._skip_special and token_id in self._tokens.special_ids
        self[token_id] = b"" if skipped else self._tokens.bytes_of(token_id)
        return self[token_id]


class _Written(dict[int, tuple[str, list[int]]]):
    """How records write tokens. Kept for so many: a request may ask for a whole vocabulary."""

    _MOST = 2**15

    def __init__(self, tokens: TokenText, skip_special: bool) -> None:
        super().__init__()
        self._tokens, self._pieces = tokens, tokens.pieces(skip_special=skip_special)

    def __missing__(self, token_id: int) -> tuple[str, list[int]]:
        written = self._tokens.token_str(token_id), list(self._pieces[token_id])
        if len(self) < self._MOST:
            self[token_id] = written
        return written


class TextStream:
    """The growing text of one request. Joined, what `take` returns is the whole text.

    Bytes that are no UTF-8 become U+FFFD, as in any decoder; bytes at the very end that only
    begin a character are dropped, since nothing is known to be wrong with them. Of several stop
    strings the one completed first counts (the longest, if several end at one byte), however the
    text was cut into tokens.
    """

    def __init__(self, tokens: TokenText, params: SamplingParams) -> None:
        self._tokens, self._params = tokens, params
        self._stops = [stop.encode() for stop in params.stop]
        self._longest = max(map(len, self._stops), default=0)
        shows_stops = params.include_stop_str_in_output
        self._hidden = frozenset(() if shows_stops else params.stop_token_ids)
        self._tail = bytearray()  # not released yet
        self._stopped = False
        self._gate = None if params.stop_after is None else _Gate(params)
        self._floor = 0  # where in the tail a stop string may begin
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    @property
    def watches(self) -> bool:
        """Whether a token may end the text."""
        return bool(self._stops) or self._gate is not None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add emitted tokens where no stop string is looked for."""
        if not self._hidden.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        pieces = self._tokens.pieces(skip_special=self._params.skip_special_tokens)
        self._tail += b"".join(map(pieces.__getitem__, token_ids))

    def push(self, token_id: int, *, check_stop: bool = True) -> str | None:
        """Add one emitted token; return the stop string it completed, if any.

        The text then ends before that string, or after it with `include_stop_str_in_output`.
        With `check_stop` off (under `min_tokens`) nothing that ends within this token counts.
        """
        if self._stopped:
            raise ValueError("a stop string has already ended this text")
        start = len(self._tail)
        piece = self._tokens.visible_bytes(token_id, self._params)
        self._tail += piece
        if self._gate is not None:
            was_open = self._gate.undecided
            blocked = self._gate.blocked(piece)
            if self._gate.undecided:
                return None  # whether a stop string counts in it is not known yet
            if blocked:
                self._floor = start + blocked
            elif was_open:
                start = 0
        if not self._stops or not check_stop:
            return None
        return self._find_stop(start)

    def take(self, final: bool = False) -> str:
        """Text that no later token can change: whole characters, no beginning of a stop string.

        `final` releases the rest.
        """
        length = len(self._tail)
        if not final and not self._stopped:
            undecided = self._gate is not None and self._gate.undecided
            length = 0 if undecided else length - self._held_back()
        text = self._decode(bytes(self._tail[:length]))
        del self._tail[:length]
        self._floor = max(0, self._floor - length)
        return text

    def _find_stop(self, start: int) -> str | None:
        """The stop string that ends first behind `start`; cuts the text there."""
        found: tuple[int, int, int] | None = None  # end, begin, which
        for which, stop in enumerate(self._stops):
            begin = self._tail.find(stop, max(self._floor, start - len(stop) + 1))
            if begin >= 0:
                candidate = (begin + len(stop), begin, which)
                found = candidate if found is None else min(found, candidate)
        if found is None:
            return None
        end, begin, which = found
        del self._tail[end if self._params.include_stop_str_in_output else begin :]
        self._stopped = True
        return str(self._params.stop[which])

    def _held_back(self) -> int:
        """Length of the longest end of the text that may still begin a stop string."""
        for length in range(min(self._longest - 1, len(self._tail)), 0, -1):
            end = bytes(self._tail[-length:])
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


class _Gate:
    """The text at the start of an answer in which no stop string counts.

    It ends with a marker and the line breaks behind it. Where it has an opening marker and the
    answer does not begin with that, every stop string counts.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._opening = (params.stop_opened_by or "").encode()
        self._closing = (params.stop_after or "").encode()
        self._inside = not self._opening
        self._seen = bytearray()  # what cannot be told yet
        self._closed = False  # the marker has come: only line breaks are left
        self._passed = False

    @property
    def undecided(self) -> bool:
        """Whether what has come may still be the opening marker."""
        return not self._inside and not self._passed

    def blocked(self, piece: bytes) -> int:
        """How many bytes at the start of the next piece no stop string may begin in."""
        if self._passed:
            return 0
        self._seen += piece
        if not self._inside:
            start = self._seen.lstrip(b"\n")
            self._inside = start.startswith(self._opening)
            self._passed = not self._inside and not self._opening.startswith(start)
            if not self._inside:
                return 0
        if not self._closed:
            end = self._seen.find(self._closing)
            self._closed = end >= 0
            keep = end + len(self._closing) if self._closed else 1 - len(self._closing)
            del self._seen[:keep]
        if self._closed:
            rest = self._seen.lstrip(b"\n")
            self._passed, self._seen = bool(rest), bytearray()
            return len(piece) - len(rest)
        return len(piece)


def _decoder_kinds(decoder: Any) -> set[str]:
    """Names of the steps of a `tokenizers` decoder."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders", [state])
    return {str(step["type"]) for step in steps}

"""How long a text can be and still fit the context, known without tokenising it.

Owns when that can be known: only where no part of a text can vanish on its way to tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emberline.engine.detokenizer import TokenText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What no normaliser here exceeds: composing a character (NFC) shortens its UTF-8 at most threefold.
_SHRINKING = {"NFC": 3, "Prepend": 1, "Replace": 1, "ByteLevel": 1}
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"}


@dataclass(frozen=True, slots=True)
class TextBound:
    """How much text a token can stand for."""

    token_bytes: int  # most UTF-8 bytes a token
    silent: bytes = b""  # bytes without a token, which add nothing

    def num_bytes(self, text: str) -> int:
        """The bytes of a text that need tokens."""
        return len(text.encode().translate(None, self.silent))


def text_bound(
    tokenizer: PreTrainedTokenizerBase, text: TokenText, vocab_size: int
) -> TextBound | None:
    """The bound of a tokenizer; None if there is none.

    There is one where bytes are the smallest tokens, so that none stands for an unknown word, and
    where nothing is dropped or shortened before the tokens are found.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    state: dict[str, Any] = json.loads(backend.to_str())
    normalizers = _steps(state["normalizer"], "normalizers")
    splitters = _steps(state["pre_tokenizer"], "pretokenizers")
    if not all(map(_shortens_little, normalizers)) or not all(map(_keeps_all, splitters)):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None  # such a token swallows any number of spaces
    pieces = [text.bytes_of(token_id) for token_id in range(vocab_size)]
    silent = bytes(set(range(256)).difference(*(piece for piece in pieces if len(piece) == 1)))
    by_bytes = any(step["type"] == "ByteLevel" for step in splitters)
    if state["model"]["type"] != "BPE" or not (by_bytes or state["model"]["byte_fallback"]):
        return None
    if silent and (normalizers or not by_bytes):
        return None
    factor = max((_SHRINKING[step["type"]] for step in normalizers), default=1)
    return TextBound(factor * max(map(len, pieces)), silent)


def _steps(state: dict[str, Any] | None, many: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, however it was composed."""
    if state is None:
        return []
    if state["type"] == "Sequence":
        return [step for inner in state[many] for step in _steps(inner, many)]
    return [state]


def _shortens_little(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        literal = step["pattern"].get("String")
        return literal is not None and len(step["content"].encode()) >= len(literal.encode())
    return step["type"] in _SHRINKING


def _keeps_all(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"

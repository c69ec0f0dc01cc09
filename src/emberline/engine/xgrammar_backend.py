"""xgrammar compiles grammars: JSON schemas, regular expressions, Lark.

Owns how a `Grammar` is handed to it. Must not know drafts, masks or requests. An extra: imported
only where it is asked for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xgrammar
from torch import Tensor

from emberline.types import Grammar, InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_WHITESPACE = 40
"""Between JSON's tokens, for a model that once indents for ever never stops."""


class XGrammar:
    """`Backend` for one tokenizer; see `GrammarCompiler` for the arguments."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=max(vocab_size, len(tokenizer)), stop_token_ids=list(eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> XGrammarCompiled:
        """See `Backend`. Free text before a grammar is not something that it has."""
        if grammar.after is not None:
            raise InvalidRequest(
                "xgrammar knows no grammar behind free text, as reasoning needs it: serve with "
                "--grammar-backend llguidance",
                "grammar",
            )
        try:
            with self._lock:
                return XGrammarCompiled(self._compile(grammar), self._vocab_size)
        except (RuntimeError, ValueError) as problem:  # what its compiler raises
            reason = str(problem).strip()
            message = f"the {grammar.kind} does not compile: {reason}"
            raise InvalidRequest(message, "grammar") from None

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.kind == "json_schema":
            schema = json.loads(grammar.source)
            return self._compiler.compile_json_schema(
                schema if isinstance(schema, dict) else grammar.source,
                strict_mode=False,  # as JSON schema says: what is not forbidden may come
                max_whitespace_cnt=MAX_WHITESPACE,
            )
        if grammar.kind == "regex":
            return self._compiler.compile_regex(grammar.source)
        return self._compiler.compile_lark(grammar.source)


@dataclass(frozen=True, slots=True)
class XGrammarCompiled:
    """What its compiler made."""

    compiled: Any
    vocab_size: int
    broken: bool = False

    def matcher(self) -> XGrammarMatcher:
        """See `Compiled`."""
        return XGrammarMatcher(xgrammar.GrammarMatcher(self.compiled), self.vocab_size)


class XGrammarMatcher:
    """xgrammar behind the `Matcher` protocol."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    def allowed(self) -> Tensor:
        """See `Matcher`."""
        if self._matcher.is_terminated():
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        self._bits.fill_(-1)  # it writes nothing where everything is allowed
        self._matcher.fill_next_token_bitmask(self._bits)
        words = self._bits.numpy().view(np.uint8)
        bits = np.unpackbits(words, bitorder="little")[: self._vocab_size]
        return torch.from_numpy(bits.astype(np.bool_))

    def consume(self, token_id: int) -> bool:
        """See `Matcher`."""
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def copy(self) -> XGrammarMatcher:
        """See `Matcher`."""
        return XGrammarMatcher(self._matcher.fork(), self._vocab_size)

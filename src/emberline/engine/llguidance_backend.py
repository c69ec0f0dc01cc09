"""llguidance compiles grammars: JSON schemas, regular expressions, Lark.

Owns how a `Grammar` is written in its language. Must not know drafts, masks or requests.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from emberline.types import Grammar, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerFast

MAX_LEXER_STATES = 50_000  # of 1 to 2 kB
MAX_ITEMS_IN_ROW = 500  # parses kept side by side; masks of a very ambiguous grammar take long
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between JSON's tokens; bounded, for a model that once indents for ever never stops."""


class LLGuidance:
    """`Backend` for one tokenizer; see `GrammarCompiler` for the arguments."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: object = None  # its view of the tokenizer, half a second to make

    def compile(self, grammar: Grammar) -> LLGuidanceCompiled:
        """See `Backend`."""
        import llguidance
        import llguidance.hf

        with self._lock:
            if self._vocabulary is None:
                size = max(self._vocab_size, len(self._tokenizer))
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=size, eos_token=self._eos_ids
                )
        source = json.dumps({"grammars": _rules(grammar, self._vocabulary)})
        limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, max_items_in_row=MAX_ITEMS_IN_ROW
        )
        start = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        # Much is compiled only when the first mask and the first token ask for it. That must not be
        # in the engine's thread, and what fails there is no grammar either.
        trial = start.deep_copy()
        allowed = trial.compute_logit_bias()
        first = next((i for i, may in enumerate(allowed[: self._vocab_size]) if may), None)
        if not trial.is_error() and first is not None and first not in self._eos_ids:
            trial.try_consume_tokens([first])
            trial.compute_logit_bias()
        if trial.is_error() or first is None:
            reason = trial.get_error().partition("<state>")[0].strip()
            if not reason or reason == "NoExtensionBias":  # the compiler's word for it
                reason = "nothing can match it"
            raise InvalidRequest(f"the {grammar.kind} does not compile: {reason}", "grammar")
        return LLGuidanceCompiled(start, self._vocab_size)


@dataclass(slots=True)
class LLGuidanceCompiled:
    """A matcher at the start, to be copied. All copies share what the lexer has worked out."""

    start: LLMatcher
    vocab_size: int
    broken: bool = False  # a copy has failed

    def matcher(self) -> LLGuidanceMatcher:
        """See `Compiled`."""
        return LLGuidanceMatcher(self.start.deep_copy(), self)


class LLGuidanceMatcher:
    """llguidance behind the `Matcher` protocol."""

    def __init__(self, matcher: LLMatcher, compiled: LLGuidanceCompiled) -> None:
        self._matcher = matcher
        self._compiled = compiled

    def allowed(self) -> Tensor:
        """See `Matcher`."""
        size = self._compiled.vocab_size
        mask = bytearray(self._matcher.compute_logit_bias())
        if self._failed():  # then the mask says that only the end may come
            return torch.zeros(size, dtype=torch.bool)
        return torch.frombuffer(mask, dtype=torch.uint8)[:size].bool()

    def consume(self, token_id: int) -> bool:
        """See `Matcher`."""
        return self._matcher.try_consume_tokens([token_id]) == 1 and not self._failed()

    def copy(self) -> LLGuidanceMatcher:
        """See `Matcher`. Its errors last: rolling back would not undo them."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._compiled)

    def _failed(self) -> bool:
        failed = bool(self._matcher.is_error())
        if failed:  # perhaps the lexer, which all copies share: later requests get a new one
            self._compiled.broken = True
        return failed


def _rules(grammar: Grammar, vocabulary: object) -> list[dict[str, object]]:
    """The grammar as llguidance's list of named grammars, the first being the whole."""
    body: dict[str, object] = {"name": "body"}
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.source)
        except (ValueError, RecursionError) as problem:
            raise InvalidRequest(f"the json_schema is not JSON: {problem}", "grammar") from None
        options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        body["json_schema"] = options | schema if isinstance(schema, dict) else schema
    elif grammar.kind == "regex":
        body["lark_grammar"] = f"start: /{_between_slashes(grammar.source)}/"
    else:
        body["lark_grammar"] = grammar.source
    if grammar.after is None:
        return [body]
    closing, closing_id = _quoted(grammar.after), _special(grammar.after, vocabulary)
    rules = f"spelled[suffix={closing}]: /(.|\\n)*/\n"
    if closing_id is None:
        rules += "free: spelled\n"
    else:  # a model may write its name in other tokens, too
        rules += f"free: spelled | FREE <[{closing_id}]>\nFREE: /(.|\\n)*/\n"
    # Line breaks beside a marker belong to it: models write some that are no part of the answer.
    rules += "BREAKS: /\\n{0,2}/"
    start = "start: free BREAKS @body"
    if grammar.opened_by is not None:
        opening, opening_id = _quoted(grammar.opened_by), _special(grammar.opened_by, vocabulary)
        if opening_id is not None:
            opening = f"(<[{opening_id}]> | {opening})"
        start = f"start: @body | BREAKS {opening} free BREAKS @body"
    return [{"name": "whole", "lark_grammar": f"{start}\n{rules}"}, body]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _special(text: str, vocabulary: object) -> int | None:
    """The special token that a text is, if it is one: no text to llguidance, it goes by its id."""
    ids = vocabulary.tokenize_str(text, parse_special=True)  # type: ignore[attr-defined]
    special = len(ids) == 1 and vocabulary.is_special_token(ids[0])  # type: ignore[attr-defined]
    return int(ids[0]) if special else None


def _between_slashes(regex: str) -> str:
    from llguidance import LLMatcher

    # The compiler's own escaping, which it wraps into a grammar of its own.
    whole = json.loads(LLMatcher.grammar_from_regex(regex))
    text: str = whole["grammars"][0]["lark_grammar"]
    return text.removeprefix("start: /").removesuffix("/")

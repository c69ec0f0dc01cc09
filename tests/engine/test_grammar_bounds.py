"""Grammars do no harm: to their own request, to the engine's thread, to anybody else."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

from emberline.engine.async_engine import AsyncEngine
from emberline.engine.detokenizer import TokenText
from emberline.engine.engine import Engine
from emberline.engine.grammar import CACHED_GRAMMARS, CACHED_SOURCES, GrammarCompiler
from emberline.types import (
    ASKED_FOR,
    NO_TOKEN_ERROR,
    FinishReason,
    Grammar,
    InvalidRequest,
    Request,
    SamplingParams,
)

from support.engines import make_engine, run
from support.grammars import Allowed, RuleMatcher
from support.paged import ConstantDrafter, PrefixDrafter, PrefixTarget
from support.serving import make_tokenizer

TOKENIZER = make_tokenizer()
SIZE = len(TOKENIZER)
EOS = int(TOKENIZER.eos_token_id)


def token(text: str) -> int:
    return int(TOKENIZER.convert_tokens_to_ids(text))


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, SIZE, [EOS])


def plain_engine() -> Engine:
    engine = make_engine(PrefixTarget(vocab_size=SIZE, num_slots=20_000), eos_ids=[EOS])
    engine.grammars = compiler()
    return engine


class LikesY(PrefixTarget):
    def logits_after(self, prefix):  # type: ignore[no-untyped-def]
        row = super().logits_after(prefix).clone()
        row[token("y")] += 50
        return row


BRANCHES = 3000
TOO_COMPLEX_BEHIND_X = (
    'start: "q" ("y" "z" | "x" big)\nbig: '
    + " | ".join(f"r{i}" for i in range(BRANCHES))
    + "\n"
    + "\n".join(f'r{i}: "a" s{i}\ns{i}: "{i}"' for i in range(BRANCHES))
)


@pytest.mark.parametrize("how", ["plain", "lookup", "prediction"])
def test_a_draft_that_is_too_complex_ends_nothing(how: str) -> None:
    """A matcher's errors last, so it must be a copy of it that tries the drafts."""
    target = LikesY(vocab_size=SIZE, num_slots=20_000)
    drafter = ConstantDrafter(token("x"), 3) if how == "lookup" else None
    engine = make_engine(target, drafter, eos_ids=[EOS], num_pages=200)
    engine.grammars = compiler()
    params = SamplingParams(
        temperature=0, grammar=Grammar("lark", TOO_COMPLEX_BEHIND_X), max_tokens=10
    )
    prediction = (token("q"), token("x"), token("x")) if how == "prediction" else ()
    request = Request("r", (7, 8), params, prediction=prediction)
    answer = run(engine, [request], text=lambda p: TokenText(TOKENIZER).stream(p))["r"]
    assert (answer.text, answer.last.finish_reason) == ("qyz", FinishReason.STOP)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "a{1000000}"),
        Grammar("lark", "start: @body"),
        Grammar("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    ],
    ids=["a large count", "without an end", "deeply nested"],
)
def test_what_fails_at_its_first_token_is_refused_when_it_is_compiled(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest, match=r"compile|JSON"):
        compiler().compile(grammar)


LATE = Grammar("regex", "[0-9]{2}(b{1000}){1000}")


def test_what_fails_later_fails_the_same_way_every_time() -> None:
    """A failed matcher's mask says that only the end may come: that is no match."""
    engine = plain_engine()
    params = SamplingParams(temperature=0, max_tokens=8, grammar=LATE)
    for name in "abc":
        answer = run(engine, [Request(name, (7, 8), params)])[name]
        assert answer.last.finish_reason is FinishReason.ERROR
        assert answer.last.error in ASKED_FOR


def test_a_grammar_that_failed_is_compiled_anew() -> None:
    """Copies share a lexer, and one that is at its limit stays there."""
    known = compiler()
    first = known.compile(LATE)
    assert known.known(LATE) is first
    matcher = first.matcher()
    for text in "12b":
        matcher.allowed()
        matcher.consume(token(text))
    assert not matcher.allowed().any()
    assert known.known(LATE) is None


def test_a_very_ambiguous_grammar_is_given_up() -> None:
    """Its masks would take longer and longer, in the engine's thread."""
    ambiguous = Grammar("lark", 'start: start "a" | "a" | start start')
    params = SamplingParams(temperature=0, max_tokens=250, grammar=ambiguous, logit_bias={EOS: -99})
    target = PrefixTarget(vocab_size=SIZE, num_slots=20_000, max_model_len=400)
    engine = make_engine(target, eos_ids=[EOS])
    engine.grammars = compiler()
    answer = run(engine, [Request("r", (7, 8), params)])["r"]
    assert answer.last.error in ASKED_FOR


def test_options_that_leave_no_token_say_so() -> None:
    engine = plain_engine()
    nothing = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[EOS], min_tokens=2)
    beside = Request("n", (9, 3), SamplingParams(temperature=0, max_tokens=6))
    alone = run(plain_engine(), [beside])["n"]
    answers = run(engine, [Request("r", (7, 8), nothing), beside])
    assert answers["r"].last.error == NO_TOKEN_ERROR
    assert answers["n"].token_ids == alone.token_ids


def test_every_text_can_be_a_choice() -> None:
    for text in ("\x7f", "\n\t", 'a"b\\c', "é", "\x00"):
        matcher = compiler().compile(Grammar.choice([text])).matcher()
        for token_id in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
            assert matcher.consume(token_id)
        assert matcher.allowed()[EOS]


def test_a_marker_counts_however_it_is_written() -> None:
    """As its special token or spelled out: so does what reads the text."""
    grammar = Grammar("regex", "[0-9]+", after="</say>")
    for written in ([token(c) for c in "hm</say>"], [token("h"), token("</say>")]):
        matcher = compiler().compile(grammar).matcher()
        assert all(matcher.consume(token_id) for token_id in written)
        allowed = matcher.allowed()
        assert allowed[token("7")]
        assert not allowed[token("x")]
        assert not allowed[EOS]


def test_the_engines_thread_never_compiles() -> None:
    """However many grammars are in flight: they come with what was compiled elsewhere."""
    inner = plain_engine()
    assert inner.grammars is not None
    backend, where = inner.grammars._backend, []
    compile_one = backend.compile

    def noting(grammar: Grammar):  # type: ignore[no-untyped-def]
        where.append(threading.current_thread().name)
        return compile_one(grammar)

    backend.compile = noting  # type: ignore[method-assign]
    engine = AsyncEngine(inner, TokenText(TOKENIZER))

    async def one(i: int) -> None:
        params = SamplingParams(grammar=Grammar("regex", f"a{{{i}}}"), max_tokens=3)
        async for _ in engine.generate(Request(str(i), (7, 8), params)):
            pass

    async def main() -> None:
        await asyncio.gather(*[one(i) for i in range(1, CACHED_GRAMMARS + 30)])

    asyncio.run(main())
    engine.shutdown()
    assert len(where) >= CACHED_GRAMMARS
    assert not any("emberline-engine" in name for name in where)


def test_a_known_grammar_waits_for_nobody() -> None:
    inner = plain_engine()
    assert inner.grammars is not None
    backend = inner.grammars._backend
    compile_one, go_on = backend.compile, threading.Event()

    def slow(grammar: Grammar):  # type: ignore[no-untyped-def]
        if grammar.source != "a":
            assert go_on.wait(20)
        return compile_one(grammar)

    backend.compile = slow  # type: ignore[method-assign]
    engine = AsyncEngine(inner, TokenText(TOKENIZER))

    async def main() -> None:
        await engine.compile(Grammar("regex", "a"))
        others = [asyncio.ensure_future(engine.compile(Grammar("regex", x))) for x in "bcd"]
        await asyncio.sleep(0)
        await asyncio.wait_for(engine.compile(Grammar("regex", "a")), 5)
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 5)
        assert not any(other.done() for other in others)
        go_on.set()
        await asyncio.gather(*others)

    asyncio.run(main())
    engine.shutdown()


def test_what_is_kept_is_bounded_by_size_too() -> None:
    known = compiler()
    known._backend.compile = lambda _: object()  # type: ignore[method-assign, assignment, return-value]
    for number in range(12):
        known.compile(Grammar("lark", f"{number}" + " " * (CACHED_SOURCES // 8)))
    kept = [len(grammar.source) for grammar in known._compiled]
    assert sum(kept) <= CACHED_SOURCES
    assert 0 < len(kept) < 12


class Counting(RuleMatcher):
    """Counts the masks that it and its copies compute."""

    def __init__(self, allowed: Allowed, vocab_size: int, output=(), counter=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__(allowed, vocab_size, output)
        self.rule, self.size = allowed, vocab_size
        self.counter = counter if counter is not None else [0]

    def allowed(self):  # type: ignore[no-untyped-def]
        self.counter[0] += 1
        return super().allowed()

    def copy(self) -> Counting:
        return Counting(self.rule, self.size, tuple(self.output), self.counter)


def test_each_mask_is_computed_once() -> None:
    target = PrefixTarget()
    engine = make_engine(target, PrefixDrafter(target, 7), eos_ids=[])
    engine.add(Request("r", (9, 5), SamplingParams(temperature=0, max_tokens=9)))
    matcher = engine._states["r"].matcher = Counting(lambda _: set(range(2, 32)), 32)
    engine.step()
    matcher.counter[0] = 0
    engine.step()
    assert matcher.counter[0] == 8


def test_a_prompt_chunk_that_emits_nothing_needs_no_mask() -> None:
    engine = make_engine(PrefixTarget(), eos_ids=[], prefill_chunk=4)
    engine.add(Request("r", (9,) * 40, SamplingParams(temperature=0, max_tokens=1)))
    matcher = engine._states["r"].matcher = Counting(lambda _: set(range(2, 32)), 32)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps == 10
    assert matcher.counter[0] == 1


def test_refusals_name_the_kind() -> None:
    with pytest.raises(InvalidRequest, match=re.escape("the regex does not compile")):
        compiler().compile(Grammar("regex", "("))

"""Grammars in whole engines: every finished answer matches, whatever was drafted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import jsonschema
import pytest
from torch import Tensor

from emberline.drafters.base import Drafter
from emberline.drafters.ngram import NGramDrafter
from emberline.engine.detokenizer import TokenText
from emberline.engine.engine import Engine
from emberline.engine.grammar import GrammarCompiler
from emberline.types import (
    FinishReason,
    Grammar,
    InvalidRequest,
    Origin,
    Request,
    SamplingParams,
)
from emberline.verify.planner import Threshold

from schemas import random_schema
from support.doubles import ScriptedPlanner
from support.engines import Answer, make_engine, run
from support.paged import ConstantDrafter, PrefixDrafter, PrefixTarget
from support.serving import make_tokenizer

MAX_TOKENS = 80


@cache
def tokenizer():  # type: ignore[no-untyped-def]
    return make_tokenizer()


def eos_id() -> int:
    return int(tokenizer().eos_token_id)


class Terse(PrefixTarget):
    """Likes what ends strings, lists and objects, so that documents are short."""

    def logits_after(self, prefix: list[int]) -> Tensor:
        row = super().logits_after(prefix).clone()
        row[tokenizer().convert_tokens_to_ids(list('"}]'))] += 4.0
        return row


def engine_with(drafts: str = "noisy", vocab: int | None = None, **options: object) -> Engine:
    size = vocab or len(tokenizer())
    target = Terse(vocab_size=size, max_model_len=256, num_slots=20_000)
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "noisy": PrefixDrafter(target, num_drafts=5, noise=1.0),
        "all right": PrefixDrafter(target, num_drafts=5),
        "illegal": ConstantDrafter(tokenizer().convert_tokens_to_ids("!")),
        "lookup": NGramDrafter(4, max_match=2, min_match=1),
    }
    engine = make_engine(
        target,
        drafters[drafts],
        eos_ids=[eos_id()],
        num_pages=2000,
        **options,  # type: ignore[arg-type]
    )
    engine.grammars = GrammarCompiler(tokenizer(), size, [eos_id()])
    return engine


def text_of(params: SamplingParams):  # type: ignore[no-untyped-def]
    return TokenText(tokenizer()).stream(params)


def answers(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    return run(engine, requests, text=text_of)


def ask_for(engine: Engine, grammar: Grammar, **options: object) -> Answer:
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.0} | options
    params = SamplingParams(grammar=grammar, **options)  # type: ignore[arg-type]
    return answers(engine, [Request("r", (5, 6), params)])["r"]


@pytest.mark.parametrize(("drafts", "num"), [("noisy", 100), ("illegal", 12), ("lookup", 12)])
def test_random_schemas_are_met(drafts: str, num: int) -> None:
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(num)]
    engine = engine_with(drafts, max_num_reqs=4)
    requests = [
        Request(
            f"{number}-{temperature}",
            (number, 3),
            SamplingParams(
                temperature=temperature,
                seed=number,
                max_tokens=MAX_TOKENS,
                logprobs=1,
                grammar=Grammar("json_schema", json.dumps(schema)),
            ),
        )
        for number, schema in enumerate(schemas)
        for temperature in (0.0, 1.0)
    ]
    finished = 0
    for key, answer in answers(engine, requests).items():
        assert len(answer.logprobs) == len(answer.token_ids)
        if answer.last.finish_reason is FinishReason.STOP:
            document = json.loads(answer.text)
            jsonschema.validate(document, schemas[int(key.split("-")[0])])
            finished += 1
        else:
            assert answer.last.finish_reason is FinishReason.LENGTH
    assert finished >= num


@pytest.mark.parametrize("drafts", ["noisy", "all right", "illegal", "lookup"])
@pytest.mark.parametrize("layout", ["static", "compact"])
def test_drafts_change_no_structured_text(drafts: str, layout: str) -> None:
    rng = random.Random(11)
    for number in range(3):
        grammar = Grammar("json_schema", json.dumps(random_schema(rng)))
        for options in ({}, {"temperature": 1.0, "seed": number}):
            plain = ask_for(engine_with("none"), grammar, **options)
            drafted = ask_for(engine_with(drafts, layout=layout), grammar, **options)
            assert drafted.token_ids == plain.token_ids
            assert drafted.last.finish_reason == plain.last.finish_reason


@pytest.mark.parametrize("length", range(1, 13))
def test_a_grammar_that_ends_inside_a_block_ends_the_answer_there(length: int) -> None:
    """Blocks of five: the end comes at every offset, and EOS with it."""
    answer = ask_for(engine_with("all right"), Grammar("regex", f"[ab]{{{length}}}"), logprobs=2)
    assert re.fullmatch(f"[ab]{{{length}}}", answer.text)
    assert answer.last.finish_reason is FinishReason.STOP
    assert answer.token_ids[-1] == eos_id()
    assert answer.last.num_output_tokens == len(answer.token_ids) == len(answer.logprobs)


def test_choices_and_lark() -> None:
    choices = ['yes "sir"', "no\\way", "vielleicht é"]
    assert ask_for(engine_with(), Grammar.choice(choices)).text in choices
    lark = 'start: "a" NUMBER ("," NUMBER)* "z"\nNUMBER: /[0-9]{1,3}/'
    assert re.fullmatch(
        r"a\d{1,3}(,\d{1,3})*z?", ask_for(engine_with(), Grammar("lark", lark)).text
    )
    assert isinstance(
        json.loads(ask_for(engine_with(), Grammar("json_schema", '{"type": "null"}')).text),
        type(None),
    )


@pytest.mark.parametrize("offset", range(8))
def test_a_grammar_begins_behind_its_marker_wherever_that_falls_in_a_block(offset: int) -> None:
    """The rest of the block after the marker is bound already."""
    engine = engine_with("all right")
    target = engine.parts.target
    assert isinstance(target, PrefixTarget)
    free = tokenizer()("x" * offset + "</t>", add_special_tokens=False)["input_ids"]
    prefix = [5, 6]
    for token in free:  # the model is made to say the marker at this place
        row = target.logits_after(prefix).clone()
        row[token] = 100.0
        target.overrides[tuple(prefix)] = row
        prefix.append(token)
    grammar = Grammar("regex", "[0-9]{4}", after="</t>")
    answer = ask_for(engine, grammar)
    assert re.fullmatch("x" * offset + "</t>\n*[0-9]{4}", answer.text)
    assert answer.last.finish_reason is FinishReason.STOP


def test_requests_with_and_without_a_grammar_share_steps() -> None:
    rng = random.Random(3)
    requests = []
    for number in range(20):
        grammar = Grammar("json_schema", json.dumps(random_schema(rng))) if number % 2 else None
        params = SamplingParams(
            temperature=float(number % 3 == 0),
            seed=number,
            max_tokens=40,
            grammar=grammar,
            stop=["q"] if number % 5 == 0 else (),
            logprobs=number % 4 if number % 4 else None,
        )
        requests.append(Request(str(number), (number % 7, 3, 4), params))
    together = answers(engine_with("noisy", max_num_reqs=8), requests)
    for request in requests:
        alone = answers(engine_with("none"), [request])[request.request_id]
        assert together[request.request_id].token_ids == alone.token_ids, request.request_id


def test_preemption_leaves_a_matcher_where_its_answer_is() -> None:
    rng = random.Random(5)
    requests = [
        Request(
            str(number),
            (number, 3),
            SamplingParams(
                temperature=0,
                max_tokens=60,
                grammar=Grammar("json_schema", json.dumps(random_schema(rng))),
            ),
        )
        for number in range(12)
    ]
    target = Terse(vocab_size=len(tokenizer()), max_model_len=128, num_slots=20_000)
    small = make_engine(
        target, PrefixDrafter(target, num_drafts=5, noise=1.0), eos_ids=[eos_id()], num_pages=24
    )
    small.grammars = GrammarCompiler(tokenizer(), len(tokenizer()), [eos_id()])
    got = answers(small, requests)
    for request in requests:
        alone = answers(engine_with("none"), [request])[request.request_id]
        assert got[request.request_id].token_ids == alone.token_ids


def test_a_step_that_drafts_nothing_is_an_ordinary_step() -> None:
    """A planner that admits 0, 0, 3, 0, 7 drafts changes nothing."""
    script = [0, 0, 3, 0, 7]
    count = iter(range(10_000))
    planner = ScriptedPlanner(lambda _drafts, _sure: script[next(count) % len(script)])
    grammar = Grammar("json_schema", json.dumps(random_schema(random.Random(2))))
    plain = ask_for(engine_with("none"), grammar)
    assert ask_for(engine_with("noisy", planner=planner), grammar).token_ids == plain.token_ids
    assert ask_for(engine_with("noisy", planner=Threshold(0.5)), grammar).token_ids == (
        plain.token_ids
    )


def test_masked_drafts_are_accepted_where_free_ones_are_not() -> None:
    """The drafter knows the target: under the same mask it is always right."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammar = Grammar("json_schema", json.dumps(schema))
    answer = ask_for(engine_with("all right"), grammar, logprobs=0, annotations=True)
    origins = [r.annotation.origin for r in answer.logprobs if r.annotation is not None]
    assert Origin.RECOVERED not in origins
    assert answer.last.stats.num_accepted >= len(answer.token_ids) // 2


def test_padded_vocabularies_are_never_drawn_from() -> None:
    size = len(tokenizer()) + 13
    answer = ask_for(engine_with("noisy", vocab=size), Grammar("regex", "[a-z]{30}"))
    assert max(answer.token_ids) < len(tokenizer())
    assert re.fullmatch("[a-z]{30}", answer.text)


@pytest.mark.parametrize(
    ("grammar", "quoted"),
    [
        (Grammar("regex", "["), "unclosed character class"),
        (Grammar("json_schema", '{"type": "objct"}'), "objct"),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("lark", "begin: "), "start"),
        (Grammar("regex", "a" * (2**20 + 1)), "limit"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_compilers_words(
    grammar: Grammar, quoted: str
) -> None:
    engine = engine_with("noisy")
    with pytest.raises(InvalidRequest, match=re.escape(quoted)) as refusal:
        engine.add(Request("r", (1,), SamplingParams(grammar=grammar)))
    assert refusal.value.param == "grammar"
    assert not engine.has_work


def test_a_grammar_needs_a_tokenizer() -> None:
    engine = engine_with("noisy")
    engine.grammars = None
    with pytest.raises(InvalidRequest, match="tokenizer"):
        engine.add(Request("r", (1,), SamplingParams(grammar=Grammar("regex", "a"))))


@pytest.mark.parametrize("option", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_options_that_forbid_the_end_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        SamplingParams(grammar=Grammar("regex", "a"), **option)  # type: ignore[arg-type]


class Tires:
    """A matcher that fails after some tokens, as a grammar that has become too complex does."""

    def __init__(self, matcher, patience: int) -> None:  # type: ignore[no-untyped-def]
        self.matcher, self.patience = matcher, patience

    def allowed(self):  # type: ignore[no-untyped-def]
        mask = self.matcher.allowed()
        return mask if self.patience > 0 else mask & False

    def consume(self, token_id: int) -> bool:
        self.patience -= 1
        return bool(self.matcher.consume(token_id))

    def copy(self):  # type: ignore[no-untyped-def]
        return Tires(self.matcher.copy(), self.patience)


def test_a_matcher_that_gives_up_ends_its_own_request_only() -> None:
    engine = engine_with("noisy")
    neighbour = Request("n", (9, 3), SamplingParams(temperature=0, max_tokens=30))
    bound = SamplingParams(temperature=0, max_tokens=30, grammar=Grammar("regex", "[a-z]*"))
    alone = answers(engine_with("none"), [neighbour])["n"]
    engine.add(neighbour)
    engine.add(Request("r", (5, 6), bound))
    state = engine._states["r"]
    assert state.matcher is not None
    state.matcher = Tires(state.matcher, 6)
    got: dict[str, list[int]] = {"n": [], "r": []}
    reasons = {}
    while engine.has_work:
        for output in engine.step():
            got[output.request_id] += output.token_ids
            if output.finished:
                reasons[output.request_id] = output.finish_reason
    assert reasons == {"n": alone.last.finish_reason, "r": FinishReason.ERROR}
    assert got["n"] == alone.token_ids
    assert 0 < len(got["r"]) <= 6


def test_the_compiled_are_kept_and_never_shared() -> None:
    compiler = GrammarCompiler(tokenizer(), len(tokenizer()), [eos_id()])
    grammar = Grammar("regex", "ab")
    first, second = (compiler.compile(one).matcher() for one in (grammar, replace(grammar)))
    assert first.consume(tokenizer().convert_tokens_to_ids("a"))
    assert bool(second.allowed()[tokenizer().convert_tokens_to_ids("a")])
    for number in range(100):
        compiler.compile(Grammar("regex", f"a{{{number + 1}}}"))
    assert len(compiler._compiled) == 64

"""Both compilers behind the one interface give the same answers."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from emberline.engine.engine import Engine
from emberline.engine.grammar import GrammarCompiler
from emberline.types import FinishReason, Grammar, InvalidRequest, Request, SamplingParams

from schemas import random_schema
from support.engines import make_engine, run
from support.paged import PrefixDrafter, PrefixTarget
from support.serving import make_tokenizer

pytest.importorskip("xgrammar", reason="an extra: make test-clients installs it")


def engine_with(backend: str, *, drafts: bool = True) -> Engine:
    tokenizer = make_tokenizer()
    target = PrefixTarget(vocab_size=len(tokenizer), max_model_len=256, num_slots=20_000)
    eos = int(tokenizer.eos_token_id)
    drafter = PrefixDrafter(target, num_drafts=5, noise=1.0) if drafts else None
    engine = make_engine(target, drafter, eos_ids=[eos], num_pages=2000)
    engine.grammars = GrammarCompiler(
        tokenizer,
        len(tokenizer),
        [eos],
        backend,  # type: ignore[arg-type]
    )
    return engine


def ask(engine: Engine, grammar: Grammar) -> tuple[list[int], str | None]:
    params = SamplingParams(temperature=0, max_tokens=60, grammar=grammar)
    answer = run(engine, [Request("r", (5, 6), params)])["r"]
    return answer.token_ids, answer.last.finish_reason


@pytest.mark.parametrize("regex", ["[ab]{1,9}", "(yes|no)[!?]*", "[0-9]{3}-[0-9]{2}"])
def test_the_same_texts_match(regex: str) -> None:
    grammar = Grammar("regex", regex)
    got = ask(engine_with("xgrammar"), grammar)
    assert got == ask(engine_with("xgrammar", drafts=False), grammar)
    assert got == ask(engine_with("llguidance"), grammar)


def test_schemas_are_met() -> None:
    rng = random.Random(3)
    engine, finished = engine_with("xgrammar"), 0
    tokenizer = make_tokenizer()
    for _ in range(15):
        schema = random_schema(rng)
        ids, reason = ask(engine, Grammar("json_schema", json.dumps(schema)))
        if reason is FinishReason.STOP:
            # It lets raw control characters into strings, which JSON does not.
            document = json.loads(tokenizer.decode(ids[:-1]), strict=False)
            jsonschema.validate(document, schema)
            finished += 1
    assert finished


def test_refusals_quote_the_compiler() -> None:
    for grammar, said in (
        (Grammar("regex", "["), "regex does not compile"),
        (Grammar("json_schema", '{"type": "objct"}'), "json_schema does not compile"),
        (Grammar("regex", "a", after="</think>"), "llguidance"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(said)):
            engine_with("xgrammar").add(Request("r", (1,), SamplingParams(grammar=grammar)))

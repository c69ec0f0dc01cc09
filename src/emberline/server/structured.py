"""Structured output: what a body says that an answer must match, as one grammar.

Owns the fields `response_format`, `structured_outputs` and the older `guided_*`, and that they do
not contradict each other. Must not compile a grammar: the engine does, and its refusal is quoted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from llguidance.gbnf_to_lark import any_to_lark
from pydantic import Discriminator, Field, Tag

from emberline.server.bodies import Fields
from emberline.server.lark import json_value, literal, running_text
from emberline.types import Grammar, InvalidRequest

Schema = dict[str, Any]


class TextFormat(Fields):
    """`response_format` of an answer that is any text."""

    type: Literal["text"]


class JsonObjectFormat(Fields):
    """`response_format` of an answer that is any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Fields):
    """A JSON schema with a name. It is enforced whatever `strict` says."""

    name: str
    description: str | None = None
    content: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Fields):
    """`response_format` of an answer that a JSON schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class TaggedStructure(Fields):
    """JSON between a beginning and an end, in the middle of text."""

    begin: str = Field(min_length=1)
    content: Schema = Field(alias="schema")
    end: str = ""


class StructuralTag(Fields):
    """Text in which every trigger begins one of the structures."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[TaggedStructure] = Field(min_length=1)
    triggers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)


def _format_type(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) and kind in FORMATS else None


FORMATS = ("text", "json_object", "json_schema", "structural_tag")

# Told apart before they are checked, so that an error speaks of what was sent.
ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")]
    | Annotated[StructuralTag, Tag("<structural_tag>")],
    Discriminator(
        _format_type,
        custom_error_type="format_type",
        custom_error_message=f"must be an object with a type of {', '.join(FORMATS)}",
    ),
]


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`: one of several ways."""

    json_: Schema | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | str | None = None


class StructuredFields(Fields):
    """The fields of a body that say what its answer must match."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar and the field that asked for it, for the error of one that does not compile."""

    grammar: Grammar
    param: str


def asked_grammar(body: StructuredFields, tokens: Mapping[str, int]) -> AskedGrammar | None:
    """The grammar that a body asks for, if it does.

    Args:
        body: any body with these fields.
        tokens: the tokenizer's named tokens, which are no text to a grammar.

    Raises:
        InvalidRequest: two fields ask, or one of them makes no sense.
    """
    asked = [
        *_from_response_format(body.response_format, tokens),
        *_from_structured(body.structured_outputs, tokens),
        *_simple("guided_json", body.guided_json, schema_grammar),
        *_simple("guided_regex", body.guided_regex, regex_grammar),
        *_simple("guided_choice", body.guided_choice, Grammar.choice),
        *_simple("guided_grammar", body.guided_grammar, lark_grammar),
    ]
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise InvalidRequest(f"{first} and {second} contradict each other: give one", second)
    return asked[0] if asked else None


def schema_grammar(schema: Schema | str) -> Grammar:
    """JSON that a schema describes; the schema as an object or as its text."""
    if isinstance(schema, str):
        return Grammar("json_schema", schema)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def regex_grammar(regex: str) -> Grammar:
    """A text that a regular expression describes whole."""
    return Grammar("regex", regex)


def lark_grammar(source: str) -> Grammar:
    """A text of a grammar in Lark's notation, or in GBNF's, which is translated.

    Raises:
        InvalidRequest: there is no rule, or the GBNF cannot be translated.
    """
    if not source.strip():
        raise InvalidRequest("the grammar is empty: give at least one rule", "grammar")
    try:
        return Grammar("lark", any_to_lark(source))
    except Exception as problem:  # the translator raises what it likes
        raise InvalidRequest(f"the grammar is no GBNF: {problem}", "grammar") from None


def structural_grammar(tag: StructuralTag, tokens: Mapping[str, int]) -> Grammar:
    """Free text in which each trigger is followed by one of its structures.

    Raises:
        InvalidRequest: a structure begins with no trigger.
    """
    structures = []
    for one in tag.structures:
        trigger = next((text for text in tag.triggers if one.begin.startswith(text)), None)
        if trigger is None:
            message = f"the structure {one.begin!r} begins with none of the triggers"
            raise InvalidRequest(message, "structural_tag")
        rest = literal(one.begin.removeprefix(trigger), tokens)
        structures.append((trigger, f"{rest} {json_value(one.content)} {literal(one.end, tokens)}"))
    return Grammar("lark", running_text(structures, tokens))


def _simple(param: str, value: Any, make: Any) -> list[AskedGrammar]:
    """The grammar of one field, if it is there; a refusal names that field."""
    if value is None:
        return []
    try:
        return [AskedGrammar(make(value), param)]
    except InvalidRequest as problem:
        raise InvalidRequest(str(problem), param) from None


def _from_response_format(
    wanted: ResponseFormat | None, tokens: Mapping[str, int]
) -> list[AskedGrammar]:
    match wanted:
        case JsonObjectFormat():
            return [AskedGrammar(Grammar.json_object(), "response_format")]
        case JsonSchemaFormat():
            schema = wanted.json_schema.content
            return _simple("response_format", schema or {"type": "object"}, schema_grammar)
        case StructuralTag():
            return _simple(
                "response_format", wanted, lambda value: structural_grammar(value, tokens)
            )
        case _:
            return []


def _from_structured(
    wanted: StructuredOutputs | None, tokens: Mapping[str, int]
) -> list[AskedGrammar]:
    """At most as many as there are ways: more than one is a contradiction like any other."""
    if wanted is None:
        return []

    def tagged(value: StructuralTag | str) -> Grammar:
        return structural_grammar(parse_tag(value), tokens)

    asked = [
        *_simple("structured_outputs.json", wanted.json_, schema_grammar),
        *_simple("structured_outputs.regex", wanted.regex, regex_grammar),
        *_simple("structured_outputs.choice", wanted.choice, Grammar.choice),
        *_simple("structured_outputs.grammar", wanted.grammar, lark_grammar),
        *_simple("structured_outputs.structural_tag", wanted.structural_tag, tagged),
    ]
    if wanted.json_object:
        asked.append(AskedGrammar(Grammar.json_object(), "structured_outputs.json_object"))
    if not asked:
        ways = ", ".join(name.rstrip("_") for name in StructuredOutputs.model_fields)
        message = f"structured_outputs asks for nothing: give one of {ways}, or leave it out"
        raise InvalidRequest(message, "structured_outputs")
    return asked


def parse_tag(value: StructuralTag | str) -> StructuralTag:
    """A structural tag as an object or as its JSON. Raises `InvalidRequest`."""
    if isinstance(value, StructuralTag):
        return value
    try:
        return StructuralTag.model_validate_json(value)
    except ValueError:
        message = "structural_tag is an object, or its JSON, of structures and triggers"
        raise InvalidRequest(message, "structural_tag") from None

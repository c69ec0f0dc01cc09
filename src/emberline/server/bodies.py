"""From a body's bytes to a JSON object, and from what is wrong with it to the answer.

Owns strictness of the JSON and how a field is named. Must not know which fields there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from emberline.server.errors import ApiError

Location = tuple[int | str, ...]


class Fields(BaseModel):
    """An object in a body: no unknown field, no coercion ("5" is no number, 1.0 no integer)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body is.

    Raises:
        ApiError: 400 for anything else, and for a key that is given twice.
    """
    try:
        # Refuses NaN, Infinity, lone surrogates and endless nesting.
        data = from_json(body, allow_inf_nan=False)
        json.loads(body, object_pairs_hook=_unique)  # the parser above keeps the last of two
    except _GivenTwice:
        raise _given_twice(json.loads(body, object_pairs_hook=_Pairs)) from None
    except ValueError as problem:
        raise ApiError(400, f"the body is not JSON: {problem}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return data


class _GivenTwice(Exception):
    """Some object gives a key twice."""


class _Pairs(list[tuple[str, Any]]):
    """An object of a body, with every pair that it gives."""


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise _GivenTwice


def _given_twice(body: object) -> ApiError:
    """The refusal of a body in which an object gives a key twice: it names the field that it is."""
    location, key = next(_doubled(body, ()))
    path = field_path(location)
    message = f"{path or 'the body'} gives {key!r} twice"
    return ApiError(400, message, param=path or key, code="duplicate_key")


def _doubled(value: object, location: Location) -> Iterator[tuple[Location, str]]:
    """Where objects give a key twice, and which."""
    if isinstance(value, _Pairs):
        seen: set[str] = set()
        for key, inner in value:
            if key in seen:
                yield location, key
            seen.add(key)
            yield from _doubled(inner, (*location, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _doubled(inner, (*location, i))


def asked_for(
    data: Mapping[str, Any], unsupported: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> dict[str, Any]:
    """An object without nulls and without what is not supported but asks for nothing.

    Args:
        data: the object.
        unsupported: names of fields, with the values that ask for nothing.
        prefix: where the object stands in the body, as in `messages[0].`.

    Raises:
        ApiError: something that is not supported is asked for.
    """
    asked = {}
    for name, value in data.items():
        if value is None:
            continue
        if name not in unsupported:
            asked[name] = value
        elif value not in unsupported[name]:
            raise ApiError(
                400,
                f"{prefix}{name} is not supported by this server: leave it out",
                param=prefix + name,
                code="unsupported_parameter",
            )
    return asked


def refuse_other_parts(messages: Sequence[Any]) -> None:
    """Refuse parts of contents that are no text, by the type that a client gave them.

    Raises:
        ApiError: 400 naming the part.
    """
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                path = f"messages[{i}].content[{j}].type"
                raise ApiError(
                    400,
                    f"{path}: only text parts are supported, not {kind!r}",
                    param=path,
                    code="unsupported_content",
                )


def first_error(problem: ValidationError, given: object) -> ApiError:
    """The error that says most: unions report one error a member.

    Args:
        problem: what is wrong with a body.
        given: the body itself.
    """
    errors: Sequence[Any] = problem.errors(include_url=False, include_input=False)
    first = errors[0]
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    if unknown:
        name = field_path(unknown[0]["loc"])
        return ApiError(400, f"unknown field {name}", param=name, code="unknown_parameter")
    if first["type"] == "missing" and _is_null(given, first["loc"]):
        path, reasons = field_path(first["loc"]), "may not be null"
    else:
        same = [error for error in errors if error["loc"][:1] == first["loc"][:1]]
        if all(error["type"] == "missing" for error in same) and (
            len({error["loc"][:-1] for error in same}) == 1
        ):
            same = [first]  # of one object, not of the members of a union: one field after another
        path = field_path(_common([error["loc"] for error in same]))
        reasons = "; or ".join(dict.fromkeys(map(_reason, same)))
    return ApiError(400, f"{path}: {reasons}", param=path, code="invalid_value")


def _reason(error: Any) -> str:
    match error["type"]:
        case "model_type":
            return "Input should be an object"  # pydantic names the class, which says nothing
        case "value_error":
            return str(error["ctx"]["error"])  # our own words, without pydantic's before them
        case _:
            return str(error["msg"])


def field_path(location: Location) -> str:
    """A field as clients write it: `messages[0].content`. Tags of alternatives, <so>, are left out.

    The location is pydantic's: names and indices.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path


def _common(locations: Sequence[Location]) -> Location:
    """What all locations begin with."""
    columns = zip(*locations, strict=False)
    shared = takewhile(lambda parts: len(set(parts)) == 1, columns)
    return tuple(parts[0] for parts in shared)


def _is_null(given: Any, location: Location) -> bool:
    """Whether the body says null at a place that counts as missing."""
    try:
        for part in location:
            if isinstance(part, int) or not part.startswith("<"):
                given = given[part]
    except (KeyError, IndexError, TypeError):
        return False
    return given is None

"""Random JSON schemas whose documents are short: what structured output is tried on."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "age", "city", "tags", "active", "score", "kind", "items", "note", "id")
WORDS = ("red", "green", "blue", "small", "large", "north", "south", "yes", "no")


def random_schema(rng: random.Random) -> Schema:
    """An object of one to four properties, at most two levels deep."""
    return _object(rng, depth=2)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4 if depth == 2 else 2))
    required = [name for name in names if rng.random() < 0.7] or names[:1]
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    kinds = ["string", "enum", "integer", "number", "boolean", "const", "pattern", "any"]
    if depth:
        kinds += ["array", "object"]
    kind = rng.choice(kinds)
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)}
    if kind == "enum":
        return {"enum": rng.sample(WORDS, rng.randint(2, 4))}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
    if kind == "const":
        return {"const": rng.choice([True, None, 7, "fixed"])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[0-9]{3}-[0-9]{2}$"])}
    if kind == "any":
        return {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]}
    if kind == "array":
        low = rng.randint(0, 2)
        items = _value(rng, 0)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "object":
        return _object(rng, depth)
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 100}
    return {"type": "boolean"}

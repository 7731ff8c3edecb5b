"""Checks that xgrammar can enforce a JSON schema: keywords that it would ignore are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from segue.messages.errors import InvalidRequest

_IGNORED = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains"),
)
"""Ignored keywords; without them the text could violate the schema."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_NUMBERS = (*_BOUNDS, "multipleOf")
_OF_STRINGS = ("minLength", "maxLength", "pattern")
_OF_ARRAYS = ("minItems", "maxItems")
_OF_OBJECTS = ("required", "minProperties", "maxProperties", "patternProperties", "propertyNames")
_SHOWS_ARRAY = ("items", "prefixItems", "unevaluatedItems")
_SHOWS_OBJECT = ("properties", "additionalProperties", "unevaluatedProperties")
"""Keywords that imply the type; the others are ignored if no type is given."""
_VALUES = ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")
"""Keywords that replace a type."""
MOST_TRIES = 256
"""Most parts of a schema to try in search of the invalid one."""
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf")
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format", "$comment", "$id",
     "$schema", "$defs", "definitions", "$anchor", "type")
)  # fmt: skip
"""Keywords allowed next to alternatives, because they do not constrain the text further."""
_ONE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_FILLED = ("anyOf", "oneOf", "allOf", "type")
"""Lists that must not be empty: for no alternatives xgrammar produces an empty text, which is not JSON."""
_MAPS = ("$defs", "definitions", "properties", "patternProperties")
"""Referenced definitions come first, because they are the culprit, not the schema that refers to them."""


def parsed(given: dict[str, Any] | str, field: str) -> Any:
    """Parse a value that may be given as an object or as its JSON text. Raises `InvalidRequest`."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not JSON: {error}", field=field) from error


def unsupported(schema: Any, path: str = "") -> str | None:
    """`path.keyword (why)` of the first part that cannot be enforced, or None. Nothing else is checked."""
    if not isinstance(schema, dict):
        return None
    here = next(_of_one(schema), None)
    if here is not None:
        keyword, why = here
        return f"{path}{keyword} ({why})"
    for place, below in _below(schema):
        if (found := unsupported(below, f"{path}{place}.")) is not None:
            return found
    return None


def _of_one(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for keyword in _IGNORED:
        if keyword in schema:
            yield keyword, "not supported"
    if schema.get("uniqueItems"):
        yield "uniqueItems", "not supported"
    for keyword in _FILLED:
        if schema.get(keyword) == []:
            yield keyword, "empty; give at least one"
    if isinstance(all_of := schema.get("allOf"), list) and len(all_of) > 1:
        yield "allOf", "of more than one schema is not supported; merge them"
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        yield "pattern", "not together with minLength or maxLength"
    if isinstance(ref := schema.get("$ref"), str) and not ref.startswith("#"):
        yield "$ref", "to another document is not supported; give it under $defs"
    yield from _read_over(schema)
    for keyword in _ALTERNATIVES:
        others = sorted(schema.keys() - _NOTES - {keyword})
        if keyword in schema and others:
            yield keyword, f"not together with {', '.join(others)}"


def _read_over(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keywords that are enforced in other places, but not in this one."""
    given = schema.keys()
    if "type" not in given and given.isdisjoint(_VALUES):
        untyped = [*_OF_NUMBERS, *_OF_STRINGS]
        untyped += () if given & set(_SHOWS_ARRAY) else _OF_ARRAYS
        untyped += () if given & set(_SHOWS_OBJECT) else _OF_OBJECTS
        yield from ((keyword, "not without a type next to it") for keyword in untyped if keyword in given)
    if "multipleOf" in given:
        kinds = schema.get("type")
        if kinds == "number" or (isinstance(kinds, list) and "number" in kinds):
            yield "multipleOf", "of an integer alone"
        elif others := sorted(given & set(_BOUNDS)):
            yield "multipleOf", f"not together with {', '.join(others)}"
    required, known = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(known, dict):
        for name in required:
            if isinstance(name, str) and name not in known:
                yield "required", f"names {name!r}, which is not among properties"


def culprit(schema: Any, refused: Callable[[Any], str | None]) -> str:
    """Path of the part that makes a schema `refused` (returns why, or None) for the same reason, e.g. `.properties.a`;
    empty if it is the schema itself, or is not found."""
    why, path, tries = refused(schema), "", 0
    root = schema if isinstance(schema, dict) else {}
    known = {key: root[key] for key in ("$defs", "definitions") if key in root}
    while why is not None and isinstance(schema, dict):
        for place, below in _below(schema):
            tries += 1
            if below is None or tries > MOST_TRIES:
                continue
            if refused({**known, **below} if isinstance(below, dict) else below) == why:
                path, schema = f"{path}.{place}", below
                break
        else:
            break
    return path


def _below(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _MAPS:
        if isinstance(named := schema.get(keyword), dict):
            yield from ((f"{keyword}.{name}", entry) for name, entry in named.items())
    for keyword in _LISTS:
        if isinstance(entries := schema.get(keyword), list):
            yield from ((f"{keyword}[{index}]", entry) for index, entry in enumerate(entries))
    for keyword in _ONE:
        yield keyword, schema.get(keyword)

"""What a JSON schema may say for its text to be held to it: what xgrammar would read over is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from segue.messages.errors import InvalidRequest

_IGNORED = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies")
"""Keywords without which the text could break the schema."""
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf")
_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format", "$comment", "$id",
     "$schema", "$defs", "definitions", "$anchor", "type")
)  # fmt: skip
"""Keywords that may stand beside alternatives: they say nothing that the alternatives do not."""
_ONE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_FILLED = ("anyOf", "oneOf", "allOf", "type")
"""Lists that may not be empty: of no alternatives xgrammar makes a text of nothing, which is no JSON."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def parsed(given: dict[str, Any] | str, field: str) -> Any:
    """What may be given as an object or as its text. Raises `InvalidRequest`."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is no JSON: {error}", field=field) from error


def unsupported(schema: Any, path: str = "") -> str | None:
    """`path.keyword (why)` of the first thing that cannot be held to, or None. Nothing else is checked."""
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
    for keyword in _ALTERNATIVES:
        others = sorted(schema.keys() - _NOTES - {keyword})
        if keyword in schema and others:
            yield keyword, f"not together with {', '.join(others)}"


def _below(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _ONE:
        yield keyword, schema.get(keyword)
    for keyword in _LISTS:
        if isinstance(entries := schema.get(keyword), list):
            yield from ((f"{keyword}[{index}]", entry) for index, entry in enumerate(entries))
    for keyword in _MAPS:
        if isinstance(named := schema.get(keyword), dict):
            yield from ((f"{keyword}.{name}", entry) for name, entry in named.items())

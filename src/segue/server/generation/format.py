"""Reads the required form of a completion's text: OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's
older `guided_*` parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.messages.limits import check_carried
from segue.messages.sampling import StructuredOutput, check_structured
from segue.server.http.body import check_names, check_unsupported
from segue.server.vllm.parameters import OF_STRUCTURED_OUTPUTS

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's earlier names → the fields of `StructuredOutput`."""
_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_OF_TAGS = ("type", "format", "structures", "triggers")
"""Keys of a structural tag: xgrammar's `format`, or vLLM's older `structures` and `triggers`."""


def structured_output(
    response_format: dict[str, Any] | None, structured: dict[str, Any] | None, guided: dict[str, Any]
) -> StructuredOutput | None:
    """The requested form, or None. `guided`: value by parameter. Raises `InvalidRequest`, also for several forms."""
    found: dict[str, StructuredOutput] = {}
    if response_format is not None and (form := _response_format(response_format)) is not None:
        found["response_format"] = form
    if structured is not None:
        fields = StructuredOutput.__struct_fields__
        check_names(structured, {*fields, *OF_STRUCTURED_OUTPUTS}, "structured_outputs", offered=fields)
        check_unsupported(structured, OF_STRUCTURED_OUTPUTS, "structured_outputs")
        asked = {name: value for name, value in structured.items() if name in fields}
        found["structured_outputs"] = _converted(asked, "structured_outputs")
    for name, value in guided.items():
        try:
            found[name] = _converted({GUIDED[name]: value}, name)
        except InvalidRequest as error:  # the client wrote only one of the two names
            said = error.message.replace(f"{name}.{GUIDED[name]}", name)
            raise InvalidRequest(said, field=name) from error
    if len(found) > 1:
        last = list(found)[-1]
        raise InvalidRequest(f"{' and '.join(found)} are given; give one", field=last)
    return next(iter(found.values()), None)


def _response_format(values: dict[str, Any]) -> StructuredOutput | None:
    kind = values.get("type")
    if kind not in _TYPES:
        raise InvalidRequest(
            f"response_format.type is {shown(kind)}{nearest(kind, _TYPES)}", field="response_format.type"
        )
    if kind == "structural_tag":
        check_names(values, _OF_TAGS, "response_format")
        check_carried(values, "response_format")
        return StructuredOutput(structural_tag=values)
    if kind != "json_schema":
        check_names(values, ("type",), "response_format")
        return StructuredOutput(json_object=True) if kind == "json_object" else None
    check_names(values, ("type", "json_schema"), "response_format")
    described = values.get("json_schema")
    if not isinstance(described, dict):
        raise wrong("response_format.json_schema", described, '{"name": …, "schema": …}')
    check_names(described, ("name", "description", "schema", "strict"), "response_format.json_schema")
    schema = described.get("schema")
    if schema is None:
        return StructuredOutput(json_object=True)
    if not isinstance(schema, dict):
        raise wrong("response_format.json_schema.schema", schema, "an object")
    check_carried(schema, "response_format.json_schema.schema")
    return StructuredOutput(json=schema)


def _converted(values: dict[str, Any], field: str) -> StructuredOutput:
    try:
        asked = msgspec.convert(values, StructuredOutput)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{field} is {shown(values)}: {error}", field=field) from error
    check_structured(asked, field)
    return asked

"""Forms that cannot be had are refused by name."""

from __future__ import annotations

import pytest
from ar_adapter import stage_request
from ar_words import ASKING, PROMPT, TEXT, WordAdapter, driver, word_adapter, write

from segue.engines.autoregressive.json_schema import unsupported
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams, StructuredOutput


@pytest.fixture(scope="module")
def adapter():
    return word_adapter()


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"regex": "(a"}, "parenthesis"),
        ({"grammar": 'root ::= "a'}, "string literal"),
        ({"grammar": 'other ::= "a"'}, "root"),
        ({"grammar": "root ::= root"}, "matches no text"),
        ({"json": {"type": "nope"}}, "nope"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum greater"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": "[1] "}, "got [1]"),
        ({"choice": ["\u6d77", "\n"]}, "matches no text"),
        ({"structural_tag": {"format": {"type": "nope"}}}, "compiled: Invalid structural tag error: Format type not"),
        ({"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["c"]}}, "trigger"),
    ],
)
def test_a_wrong_form_is_named(adapter, form, word):
    [result] = write(adapter, form, seeds=[1])
    error = result.last.error
    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.main.structured_outputs"
    assert word in error.message
    assert error.message.startswith("sampling.main.structured_outputs ")
    assert ".cc" not in error.message  # where in its own source xgrammar noticed is nothing to a client


@pytest.mark.parametrize(
    ("form", "field", "word"),
    [
        ({"json": "{"}, ".json", "no JSON"),
        ({"json": {"properties": {"a": {"items": {"not": {}}}}}}, ".json", "properties.a.items.not (not supported)"),
        ({"regex": "a" * (1 << 19)}, "", "at most 262144"),
        ({"choice": ["\ud800"]}, "", "surrogate"),
        ({"structural_tag": "{"}, ".structural_tag", "no JSON"),
        ({"structural_tag": {}}, ".structural_tag", '"format": …'),
        ({"structural_tag": {"structures": [], "triggers": ["a"]}}, ".structural_tag.structures", "at least one"),
        ({"structural_tag": {"structures": [{}]}}, ".structural_tag.triggers", "at least one"),
        (
            {"structural_tag": {"structures": [{"begin": "a"}], "triggers": ["a"]}},
            ".structural_tag.structures[0]",
            '"schema": …',
        ),
        (
            {"structural_tag": {"format": {"elements": [{"json_schema": {"not": {}}}]}}},
            ".structural_tag",
            "format.elements[0].json_schema has not (not supported)",
        ),
    ],
)
def test_what_is_seen_at_once(adapter, form, field, word):
    drive, _ = driver(adapter)
    sampling = SamplingParams(structured_outputs=StructuredOutput(**form))
    with pytest.raises(InvalidRequest) as caught:
        drive.add(stage_request("it", sampling=sampling, to_client=TEXT), PROMPT)
    assert caught.value.field == f"sampling.main.structured_outputs{field}"
    assert word in caught.value.message
    drive.engine.audit()


def test_needs_a_tokenizer(adapter):
    bare = WordAdapter(adapter.model)
    bare.vocabulary = None
    drive, _ = driver(bare)
    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        drive.add(stage_request("it", sampling=ASKING), PROMPT)


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "object", "properties": {"not": {"type": "string"}}}, None),
        ({"enum": [{"not": 1}], "description": "if"}, None),
        ({"anyOf": [{"type": "string"}, {"uniqueItems": True}]}, "anyOf[1].uniqueItems (not supported)"),
        ({"allOf": [{"minimum": 1}]}, None),
        ({"allOf": [{}, {}]}, "allOf (of more than one schema is not supported; merge them)"),
        ({"items": {"anyOf": []}}, "items.anyOf (empty; give at least one)"),
        ({"type": []}, "type (empty; give at least one)"),
        ({"$defs": {"a": {"if": {}}}}, "$defs.a.if (not supported)"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "title": "x"}, None),
        ({"$ref": "https://example.org/a"}, "$ref (to another document is not supported; give it under $defs)"),
        ({"$ref": "#/$defs/a", "minimum": 3}, "$ref (not together with minimum)"),
        ({"pattern": "a", "maxLength": 3}, "pattern (not together with minLength or maxLength)"),
        (True, None),
    ],
)
def test_what_a_schema_may_say(schema, found):
    assert unsupported(schema) == found

"""Forms that cannot be had are refused by name."""

from __future__ import annotations

import pytest
from ar_adapter import stage_request
from ar_words import ASKING, PROMPT, TEXT, WordAdapter, driver, word_adapter, write

from segue.engines.autoregressive.grammar.json_schema import unsupported
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams, StructuredOutput


@pytest.fixture(scope="module")
def adapter():
    return word_adapter()


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "(a"}, "at character 3 of its regular expression: The parenthesis is not closed"),
        ({"regex": "a{3,1}"}, "Lower bound is larger than upper bound: 3 > 1"),
        ({"grammar": 'root ::= "a'}, 'at line 1, column 12: Expect " in string literal'),
        ({"grammar": 'other ::= "a"'}, 'at line 1, column 1: The root rule with name "root" is not found'),
        ({"json": {"type": "nope"}}, 'type is "nope"; it must be string, number, '),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "no number is within its bounds"),
        ({"json": {"$ref": "#/nowhere"}}, "$ref is '#/nowhere', which does not exist in the schema"),
        ({"json": "[1] "}, "[1] is not a schema; it must be an object, true or false"),
        ({"json": {"properties": {"a": {"items": {"type": "nope"}}}}}, 'at properties.a.items: type is "nope"; '),
        (
            {
                "json": {
                    "properties": {"a": {"$ref": "#/$defs/b"}},
                    "$defs": {"b": {"anyOf": [{}, {"minLength": "x", "type": "string"}]}},
                }
            },
            "at $defs.b.anyOf[1]: minLength must be an integer",
        ),
        (
            {"json": {"properties": {"a": {"type": "string", "pattern": "(a"}}}},
            "at properties.a: at character 3 of its",
        ),
        (
            {"json": {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {}}},
            "at properties.a: $ref is '#/$defs/b', which",
        ),
        ({"structural_tag": {"format": {"type": "nope"}}}, "there is no format of type 'nope'"),
        (
            {"structural_tag": {"format": {"type": "or", "elements": []}}},
            "the format Or must have at least one element",
        ),
        (
            {
                "structural_tag": {
                    "format": {
                        "type": "or",
                        "elements": [{"type": "json_schema", "json_schema": {"items": {"type": "nope"}}}],
                    }
                }
            },
            'at format.elements[0].json_schema.items: type is "nope"; ',
        ),
        (
            {"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["c"]}},
            "One tag does",
        ),
    ],
)
def test_a_wrong_form_is_named(adapter, form, says):
    [result] = write(adapter, form, seeds=[1])
    error = result.last.error
    assert isinstance(error, InvalidRequest)
    [name] = form
    assert error.field == f"sampling.main.structured_outputs.{name}"
    assert error.message.startswith(f"sampling.main.structured_outputs.{name} cannot be compiled: {says}")
    for theirs in (".cc", "Check failed", "EBNF", "parsing error"):  # is nothing to a client
        assert theirs not in error.message


@pytest.mark.parametrize("form", [{"grammar": "root ::= root"}, {"choice": ["\u6d77", "\n"]}])
def test_a_form_without_a_text(adapter, form):
    [result] = write(adapter, form, seeds=[1])
    [name] = form
    said = f"sampling.main.structured_outputs.{name} matches no text that this model can write"
    assert result.last.error.message == said


@pytest.mark.parametrize(
    ("form", "field", "word"),
    [
        ({"json": "{"}, ".json", "not JSON"),
        ({"json": {"properties": {"a": {"items": {"not": {}}}}}}, ".json", "properties.a.items.not (not supported)"),
        ({"regex": "a" * (1 << 19)}, ".regex", "at most 262144"),
        ({"choice": ["\ud800"]}, ".choice", "surrogate"),
        ({"structural_tag": "{"}, ".structural_tag", "not JSON"),
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
        ({"allOf": [{"type": "integer", "minimum": 1}]}, None),
        ({"items": {"minimum": 1}}, "items.minimum (not without a type next to it)"),
        ({"pattern": "a"}, "pattern (not without a type next to it)"),
        ({"required": ["a"]}, "required (not without a type next to it)"),
        ({"properties": {"a": {}}, "required": ["a"], "minProperties": 1}, None),
        ({"items": {}, "minItems": 1}, None),
        ({"type": "object", "required": ["a"]}, "required (names 'a', which is not among properties)"),
        ({"type": "array", "contains": {}}, "contains (not supported)"),
        ({"type": "integer", "multipleOf": 3}, None),
        ({"type": ["null", "number"], "multipleOf": 3}, "multipleOf (of an integer alone)"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "multipleOf (not together with minimum)"),
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

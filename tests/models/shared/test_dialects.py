"""Tool calls and thoughts in a stream of text: found in every form, the same however the stream is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.messages.errors import ConfigError
from segue.models.shared.dialects.dialect import CALL_FORMATS, Dialect, dialect_of
from segue.models.shared.dialects.pieces import CallArguments, CallBegun, Chain, Parser, Said, Thought
from segue.models.shared.dialects.reasoning import MAGISTRAL, THINK, ReasoningParser

Reading = tuple[str, str, list[tuple[str, str]]]
"""(what was said, what was thought, calls: name and arguments)"""
NAMES = frozenset({"look", "wait"})


def read(parser: Parser, pieces: list[str]) -> Reading:
    said, thought, calls = "", "", []
    for piece in [new for text in pieces for new in parser.feed(text)] + parser.finish():
        match piece:
            case Said(text):
                said += text
            case Thought(text):
                thought += text
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1, "arguments follow their call"
                calls[index] = (calls[index][0], calls[index][1] + text)
    return said, thought, calls


def calls_of(name: str) -> Callable[[], Parser]:
    return lambda: CALL_FORMATS[name].parser(NAMES.__contains__)


HERMES, LLAMA, MISTRAL, PYTHONIC = map(calls_of, ("hermes", "llama3_json", "mistral", "pythonic"))
LOOK = ("look", '{"at": "the <sea>", "far": [1, {"x": "}"}]}')
WAIT = ("wait", "{}")
L = LOOK[1]


def forced(name: str | None) -> Parser:
    """Of a model that does not think."""
    return Dialect().forced_parser(name, opened=False)


@pytest.mark.parametrize(
    ("parser", "text", "said", "calls"),
    [
        # Hermes, Qwen
        (HERMES, f'<tool_call>\n{{"name": "look", "arguments": {L}}}\n</tool_call>', "", [LOOK]),
        (HERMES, f'Let me see.\n\n<tool_call>{{"name": "look", "arguments": {L}}}</tool_call>', "Let me see.", [LOOK]),
        (
            HERMES,
            f'<tool_call>\n{{"name": "look", "arguments": {L}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "wait"}\n</tool_call>\n',
            "",
            [LOOK, WAIT],
        ),
        (HERMES, f'<tool_call>{{"arguments": {L}, "name": "look"}}</tool_call>', "", [LOOK]),
        (HERMES, f'<tool_call>{{"name": "look", "arguments": {json.dumps(L)}}}</tool_call>', "", [LOOK]),
        (HERMES, '<tool_call>{"name": "wait", "arguments": null}</tool_call> Done.', "Done.", [WAIT]),
        (HERMES, 'A<tool_call>{"name": "wait", "id": [1], "n": 3}</tool_call>\nB', "A\nB", [WAIT]),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "cut o', "", [("look", '{"at": "cut o')]),
        (HERMES, "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
        (HERMES, '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        (HERMES, '<tool_call>{"nam', '<tool_call>{"nam', []),
        (HERMES, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        (HERMES, "a <tool_ b", "a <tool_ b", []),
        (HERMES, " plain text \n", " plain text \n", []),
        # Llama
        (LLAMA, f'{{"name": "look", "parameters": {L}}}', "", [LOOK]),
        (LLAMA, f'<|python_tag|>{{"type": "function", "name": "look", "parameters": {L}}}', "", [LOOK]),
        (LLAMA, f'{{"name": "look", "parameters": {L}}}; {{"name": "wait", "parameters": {{}}}}', "", [LOOK, WAIT]),
        (LLAMA, '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
        (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
        (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (LLAMA, ' the object {"name": "look"}', ' the object {"name": "look"}', []),
        # Mistral
        (MISTRAL, f'[TOOL_CALLS][{{"name": "look", "arguments": {L}}}]', "", [LOOK]),
        (
            MISTRAL,
            f'[TOOL_CALLS] [{{"name": "look", "arguments": {L}}}, {{"arguments": {{}}, "name": "wait", "id": "a"}}]',
            "",
            [LOOK, WAIT],
        ),
        (MISTRAL, f"[TOOL_CALLS]look{L}", "", [LOOK]),
        (MISTRAL, f"Sure.[TOOL_CALLS]look[ARGS]{L}[TOOL_CALLS]wait{{}}", "Sure.", [LOOK, WAIT]),
        (MISTRAL, f"[TOOL_CALLS]look[CALL_ID]abc123def[ARGS]{L}", "", [LOOK]),
        (MISTRAL, "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
        (MISTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
        (MISTRAL, "[1, 2]", "[1, 2]", []),
        # Python
        (PYTHONIC, '[look(at="a", far=[1, True]), wait()]', "", [("look", '{"at": "a", "far": [1, true]}'), WAIT]),
        (PYTHONIC, "<|python_start|>[wait()]<|python_end|>", "", [WAIT]),
        (PYTHONIC, "[1, 2]", "[1, 2]", []),
        (PYTHONIC, "[look(x)]", "[look(x)]", []),
        (PYTHONIC, "[look(at=", "[look(at=", []),
        (PYTHONIC, "Hello [wait()]", "Hello [wait()]", []),
        # held to it by a grammar
        (lambda: forced(None), f'[{{"name": "look", "parameters": {L}}}, {{"name": "wait"}}]', "", [LOOK, WAIT]),
        (lambda: forced("look"), f" {L}", "", [LOOK]),
    ],
)  # fmt: skip
def test_calls(parser: Callable[[], Parser], text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert read(parser(), [text]) == (said, "", calls)
    assert read(parser(), list(text)) == (said, "", calls), "letter by letter"


@pytest.mark.parametrize(
    ("opened", "text", "thought"),
    [(True, f"Hm.</think>{L}", "Hm."), (False, f"<think>Hm.</think>{L}", "Hm."), (False, L, "")],
)
def test_a_thought_before_a_call_that_must_come(opened: bool, text: str, thought: str) -> None:
    parser = Dialect(reasoning=THINK).forced_parser("look", opened=opened)
    assert read(parser, [text]) == ("", thought, [LOOK])


@pytest.mark.parametrize(
    ("opened", "text", "said", "thought"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
        (True, "Hm.\n</think>\n\nYes. ", "Yes. ", "Hm."),
        (True, "<think>\nHm.</think>Yes.", "Yes.", "Hm."),
        (True, "cut off", "", "cut off"),
        (False, "<think>\n\n</think>\n\nYes.", "Yes.", ""),
        (False, "No <think>thought</think>", "No <think>thought</think>", ""),
        (False, "  <thin", "  <thin", ""),
        (False, "", "", ""),
    ],
)
def test_thoughts(opened: bool, text: str, said: str, thought: str) -> None:
    for pieces in ([text], list(text)):
        assert read(ReasoningParser(THINK, opened=opened), pieces) == (said, thought, [])
    other = text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    said = said.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    if "<thin" not in said:
        assert read(ReasoningParser(MAGISTRAL, opened=opened), [other]) == (said, thought, [])


def test_a_call_behind_a_thought() -> None:
    text = f'<think>I must <tool_call> now.</think>\n\n<tool_call>{{"name": "look", "arguments": {L}}}</tool_call>'
    dialect = Dialect(calls=CALL_FORMATS["hermes"], reasoning=THINK)
    assert read(dialect.parser(opened=False, tools=NAMES), list(text)) == ("", "I must <tool_call> now.", [LOOK])
    assert read(dialect.parser(opened=False, tools=None), [text])[2] == [], "nothing may be called"


# ── however it is cut ──────────────────────────────────────────────────────────────────────────────────────────────

PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "thought": lambda: ReasoningParser(THINK, opened=False),
    "open thought": lambda: ReasoningParser(THINK, opened=True),
    "both": lambda: Chain(ReasoningParser(THINK, opened=False), HERMES()),
    "forced": lambda: forced(None),
    "named": lambda: forced("look"),
}
_PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", "{", "}", ";",
     '{"name": "look", "arguments": {"a": "\\"}"}}', '{"name": "wait"}', '"name"', ": ", '"look"', '"arguments"', ",",
     "look", " ", "\n", "x", '"', "\\", "[ARGS]", "[CALL_ID]", "<", "<tool", "wait()", '"parameters": {}',
     "null", "7", "é"]
)  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@given(parts=st.lists(_PARTS, max_size=12), data=st.data())
def test_what_is_found_does_not_depend_on_the_cuts(name: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(PARSERS[name](), [text])
    assert read(PARSERS[name](), pieces) == whole
    assert read(PARSERS[name](), list(text)) == whole


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text(alphabet="abc \n.,!", max_size=30))
def test_plain_text_is_left_as_it_is(name: str, text: str) -> None:
    said, thought, calls = read(PARSERS[name](), list(text))
    if name == "open thought":
        assert (said, thought, calls) == ("", text.strip(), [])
    elif name == "named":
        arguments = text.lstrip()
        assert (said, thought, calls) == ("", "", [("look", arguments)] if arguments else [])
    else:
        assert (thought, calls) == ("", [])
        assert said == ("" if name == "forced" else text), "what a grammar holds is no text"


_ARGUMENTS = st.dictionaries(st.text(max_size=4), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=4,
), max_size=3)  # fmt: skip


@given(
    calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), _ARGUMENTS), min_size=1, max_size=3), spaced=st.booleans()
)
def test_whatever_is_called_is_found(calls: list[tuple[str, dict[str, object]]], spaced: bool) -> None:
    indent = 1 if spaced else None
    objects = [json.dumps({"name": name, "arguments": arguments}, indent=indent) for name, arguments in calls]
    written = {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
    }
    for name, text in written.items():
        said, _, found = read(calls_of(name)(), list(text))
        assert said == ""
        assert [(called, json.loads(arguments)) for called, arguments in found] == calls


def test_arguments_stream_as_they_are_written() -> None:
    parser = HERMES()
    assert parser.feed('<tool_call>{"name": "lo') == []
    assert parser.feed('ok", "arguments": {"at"') == [CallBegun(0, "look"), CallArguments(0, '{"at"')]
    assert parser.feed(': "x') == [CallArguments(0, ': "x')]
    assert parser.feed('"}}</tool') == [CallArguments(0, '"}')]
    assert parser.feed("_call>") == []
    assert parser.finish() == []


# ── which dialect a checkpoint has ─────────────────────────────────────────────────────────────────────────────────

QWEN3 = """{%- if tools %}{{- '<tool_call>\\n{"name": <function-name>' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + message.content }}
{%- if message.tool_calls %}{{- '<tool_call>\\n{"name": "' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
R1 = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
)


def checkpoint(directory: Path, template: object, **config: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return directory


@pytest.mark.parametrize(
    ("template", "model_type", "calls"),
    [
        (QWEN3, "qwen3", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama", "llama3_json"),
        ('{{ tools }}"parameters": dictionary of argument', "x", "llama3_json"),
        ("{{ tools }}[func_name1(params_name1=params_value1", "llama", "pythonic"),
        ("{{ tools }}<tool_call><function=", "qwen3_moe", None),
        ("{{ tools }}", "mixtral", "mistral"),
        ("{{ tools }}", "gpt2", None),
        ("{{ messages }}", "llama", None),
    ],
)
def test_the_call_format_is_found_by_the_template(
    tmp_path: Path, template: str, model_type: str, calls: str | None
) -> None:
    dialect = dialect_of(checkpoint(tmp_path, template), {"model_type": model_type})
    assert (dialect.calls.name if dialect.calls else None) == calls
    assert dialect.takes_tools == ("tools" in template)


def test_whether_the_prompt_ends_in_a_thought_is_asked_of_the_template(tmp_path: Path) -> None:
    qwen3 = dialect_of(checkpoint(tmp_path, QWEN3), {})
    assert qwen3.reasoning == THINK
    assert qwen3.template_variables == {"enable_thinking"}
    assert not qwen3.begins_in_thought({})
    assert not qwen3.begins_in_thought({"enable_thinking": False})
    r1 = dialect_of(checkpoint(tmp_path, R1), {})
    assert r1.begins_in_thought({})
    assert dialect_of(checkpoint(tmp_path, R1.replace("{{ '<think>", "{{ raise_exception('no') }}{{ '<think>")), {})
    hybrid = R1.replace("{{ '<think>\\n' }}", "{{ '<think>' if thinking else '</think>' }}")
    deepseek = dialect_of(checkpoint(tmp_path, hybrid), {})
    assert [deepseek.begins_in_thought({"thinking": on}) for on in (True, False)] == [True, False]


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
    assert dialect_of(tmp_path, {}) == Dialect()
    listed = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": QWEN3}]
    assert dialect_of(checkpoint(tmp_path, listed), {}).template_variables == {"enable_thinking"}
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% generation %}{{ mood }}{% endgeneration %}")
    assert dialect_of(tmp_path, {}).template_variables == {"mood"}
    (tmp_path / "chat_template.jinja").write_text("{% if")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: line 1"):
        dialect_of(tmp_path, {})
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        dialect_of(tmp_path, {})


def test_ids_are_what_the_templates_take() -> None:
    assert re.fullmatch(r"[A-Za-z0-9]{9}", CALL_FORMATS["mistral"].call_id())
    assert CALL_FORMATS["hermes"].call_id() != CALL_FORMATS["hermes"].call_id()
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        Dialect().with_calls("hermse")

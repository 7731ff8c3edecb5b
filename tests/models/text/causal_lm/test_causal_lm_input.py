"""Prompt ids are what the library's tokenizer and `apply_chat_template` give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from causal_lm_family import make

from segue.engines.contract import LoadContext
from segue.engines.module.contract import Work
from segue.messages.errors import InvalidRequest, TooLong
from segue.messages.request import ChatOptions, MediaPart, Message, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.shared.library import AutoTokenizer
from segue.models.shared.text.prompt_embeds import NO_TOKEN
from segue.models.shared.text.text_input import TextInput
from segue.models.text.causal_lm.input import InputProcessor
from segue.models.text.causal_lm.tiny_config import SMALL

CHATTING = [name for name, small in SMALL.items() if small.template is not None]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def said(role: str, text: str, **extra: Any) -> Message:
    return Message(role, [TextPart(text)] if text else [], extra)


def processor(directory: Path, **context: Any) -> InputProcessor:
    return InputProcessor(LoadContext(directory, "input", torch.device("cpu"), torch.float32, **context))


def ids(processor: InputProcessor, **fields: Any) -> list[int]:
    return processor.process(Request(request_id="r", **fields))["token_ids"].tolist()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwens(qwen: Path) -> InputProcessor:
    return processor(qwen)


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    return [{"role": m.role, "content": "".join(part.text for part in m.content)} for m in messages]


@pytest.mark.parametrize("kind", CHATTING)
def test_messages_and_prompt(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    own = processor(tmp_path)
    messages = [said("system", "Be brief."), said("user", " Hello! "), said("assistant", "Yes?"), said("user", "Why?")]
    for count in (2, 4):
        expected = tokenizer.apply_chat_template(plain(messages[:count]), add_generation_prompt=True)["input_ids"]
        assert ids(own, messages=messages[:count]) == expected
    begin = SMALL[kind].begin
    raw = ids(own, prompt="Hello there")
    assert raw == tokenizer("Hello there")["input_ids"]
    assert (raw[0] == tokenizer.bos_token_id) == (begin is not None)
    if begin is not None:  # the template has written it: it is there once
        first, second, *_ = ids(own, messages=messages)
        assert first == tokenizer.bos_token_id != second


def test_parts_of_a_message_are_lines_of_one_text(qwens: InputProcessor) -> None:
    parts = Message("user", [TextPart("Hello "), TextPart("there")])
    assert ids(qwens, messages=[parts]) == ids(qwens, messages=[said("user", "Hello \nthere")])


@pytest.mark.parametrize("content", ["message.content", "message['content']"])
def test_a_template_that_goes_through_parts_is_given_them(qwen: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(qwen, tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in " + content + " %}<{{ part.text }}>{% endfor %}{% endif %};{% endfor %}"
    )
    own = processor(tmp_path / "own")
    parts = Message("user", [TextPart("Hello"), TextPart("there")])
    assert ids(own, messages=[said("system", "Well"), parts]) == ids(own, prompt="Well;<Hello><there>;")


def test_tools_and_calls(qwen: Path, qwens: InputProcessor) -> None:
    """Arguments of calls, text in OpenAI's messages, are objects to the template."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"where": "out"}'}}
    messages = [
        said("user", "Look!"),
        said("assistant", "", tool_calls=[call]),
        said("tool", "sea", tool_call_id="1"),
    ]
    parsed = {**call, "function": {"name": "look", "arguments": {"where": "out"}}}
    conversation = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "sea", "tool_call_id": "1"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    expected = tokenizer.apply_chat_template(conversation, tools=[TOOL], add_generation_prompt=True)["input_ids"]
    given = ids(qwens, messages=messages, chat=ChatOptions(tools=[TOOL]))
    assert given == expected
    assert '"arguments": {"where": "out"}' in tokenizer.decode(given)
    assert given != ids(qwens, messages=messages)


@pytest.mark.parametrize("calls", [["x"], [{"function": "look"}], [{"function": {"name": "f", "arguments": "{"}}]])
def test_wrong_calls_are_refused(qwens: InputProcessor, calls: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ids(qwens, messages=[said("user", "a"), said("assistant", "", tool_calls=calls)])
    assert caught.value.field == "messages[1].tool_calls"


def test_template_arguments(qwen: Path, qwens: InputProcessor) -> None:
    messages = [said("user", "Hello")]
    thinking = ids(qwens, messages=messages)
    quick = ids(qwens, messages=messages, chat=ChatOptions(template_kwargs={"enable_thinking": False}))
    assert quick[: len(thinking)] == thinking
    assert AutoTokenizer.from_pretrained(qwen).decode(quick[len(thinking) :]) == "<think>\n\n</think>\n\n"
    with pytest.raises(InvalidRequest, match="multiple values for keyword argument 'tokenize'"):
        ids(qwens, messages=messages, chat=ChatOptions(template_kwargs={"tokenize": True}))


def test_a_reply_is_continued(qwen: Path, qwens: InputProcessor) -> None:
    messages = [said("user", "Hello"), said("assistant", "Good")]
    going_on = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    text = AutoTokenizer.from_pretrained(qwen).decode(ids(qwens, messages=messages, chat=going_on))
    assert text.endswith("<|im_start|>assistant\nGood")
    over = ChatOptions(add_generation_prompt=False)
    assert AutoTokenizer.from_pretrained(qwen).decode(ids(qwens, messages=messages, chat=over)).endswith("<|im_end|>\n")
    with pytest.raises(InvalidRequest, match="either continued or begun"):
        ids(qwens, messages=messages, chat=ChatOptions(continue_final_message=True))


def test_what_the_template_refuses_is_the_clients_mistake(tmp_path: Path) -> None:
    own = processor(make("mistral", tmp_path))
    with pytest.raises(InvalidRequest, match="refuses these messages: roles must alternate"):
        ids(own, messages=[said("user", "a"), said("user", "b")])


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({}, "messages", "messages is empty"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids", "either prompt or prompt_token_ids"),
        ({"prompt": "a", "messages": [said("user", "b")]}, "prompt", "either messages or prompt, not both"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "is empty"),
        ({"prompt_token_ids": [1, 672]}, "prompt_token_ids[1]", "from 0 to 671"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids[0]", "is -1"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"messages": [Message("user", [MediaPart("image", b"")])]}, "messages[0].content[0]", "is image"),
    ],
)
def test_wrong_requests(qwens: InputProcessor, fields: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text.replace("(", r"\(")) as caught:
        ids(qwens, **fields)
    assert caught.value.field == field


def test_too_long(qwen: Path) -> None:
    own = processor(qwen, max_model_len=50)
    assert len(ids(own, prompt_token_ids=[1] * 49)) == 49
    for fields in ({"prompt_token_ids": [1] * 50}, {"prompt": "a " * 60}, {"messages": [said("user", "a " * 60)]}):
        with pytest.raises(TooLong, match="the context is 50 tokens, so it may have at most 49") as caught:
            ids(own, **fields)
        assert caught.value.field in fields


class Counting:
    """A tokenizer that notes how much text it is given."""

    def __init__(self, own: Any) -> None:
        self._own, self.given = own, 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.given += len(text)
        return self._own(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@pytest.mark.parametrize("text", ["the sea ", "x", "\u00e9 "])
def test_of_a_text_that_cannot_fit_only_a_part_is_tokenized(qwen: Path, text: str) -> None:
    own = processor(qwen, max_model_len=50)
    own._tokenizer = counting = Counting(own._tokenizer)
    for fields in ({"prompt": text * 100_000}, {"messages": [said("user", text * 100_000)]}):
        with pytest.raises(TooLong, match="more than 100 tokens; the context is 50 tokens") as caught:
            ids(own, **fields)
        assert caught.value.field in fields
    assert counting.given < 10_000


def test_a_text_that_others_would_wait_for(qwens: InputProcessor) -> None:
    cut = {"llm": SamplingParams(truncate_prompt_tokens=5)}
    for fields in ({"modalities": ["tokens"]}, {"sampling": cut}, {}):
        with pytest.raises(TooLong, match="at most 1048576 are taken"):
            ids(qwens, prompt="x" * ((1 << 20) + 1), **fields)


@pytest.mark.parametrize("keep", [1, 7, 32, 33, 49])
def test_truncated(qwen: Path, keep: int) -> None:
    given = list(range(5, 38))
    own = processor(qwen, max_model_len=50)
    assert (
        ids(own, prompt_token_ids=given, sampling={"llm": SamplingParams(truncate_prompt_tokens=keep)})
        == (given[-keep:])
    )


def test_the_first_tokens_are_kept(qwen: Path) -> None:
    cut = {"llm": SamplingParams(truncate_prompt_tokens=3, truncation_side="right")}
    assert ids(processor(qwen), prompt_token_ids=[5, 6, 7, 8, 9], sampling=cut) == [5, 6, 7]


def test_truncated_to_the_context(qwen: Path) -> None:
    given = list(range(5, 65))
    cut = {"llm": SamplingParams(truncate_prompt_tokens=-1)}
    assert ids(processor(qwen, max_model_len=41), prompt_token_ids=given, sampling=cut) == given[-40:]


def test_the_prompt_of_another_stage_cannot_be_cut(qwens: InputProcessor) -> None:
    with pytest.raises(InvalidRequest, match="only the prompt of stage 'llm' can be cut") as caught:
        ids(qwens, prompt_token_ids=[5, 6], sampling={"other": SamplingParams(truncate_prompt_tokens=1)})
    assert caught.value.field == "sampling.other.truncate_prompt_tokens"


def test_a_long_text_of_long_words_fits(qwen: Path) -> None:
    """More characters than eight a token, and fewer tokens than the context."""
    own = processor(qwen, max_model_len=12)
    special = "<|im_start|>" * 11
    assert len(special) > 8 * 12
    assert len(ids(own, prompt=special)) == 11


def test_without_a_template(qwen: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(qwen, tmp_path / "copy")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    own = processor(directory)
    assert ids(own, prompt="Hello")
    with pytest.raises(InvalidRequest, match="no chat template; send a prompt or prompt_token_ids"):
        ids(own, messages=[said("user", "Hello")])
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!")  # a file of its own
    assert ids(processor(directory), messages=[said("user", "Hello")]) == ids(own, prompt="Hello!")


def test_without_a_tokenizer(qwen: Path, tmp_path: Path) -> None:
    shutil.copy(qwen / "config.json", tmp_path)
    own = processor(tmp_path)
    assert ids(own, prompt_token_ids=[1, 2]) == [1, 2]
    for fields in ({"prompt": "a"}, {"messages": [said("user", "a")]}):
        with pytest.raises(InvalidRequest, match="no tokenizer; send prompt_token_ids"):
            ids(own, **fields)


# --- parts that come as embeddings -----------------------------------------------------------------------------------

ROWS = torch.arange(3.0 * 64).reshape(3, 64)


def embedded(rows: torch.Tensor, field: str = "messages[0].content[0]") -> TextPart:
    return TextPart("", safetensors.torch.save({"rows": rows}), field)


@pytest.mark.parametrize("kind", CHATTING)
def test_rows_stand_where_their_text_would(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path)
    own = processor(tmp_path, options={"max_prompt_embeds_bytes": 1 << 16})
    between = own.process(
        Request(request_id="r", messages=[Message("user", [embedded(ROWS), TextPart("Why?"), embedded(ROWS[:2])])])
    )
    without = ids(own, messages=[said("user", "\nWhy?\n")])
    found = between["token_ids"].tolist()
    assert found.count(NO_TOKEN) == 5
    first = found.index(NO_TOKEN)
    assert [token == NO_TOKEN for token in found[first : first + 4]] == [True, True, True, False]
    assert max(found) < len(AutoTokenizer.from_pretrained(tmp_path)), "the mark itself is nowhere"
    assert torch.equal(between["embeds"], torch.cat([ROWS, ROWS[:2]]))
    assert [found[:2], found[-2:]] == [without[:2], without[-2:]], "the template is around them"


def test_a_template_that_drops_a_part_is_refused(qwen: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen, tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    own = processor(tmp_path / "own", options={"max_prompt_embeds_bytes": 1 << 16})
    messages = [Message("user", [embedded(ROWS)]), Message("user", [embedded(ROWS)])]
    with pytest.raises(InvalidRequest, match="renders 1 of 2 parts of prompt_embeds") as caught:
        own.process(Request(request_id="r", messages=messages))
    assert caught.value.field == "messages"


def test_others_take_none(tmp_path: Path) -> None:
    """Of any family whose input stage does not say that it does."""
    make("qwen3", tmp_path)
    own = TextInput(AutoTokenizer.from_pretrained(tmp_path), 640, 512)
    request = Request(request_id="r", messages=[Message("user", [embedded(ROWS)])])
    [result] = own.run([Work("r", request, last=True)])
    assert isinstance(result.error, InvalidRequest)
    assert result.error.field == "messages[0].content[0]"
    assert "takes its prompt in other forms" in result.error.message

"""`skip_tokenizer_init`: token ids in, token ids out, with the same replies; what is about text is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from truth_system import System

from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.sampling import SamplingParams
from segue.models.omni.multimodal_lm.tiny import presets
from segue.models.shared.library import AutoModelForCausalLM
from segue.models.text.causal_lm import tiny
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.server.app import create_app

IDS = [40, 51, 62, 73, 84]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broken tokenizer: reading it would stop the start."""
    made = tmp_path_factory.mktemp("qwen3")
    tiny.make("qwen3", made)
    (made / "tokenizer.json").write_text("[")
    return made


@pytest.fixture(scope="module")
def system(directory: Path) -> Iterator[System]:
    system = System(directory, skip_tokenizer_init=True)
    yield system
    system.close()


@pytest.fixture(scope="module")
def reply(directory: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = model.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=GREEDY.max_tokens)
    return out[0, len(IDS) :].tolist()


def post(system: System, path: str, **body: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(system.omni))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, json=body, timeout=300)

    return system.run(ask())


def test_ids_in_ids_out(system: System, reply: list[int]) -> None:
    [output] = system.ask({"prompt_token_ids": IDS, "sampling": SamplingParams(logprobs=1).over(GREEDY)})
    assert (output.token_ids["llm"], output.text) == (reply, "")
    more = {"temperature": 0, "max_tokens": 12, "return_token_ids": True, "return_tokens_as_token_ids": True}
    body = post(system, "/v1/completions", prompt=IDS, logprobs=1, **more).json()
    assert body["choices"][0]["token_ids"] == reply
    assert body["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in reply]
    chat = post(system, "/v1/chat/completions", prompt_token_ids=IDS, logprobs=True, **more).json()
    assert chat["choices"][0]["token_ids"] == reply


IDS_OUT = {"prompt": IDS, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "return_token_ids": True}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/completions", {"prompt": "Hello", "return_token_ids": True}, "prompt", "prompt is text"),
        ("/v1/completions", {"prompt": IDS}, "return_token_ids", "the answer has no text"),
        ("/v1/completions", {**IDS_OUT, "logprobs": 1}, "logprobs", "set return_tokens_as_token_ids"),
        ("/v1/completions", {**IDS_OUT, "echo": True}, "echo", "leave it out"),
        ("/v1/completions", {**IDS_OUT, "stop": ["."]}, "stop", "use stop_token_ids"),
        ("/v1/completions", {**IDS_OUT, "bad_words": ["sea"]}, "bad_words", "is set"),
        ("/v1/completions", {**IDS_OUT, "guided_regex": "a*"}, "guided_regex", "is set"),
        ("/v1/completions", {**IDS_OUT, "response_format": {"type": "json_object"}}, "response_format", "is set"),
        ("/v1/chat/completions", CHAT, "messages", "send prompt_token_ids"),
        ("/v1/responses", {"input": "Hello"}, "input", "are text"),
        ("/tokenize", {"prompt": "Hello"}, "prompt", "prompt is text"),
        ("/detokenize", {"tokens": IDS}, "tokens", "decode them yourself"),
    ],
)
def test_text_is_refused(system: System, path: str, body: dict[str, Any], param: str, says: str) -> None:
    answer = post(system, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert "loads no tokenizer (skip_tokenizer_init)" in error["message"]


def test_text_is_refused_from_python(system: System) -> None:
    for prompt, field in (("Hello", "prompt"), ({"prompt_token_ids": IDS, "modalities": ["tokens"]}, "modalities")):
        with pytest.raises(InvalidRequest, match="loads no tokenizer") as caught:
            system.ask(prompt)
        assert caught.value.field == field


def test_without_the_files(directory: Path, tmp_path: Path, reply: list[int]) -> None:
    shutil.copytree(directory, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*", "vocab*", "chat_template*"))
    system = System(tmp_path / "m", skip_tokenizer_init=True)
    [output] = system.ask({"prompt_token_ids": IDS, "sampling": GREEDY})
    system.close()
    assert output.token_ids["llm"] == reply


def test_what_needs_a_tokenizer_stops_the_start(directory: Path, tmp_path: Path) -> None:
    presets.make("qwen3-vl", tmp_path)
    with pytest.raises(ConfigError, match="the family 'multimodal_lm' needs the checkpoint's tokenizer"):
        AsyncOmni(tmp_path, skip_tokenizer_init=True)
    stops = {"skip_tokenizer_init": True, "stages": {"llm": {"sampling": {"stop": ["."]}}}}
    with pytest.raises(ConfigError, match=r"stages\.llm\.sampling\.stop is set, but skip_tokenizer_init is true"):
        AsyncOmni(directory, config=stops)
    with pytest.raises(ConfigError, match="skip_tokenizer_init is 'no'"):
        AsyncOmni(directory, config={"skip_tokenizer_init": "no"})

"""Programs that each use one library's client against a server, in an environment that has these libraries alone:
`python programs.py NAME URL`. What comes back is checked for its form: the model is a tiny one, and says anything."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello"}]
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Look somewhere.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["sea", "sky"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
PROGRAMS: dict[str, Callable[[str], None]] = {}


def program(run: Callable[[str], None]) -> Callable[[str], None]:
    PROGRAMS[run.__name__] = run
    return run


@program
def litellm(url: str) -> None:
    import litellm as client

    about: dict[str, Any] = {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": f"{url}/v1",
        "messages": HELLO,
        "max_tokens": 8,
    }
    whole = client.completion(**about)
    assert whole.usage.completion_tokens == 8
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.completion(**about, stream=True, seed=1)]
    assert "".join(pieces)
    tools = [{"type": "function", "function": LOOK}]
    called = client.completion(**{**about, "max_tokens": 60}, tools=tools, tool_choice="required")
    [call] = called.choices[0].message.tool_calls[:1]
    assert call.function.name == "look"


@program
def langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=60, temperature=0)  # type: ignore[call-arg]
    assert model.invoke("Hello").usage_metadata["output_tokens"]
    assert "".join(str(chunk.content) for chunk in model.stream("Hello"))
    called = model.bind_tools([{"type": "function", "function": LOOK}], tool_choice="look").invoke("Hello")
    assert called.tool_calls[0]["args"]["at"] in ("sea", "sky")
    over = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", use_responses_api=True, max_tokens=8)  # type: ignore[call-arg]
    assert over.invoke("Hello").usage_metadata["output_tokens"] == 8


@program
def anthropic(url: str) -> None:
    import anthropic as library

    client = library.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 8}
    assert client.messages.create(**asked).usage.output_tokens == 8
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"
    assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 1
    tool = {"name": "look", "input_schema": LOOK["parameters"]}
    called = client.messages.create(
        **{**asked, "max_tokens": 60}, tools=[tool], tool_choice={"type": "tool", "name": "look"}
    )
    assert [block.input["at"] in ("sea", "sky") for block in called.content if block.type == "tool_use"] == [True]
    try:
        client.messages.create(**asked, extra_body={"nothing": 1})
    except library.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error"  # noqa: PT017 there is no pytest here
    else:
        raise AssertionError("an unknown parameter was taken")


@program
def pydantic_ai(url: str) -> None:
    from enum import Enum

    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Where(Enum):
        SEA, SKY = "sea", "sky"

    class Seen(BaseModel):
        at: Where

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    assert Agent(model).run_sync("Hello", model_settings={"max_tokens": 8, "seed": 1}).usage.output_tokens == 8
    seen = Agent(model, output_type=NativeOutput(Seen)).run_sync("Hello", model_settings={"max_tokens": 60})
    assert seen.output.at in Where


@program
def instructor(url: str) -> None:
    from typing import Literal

    import instructor as library
    import openai
    from pydantic import BaseModel

    class Seen(BaseModel):
        at: Literal["sea", "sky"]

    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        seen = client.chat.completions.create(
            model=MODEL, messages=HELLO, response_model=Seen, max_tokens=60, max_retries=0
        )
        assert seen.at in ("sea", "sky")


@program
def openai_agents(url: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    async def both() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        settings = agents.ModelSettings(max_tokens=2000)  # it refuses answers that are cut off
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            agent = agents.Agent("someone", model=kind(MODEL, client), model_settings=settings)
            assert isinstance((await agents.Runner.run(agent, "Hello")).final_output, str)

    asyncio.run(both())


@program
def lm_eval(url: str) -> None:
    """Choices by their log-probabilities, and a text, with the server's own tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"q": f"{one} and", "good": str(one), "choices": ["1", "2"]} for one in (1, 2, 1, 2)]
        Path(folder, "rows.json").write_text("\n".join(map(json.dumps, rows)))
        data = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: " + str(Path(folder, "rows.json"))
        asked = "test_split: test\nnum_fewshot: 0\ndoc_to_text: '{{q}}'\n"
        Path(folder, "choose.yaml").write_text(
            f"task: choose\n{data}\n{asked}output_type: multiple_choice\ndoc_to_choice: '{{{{choices}}}}'\n"
            "doc_to_target: good\nmetric_list:\n  - metric: acc\n"
        )
        Path(folder, "write.yaml").write_text(
            f"task: write\n{data}\n{asked}output_type: generate_until\ndoc_to_target: good\n"
            "generation_kwargs:\n  max_gen_toks: 8\n  until: ['zzz']\nmetric_list:\n  - metric: exact_match\n"
        )
        arguments = f"model={MODEL},base_url={url}/v1/completions,tokenizer_backend=remote,max_retries=1"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", "choose,write", "--include_path", folder]
        subprocess.run(command, check=True)


@program
def schemathesis(url: str) -> None:
    """Bodies made from `/openapi.json`, right and wrong ones: no 5xx, and answers of their schemas."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    command += ["--checks", "not_a_server_error,content_type_conformance,response_schema_conformance"]
    command += ["--max-examples", "20", "--request-timeout", "60", "--seed", "1", "--phases", "fuzzing"]
    # adapters and jobs outlive a request
    command += ["--exclude-path-regex", "lora|/v1/videos", "--generation-database", "none"]
    with tempfile.TemporaryDirectory() as folder:  # it keeps files where it runs
        subprocess.run(command, check=True, cwd=folder)


if __name__ == "__main__":
    # they look things up elsewhere otherwise
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    PROGRAMS[sys.argv[1]](sys.argv[2])

"""Llama 3.2 Vision: conversations with images anywhere in them, looked at by cross-attention, as `generate` has them.

What other models that see are held to as well is in `test_multimodal_parity`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from multimodal_family import FALLBACK, Run, Stages, answer, context, library_processor, medium, sent, stage_request
from PIL import Image

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import Payload
from segue.kernels.attention.paged_attention import FLAT
from segue.media.parts import PYTHON_POLICY, messages_from
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.omni.multimodal_lm.cross.llm import CrossLLM
from segue.models.omni.multimodal_lm.tiny import presets as tiny

TOKENS = 16
Turns = tuple[tuple[str | int, ...], ...]
"""Of user and assistant in turn: texts, and images by their seeds."""
TALKS: dict[str, Turns] = {
    "none": (("write a few words about the sea",),),
    "first": ((1, "what is this"),),
    "behind text": (("what is to be seen in", 1),),
    "in the middle": (("good morning",), ("hello",), ("look:", 1, "what is this, and of which colour?")),
    "two apart": (("this", 8, "and this", 10, "are they the same?"),),
    "two turns": ((2, "what is this"), ("a hill",), (3, "and this?")),
    "a pair and one": (("look", 1, 1), ("well",), ("and", 4, "is it another?")),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "in pieces": {"max_tokens_per_step": 9, "block_size": 4},
    "token by token": {"prefill_chunk": 1, "block_size": 4},
    "one at a time": {"max_batch": 1},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cross")
    tiny.make("llama3.2-vision", directory)
    return directory


@pytest.fixture(scope="module")
def stages(directory: Path) -> Stages:
    return Stages(directory)


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[int]]:
    return {name: reply(directory, turns) for name, turns in TALKS.items()}


def conversation(turns: Turns, image: str) -> list[dict[str, Any]]:
    """`image`: what the value of an image's part is called, `image` or none at all."""
    return [
        {
            "role": "assistant" if number % 2 else "user",
            "content": [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image", image: medium("image", part)}
                for part in turn
            ],
        }
        for number, turn in enumerate(turns)
    ]


def reply(directory: Path, turns: Turns) -> list[int]:
    """The library's own."""
    messages = conversation(turns, "image")
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = Image.fromarray(part["image"])
    inputs = library_processor(directory).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return answer(directory, dict(inputs), TOKENS)


def payload_of(stages: Stages, turns: Turns) -> Payload:
    messages = messages_from(conversation(turns, "image"), PYTHON_POLICY)
    return stages.input.process(Request(request_id="r", messages=messages))


def replies(run: Run, talks: dict[str, Turns] = TALKS) -> dict[str, list[int]]:
    for name, turns in talks.items():
        run.add(name, payload_of(run.stages, turns), TOKENS)
    return run.finish(list(talks))


def test_images_anywhere(stages: Stages, expected: dict[str, list[int]]) -> None:
    assert len({tuple(ids) for ids in expected.values()}) == len(expected)
    for name, turns in TALKS.items():
        assert replies(Run(stages), {name: turns}) == {name: expected[name]}


@pytest.mark.parametrize("setting", SETTINGS)
def test_beside_others_and_once_more(stages: Stages, expected: dict[str, list[int]], setting: str) -> None:
    run = Run(stages, **SETTINGS[setting])
    assert replies(run) == expected
    assert replies(run) == expected
    assert all(run.cached.values())


def test_text_before_other_images_is_another(stages: Stages, directory: Path) -> None:
    """The library lets it look at all of them: nothing of it can be shared."""
    run = Run(stages, block_size=4)
    replies(run, {"first": TALKS["in the middle"]})
    turns: Turns = (*TALKS["in the middle"][:2], ("look:", 13, "what is this, and of which colour?"))
    assert replies(run, {"other": turns})["other"] == reply(directory, turns)
    assert run.cached["other"] == 0
    longer: Turns = (*TALKS["two turns"][:2], (3, "and what is that?"))
    replies(run, {"two turns": TALKS["two turns"]})
    assert replies(run, {"longer": longer})["longer"] == reply(directory, longer)
    assert run.cached["longer"] >= 16


def test_two_replies_to_one_prompt(stages: Stages, expected: dict[str, list[int]]) -> None:
    run = Run(stages, block_size=4, max_tokens_per_step=10)
    assert run.two(payload_of(stages, TALKS["two apart"]), TOKENS) == dict.fromkeys((0, 1), expected["two apart"])


@pytest.mark.parametrize("images", [0, 1, 3])
def test_room_for_fewer_images_than_there_are(
    directory: Path, stages: Stages, expected: dict[str, list[int]], images: int
) -> None:
    ours = stages.llm
    assert isinstance(ours, CrossLLM)
    room = images * ours._kept.capacity // 8
    small = Stages(directory)
    small.llm = llm = CrossLLM(context(directory, "llm", options={"cache_bytes": room}))
    assert replies(Run(small)) == expected
    assert llm._kept.bytes <= room == llm._kept.capacity
    assert len(llm._kept._kept) == images
    assert llm.weight_bytes == ours.weight_bytes - ours._kept.capacity + room


def test_an_image_is_made_once(directory: Path) -> None:
    stages = Stages(directory)
    assert isinstance(stages.llm, CrossLLM)
    before = stages.llm._kept.made
    run = Run(stages)
    replies(run, {name: TALKS[name] for name in ("first", "behind text", "in the middle")})
    replies(run, {"first": TALKS["first"]})
    assert stages.llm._kept.made == before + 1


@pytest.mark.parametrize("spoilt", ["cross_attn_attn_gate", "cross_attn_mlp_gate"])
def test_weights_of_layers_that_look_count(directory: Path, expected: dict[str, list[int]], spoilt: str) -> None:
    stages = Stages(directory)
    with torch.no_grad():
        for layer in (1, 3):
            stages.llm._decoder.model.layers[layer].get_parameter(spoilt).mul_(-1)
    found = replies(Run(stages))
    assert found["none"] == expected["none"]
    assert all(found[name] != expected[name] for name in ("first", "two turns"))


def test_prompts_with_images_may_be_penalised_and_asked_for(stages: Stages) -> None:
    """An image's token is behind those that the head has rows for."""
    payload = payload_of(stages, TALKS["first"])
    assert int(payload["token_ids"].max()) >= stages.llm._decoder.vocab_size
    asked = SamplingParams(max_tokens=4, temperature=0.0, repetition_penalty=1.3, prompt_logprobs=1).over(FALLBACK)
    engine = AutoregressiveEngine(stages.llm, AutoregressiveConfig(num_blocks=100, block_size=8))
    request = stage_request("r", frozenset({"input", "encoder"}), asked)
    engine.add(replace(request, to_client=frozenset({"text"})))
    engine.feed("r", "input", sent("input", "llm", payload), final=True)
    for chunk, final in stages.encoded(payload):
        engine.feed("r", "encoder", chunk, final=final)
    tokens: list[int] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens += output.token_ids
    assert len(tokens) == 4
    assert max(tokens) < stages.llm._decoder.vocab_size


def test_what_does_not_go_together_is_refused(directory: Path, stages: Stages) -> None:
    with pytest.raises(ConfigError, match="layers of this model cross-attend to images") as caught:
        Run(stages, deterministic=True)
    assert caught.value.field == "deterministic"
    with pytest.raises(InvalidRequest, match="1 placeholder for image"):
        stages.input.process(Request(request_id="r", prompt="a <|image|> b"))
    assert stages.llm._decoder.model.config._attn_implementation == FLAT

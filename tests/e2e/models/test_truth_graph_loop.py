"""The example of a graph with a loop: each visit gives what the library gives for the conversation so far, and the
image that the client gets as a file is the one that the judge saw."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from server_process import models_of_graph
from truth_system import System, library_answers

from segue.messages.deltas import Delta, EncodedDelta, ModelDelta
from segue.messages.formats import Format
from segue.models.shared.library import AutoTokenizer
from segue.orchestrator.omni.outputs import RequestOutput

EXAMPLE = Path(__file__).parents[3] / "examples" / "illustrator" / "illustrator.py"
ASKED = "A red boat on a calm lake"
VISITS = ("write", "write@1", "write@2")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with models_of_graph(tmp_path_factory.mktemp("illustrator"), "qwen3", "z-image", "qwen2.5-vl") as directory:
        yield directory


@pytest.fixture(scope="module")
def system(checkpoints: Path) -> Iterator[System]:
    system = System(EXAMPLE)
    yield system
    system.close()


def prompt(*modalities: str) -> dict[str, Any]:
    greedy = {"temperature": 0.0, "max_tokens": 12}
    return {
        "messages": [{"role": "user", "content": ASKED}],
        "modalities": ["text", "image", *modalities],
        "seed": 5,
        "sampling": {"write.llm": greedy, "judge.llm": greedy},
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
    }


@pytest.fixture(scope="module")
def undisturbed(system: System) -> RequestOutput:
    [output] = system.ask(prompt("write.text", "draw.image", "judge.text"))
    return output


def conversation(output: RequestOutput, visit: int) -> list[dict[str, str]]:
    """What the model that writes is asked in a visit."""
    messages = [{"role": "user", "content": ASKED}]
    for number in range(visit):
        judged = output.models["judge" if number == 0 else f"judge@{number}"].text
        messages += [
            {"role": "assistant", "content": output.models[VISITS[number]].text},
            {"role": "user", "content": f"The image is not right: {judged.strip()} Write a better prompt, and nothing "
             "else."},
        ]  # fmt: skip
    return messages


def test_each_visit_goes_on_with_the_conversation(undisturbed: RequestOutput, checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "qwen3")
    prompts = []
    for visit in range(3):
        rendered = tokenizer.apply_chat_template(
            conversation(undisturbed, visit), tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    answers = library_answers(checkpoints / "qwen3", prompts, 12)
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    assert [undisturbed.models[visit].text for visit in VISITS] == texts
    assert undisturbed.text == texts[-1]
    assert undisturbed.token_ids["write.llm"] == answers[-1]
    assert undisturbed.usage.prompt_tokens == len(prompts[-1])
    assert undisturbed.outputs[0].stop_reason == "the bound of edge judge -> write"


def test_the_client_gets_the_last_image(undisturbed: RequestOutput) -> None:
    images = [undisturbed.models[name].images[0] for name in ("draw", "draw@1", "draw@2")]
    assert len(undisturbed.images) == 1
    np.testing.assert_array_equal(np.asarray(undisturbed.images[0]), np.asarray(images[2]))
    assert np.abs(np.asarray(images[0], float) - np.asarray(images[1], float)).max() > 8


def test_a_file_and_the_judge_get_the_same_image(system: System, undisturbed: RequestOutput) -> None:
    request = system.omni.request(prompt())
    request.formats = {"image": Format(name="png")}

    async def body() -> bytes:
        files = [delta async for delta in system.omni.stream(request) if isinstance(delta, EncodedDelta)]
        return b"".join(one.data for one in files)

    image = Image.open(io.BytesIO(system.run(body())))
    # sums of another batch, or of a call that is not replayed, may round otherwise
    np.testing.assert_allclose(np.asarray(image, float), np.asarray(undisturbed.images[0], float), atol=1)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ["write.llm", "draw.denoiser", "judge.llm"])
def test_killed_in_a_later_visit(system: System, undisturbed: RequestOutput, stage: str) -> None:
    killed: list[psutil.Process] = []

    def seen(delta: Delta) -> None:
        if isinstance(delta, ModelDelta) and delta.model == "write@1" and not killed:
            killed.append(psutil.Process(system.pid(stage)))
            killed[0].kill()

    async def body() -> RequestOutput:
        output = await system.collect(prompt("write.text", "draw.image", "judge.text"), seen)
        await asyncio.to_thread(killed[0].wait)
        return output

    output = system.run(body())
    assert output.text == undisturbed.text
    np.testing.assert_array_equal(np.asarray(output.images[0]), np.asarray(undisturbed.images[0]))


@pytest.mark.nightly
def test_ranks_and_replicas(checkpoints: Path, undisturbed: RequestOutput) -> None:
    """The model that is returned to has two ranks, the one that looks at the images two replicas."""
    stages = {"write.llm": {"tensor_parallel": 2}, "judge.llm": {"replicas": 2}, "draw.denoiser": {"replicas": 2}}
    system = System(EXAMPLE, stages=stages)
    try:
        outputs = system.ask(*(prompt("write.text", "draw.image", "judge.text") for _ in range(2)))
    finally:
        system.close()
    for output in outputs:
        assert {name: one.text for name, one in output.models.items()} == {
            name: one.text for name, one in undisturbed.models.items()
        }
        np.testing.assert_array_equal(np.asarray(output.images[0]), np.asarray(undisturbed.images[0]))

"""A model that looks at images by cross-attention through the whole system: streamed, beside text, and with its
worker killed while it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from truth_system import System, assert_same, spans

from segue.messages.deltas import Delta, TextDelta
from segue.messages.sampling import SamplingParams
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from segue.models.shared.library import AutoModelForMultimodalLM, AutoProcessor

TOKENS = 24
QUESTIONS = (
    ("what is this", 1),
    ("write a few words about the sea", 0),
    ("how do these differ, and where are they", 2),
)


class Library:
    """transformers on the checkpoint."""

    def __init__(self, directory: Path, assets: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(directory)
        self.model = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32).eval()
        photo = Image.open(assets / "photo.jpg").convert("RGB")
        self.images = [photo, photo.rotate(90, expand=True)]

    def answer(self, text: str, images: int) -> list[int]:
        content = [{"type": "image", "image": image} for image in self.images[:images]]
        inputs = self.processor.apply_chat_template(
            [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    def asked(self, text: str, images: int) -> dict[str, Any]:
        content = [{"type": "image", "image": np.asarray(image)} for image in self.images[:images]]
        return {
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
            "sampling": SamplingParams(temperature=0.0, max_tokens=TOKENS),
        }


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Iterator[tuple[System, Library]]:
    directory = tmp_path_factory.mktemp("cross")
    tiny.make("llama3.2-vision", directory)
    system = System(directory, stages={"llm": {"max_tokens_per_step": 24}})
    yield system, Library(directory, assets)
    system.close()


@pytest.mark.nightly
def test_streamed_and_whole_and_after_a_kill(running: tuple[System, Library]) -> None:
    system, library = running
    expected = [library.answer(*question) for question in QUESTIONS]
    assert len({tuple(reply) for reply in expected}) == len(QUESTIONS)
    asked = [library.asked(*question) for question in QUESTIONS]
    whole = system.ask(*asked)
    longest = max(range(len(asked)), key=lambda index: len(expected[index]))

    async def body() -> tuple[Any, list[Delta]]:
        killed: list[Delta] = []

        def kill(delta: Delta) -> None:
            if isinstance(delta, TextDelta) and not killed:  # the first: the reply goes on
                killed.append(delta)
                system.kill("llm")

        streams = (
            system.collect(prompt, kill if i == longest else lambda delta: None) for i, prompt in enumerate(asked)
        )
        return await asyncio.gather(*streams), killed

    streamed, killed = system.run(body())
    assert killed
    for one, other, reply, (_, images) in zip(whole, streamed, expected, QUESTIONS, strict=True):
        assert one.token_ids == {"llm": reply}
        assert ("encoder" in spans(one)) == bool(images)
        assert_same(one, other)

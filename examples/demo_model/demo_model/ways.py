"""Ways to ask the model the same: through Segue in one batch, streamed, with workers that are killed, and through the
library."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from segue import AsyncOmni, Omni
from segue.messages.deltas import Delta, TextDelta
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor
from segue.orchestrator.omni.outputs import RequestOutput

AT_ONCE = 16
"""Streamed requests."""
_KINDS = {"image": "images", "video": "videos", "audio": "audio"}


def batched(directory: Path, prompts: Sequence[dict[str, Any]], **settings: Any) -> list[str]:
    """All at once. `settings`: of `Omni`."""
    with Omni(directory, **settings) as omni:
        return [out.text for out in omni.generate(prompts, modalities=["text"])]


def killed(directory: Path, prompts: Sequence[dict[str, Any]]) -> list[str]:
    """`after_kills`, of texts."""
    return [out.text for out in after_kills(directory, prompts, modalities=["text"])]


def after_kills(directory: Path, prompts: Sequence[dict[str, Any]], **settings: Any) -> list[RequestOutput]:
    """All at once; after a third and after two thirds of the answers every worker is killed.

    `settings`: of requests."""
    outs: dict[int, RequestOutput] = {}
    thirds = {len(prompts) // 3, 2 * len(prompts) // 3}
    with Omni(directory) as omni:
        for place, out in omni.as_completed(prompts, **settings):
            if isinstance(out, Exception):
                raise out
            outs[place] = out
            if len(outs) in thirds:
                workers = {one.pid for stage in omni.health().stages.values() for one in stage.replicas}
                for pid in workers - {None}:
                    os.kill(pid, signal.SIGKILL)
    return [outs[place] for place in range(len(prompts))]


def streamed(directory: Path, prompts: Sequence[dict[str, Any]]) -> list[str]:
    """`in_pieces`, of texts."""
    answers = in_pieces(directory, prompts, modalities=["text"])
    return ["".join([delta.text for delta in deltas if isinstance(delta, TextDelta)]) for deltas in answers]


def in_pieces(directory: Path, prompts: Sequence[dict[str, Any]], **settings: Any) -> list[list[Delta]]:
    """All that each request streams, `AT_ONCE` of them at a time. `settings`: of requests."""

    async def ask(omni: AsyncOmni, free: asyncio.Semaphore, prompt: dict[str, Any]) -> list[Delta]:
        async with free:
            return [delta async for delta in omni.stream(omni.request(prompt, **settings))]

    async def all_of_them() -> list[list[Delta]]:
        free = asyncio.Semaphore(AT_ONCE)
        async with AsyncOmni(directory) as omni:
            return await asyncio.gather(*(ask(omni, free, prompt) for prompt in prompts))

    return asyncio.run(all_of_them())


def library(directory: Path, prompts: Sequence[dict[str, Any]]) -> list[str]:
    """One by one, by `generate` of transformers, in float32."""
    model, processor = library_of(directory)
    return [_generated(model, processor, prompt) for prompt in prompts]


def library_of(directory: Path) -> tuple[Any, Any]:
    """The library's model, in float32, and its processor."""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    return model, Qwen3OmniMoeProcessor.from_pretrained(directory)


def encoded(processor: Any, prompt: dict[str, Any]) -> Any:
    """What the library's model takes of a prompt."""
    media: dict[str, list[Any]] = {}
    messages = []
    for message in prompt["messages"]:
        parts = message["content"] if isinstance(message["content"], list) else [_written(message["content"])]
        messages.append({"role": message["role"], "content": [_written("") | one for one in parts]})
        for part in parts:
            if part["type"] != "text":
                held = part[part["type"]]
                media.setdefault(_KINDS[part["type"]], []).append(held[0] if isinstance(held, tuple) else held)
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return processor(text=[text], **media, return_tensors="pt", fps=2.0)


def _generated(model: Any, processor: Any, prompt: dict[str, Any]) -> str:
    given = encoded(processor, prompt)
    with torch.inference_mode():
        ids = model.generate(
            **given,
            return_audio=False,
            thinker_do_sample=False,
            thinker_max_new_tokens=prompt["sampling"]["thinker"]["max_tokens"],
            thinker_eos_token_id=model.config.im_end_token_id,
        )
    return str(processor.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


def _written(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


WAYS: dict[str, Callable[..., list[str]]] = {
    "batched": batched,
    "streamed": streamed,
    "killed": killed,
    "library": library,
}

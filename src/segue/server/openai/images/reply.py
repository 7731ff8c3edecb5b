"""Builds the answers of OpenAI's image endpoints, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from segue.messages.deltas import Delta, EncodedDelta, Finished, ProgressDelta, Usage
from segue.messages.errors import SegueError, StageFailed
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.generations import run_generations
from segue.server.openai.images.request import ImageRequest


async def whole_images(asked: ImageRequest, service: Service, metrics: ServerMetrics) -> dict[str, Any]:
    """Build an answer that is not streamed."""
    images: dict[int, EncodedDelta] = {}
    end: Finished | None = None
    async with aclosing(_deltas(asked, service, metrics)) as deltas:
        async for delta in deltas:
            if isinstance(delta, EncodedDelta) and delta.kind == "image":
                images[delta.index] = delta
            elif isinstance(delta, Finished):
                end = delta
    if end is None or not images:
        raise StageFailed("the model gave no image")
    data = [{"b64_json": images[index].data.decode()} for index in sorted(images)]
    return {
        "created": int(time.time()),
        "background": "opaque",
        "output_format": asked.output_format,
        "size": _size(images[min(images)]),
        "seed": asked.request.seed,
        "data": data,
        "usage": _usage(end.usage),
    }


async def image_events(
    asked: ImageRequest, service: Service, metrics: ServerMetrics
) -> AsyncGenerator[dict[str, object]]:
    """Yield requested previews and steps, and each image when it is done. The last image has the usage."""
    last: dict[str, object] | None = None
    async with aclosing(_deltas(asked, service, metrics)) as deltas:
        async for delta in deltas:
            if isinstance(delta, ProgressDelta):
                yield {
                    "type": f"{asked.event}.progress",
                    "image_index": delta.index,
                    "step": delta.step,
                    "steps": delta.steps,
                }
            elif isinstance(delta, EncodedDelta) and delta.kind == "preview":
                head = {"type": f"{asked.event}.partial_image", "partial_image_index": delta.facts["partial"]}
                yield {**head, **_image(asked, delta)}
            elif isinstance(delta, EncodedDelta):
                if last is not None:
                    yield {**last, "usage": None}
                last = {"type": f"{asked.event}.completed", **_image(asked, delta)}
            elif isinstance(delta, Finished):
                if last is None:
                    raise StageFailed("the model gave no image")
                yield {**last, "usage": _usage(delta.usage)}


async def _deltas(asked: ImageRequest, service: Service, metrics: ServerMetrics) -> AsyncGenerator[Delta]:
    try:
        async with aclosing(run_generations(service, [asked.request], metrics, {})) as deltas:
            async for _, delta in deltas:
                yield delta
    except SegueError as error:
        raise asked.as_written(error) from error


def _image(asked: ImageRequest, delta: EncodedDelta) -> dict[str, object]:
    return {
        "b64_json": delta.data.decode(),
        "image_index": delta.index,
        "created_at": int(time.time()),
        "size": _size(delta),
        "seed": asked.request.seed,
        "quality": "auto",
        "background": "opaque",
        "output_format": asked.output_format,
    }


def _size(delta: EncodedDelta) -> str:
    return f"{delta.facts['width']}x{delta.facts['height']}"


def _usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage of images: tokens read and generated, if the model counts tokens."""
    made = usage.completion_modalities
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens_details": {
            "text_tokens": usage.prompt_modalities.get("text", 0),
            "image_tokens": usage.prompt_modalities.get("image", 0),
        },
        "output_tokens_details": {"text_tokens": made.get("text", 0), "image_tokens": made.get("image", 0)},
    }

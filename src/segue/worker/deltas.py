"""What a client gets of an engine's output: deltas, and parts of files for the output stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.graph.parts import OUTPUT, TOKENS, full_name, is_built_in, member_of, own_name
from segue.media.files import PREVIEW
from segue.messages.deltas import (
    AudioDelta,
    ClassesDelta,
    ClientDelta,
    EmbeddingDelta,
    ImageDelta,
    ProgressDelta,
    ScoreDelta,
    TextDelta,
    TokensDelta,
    VideoDelta,
)
from segue.messages.errors import StageFailed

CLIENT_KEYS = {
    "audio": "samples",
    "image": "image",
    "video": "video",
    "embedding": "embedding",
    "score": "score",
    "classes": "classes",
}
"""Modality → the key of a payload under which the client's data stand (`segue.engines.module.contract.Result`)."""


def _check_payload(request: StageRequest, payload: Mapping[str, Any]) -> None:
    """Raise `StageFailed` for a payload without anything that the client receives, which would be lost silently."""
    wanted = sorted(CLIENT_KEYS.keys() & (request.to_client | request.encoded))
    if not wanted or not payload or is_built_in(request.stage):
        return
    if payload.keys().isdisjoint(CLIENT_KEYS.values()):
        right = ", ".join(f"{name} under {CLIENT_KEYS[name]!r}" for name in wanted)
        raise StageFailed(f"stage {request.stage!r} gave a payload with {sorted(payload)}; it must have {right}")
    if "samples" in payload and not isinstance(payload["samples"], torch.Tensor):
        raise StageFailed(
            f"stage {request.stage!r} gave samples of type {type(payload['samples']).__name__}; they must be a tensor"
        )


def client_deltas(request: StageRequest, output: StageOutput, made: Counter[tuple[str, int]]) -> list[ClientDelta]:
    """Return the part of an output that the client asked for; data only for the client leave the payload.

    `made` counts the units of the request's outputs so far. Raises `StageFailed` for a payload that has nothing of it.
    """
    payload: dict[str, Any] = output.payload or {}
    _check_payload(request, payload)
    if own_name(request.stage) == OUTPUT:
        member = member_of(request.stage)
        files = payload.get("deltas", ())
        return [msgspec.structs.replace(delta, stage=full_name(member, delta.stage)) for delta in files]
    tokens = tokens_of(output)
    deltas: list[ClientDelta] = []

    def place(kind: str) -> dict[str, int]:
        return {"index": output.index, "start": made[kind, output.index]}

    if "text" in request.to_client and (tokens.text or tokens.token_ids):
        deltas.append(
            TextDelta(
                request.stage,
                tokens.text,
                tokens.token_ids,
                tokens.first_index,
                logprobs=tokens.logprobs,
                prompt_token_ids=tokens.prompt_token_ids,
                prompt_logprobs=tokens.prompt_logprobs,
                **place("text"),
            )
        )
    if "audio" in request.to_client and "samples" in payload:
        samples = payload["samples"]
        if samples.numel():
            deltas.append(AudioDelta(request.stage, _floats(samples), int(payload["sample_rate"]), **place("audio")))
    if "embedding" in request.to_client and "embedding" in payload:
        deltas.append(EmbeddingDelta(request.stage, _floats(payload["embedding"]), **place("embedding")))
    if "score" in request.to_client and "score" in payload:
        deltas.append(ScoreDelta(request.stage, float(payload["score"]), **place("score")))
    if "classes" in request.to_client and "classes" in payload:
        classes = _floats(payload["classes"])
        deltas.append(ClassesDelta(request.stage, classes, payload["label"], **place("classes")))
    if TOKENS in request.to_client and TOKENS in payload:
        prompt: dict[str, Any] = {**payload.pop(TOKENS), **place(TOKENS)}
        deltas.append(TokensDelta(request.stage, **prompt))
    # previews go to the client even if it asked for a video
    if "image" in payload and ("image" in request.to_client or (request.to_client and "partial" in payload)):
        deltas.append(_image(request.stage, payload))
    if "video" in request.to_client and "video" in payload:
        deltas.append(_video(request.stage, payload))
    asked = request.request.diffusion
    if output.progress is not None and asked is not None and asked.progress:
        deltas.append(ProgressDelta(request.stage, *output.progress, output.index))
    for delta in deltas:
        made[delta.kind, delta.index] = delta.end
    return deltas


def tokens_of(output: StageOutput) -> TokenOutput:
    """Return an output with its tokens; those of an engine kind without tokens have none."""
    return output if isinstance(output, TokenOutput) else TokenOutput(output.request_id)


def file_parts(request: StageRequest, output: StageOutput, made: Counter[tuple[str, int]]) -> Payload | None:
    """Return the parts of an output that go into the client's files (`segue.media.files`), for the output stage.
    `made`: as for `client_deltas`."""
    payload: Payload = output.payload or {}
    encoded = request.encoded
    parts: list[Payload] = []
    if "audio" in encoded and "samples" in payload and payload["samples"].numel():
        samples = payload["samples"].detach().float().cpu()
        rate = int(payload["sample_rate"])
        start = made["audio", 0]
        parts.append({"kind": "audio", "output": 0, "start": start, "data": samples, "sample_rate": rate})
        made["audio", 0] += len(samples)
    if encoded and "image" in payload and "image" in request.request.formats:
        parts.append(_image_part(request.stage, payload))
    if "video" in encoded and "video" in payload:
        parts.append(_video_part(request.stage, payload))
    return {"parts": parts} if parts else None


def _floats(tensor: Any) -> bytes:
    """Convert a tensor to little-endian float32."""
    data: bytes = tensor.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes()
    return data


def _pixels(stage: str, payload: dict[str, Any]) -> Any:
    """[h, w, 3] uint8 on the CPU."""
    image = payload["image"]
    if image.ndim != 3 or image.shape[2] != 3:
        raise StageFailed(f"stage {stage!r} gave an image of shape {tuple(image.shape)}, not [h, w, 3]")
    return image.cpu()


def _image(stage: str, payload: dict[str, Any]) -> ImageDelta:
    """Make a delta of `{"image": uint8 [h, w, 3], "index": int, "partial": int | None}`; the last two are optional."""
    image = _pixels(stage, payload)
    height, width, _ = image.shape
    data = image.numpy().tobytes()
    return ImageDelta(
        stage, data, height, width, payload.get("index", 0), payload.get("partial"), payload.get("latent_tokens", 0)
    )


def _image_part(stage: str, payload: dict[str, Any]) -> dict[str, Any]:
    """The same as a part for the output stage."""
    partial = payload.get("partial")
    return {
        "kind": "image" if partial is None else PREVIEW,
        "output": payload.get("index", 0),
        "start": partial or 0,
        "data": _pixels(stage, payload)[None],
        "tokens": 0 if partial is not None else payload.get("latent_tokens", 0),
    }


def _frames(stage: str, payload: dict[str, Any]) -> Any:
    """[frames, h, w, 3] uint8 on the CPU."""
    video = payload["video"]
    if video.ndim != 4 or video.shape[3] != 3:
        raise StageFailed(f"stage {stage!r} gave frames of shape {tuple(video.shape)}, not [frames, h, w, 3]")
    return video.cpu()


def _video(stage: str, payload: dict[str, Any]) -> VideoDelta:
    """Make a delta of `{"video": uint8 [frames, h, w, 3], "fps": float, "index", "first": int}`; last two optional."""
    video = _frames(stage, payload)
    frames, height, width, _ = video.shape
    data = video.numpy().tobytes()
    return VideoDelta(
        stage, data, frames, height, width, float(payload["fps"]), payload.get("index", 0), payload.get("first", 0)
    )


def _video_part(stage: str, payload: dict[str, Any]) -> dict[str, Any]:
    """The same as a part for the output stage."""
    return {
        "kind": "video",
        "output": payload.get("index", 0),
        "start": payload.get("first", 0),
        "data": _frames(stage, payload),
        "fps": float(payload["fps"]),
    }

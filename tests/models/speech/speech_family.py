"""A tiny Whisper, recordings, and what `generate` of the library writes down of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()

from transformers import WhisperForConditionalGeneration, WhisperProcessor  # noqa: E402

from segue.engines.autoregressive.config import AutoregressiveConfig  # noqa: E402
from segue.engines.autoregressive.engine import AutoregressiveEngine  # noqa: E402
from segue.engines.contract import Payload, StageOutput, StageRequest  # noqa: E402
from segue.media.audio import decode_audio  # noqa: E402
from segue.media.limits import MediaLimits  # noqa: E402
from segue.media.parts import PYTHON_POLICY, messages_from  # noqa: E402
from segue.messages.request import MediaPart, Request  # noqa: E402
from segue.messages.sampling import FALLBACK  # noqa: E402
from segue.models.speech.speech_seq2seq.stages import STAGE_MODELS, TRANSFERS  # noqa: E402

RATE = 16000
END = 640
Samples = Any


def recordings(speech: Path) -> dict[str, Samples]:
    """[samples] float32 each, at `RATE`."""
    voice = decode_audio(MediaPart("audio", speech.read_bytes()), RATE, MediaLimits())
    noise = np.random.default_rng(0).normal(0, 0.1, 40000).astype(np.float32)
    return {
        "voice": voice,
        "its beginning": voice[:12000],
        "its end": voice[12000:],
        "backwards": voice[::-1].copy(),
        "quiet": voice * np.float32(0.2),
        "a tone": np.sin(np.arange(32000) * 0.1).astype(np.float32),
        "noise": noise,
        "silence": np.zeros(RATE, dtype=np.float32),
        "in noise": voice + noise[: len(voice)],
        "fast": voice[::2].copy(),
    }


def long_recording(clips: dict[str, Samples]) -> Samples:
    """A little more than a window."""
    return np.concatenate([*clips.values()] * 3)[: 34 * RATE]


class Library:
    """transformers on a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.model = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.processor = WhisperProcessor.from_pretrained(directory)

    def ids(self, samples: Samples, **asked: Any) -> list[int]:
        """Of a recording of one window, without marks of time and end token. `asked`: `language`, `task`, `prompt`."""
        made = self.processor(samples, sampling_rate=RATE, return_tensors="pt")
        return self._generate(made, asked)[0].tolist()

    def segments(self, samples: Samples, **asked: Any) -> list[tuple[float, float, list[int]]]:
        """(start, end, ids) of the sequential long form."""
        made = self.processor(
            samples,
            sampling_rate=RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        )
        out = self._generate(made, asked, return_timestamps=True, return_segments=True)
        return [
            (round(float(one["start"]), 2), round(float(one["end"]), 2), one["tokens"].tolist())
            for one in out["segments"][0]
        ]

    def text(self, ids: list[int]) -> str:
        return self.processor.decode(ids, skip_special_tokens=True)

    def _generate(self, made: Any, asked: dict[str, Any], **more: Any) -> Any:
        others = {"task": "transcribe", **asked}
        if "prompt" in others:
            more["prompt_ids"] = self.processor.get_prompt_ids(others.pop("prompt"), return_tensors="pt")
        return self.model.generate(**made, **others, **more)


class Stages:
    """The adapters of one checkpoint, and requests through an engine over its decoder."""

    def __init__(self, directory: Path, **options: Any) -> None:
        """`options`: of the stage `llm`."""
        device = torch.device("cpu")
        self.input = STAGE_MODELS["input"](AutoregressiveContext(directory, "input", device, torch.float32))
        self.encoder = STAGE_MODELS["encoder"](AutoregressiveContext(directory, "encoder", device, torch.float32))
        self.llm = STAGE_MODELS["llm"](AutoregressiveContext(directory, "llm", device, torch.float32, options=options))

    def engine(self, **config: Any) -> AutoregressiveEngine:
        return AutoregressiveEngine(self.llm, AutoregressiveConfig(**{"num_blocks": 800, "block_size": 2, **config}))

    def written(self, engine: AutoregressiveEngine, clips: dict[str, Samples], **options: Any) -> dict[str, list[int]]:
        """Ids of each, without the end token."""
        for name, clip in clips.items():
            content = [{"type": "audio", "audio": clip}]
            messages = messages_from([{"role": "user", "content": content}], PYTHON_POLICY)
            made = self.input.process(Request(request_id=name, messages=messages, options=options))
            [work] = self.encoder.feed(name, "input", _sent("input", "encoder", made), final=True)
            [result] = self.encoder.run([work])
            engine.add(self._request(name))
            engine.feed(name, "input", _sent("input", "llm", made), final=True)
            engine.feed(name, "encoder", _sent("encoder", "llm", result.payload), final=True)
        texts: dict[str, list[int]] = {name: [] for name in clips}
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                texts[output.request_id] += output.token_ids
            engine.audit()
        return {name: ids[:-1] if ids[-1:] == [END] else ids for name, ids in texts.items()}

    def _request(self, name: str) -> StageRequest:
        return StageRequest(
            name,
            "llm",
            Request(request_id=name),
            self.llm.default_sampling.over(FALLBACK),
            seed=0,
            upstreams=frozenset({"input", "encoder"}),
            downstreams=frozenset(),
            to_client=frozenset({"text"}),
        )


def _sent(source: str, target: str, payload: Payload) -> Payload:
    request = StageRequest("r", source, Request(request_id="r"), FALLBACK, 0, frozenset(), frozenset(), frozenset())
    made = TRANSFERS[source, target](request, StageOutput("r", payload=payload, finished=True))
    assert made is not None
    return made

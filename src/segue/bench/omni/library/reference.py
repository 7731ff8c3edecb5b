"""Serve a batch of requests with `generate` of `transformers`, called as documented.

It uses all features that apply: KV cache, inference mode, SDPA, all cores, one forward for a whole batch (left
padding). In a batch with replies of different lengths each row ends at its own: stopping criteria answer per row, the
library pads finished rows with an end token and vocodes each row at its own length, just as when rows end by
themselves. Only the batch as a whole takes as long as its longest row.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from segue.bench.harness.library import Clock
from segue.bench.omni.baseline import Answer, Options
from segue.bench.omni.workload import VIDEO_FPS, BenchRequest
from segue.kernels.torchvision_shim import ensure_torchvision
from segue.messages.request import MediaPart, TextPart
from segue.parallel.wire import dtype_of

ensure_torchvision()

from transformers import (  # noqa: E402
    AutoProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

SAMPLE_RATE = 24_000


class Reference(ABC):
    """The loaded model and its processor."""

    config_class: type[Any]
    model_class: type[Any]
    thinker_only: Sequence[str] = ()
    """Arguments of `generate` to be prefixed with `thinker_`."""

    def __init__(self, options: Options) -> None:
        self.device = torch.device(options.device)
        self._dtype = dtype_of(options.dtype)
        # configs name ids of other vocabularies: the library warns of them at every start
        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.set_num_threads(options.threads)
        self._processor = AutoProcessor.from_pretrained(options.model_dir)
        self.model = self._dummy(options) if options.load_format == "dummy" else self._stored(options)
        self.model.eval()
        self.ends = list(options.talker_ends)
        self._thinker_bans = Bans(options.suppressed_thinker, self.device)
        self.talker_bans = Bans(options.suppressed_talker, self.device)

    @abstractmethod
    def thinker_arguments(self) -> dict[str, Any]:
        """Arguments of `generate` for the thinker, besides length, greedy sampling and bans; with the end token as
        `thinker_pad_token_id`: it pads finished rows of a batch, and the library recognises them as ended."""

    @abstractmethod
    def talker_arguments(self, codes: Sequence[int]) -> dict[str, Any]:
        """Arguments of `generate` for the talker, besides greedy sampling, so that row i is spoken with `codes[i]`
        codes."""

    @torch.inference_mode()
    def generate(self, requests: Sequence[BenchRequest]) -> list[Answer]:
        """Serve requests as one batch."""
        began = time.monotonic()
        inputs = self._prepare(requests)
        prepared = time.monotonic()
        thinker, talker = Clock(), Clock()
        replies = [request.reply_tokens for request in requests]
        sequences, waves = self.model.generate(
            **inputs,
            thinker_max_new_tokens=max(replies),
            thinker_do_sample=False,
            thinker_logits_processor=LogitsProcessorList([self._thinker_bans]),
            thinker_stopping_criteria=StoppingCriteriaList([RowLimits(replies)]),
            thinker_streamer=thinker,
            **self.thinker_arguments(),
            talker_streamer=talker,
            talker_do_sample=False,
            talker_top_k=None,
            talker_top_p=None,
            talker_temperature=None,
            **self.talker_arguments([request.codes for request in requests]),
        )
        waves = [waves] if len(requests) == 1 else waves
        waves = [wave.reshape(-1).cpu().numpy().astype("<f4") for wave in waves]
        done = time.monotonic()
        padded = inputs["input_ids"].shape[1]
        prompts = inputs["attention_mask"].sum(dim=1).tolist()
        spoken = torch.stack(talker.tokens, dim=1)  # [batch, steps]
        return [
            Answer(
                index=request.index,
                batch=len(requests),
                began=began,
                prepared=prepared,
                first_token=thinker.times[0],
                thinker_done=thinker.ended,
                talker_done=talker.ended,
                done=done,
                prompt_tokens=int(prompts[row]),
                text_ids=sequences[row, padded : padded + request.reply_tokens].tolist(),
                code_ids=spoken[row, : request.codes].tolist(),
                samples=waves[row].tobytes(),
                sample_rate=SAMPLE_RATE,
                gpu_bytes=self.gpu_bytes(),
            )
            for row, request in enumerate(requests)
        ]

    def gpu_bytes(self) -> int:
        """Peak GPU memory of this process; 0 on a CPU."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _prepare(self, requests: Sequence[BenchRequest]) -> dict[str, Any]:
        media = _Media([], [], [])
        conversations = [media.conversation(request) for request in requests]
        text = self._processor.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
        inputs = self._processor(
            text=text,
            images=media.images or None,
            audio=media.audio or None,
            videos=media.videos or None,
            padding=True,
            return_tensors="pt",
            # the frames are already sampled at this rate: none must be dropped
            videos_kwargs={"fps": VIDEO_FPS, "do_sample_frames": False} if media.videos else {},
        )
        ready: dict[str, Any] = {}
        for name, value in inputs.items():
            moved = value.to(self.device) if isinstance(value, torch.Tensor) else value
            if isinstance(moved, torch.Tensor) and moved.is_floating_point():
                moved = moved.to(self._dtype)
            ready[f"thinker_{name}" if name in self.thinker_only else name] = moved
        return ready

    def _stored(self, options: Options) -> Any:
        more = {"dtype": self._dtype, "attn_implementation": "sdpa"}
        return self.model_class.from_pretrained(options.model_dir, **more).to(options.device)

    def _dummy(self, options: Options) -> Any:
        """A model with random weights of the config's shape, created on the device."""
        config = self.config_class.from_pretrained(options.model_dir)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype_of(options.dtype))
        try:
            with torch.device(options.device):
                return self.model_class._from_config(config, attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True)
class _Media:
    """The arrays of a batch, in prompt order."""

    images: list[np.ndarray]
    audio: list[np.ndarray]
    videos: list[np.ndarray]

    def conversation(self, request: BenchRequest) -> list[dict[str, Any]]:
        """A request in the format of chat templates; keeps its arrays."""
        return [
            {"role": message.role, "content": [self._part(part) for part in message.content]}
            for message in request.messages
        ]

    def _part(self, part: TextPart | MediaPart) -> dict[str, Any]:
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        info = part.array
        assert info is not None, "the workload's media are arrays"
        array = np.frombuffer(part.data, dtype=info.dtype).reshape(info.shape).copy()
        {"image": self.images, "audio": self.audio, "video": self.videos}[part.kind].append(array)
        return {"type": part.kind, part.kind: ""}


class RowLimits(StoppingCriteria):
    """Row i ends after `limits[i]` new tokens. Called once per step."""

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = torch.tensor(limits)
        self._steps = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self._steps += 1
        return (self._steps >= self._limits).to(input_ids.device)  # type: ignore[return-value]


class RowEnds(LogitsProcessor):
    """Row i ends with the token `end` after `limits[i]` others. Called once per step."""

    def __init__(self, limits: Sequence[int], end: int) -> None:
        self._limits = torch.tensor(limits)
        self._end = end
        self._steps = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        ended = (self._steps >= self._limits).to(scores.device)
        self._steps += 1
        scores = scores.masked_fill(ended[:, None], float("-inf"))  # type: ignore[assignment]
        scores[:, self._end] = scores[:, self._end].masked_fill(ended, 0.0)
        return scores


class Bans(LogitsProcessor):
    """Forbids ids. (`generate` itself takes the talker's `suppress_tokens`.)"""

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self._ids = torch.tensor(list(ids), device=device)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.index_fill(1, self._ids, float("-inf"))  # type: ignore[return-value]

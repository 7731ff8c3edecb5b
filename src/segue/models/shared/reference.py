"""Run the library's own model as the reference that Segue is compared with (`segue verify`).

A family names a module as its `reference_module`, whose `load` makes a `Reference` from a `Library`.

Replies are not compared by generating twice: the library is forced to follow Segue's reply (`Follow`), and records its
own choice at every position. If that is Segue's token everywhere, its own greedy reply equals Segue's. If not, the
positions after the first difference are still compared, and the margin tells a near tie from an error.

Models that return numbers for one or two texts run one text at a time, without padding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from segue.media.audio import decode_audio
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.media.video import decode_video
from segue.messages.reference import Followed, LibraryAnswer, Question
from segue.messages.request import MediaPart, Request, TextPart
from segue.models.shared.library import AutoTokenizer

LIMITS = MediaLimits()


class NotTaken(Exception):
    """The library's own call does not support this request."""


class Reference(Protocol):
    """The library's model, loaded."""

    def answer(self, question: Question) -> LibraryAnswer:
        """Run the library on a question. Raises `NotTaken`, and the library's exceptions."""


@dataclass(frozen=True)
class Library:
    """Loads a checkpoint by the library."""

    model_dir: Path
    device: str
    """`cpu`, `cuda:0`, or `auto`: over several GPUs."""
    dtype: torch.dtype

    def load(self, auto: Any) -> Any:
        """A model of transformers, for inference; `auto`: the class that loads it."""
        spread = {} if self.device == "cpu" else {"device_map": self.device}
        return auto.from_pretrained(self.model_dir, dtype=self.dtype, **spread).eval()

    def ready(self, inputs: Any, model: Any) -> dict[str, Any]:
        """Move a processor's tensors to the model's device and cast floating-point ones to its dtype."""
        return {
            name: value.to(model.device, self.dtype if value.is_floating_point() else None)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in inputs.items()
        }


class Follow:
    """A `LogitsProcessor` that forces `generate` to write a reply, and records its own choices."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._given = list(token_ids)
        self.best: list[int] = []
        self.margins: list[float] = []

    @property
    def most(self) -> int:
        """`max_new_tokens` for `generate`: large enough to show whether the library would continue after the reply."""
        return len(self._given) + 1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[1, vocab] → the same with all tokens but the reply's masked."""
        best = int(scores[0].argmax())
        place = len(self.best)
        self.best.append(best)
        if place >= len(self._given):
            return scores
        token = self._given[place]
        if math.isfinite(scores[0, best]):
            margin = float(scores[0, best] - scores[0, token])
            self.margins.append(0.0 if best == token else margin if math.isfinite(margin) else math.inf)
        else:  # with NaN scores, any index may be the "largest"
            self.margins.append(math.nan)
        led = torch.full_like(scores, -math.inf)
        led[0, token] = 0.0
        return led

    def followed(self, stage: str, most: int, logits: Sequence[torch.Tensor] | None = None) -> Followed:
        """`most`: the request's token limit, where the library stops in any case; `logits`: [1, vocab] of each
        position."""
        logprobs = None
        if logits is not None:
            rows = zip(logits, self._given, strict=False)
            logprobs = [float(row[0].float().log_softmax(-1)[token]) for row, token in rows]
        return Followed(stage, self.best[:most], self.margins, logprobs)


def processors(*each: Any) -> Any:
    """The list class that `generate` expects."""
    from transformers import LogitsProcessorList

    return LogitsProcessorList(each)


def follow(model: Any, inputs: dict[str, Any], question: Question, stage: str, **more: Any) -> list[Followed]:
    """Force greedy `generate` to follow a stage's reply. `inputs`: arguments of `generate`, including the prompt."""
    reply = Follow(question.token_ids[stage])
    most = most_tokens(question.request, stage)
    with torch.inference_mode():
        made = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=min(most, reply.most),
            logits_processor=processors(reply),
            output_logits=True,
            return_dict_in_generate=True,
            **more,
        )
    return [reply.followed(stage, most, made.logits)]


def most_tokens(request: Request, stage: str) -> int:
    """`max_tokens` of a stage, which every compared request must set."""
    most = request.sampling[stage].max_tokens
    assert most is not None
    return most


def text_of(request: Request) -> str:
    """The text of its prompt, or of all its messages."""
    if request.prompt is not None:
        return request.prompt
    return "".join(part.text for message in request.messages for part in message.content if isinstance(part, TextPart))


def media_of(request: Request) -> list[MediaPart]:
    return [part for message in request.messages for part in message.content if isinstance(part, MediaPart)]


def image_of(part: MediaPart) -> Any:
    """A PIL image."""
    from PIL import Image

    return Image.fromarray(decode_image(part, LIMITS))


def samples_of(part: MediaPart, rate: int) -> np.ndarray:
    """[samples] float32 mono."""
    return decode_audio(part, rate, LIMITS)


def clip_of(part: MediaPart, fps: float, audio_rate: int | None = None) -> Any:
    """`segue.media.video.Video`."""
    return decode_video(part, fps, LIMITS, audio_rate=audio_rate)


def check_arguments(call: Any, given: dict[str, Any]) -> None:
    """Raise `NotTaken` for an argument that a pipeline's call does not have."""
    known = inspect.signature(call).parameters
    if missing := [name for name in given if name not in known]:
        raise NotTaken(f"the library's pipeline does not accept {' and '.join(missing)}")


Head = Callable[[Any, torch.Tensor], torch.Tensor]
"""(the model's output, mask [1, tokens]) → [numbers]."""


class TextModel:
    """`Reference` for models that return numbers for texts."""

    def __init__(self, library: Library, auto: Any, head: Head) -> None:
        self._model: Any = library.load(auto)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(library.model_dir)
        self._head = head

    def answer(self, question: Question) -> LibraryAnswer:
        pair = question.request.options.get("text_pair")
        read = self._tokenizer(text_of(question.request), pair, return_tensors="pt").to(self._model.device)
        with torch.inference_mode():
            vector = self._head(self._model(**read), read["attention_mask"])
        return LibraryAnswer(index=question.index, vector=vector.float().tolist())

"""Call transformers' own Qwen3-Omni: the reference that Segue is compared with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from segue.media.video import Video
from segue.messages.reference import LibraryAnswer, Question
from segue.messages.request import MediaPart, TextPart
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor
from segue.models.shared.reference import Follow, Library, clip_of, image_of, most_tokens, processors, samples_of

FPS = 2.0
"""Frames per second at which videos are sampled."""
RATE = 16000
"""Sample rate of the audio inputs."""


@dataclass(frozen=True)
class Reference:
    """transformers' model and processor on a checkpoint; `segue.models.shared.reference.Reference`."""

    library: Library
    model: Any
    processor: Any

    def answer(self, question: Question) -> LibraryAnswer:
        """The thinker is forced to follow Segue's reply."""
        request = question.request
        with_audio = bool(request.options.get("use_audio_in_video"))
        made = self._read([part for message in request.messages for part in message.content], with_audio)
        text = Follow(question.token_ids["thinker"])
        most = most_tokens(request, "thinker")
        with torch.inference_mode():
            self.model.generate(
                **self.library.ready(made, self.model),
                return_audio=False,
                use_audio_in_video=with_audio,
                thinker_do_sample=False,
                thinker_max_new_tokens=min(most, text.most),
                thinker_eos_token_id=self.model.config.im_end_token_id,
                thinker_logits_processor=processors(text),
            )
        return LibraryAnswer(
            index=question.index,
            prompt_token_ids=made["input_ids"][0].tolist(),
            followed=[text.followed("thinker", most)],
        )

    def _read(self, parts: list[TextPart | MediaPart], with_audio: bool) -> Any:
        """Model inputs of one user message, by one call of the processor."""
        content: list[dict[str, Any]] = []
        media: dict[str, list[Any]] = {"images": [], "videos": [], "audio": []}
        origins: list[int | None] = []
        for part in parts:
            if isinstance(part, TextPart):
                content.append({"type": "text", "text": part.text})
                continue
            content.append({"type": part.kind})
            if part.kind == "image":
                media["images"].append(image_of(part))
            elif part.kind == "audio":
                media["audio"].append(samples_of(part, RATE))
                origins.append(None)
            else:
                clip: Video = clip_of(part, FPS, RATE if with_audio else None)
                if clip.audio is not None:
                    media["audio"].append(clip.audio)
                    origins.append(len(media["videos"]))
                media["videos"].append(clip.frames)
        heard = any(origin is not None for origin in origins)
        more: dict[str, Any] = {"load_audio_from_video": True, "audio_from_video_indices": origins} if heard else {}
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        with warnings.catch_warnings():  # the library builds a numpy range from torch numbers: numpy 2 warns
            warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
            return self.processor(
                text=[prompt],
                return_tensors="pt",
                videos_kwargs={"fps": FPS},
                **{kind: given for kind, given in media.items() if given},
                **more,
            )


def load(library: Library) -> Reference:
    """Load transformers' model of a checkpoint."""
    model = library.load(Qwen3OmniMoeForConditionalGeneration)
    return Reference(library, model, Qwen3OmniMoeProcessor.from_pretrained(library.model_dir))

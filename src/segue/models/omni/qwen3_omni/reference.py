"""Call transformers' own Qwen3-Omni: the reference that Segue is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from segue.media.video import Video
from segue.messages.reference import LibraryAnswer, Question
from segue.messages.request import MediaPart, TextPart
from segue.models.omni.qwen3_omni.family import DEFAULT_VOICE
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor
from segue.models.shared.omni.chat import audio_of_videos
from segue.models.shared.reference import Follow, Library, clip_of, image_of, most_tokens, processors, samples_of

FPS = 2.0
"""Frames per second at which videos are sampled."""
_CONTEXT = 25
"""Frames that `generate` puts in front of each further piece of codes that it decodes."""
RATE = 16000
"""Sample rate of the audio inputs."""


def spoken_codes(model: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, codes [1, groups, frames]) of the library's `generate` with these arguments, its talker greedy."""
    pieces: list[torch.Tensor] = []
    hook = model.code2wav.register_forward_pre_hook(lambda module, args: pieces.append(args[0]))
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            # of the repetition penalty, which Segue, too, applies to codes alone
            warnings.filterwarnings("ignore", "Passing `repetition_penalty`")
            sequences, _ = model.generate(**given, talker_do_sample=False)
    finally:
        hook.remove()
    # `generate` decodes pieces apart, each with 25 frames of the one before it; one call over all is exact
    return sequences[0], torch.cat([pieces[0], *(piece[..., _CONTEXT:] for piece in pieces[1:])], dim=-1)


@dataclass(frozen=True)
class Reference:
    """transformers' model and processor on a checkpoint; `segue.models.shared.reference.Reference`."""

    library: Library
    model: Any
    processor: Any

    def answer(self, question: Question) -> LibraryAnswer:
        """Thinker and talker are forced to follow Segue's reply, the talker in the first codes."""
        request = question.request
        with_audio = bool(request.options.get("use_audio_in_video"))
        made = self._read([part for message in request.messages for part in message.content], with_audio)
        text, codes = (Follow(question.token_ids.get(stage, [])) for stage in ("thinker", "talker"))
        most = most_tokens(request, "thinker")
        given: dict[str, Any] = {
            **self.library.ready(made, self.model),
            "use_audio_in_video": with_audio,
            "thinker_do_sample": False,
            "thinker_max_new_tokens": min(most, text.most),
            "thinker_eos_token_id": self.model.config.im_end_token_id,
            "thinker_logits_processor": processors(text),
        }
        answer = LibraryAnswer(index=question.index, prompt_token_ids=made["input_ids"][0].tolist())
        # the library fails to speak a reply of one token, and a row of codes that is the last
        if len(question.token_ids.get("talker", [])) < 2 or len(question.token_ids["thinker"]) < 2:
            with torch.inference_mode():
                self.model.generate(**given, return_audio=False)
            answer.followed = [text.followed("thinker", most)]
            return answer
        most_codes = most_tokens(request, "talker")
        limits = {"talker_max_new_tokens": min(most_codes, codes.most), "talker_logits_processor": processors(codes)}
        _, samples = self._spoken(**given, **limits, speaker=request.voice or DEFAULT_VOICE)
        answer.followed = [text.followed("thinker", most), codes.followed("talker", most_codes)]
        answer.samples = samples.tobytes()
        return answer

    def spoken(
        self, parts: Sequence[TextPart | MediaPart], *, voice: str, tokens: int, codes: int, **more: Any
    ) -> tuple[list[int], np.ndarray]:
        """(reply, [samples] float32) to one user message, greedy. `tokens`, `codes`: the most of each; `more`: of
        `generate`."""
        made = self._read(parts, with_audio=False)
        sequence, samples = self._spoken(
            **self.library.ready(made, self.model),
            speaker=voice,
            thinker_do_sample=False,
            thinker_max_new_tokens=tokens,
            thinker_eos_token_id=self.model.config.im_end_token_id,
            talker_max_new_tokens=codes,
            **more,
        )
        return sequence[made["input_ids"].shape[1] :].tolist(), samples

    def _spoken(self, **given: Any) -> tuple[torch.Tensor, np.ndarray]:
        """(token ids, [samples] float32 by one call over all codes) of `generate` with these arguments."""
        sequence, codes = spoken_codes(self.model, **given)
        with torch.inference_mode():
            samples = self.model.code2wav(codes)[0, 0]
        return sequence, samples.float().cpu().numpy().astype("<f4")

    def _read(self, parts: Sequence[TextPart | MediaPart], with_audio: bool) -> Any:
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
        more = audio_of_videos(origins)
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


def speaking(model: Any) -> Any:
    """The library's model, able to speak of prompts with both images or video and audio: its talker computes positions
    from a config of the audio encoder, which only the thinker's has."""
    if model.has_talker:
        model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model


def load(library: Library) -> Reference:
    """Load transformers' model of a checkpoint."""
    model = speaking(library.load(Qwen3OmniMoeForConditionalGeneration))
    return Reference(library, model, Qwen3OmniMoeProcessor.from_pretrained(library.model_dir))

"""Call transformers' own Qwen2.5-Omni, working around its pitfalls: the reference that Segue is compared with.

Optional reading: the library's own way, to compare with.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from segue.messages.reference import LibraryAnswer, Question
from segue.messages.request import MediaPart, TextPart
from segue.models.omni.qwen2_5_omni.family import DEFAULT_VOICE
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor
from segue.models.shared.omni.chat import audio_of_videos
from segue.models.shared.reference import Follow, Library, clip_of, image_of, most_tokens, processors, samples_of

FPS = 2.0
"""Frames per second that the library's processor samples from a video."""
RATE = 16000
"""Sample rate of the audio inputs."""


@dataclass(frozen=True)
class Reply:
    """The output of transformers for one prompt."""

    token_ids: list[int]
    """The thinker's token ids, end token included."""
    codes: list[int]
    """The talker's codes, without the end token; empty if no speech was requested."""
    samples: torch.Tensor
    """[samples] float32, 24 kHz."""
    speech_ended: bool
    """The talker ended by itself, not at its length limit."""


@dataclass(frozen=True)
class Reference:
    """transformers' model and processor on a checkpoint; `segue.models.shared.reference.Reference`."""

    library: Library
    model: Any
    processor: Any

    def answer(self, question: Question) -> LibraryAnswer:
        """Thinker and talker are forced to follow Segue's reply, so that both sides decode the same codes to audio."""
        request = question.request
        with_audio = bool(request.options.get("use_audio_in_video"))
        made = self._read([part for message in request.messages for part in message.content], with_audio)
        inputs = _thinkers(self.library.ready(made, self.model)) | {"use_audio_in_video": with_audio}
        text, codes = (Follow(question.token_ids.get(stage, [])) for stage in ("thinker", "talker"))
        most = most_tokens(request, "thinker")
        given: dict[str, Any] = {
            **inputs,
            "speaker": request.voice or self._default_voice(),
            "thinker_do_sample": False,
            "thinker_max_new_tokens": min(most, text.most),
            "thinker_logits_processor": processors(text),
        }
        answer = LibraryAnswer(index=question.index, prompt_token_ids=made["input_ids"][0].tolist())
        # the library fails to speak a reply of one token
        if "talker" not in question.token_ids or len(question.token_ids["thinker"]) < 2:
            with torch.inference_mode():
                self.model.generate(**given, generation_mode="text")
            answer.followed = [text.followed("thinker", most)]
            return answer
        most_codes = most_tokens(request, "talker")
        with torch.inference_mode(), _NoiseOfSeed(request.seed or 0):
            _, samples = self.model.generate(
                **given,
                talker_do_sample=False,
                talker_max_new_tokens=min(most_codes, codes.most),
                talker_eos_token_id=self._talker_ends(),
                talker_logits_processor=processors(codes),
            )
        answer.followed = [text.followed("thinker", most), codes.followed("talker", most_codes)]
        answer.samples = samples.float().cpu().numpy().astype("<f4").tobytes()
        return answer

    def _read(self, parts: list[TextPart | MediaPart], with_audio: bool) -> Any:
        """Model inputs of one user message."""
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
                clip = clip_of(part, FPS, RATE if with_audio else None)
                if with_audio:
                    media["audio"].append(clip.audio)
                    origins.append(len(media["videos"]))
                media["videos"].append(clip.frames)
        given = {kind: items for kind, items in media.items() if items} | audio_of_videos(origins)
        return self.process(self.prompt([{"role": "user", "content": content}]), **given)

    def _default_voice(self) -> str:
        """`generate` knows one name; a checkpoint may have others."""
        return min(self.model.speaker_map, key=lambda name: name != DEFAULT_VOICE, default=DEFAULT_VOICE)

    def _talker_ends(self) -> list[int]:
        """The library hard-codes the end tokens of the published sizes."""
        config = self.model.config.talker_config
        return [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """Messages in the processor's format (`{"role": …, "content": [{"type": "image"}, …]}`) → templated text."""
        return self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def inputs(self, text: str, *kinds: str, **media: Any) -> Any:
        """Model inputs of one user message: one part of each of `kinds`, then `text`; `media`: processor arguments."""
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]
        prompt = self.prompt([{"role": "user", "content": content}])
        return self.process(prompt, **media)

    def process(self, prompt: str, **media: Any) -> Any:
        """Model inputs of a templated prompt and its media."""
        with warnings.catch_warnings():  # the library builds a numpy range from torch numbers: numpy 2 warns
            warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
            return self.processor(text=[prompt], return_tensors="pt", **media)

    def generate(
        self,
        inputs: Mapping[str, Any],
        *,
        max_tokens: int = 40,
        max_codes: int = 60,
        speech: bool = True,
        speaker: str = "Chelsie",
        noise_seed: int = 0,
        use_audio_in_video: bool = False,
        talker_repetition_penalty: float = 1.05,
        **more: Any,
    ) -> Reply:
        """Call `generate`, greedy unless `more` (passed on as is: `thinker_…`, `talker_…`) says otherwise.

        The vocoder's noise is `torch.randn(1, frames, 80)` of a CPU generator seeded with `noise_seed`.
        """
        given = _thinkers(inputs)
        given |= {"use_audio_in_video": use_audio_in_video, "thinker_do_sample": False, "talker_do_sample": False}
        given |= {"thinker_max_new_tokens": max_tokens, **more}
        prompt_length = inputs["input_ids"].shape[1]
        text_only = self.model.generate(**given, generation_mode="text", speaker=speaker)
        token_ids = text_only[0, prompt_length:].tolist()
        if not speech or len(token_ids) < 2:  # the library fails to speak a reply of one token
            return Reply(token_ids, [], torch.zeros(0), speech_ended=speech)
        codes: list[int] = []

        def before_vocoder(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            codes.extend(args[0][0].tolist())
            torch.manual_seed(noise_seed)

        hook = self.model.token2wav.register_forward_pre_hook(before_vocoder)
        try:
            sequences, samples = self.model.generate(
                **given,
                speaker=speaker,
                talker_max_new_tokens=max_codes,
                talker_repetition_penalty=talker_repetition_penalty,
                talker_eos_token_id=self._talker_ends(),
            )
        finally:
            hook.remove()
        assert sequences[0, prompt_length:].tolist() == token_ids
        return Reply(token_ids, codes, samples, speech_ended=len(codes) < max_codes)

    def vocode(self, codes: list[int], *, speaker: str = "Chelsie", noise_seed: int = 0) -> torch.Tensor:
        """The waveform of the codes, decoded at once: [samples]."""
        voice = self.model.speaker_map[speaker]
        torch.manual_seed(noise_seed)
        with torch.no_grad():
            return self.model.token2wav(
                torch.tensor([codes]), conditioning=voice["cond"], reference_mel=voice["ref_mel"]
            ).reshape(-1)


class _NoiseOfSeed(TorchFunctionMode):
    """Makes `torch.randn`, which draws the vocoder's noise, draw on the CPU from a seed whatever the requested device,
    as Segue does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.randn:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu", "generator": self._generator}).to(kwargs.get("device"))


def _thinkers(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Prefix the inputs as the thinker's: otherwise the library passes pixels to the talker, which rejects them."""
    return {f"thinker_{key}" if key.startswith("pixel_values") else key: value for key, value in inputs.items()}


def load(library: Library) -> Reference:
    """Load transformers' model of a checkpoint."""
    # the talker's config names ids of the thinker's vocabulary; the library warns of them at every start
    model = library.load(Qwen2_5OmniForConditionalGeneration)
    return Reference(library, model, Qwen2_5OmniProcessor.from_pretrained(library.model_dir))

"""transformers' own answer on a checkpoint of Qwen2.5-Omni: what every parity test compares with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()

from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor  # noqa: E402


@dataclass(frozen=True)
class Reply:
    """What transformers made of one prompt."""

    token_ids: list[int]
    """The thinker's, end token included."""
    codes: list[int]
    """The talker's, without the token that ended them; empty where no speech was asked for."""
    samples: torch.Tensor
    """[samples] float32, 24 kHz."""
    speech_ended: bool
    """The talker ended by itself, not at its limit."""


@dataclass(frozen=True)
class Reference:
    """transformers' model and processor on a checkpoint, float32, one thread's worth of care for its pitfalls."""

    model: Any
    processor: Any

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """Messages as the processor takes them (`{"role": …, "content": [{"type": "image"}, …]}`) → templated text."""
        return self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def inputs(self, text: str, *kinds: str, **media: Any) -> Any:
        """Model inputs of one user message: a part of each of `kinds`, then `text`; `media` as the processor takes."""
        content = [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]
        prompt = self.prompt([{"role": "user", "content": content}])
        return self.process(prompt, **media)

    def process(self, prompt: str, **media: Any) -> Any:
        """Model inputs of a templated prompt and its media."""
        with warnings.catch_warnings():  # the library asks numpy for a range of torch numbers: numpy 2 comments on it
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
        """`generate`, greedy unless `more` says otherwise, which goes to it as it is (`thinker_…`, `talker_…`).

        The vocoder's noise is `torch.randn(1, frames, 80)` of a CPU generator seeded with `noise_seed`.
        """
        given = {f"thinker_{key}" if key.startswith("pixel_values") else key: value for key, value in inputs.items()}
        given |= {"use_audio_in_video": use_audio_in_video, "thinker_do_sample": False, "talker_do_sample": False}
        given |= {"thinker_max_new_tokens": max_tokens, **more}
        prompt_length = inputs["input_ids"].shape[1]
        text_only = self.model.generate(**given, generation_mode="text", speaker=speaker)
        token_ids = text_only[0, prompt_length:].tolist()
        if not speech or len(token_ids) < 2:  # of a reply of one token nothing is spoken; the library fails on it
            return Reply(token_ids, [], torch.zeros(0), speech_ended=speech)
        config = self.model.config.talker_config
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
                talker_eos_token_id=[config.tts_codec_pad_token_id, config.tts_codec_end_token_id],
            )
        finally:
            hook.remove()
        assert sequences[0, prompt_length:].tolist() == token_ids
        return Reply(token_ids, codes, samples, speech_ended=len(codes) < max_codes)

    def vocode(self, codes: list[int], *, speaker: str = "Chelsie", noise_seed: int = 0) -> torch.Tensor:
        """[samples] of given codes, all at once."""
        voice = self.model.speaker_map[speaker]
        torch.manual_seed(noise_seed)
        with torch.no_grad():
            return self.model.token2wav(
                torch.tensor([codes]), conditioning=voice["cond"], reference_mel=voice["ref_mel"]
            ).reshape(-1)


def load(tiny_dir: Path) -> Reference:
    """transformers on a checkpoint."""
    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    return Reference(model, Qwen2_5OmniProcessor.from_pretrained(tiny_dir))

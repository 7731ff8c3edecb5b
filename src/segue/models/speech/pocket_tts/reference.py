"""Call transformers' own Pocket TTS: the reference that Segue is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from segue.models.shared.library import AutoTokenizer
from segue.models.speech.pocket_tts.library import (
    PocketTTSAudioTokenizerModel,
    PocketTTSFeatureExtractor,
    PocketTTSForConditionalGeneration,
    PocketTTSProcessor,
)
from segue.models.speech.pocket_tts.loading import CODEC, load_voice


class WithNoise(PocketTTSForConditionalGeneration):
    """The library's model, which takes its noise from a table instead of the global generator."""

    noise: torch.Tensor | None = None
    """[frames, D], with the temperature in it; None: the library's own."""
    frame = 0

    def sample_latent(self, condition: torch.Tensor, noise: torch.Tensor, num_flow_steps: int) -> torch.Tensor:
        if self.noise is not None:
            noise = self.noise[self.frame][None].to(noise.dtype)
            self.frame += 1
        latent: torch.Tensor = super().sample_latent(condition, noise, num_flow_steps)
        return latent


class Reference:
    """transformers' model and processor on a checkpoint, in float32."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.processor: Any = PocketTTSProcessor(
            PocketTTSFeatureExtractor(),
            tokenizer,
            audio_tokenizer=PocketTTSAudioTokenizerModel.from_pretrained(model_dir / CODEC).eval(),
            chat_template=tokenizer.chat_template,
        )
        self.model: Any = WithNoise.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def spoken(
        self, text: str, voice: str, *, noise: torch.Tensor | None = None, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(latents [frames, D] in the audio tokenizer's space, samples [t]) of `generate`. `noise` [frames, D]: None is
        greedy; `given`: arguments of `generate`."""
        content = [{"type": "audio"}, {"type": "text", "text": text}]
        written = self.processor.apply_chat_template([{"role": "user", "content": content}])
        latents = [load_voice(self._model_dir, voice, self.model.config.latent_dim)]
        inputs = self.processor(text=[written], audio_prompt_latents=latents, return_tensors="pt")
        self.model.noise, self.model.frame = noise, 0
        sample = noise is not None
        out = self.model.generate(**inputs, do_sample=sample, return_dict_in_generate=True, **given)
        return out.audio_latents[0], self.processor.decode(out.audio_latents[0])

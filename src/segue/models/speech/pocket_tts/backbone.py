"""The backbone: reads a text and a voice, and generates rows of numbers, a continuous latent per frame of audio.

T prompt tokens, H width, D numbers of a latent.

Inputs (from `PocketTTSModel`): text tokens by their embedding; the frames of the voice, and latents, each by a
projection; the last token of the prompt as the learnt first latent. The flow head draws a latent from noise, which
comes from the request's own random numbers. A unit is a row: what the frame is (`ending`), and the bits of D numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from segue.engines.autoregressive.contract import (
    AutoregressiveContext,
    Draws,
    Fed,
    FlatBatch,
    KVSpec,
    Prompt,
    numbers_of,
    row_identity,
)
from segue.engines.contract import Payload, StageRequest
from segue.kernels.prepare import prepared_bytes
from segue.messages.errors import ConfigError, StageFailed
from segue.messages.sampling import SamplingParams
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.checkpoint.pretrained import errors_only
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.generation import context_length, default_sampling, generation_of
from segue.models.shared.library import GenerationConfig
from segue.models.speech.pocket_tts.ending import KINDS, LAST, Ending, kind_logits
from segue.models.speech.pocket_tts.input import voice_of
from segue.models.speech.pocket_tts.loading import load_config, load_model, load_voice, voice_names

_GENERATION = {"num_flow_steps": 1, "eos_threshold": -4.0, "min_frames_before_eos": 6}
"""The library's defaults of settings that only this family has."""


@dataclass(slots=True)
class _State:
    request: StageRequest


class Backbone:
    """`AutoregressiveModel` that yields rows of numbers, over the backbone and its flow head."""

    axes = 1
    conditioned = False
    recordable = True
    vocabulary = None
    vocab_size = KINDS
    end_token_ids = frozenset({LAST})

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable or unsupported checkpoint."""
        config = load_config(ctx)
        generation = generation_of(ctx.model_dir, config)
        own = {name: getattr(generation, name, None) for name in _GENERATION}
        settings = {name: _GENERATION[name] if value is None else value for name, value in own.items()}
        self._steps = int(settings["num_flow_steps"])
        self._threshold = float(settings["eos_threshold"])
        self._first = int(settings["min_frames_before_eos"])
        if self._steps < 1:
            raise ConfigError(f"generation_config.json: num_flow_steps is {self._steps}; at least 1", field="model")
        net = load_model(ctx, config)
        self.net = net
        self._bos_id, self._voice_id = config.audio_bos_token_id, config.audio_prompt_token_id
        with errors_only("transformers.modeling_utils"):  # the config names the flow head, which has no attention
            self._decoder = PagedDecoder(
                net,
                net.model,
                quantization=ctx.quantization,
                fused=ctx.fused and ctx.group is None,
                head="eos_head",
                rows=self._rows,
            )
        self.library_decoder = self._decoder.model
        self.groups = 1 + config.latent_dim
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.kv: KVSpec = self._decoder.kv
        self.weight_bytes: int = held_bytes(net) + prepared_bytes(net)
        self.max_model_len: int = context_length(config, ctx.max_model_len)
        self.default_sampling: SamplingParams = _sampling(generation)
        self._frame_rate: float = config.frame_rate
        self.voices = voice_names(ctx.model_dir)
        self._marks = {self._bos_id, self._voice_id, config.audio_prompt_bos_token_id, config.audio_latent_token_id}
        self._voice = cache(lambda name: load_voice(ctx.model_dir, name, config.latent_dim))

    def begin(self, request: StageRequest) -> _State:
        """Raises `NotFound` for an unknown voice."""
        voice_of(request.request.voice, self.voices)
        return _State(request)

    @torch.inference_mode()
    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """The text's ids → the prompt."""
        ids: list[int] = payload["token_ids"].tolist()
        voice = self._voice(payload["voice"]) if payload["voice"] else torch.empty(0, self.groups - 1)
        text = sum(token not in self._marks for token in ids)
        budget = None
        if state.request.sampling.max_tokens is None:
            budget = math.ceil((text / 3 + 2) * self._frame_rate)  # as in `generate`
        ending = Ending(self._first, payload["frames_after_eos"], budget)
        return Fed(prompt=self._prompt(ids, voice, text, ending))

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n, 1 + D] rows of numbers, or [n] text ids → [n, H]."""
        if token_ids.ndim == 1:
            return self._decoder.embed(token_ids)
        return self.net.model.embed_audio_latents(numbers_of(token_ids[:, 1:]))

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (hidden states after the final norm [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch), None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, KINDS] float32."""
        return kind_logits(self._decoder.logits(hidden)[:, 0], self._threshold)

    @torch.inference_mode()
    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, H], [n] codes 0 → [n, D]."""
        latents = self.net.sample_latent(hidden, draws.noise().to(hidden.dtype), self._steps)
        return draws.codes_of(latents.float())

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise StageFailed("the backbone makes latents, not text")

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] ids → [n, H], the learnt first latent in the place of its id."""
        first = self.net.model.embed_audio_latents(self.net.model.bos_latent)
        return torch.where((ids == self._bos_id)[:, None], first, self.net.model.embed_tokens(ids))

    def _prompt(self, ids: list[int], voice: torch.Tensor, text: int, ending: Ending) -> Prompt:
        """Put the frames of the voice in the place of their token."""
        embeds = self._rows(torch.tensor(ids, device=self.device))
        weight = self.net.model.audio_prompt_proj.weight
        frames = self.net.model.audio_prompt_proj(voice.to(weight.device, weight.dtype))
        identity: list[int | bytes] = list(ids)
        if self._voice_id in ids:
            at = ids.index(self._voice_id)
            embeds = torch.cat([embeds[:at], frames, embeds[at + 1 :]])
            identity[at : at + 1] = [row_identity(row) for row in voice.view(torch.int32).tolist()]
        return Prompt(
            token_ids=[0] * len(embeds),  # ids of text are no kinds of frames
            embeds=embeds.cpu(),  # device memory belongs to keys and values
            identity=identity,
            modality_tokens={"text": len(embeds) - len(voice)} | ({"audio": len(voice)} if len(voice) else {}),
            rule=ending,
        )


def _sampling(generation: GenerationConfig) -> SamplingParams:
    """The temperature is the variance of the flow head's noise; no other setting applies to latents."""
    given = default_sampling(generation)
    return SamplingParams(temperature=given.temperature, max_tokens=generation.max_new_tokens)

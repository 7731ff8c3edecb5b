"""The thinker: the language model that reads the prompt and writes the reply.

T prompt tokens, H hidden size, `tokens` all tokens of a flat batch. The decoder is transformers' own; only its
attention is the engine's (`segue_paged`), and only in this decoder: the encoders are a separate stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen2_5_omni.generation import GENERATE, thinker_ends, thinker_generation
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniPreTrainedModelForConditionalGeneration
from segue.models.omni.qwen2_5_omni.loading import load_config, load_thinker
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.generation import context_length, default_sampling
from segue.models.shared.lora import named_adapter, with_adapter
from segue.models.shared.omni.positions import positions_of
from segue.models.shared.omni.prompt import MEDIA_ROWS, Arrived, MediaPlaces, by_modality, media_rows, media_rows_of
from segue.models.shared.omni.say import given_reply
from segue.models.shared.text.tokenizer import decode, tokenizer_for, vocabulary_of


class Thinker:
    """`AutoregressiveModel` over the thinker's decoder."""

    axes = 3
    conditioned = False
    recordable = True

    def __init__(self, ctx: AutoregressiveContext) -> None:
        config = load_config(ctx)
        thinker = config.thinker_config
        text = thinker.text_config
        self._decoder = PagedDecoder(
            load_thinker(ctx, config),
            inner="model",
            head="lm_head",
            quantization=ctx.quantization,
            lora=ctx.lora,
            fused=ctx.fused and ctx.group is None,
        )
        self.lora = self._decoder.lora
        self.library_decoder = self._decoder.model
        self._positions = positions_of(Qwen2_5OmniPreTrainedModelForConditionalGeneration, thinker)
        self._tokenizer = tokenizer_for(ctx)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self._places = MediaPlaces(thinker)
        self.device = ctx.device
        self.vocab_size: int = text.vocab_size
        self.max_model_len: int = context_length(text, ctx.max_model_len)
        capture_width = text.hidden_size if config.enable_audio_output else 0
        self.kv: KVSpec = replace(self._decoder.kv, capture_width=capture_width, capture_dtype=ctx.dtype)
        self.weight_bytes: int = self._decoder.weight_bytes
        generation = thinker_generation(thinker, ctx.model_dir)
        self.end_token_ids = thinker_ends(generation, thinker, ctx.model_dir, self._tokenizer)
        self.default_sampling: SamplingParams = default_sampling(generation, GENERATE)

    def begin(self, request: StageRequest) -> Arrived:
        """Raises `NotFound` for an unknown LoRA adapter."""
        return Arrived("encoder" in request.upstreams, named_adapter(self.lora, request.request.adapter))

    def feed(self, state: Arrived, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Collect the prompt's facts from the input stage and the media rows from the encoder; return the prompt once
        complete."""
        state.take(upstream, payload, final=final)
        if not state.ready:
            return Fed()
        prompt, state.rows = self._prompt(state), []  # the rows may be on the device: drop them here
        return Fed(prompt=prompt if state.adapter is None else with_adapter(prompt, state.adapter))

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._decoder.embed(token_ids)

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, H] → (hidden states after the final norm [tokens, H], rows for the talker [tokens, H] or None)."""
        hidden = self._decoder.forward(embeds, batch)
        if not self.kv.capture_width:
            return hidden, None
        return hidden, hidden + self._without_media(embeds, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._decoder.logits(hidden)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Detokenize; empty if the checkpoint has no tokenizer."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def _without_media(self, embeds: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
        """Embeddings with media rows zeroed: the talker does not see them (`embeds_to_talker` in `generate`)."""
        media = media_rows_of(batch)
        return embeds if media is None else embeds.masked_fill(media.to(embeds.device)[:, None], 0)

    def _prompt(self, arrived: Arrived) -> Prompt:
        """Raises `InvalidRequest` for ids and media that do not match, `StageFailed` for rows of other media."""
        ids = arrived.token_ids
        assert ids is not None
        places = self._places(ids, arrived)
        embeds = self._with_media(ids, places, arrived).cpu() if places else None
        positions, delta = self._positions(ids, arrived.media, use_audio_in_video=arrived.use_audio_in_video)
        return Prompt(
            token_ids=ids.tolist(),
            embeds=embeds,
            positions=positions.to(self.device),
            position_delta=delta,
            identity=self._places.identity(ids, arrived) if places else None,
            modality_tokens=by_modality(ids, places),
            reply=given_reply(arrived.reply, self.end_token_ids),
            extras={MEDIA_ROWS: media_rows(places)} if places else {},
        )

    @torch.inference_mode()
    def _with_media(self, ids: torch.Tensor, places: dict[str, torch.Tensor], arrived: Arrived) -> torch.Tensor:
        """Embeddings [T, H] with media rows in place."""
        embeds = self._decoder.embed(ids.to(self.device))
        for kind, where in places.items():
            own = [rows.to(device=self.device, dtype=embeds.dtype) for of, _, rows in arrived.rows if of == kind]
            embeds[where.to(self.device)] = torch.cat(own)
        return embeds

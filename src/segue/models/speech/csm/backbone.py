"""The backbone: reads a conversation of texts and recordings, and generates rows of codes for its last text.

T prompt tokens, H width, K codes per row.

Inputs (from `CsmForConditionalGeneration`): text tokens by their own embedding; a row of codes, generated or of a
recording, as the sum of its codes' embeddings; the token after a recording as the row of `codebook_eos_token_id`.

An utterance ends with a row whose codes are all `codebook_eos_token_id`. As in `generate`, the last code is not looked
at: if it is another, the row ends the utterance, too, and is spoken (`rows_without_end`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from segue.engines.autoregressive.contract import (
    AutoregressiveContext,
    Draws,
    Fed,
    FlatBatch,
    KVSpec,
    Prompt,
    row_identity,
)
from segue.engines.contract import Payload, StageRequest
from segue.kernels.prepare import prepared_bytes
from segue.messages.errors import StageFailed
from segue.messages.sampling import SamplingParams
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.checkpoint.pretrained import errors_only
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.generation import context_length, default_sampling, generation_of
from segue.models.shared.speech.recordings import PromptParts
from segue.models.shared.speech.talker import SpokenCodes
from segue.models.speech.csm.depth import DepthDecoder, depth_sampling
from segue.models.speech.csm.family import VOICES, speaker
from segue.models.speech.csm.loading import load_config, load_language_models


class Backbone:
    """`AutoregressiveModel` that yields rows, over the backbone and its depth decoder."""

    axes = 1
    conditioned = False
    recordable = True
    vocabulary = None
    voices = VOICES

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable or unsupported checkpoint."""
        config = load_config(ctx)
        generation = generation_of(ctx.model_dir, config)
        net = load_language_models(ctx, config)
        self.net = net
        with errors_only("transformers.modeling_utils"):  # the backbone's config names parts that it does not have
            self._decoder = PagedDecoder(
                net,
                net.backbone_model,
                quantization=ctx.quantization,
                fused=ctx.fused and ctx.group is None,
                head="lm_head",
            )
        self.library_decoder = self._decoder.model
        codes: int = config.codec_config.codebook_size
        self._spoken = SpokenCodes(codes, config.vocab_size, frozenset(), ctx.device)
        self._depth = DepthDecoder(net, depth_sampling(generation), self._spoken)
        self.groups: int = config.num_codebooks
        self._audio, self._audio_end = config.audio_token_id, config.audio_eos_token_id
        self._pad, self._end = config.codebook_pad_token_id, config.codebook_eos_token_id
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.kv: KVSpec = self._decoder.kv
        whole = nn.ModuleList([net.backbone_model, net.lm_head, net.depth_decoder, net.embed_text_tokens])
        self.weight_bytes: int = held_bytes(whole) + prepared_bytes(whole)
        self.vocab_size: int = config.vocab_size
        self.max_model_len: int = context_length(config, ctx.max_model_len)
        self.end_token_ids: frozenset[int] = frozenset()  # a code 0 ends nothing
        self.default_sampling: SamplingParams = default_sampling(generation)

    def begin(self, request: StageRequest) -> PromptParts:
        """Raises `NotFound` for an unknown voice."""
        speaker(request.request.voice)
        return PromptParts()

    @torch.inference_mode()
    def feed(self, state: PromptParts, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """The conversation's ids and its recordings' codes → the prompt, once all have arrived."""
        state.take(upstream, payload)
        if state.prompted or state.ids is None or len(state.recordings) < int((state.ids == self._audio).sum()):
            return Fed()
        state.prompted = True
        return Fed(prompt=self._prompt(state.ids, state.in_order()))

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n, K] rows of codes, or [n] text ids → [n, H]."""
        if token_ids.ndim == 1:
            return self._decoder.embed(token_ids)
        rows: torch.Tensor = self.net.backbone_model.embed_tokens(token_ids[None])[0]
        return rows

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (hidden states after the final norm [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch), None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32, without the ids that the codec does not have."""
        return self._spoken.only(self._decoder.logits(hidden))

    @torch.inference_mode()
    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, H], [n] codes 0 → [n, K - 1]."""
        return self._depth(hidden, ids, draws)

    def ends(self, row: Sequence[int]) -> bool:
        """Whether the utterance ends with this row of codes."""
        return all(code == self._end for code in row[:-1])

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise StageFailed("the backbone makes codes, not text")

    def _prompt(self, ids: torch.Tensor, recordings: Sequence[torch.Tensor]) -> Prompt:
        """Put the recordings' rows [frames, K] in the places of their tokens."""
        waiting = iter(recordings)
        end = torch.full((1, self.groups), self._end)
        text = self.embed(ids.to(self.device), None)
        parts: list[torch.Tensor] = []
        identity: list[int | bytes] = []
        for place, token in enumerate(ids.tolist()):
            if token not in (self._audio, self._audio_end):
                parts.append(text[place : place + 1])
                identity.append(token)
                continue
            rows = next(waiting) if token == self._audio else end
            parts.append(self.embed(rows.to(self.device), None))
            identity += [row_identity(row) for row in rows.tolist()]
        embeds = torch.cat(parts)
        spoken = sum(len(rows) for rows in recordings)
        modality_tokens = {"text": len(embeds) - spoken} | ({"audio": spoken} if spoken else {})
        return Prompt(
            token_ids=[self._pad] * len(embeds),  # never drawn, so that no penalty refers to it
            embeds=embeds.cpu(),  # device memory belongs to keys and values
            identity=identity,
            modality_tokens=modality_tokens,
        )

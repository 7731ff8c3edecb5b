"""The thinker: the language model that reads the prompt and writes the reply.

H hidden size, `tokens` all tokens of a flat batch. The decoder is the library's own; only its attention and its experts
are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec
from segue.engines.contract import Payload, StageRequest
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeConfig
from segue.models.omni.qwen3_omni.loading import load_config, load_thinker
from segue.models.omni.qwen3_omni.prompt import Prompts
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.deep_features import deep_features
from segue.models.shared.decoder.generation import context_length, default_sampling, generation_in
from segue.models.shared.lora import named_adapter, with_adapter
from segue.models.shared.omni.prompt import Arrived, media_rows_of
from segue.models.shared.omni.say import given_reply
from segue.models.shared.text.tokenizer import decode, tokenizer_for, vocabulary_of


class _Layer:
    """The decoder layer whose hidden states of media the talker takes."""

    def __init__(self, decoder: nn.Module, config: Qwen3OmniMoeConfig) -> None:
        """Raises `ConfigError` if the thinker has no such layer."""
        number, layers = config.talker_config.accept_hidden_layer, cast(nn.ModuleList, decoder.layers)
        if not 0 < number < len(layers):  # 0 is the embeddings, the last is after the norm
            raise ConfigError(
                f"config.json: accept_hidden_layer is {number}; the thinker has {len(layers)} layers, of which the "
                f"talker can take 1 to {len(layers) - 1}",
                field="talker_config",
            )
        self._layer = layers[number - 1]

    @contextmanager
    def output(self) -> Iterator[list[torch.Tensor]]:
        """Collects the layer's output [1, tokens, H] of the calls inside."""
        outputs: list[torch.Tensor] = []
        hook = self._layer.register_forward_hook(lambda module, given, out: outputs.append(out))
        try:
            yield outputs
        finally:
            hook.remove()


GENERATE = SamplingParams(max_tokens=1024)
"""What the reference's `generate` passes to the thinker: `thinker_max_new_tokens`."""


class Thinker:
    """`AutoregressiveModel` over the thinker's decoder."""

    axes = 3
    conditioned = False
    recordable = True

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint."""
        config = load_config(ctx)
        thinker = config.thinker_config
        self.max_model_len: int = context_length(thinker.text_config, ctx.max_model_len)
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
        self._middle_layer = _Layer(self._decoder.model, config) if config.enable_audio_output else None
        self._tokenizer = tokenizer_for(ctx)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self.device = self._decoder.device
        self._prompt = Prompts(thinker, self._decoder.embed, self.device)
        self.kv: KVSpec = self._decoder.kv
        if self._middle_layer is not None:
            self.kv = replace(self.kv, capture_width=thinker.text_config.hidden_size, capture_dtype=ctx.dtype)
        self.vocab_size: int = self._decoder.vocab_size
        self.weight_bytes: int = self._decoder.weight_bytes
        # the reference passes this end token to the thinker, whatever the thinker's own config says
        self.end_token_ids = frozenset({config.im_end_token_id})
        self.default_sampling: SamplingParams = default_sampling(generation_in(thinker, ctx.model_dir), GENERATE)

    def begin(self, request: StageRequest) -> Arrived:
        """Raises `NotFound` for an unknown LoRA adapter."""
        adapter = named_adapter(self.lora, request.request.adapter)
        return Arrived(from_encoder="encoder" in request.upstreams, adapter=adapter)

    def feed(self, state: Arrived, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Collect the prompt's facts from the input stage and the media rows from the encoder; return the prompt once
        complete."""
        state.take(upstream, payload, final=final)
        if not state.ready:
            return Fed()
        prompt, state.rows = self._prompt(state), []  # the rows may be on the device: drop them here
        prompt.reply = given_reply(state.reply, self.end_token_ids)
        return Fed(prompt=prompt if state.adapter is None else with_adapter(prompt, state.adapter))

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._decoder.embed(token_ids)

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, H] → (hidden states after the final norm [tokens, H], rows for the talker [tokens, H] or None)."""
        media = None if self._middle_layer is None else media_rows_of(batch)
        if self._middle_layer is None or media is None:
            hidden = self._decoder.forward(embeds, batch, **deep_features(batch, embeds))
            return hidden, None if self._middle_layer is None else embeds
        with self._middle_layer.output() as captured:
            hidden = self._decoder.forward(embeds, batch, **deep_features(batch, embeds))
        return hidden, torch.where(media.to(embeds.device)[:, None], captured[0][0], embeds)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._decoder.logits(hidden)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Detokenize; empty if the checkpoint has no tokenizer."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

"""The stage model of a language model: reads a prompt, writes the reply."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec, Prompt, Then
from segue.engines.contract import Payload, StageRequest
from segue.kernels.linear.lora import Lora
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.sampling import SamplingParams
from segue.models.shared.checkpoint.pretrained import load_config, load_model
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.gathered import GatheredDecoder, attends_itself
from segue.models.shared.decoder.generation import context_length, default_sampling, end_tokens, generation_of
from segue.models.shared.input_stage import THEN
from segue.models.shared.library import PreTrainedModel
from segue.models.shared.lora import named_adapter, with_adapter
from segue.models.shared.text.prompt_embeds import NO_TOKEN, identity_of, runs_of
from segue.models.shared.text.tokenizer import decode, tokenizer_for, vocabulary_of


class LLM:
    """`AutoregressiveModel` over any causal LM of transformers."""

    axes = 1
    conditioned = False

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint or an unsupported model."""
        config = load_config(ctx)
        self.max_model_len: int = context_length(config, ctx.max_model_len)
        self._decoder = _decoder(ctx, load_model(ctx, config))
        self.recordable = not self._decoder.kv.gathered
        self.lora = self._decoder.lora
        self._tokenizer = tokenizer_for(ctx)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self.library_decoder = self._decoder.model
        self.device = self._decoder.device
        self.kv: KVSpec = self._decoder.kv
        self.vocab_size: int = self._decoder.vocab_size
        self.weight_bytes: int = self._decoder.weight_bytes
        generation = generation_of(ctx.model_dir, config)
        self.end_token_ids = end_tokens(generation, self._tokenizer)
        self.default_sampling: SamplingParams = default_sampling(generation)

    def begin(self, request: StageRequest) -> Lora | None:
        """The LoRA adapter that the request names. Raises `NotFound`. The prompt arrives whole or in pieces."""
        return named_adapter(self.lora, request.request.adapter)

    def feed(self, state: Lora | None, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """The prompt from the input stage, or a piece of it."""
        then = Then(payload.get(THEN, "end"))
        if "embeds" not in payload and "token_ids" not in payload:
            return Fed(closed=True)
        if "embeds" in payload:
            ids = payload.get("token_ids", torch.full(payload["embeds"].shape[:1], NO_TOKEN))
            prompt = self._embedded(ids, payload["embeds"])
        else:
            ids = payload["token_ids"]
            prompt = Prompt(token_ids=ids.tolist(), modality_tokens={"text": len(ids)})
        return Fed(prompt=prompt if state is None else with_adapter(prompt, state), then=then)

    def _embedded(self, ids: torch.Tensor, embeds: torch.Tensor) -> Prompt:
        """A prompt with `ids` [T]; `NO_TOKEN` marks positions whose embeddings are the rows of `embeds` [n, H]."""
        if self._decoder.reads_ids:
            raise InvalidRequest(
                "prompt_embeds are set, but this model's layers also look up the prompt's token ids",
                field="prompt_embeds",
            )
        embeds = embeds.cpu()
        own = ids == NO_TOKEN
        rows = embeds.new_zeros(len(ids), embeds.shape[1], dtype=self._decoder.kv.dtype)
        rows[own] = embeds.to(rows.dtype)
        listed, hashes = ids.tolist(), iter(identity_of(embeds))
        return Prompt(
            token_ids=listed,
            embeds=rows,
            looked_up=runs_of(~own),
            identity=[next(hashes) if token == NO_TOKEN else token for token in listed],
            modality_tokens={"text": len(listed)},
        )

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._decoder.embed(token_ids)

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (final hidden states [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._decoder.logits(hidden)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Detokenize; empty if the checkpoint has no tokenizer."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)


def _decoder(ctx: AutoregressiveContext, model: PreTrainedModel) -> PagedDecoder | GatheredDecoder:
    if not attends_itself(model):
        fused = ctx.fused and ctx.group is None
        return PagedDecoder(model, quantization=ctx.quantization, lora=ctx.lora, fused=fused)
    for field, asked in (("lora", ctx.lora), ("tensor_parallel", ctx.group)):
        if asked is not None:
            raise ConfigError(
                f"{type(model).__name__} uses its own attention, which does not support {field}", field=field
            )
    return GatheredDecoder(model, quantization=ctx.quantization)

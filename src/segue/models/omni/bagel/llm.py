"""The stage that reads a prompt with rows of images and writes the reply: the decoder's understanding expert.

T prompt tokens, n patches of an image, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.messages.errors import StageFailed
from segue.messages.sampling import SamplingParams
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.decoder import UNDERSTANDING
from segue.models.omni.bagel.input import END
from segue.models.omni.bagel.loading import load_language_model
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.text.tokenizer import decode, load_tokenizer, vocabulary_of


@dataclass(slots=True)
class _State:
    """The inputs of one request that have arrived."""

    from_encoder: bool
    """The request visits the encoder stage: wait for its rows."""
    prompt: Payload | None = None
    rows: list[Payload] = field(default_factory=list)
    encoder_done: bool = False


class LLM:
    """`AutoregressiveModel` over the decoder."""

    axes = 1
    conditioned = False
    recordable = True

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint."""
        config = read_config(ctx.model_dir)
        net = load_language_model(ctx, config, UNDERSTANDING)
        self._decoder = PagedDecoder(net, quantization=ctx.quantization, fused=ctx.fused)
        self._tokenizer = load_tokenizer(ctx.model_dir)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self.device = self._decoder.device
        self.kv: KVSpec = replace(self._decoder.kv, bidirectional=frozenset(range(config.llm.num_hidden_layers)))
        self.vocab_size: int = self._decoder.vocab_size
        self.weight_bytes: int = self._decoder.weight_bytes
        longest = config.llm.max_position_embeddings
        self.max_model_len: int = min(ctx.max_model_len or longest, longest)
        end = None if self._tokenizer is None else self._tokenizer.get_vocab().get(END)
        self.end_token_ids = frozenset() if end is None else frozenset({end})
        self.default_sampling = SamplingParams(temperature=0.0)  # as the reference answers

    def begin(self, request: StageRequest) -> _State:
        return _State("encoder" in request.upstreams)

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Collect the input stage's prompt and the encoder's rows; return the prompt once complete."""
        if upstream == "encoder":
            state.rows += payload["media"]
            state.encoder_done = final
        else:
            state.prompt = payload
        if state.prompt is None or (state.from_encoder and not state.encoder_done):
            return Fed()
        prompt, state.rows = self._prompt(state.prompt, state.rows), []  # the rows may be on the device: drop them here
        return Fed(prompt=prompt)

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._decoder.embed(token_ids)

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (final hidden states [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._decoder.logits(hidden)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Detokenize; empty if the checkpoint has no tokenizer."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    @torch.inference_mode()
    def _prompt(self, payload: Payload, rows: list[Payload]) -> Prompt:
        ids, images = payload["token_ids"].cpu(), payload["media"]
        if [image["hash"] for image in images] != [image["hash"] for image in rows]:
            raise StageFailed(f"the prompt has {len(images)} images, but the encoder sent {len(rows)} that differ")
        if not images:
            return Prompt(token_ids=ids.tolist(), modality_tokens={"text": len(ids)})
        embeds = self._decoder.embed(ids.to(self.device))
        identity: list[int | bytes] = list(ids.tolist())
        spans = []
        for image, encoded in zip(images, rows, strict=True):
            start, stop = image["span"]
            embeds[start + 1 : stop - 1] = encoded["rows"].to(device=self.device, dtype=embeds.dtype)
            identity[start:stop] = _identities(image["hash"], stop - start)
            spans.append((start, stop))
        seen = sum(stop - start for start, stop in spans)
        return Prompt(
            token_ids=ids.tolist(),
            embeds=embeds.cpu(),  # the engine does not account device memory that a request holds beyond its KV
            positions=payload["positions"].to(self.device),
            position_delta=payload["position_delta"],
            identity=identity,
            bidirectional=spans,
            modality_tokens={"text": len(ids) - seen, "image": seen},
        )


def _identities(content: bytes, count: int) -> list[int | bytes]:
    """What each token of an image's span is, for the prefix cache: the whole image, and its place there. Positions
    follow from what is before it, which the cache's keys include."""
    return [hashlib.blake2b(content + b"%d" % place, digest_size=16).digest() for place in range(count)]

"""The language model: reads text and patches of codes, and generates rows: a text token and the codes of a patch.

T prompt tokens, H width, G frames of a patch, K codes of a frame; a row has 1 + G · K entries.

A patch counts where the text token is `<|empty|>`; with any other, all its codes are empty. Inputs: text tokens by
their own embedding, patches by the patch encoder, which nothing but their codes enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

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
from segue.kernels.prepare import DECODE_ROWS, Plan, prepare, prepared_bytes
from segue.messages.sampling import SamplingParams
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.speech.recordings import PromptParts
from segue.models.shared.text.tokenizer import decode, vocabulary_of
from segue.models.speech.mimo_audio.config import read_config
from segue.models.speech.mimo_audio.loading import load_language_model
from segue.models.speech.mimo_audio.patch_decoder import PatchDecoder, code_sampling
from segue.models.speech.mimo_audio.tokens import EMPTY, SPOKEN_END, STOP, TURN_END, id_of, tokenizer_of


@dataclass
class _Parts(PromptParts):
    """Earlier replies have patches, too."""

    replies: list[tuple[int, Tensor]] = field(default_factory=list)
    """How many recordings are before each, and its patches."""

    def take(self, upstream: str, payload: Payload) -> None:
        super().take(upstream, payload)
        if upstream != "encoder":
            self.replies = [(one["after"], one["codes"].cpu()) for one in payload.get("replies", [])]

    def in_order(self) -> list[Tensor]:
        """Recordings and replies in prompt order."""
        patches = [((index, 1), codes) for index, codes in self.recordings.items()]
        patches += [((before, 0), codes) for before, codes in self.replies]
        patches.sort(key=lambda one: one[0])  # of replies with equally many recordings before them, the order stays
        return [codes for _, codes in patches]


class LLM:
    """`AutoregressiveModel` that yields rows, and text.

    Options: `audio_temperature`, `audio_top_k`, `audio_top_p`, with which codes are drawn.
    """

    axes = 1
    conditioned = False
    recordable = True

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable or unsupported checkpoint."""
        config = read_config(ctx.model_dir)
        sampling = code_sampling(ctx)
        net = load_language_model(ctx, config)
        self.net = net
        self._decoder = PagedDecoder(net.decoder, quantization=ctx.quantization, fused=ctx.fused)
        for part in (net.input_local_transformer, net.local_transformer):
            prepare(part, ctx.device, Plan(recognised=True, rows=DECODE_ROWS))
        self._patches = PatchDecoder(net, config, sampling)
        self._tokenizer = tokenizer_of(ctx.model_dir, config)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self._empty = id_of(self._tokenizer, EMPTY)
        self._spoken_end = id_of(self._tokenizer, SPOKEN_END)
        self.groups: int = 1 + config.codes_per_patch
        self._group = config.group_size
        self.silent = torch.tensor(config.empty_codes * config.group_size, device=ctx.device)
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.kv: KVSpec = self._decoder.kv
        self.weight_bytes: int = held_bytes(net) + prepared_bytes(net)
        self.vocab_size: int = config.vocab_size
        longest = config.max_position_embeddings
        self.max_model_len: int = min(ctx.max_model_len or longest, longest)
        self.end_token_ids = frozenset(id_of(self._tokenizer, token) for token in (STOP, TURN_END))
        self.default_sampling = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=8192)

    def begin(self, request: StageRequest) -> _Parts:
        """A reply that is spoken ends with its speech, even if nobody listens."""
        sampling = request.sampling
        spoken = request.downstreams or request.request.options.get("few_shot")
        if spoken and not sampling.ignore_eos:
            ends = sorted({*(sampling.stop_token_ids or ()), self._spoken_end})
            request.sampling = msgspec.structs.replace(sampling, stop_token_ids=ends)
        return _Parts()

    @torch.inference_mode()
    def feed(self, state: _Parts, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """The conversation's ids and its recordings' codes → the prompt, once all have arrived."""
        state.take(upstream, payload)
        if state.prompted or state.ids is None:
            return Fed()
        patches = state.in_order()
        if sum(map(len, patches)) < int((state.ids == self._empty).sum()):
            return Fed()
        state.prompted = True
        return Fed(prompt=self._prompt(state.ids, patches))

    @torch.inference_mode()
    def embed(self, token_ids: Tensor, conditioning: Tensor | None) -> Tensor:
        """[n, 1 + G · K] rows, or [n] text ids → [n, H]."""
        if token_ids.ndim == 1:
            return self._decoder.embed(token_ids)
        text = token_ids[:, 0]
        rows, spoken = self._decoder.embed(text), self.speaks(text)
        if spoken.is_cuda or spoken.any():  # on a GPU, to look would be to wait
            rows = torch.where(spoken[:, None], self._encoded(token_ids[:, 1:]), rows)
        return rows

    def forward(self, embeds: Tensor, batch: FlatBatch) -> tuple[Tensor, None]:
        """[tokens, H] → (hidden states after the final norm [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch), None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._decoder.logits(hidden)

    @torch.inference_mode()
    def advance(self, hidden: Tensor, ids: Tensor, draws: Draws) -> Tensor:
        """[n, H], [n] text tokens → [n, G · K]."""
        return self._patches(hidden, draws)

    def speaks(self, ids: Tensor) -> Tensor:
        """[n] text tokens → [n] bool: where the token is `<|empty|>`, the patch counts."""
        return ids == self._empty

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def _encoded(self, codes: Tensor) -> Tensor:
        """[n, G · K] → [n, H]."""
        return self.net.encode(codes.unflatten(1, (self._group, -1)))

    def _prompt(self, ids: Tensor, recordings: Sequence[Tensor]) -> Prompt:
        """Put the recordings' patches in the places of their tokens."""
        embeds = self._decoder.embed(ids.to(self.device))
        codes = self.silent.cpu().repeat(len(ids), 1)
        places = (ids == self._empty).nonzero()[:, 0]
        if len(places):
            codes[places] = torch.cat(list(recordings))
            embeds[places.to(self.device)] = self._encoded(codes[places].to(self.device))
        rows = torch.cat([ids[:, None], codes], dim=1).tolist()
        spoken = len(places)
        return Prompt(
            token_ids=ids.tolist(),
            embeds=embeds.cpu(),  # device memory belongs to keys and values
            identity=[row_identity(row) for row in rows],  # as of generated ones
            modality_tokens={"text": len(ids) - spoken} | ({"audio": spoken} if spoken else {}),
        )

"""The decoder: reads the forced tokens, attends to a window's encoder states, writes the text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.messages.speech import time_mark
from segue.models.shared.checkpoint.files import read_object
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.generation import default_sampling, end_tokens, generation_of, whole_length
from segue.models.shared.decoder.interface import decoder_of, name_of
from segue.models.shared.decoder.kept_media import KeptMedia
from segue.models.shared.encoder_cache import cache_bytes
from segue.models.shared.text.tokenizer import decode, load_tokenizer, vocabulary_of
from segue.models.speech.speech_seq2seq.facts import speech_facts
from segue.models.speech.speech_seq2seq.hearing import Window, step_windows
from segue.models.speech.speech_seq2seq.loading import separate_cross_attention, without_encoder
from segue.models.speech.speech_seq2seq.rule import SpeechRule

_WINDOWS = 8
"""Default number of windows whose keys and values are kept."""
_EXAMPLE = 40
"""Encoder rows of the load check's example."""


@dataclass(slots=True)
class _State:
    """The inputs of one request that have arrived."""

    asked: Payload | None = None
    encoded: Payload | None = None


class LLM:
    """`AutoregressiveModel` over the decoder of an encoder-decoder.

    Option: `cache_bytes`, for keys and values of windows; they count to `weight_bytes`, because they use the same
    memory.
    """

    axes = 1
    conditioned = False
    recordable = False

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint or an unsupported model."""
        config = load_config(ctx)
        self.max_model_len: int = whole_length(config, config.max_target_positions, "", ctx.max_model_len)
        model = without_encoder(ctx)
        example = torch.randn(1, _EXAMPLE, config.d_model, generator=torch.Generator().manual_seed(0))
        example = example.to(model.device, model.dtype)
        layers = separate_cross_attention(model, example)
        self._example = example
        inner = name_of(decoder_of(model), model)
        self._decoder = PagedDecoder(model, inner=inner, fused=ctx.fused, encoder_states=example)
        self._tokenizer = load_tokenizer(ctx.model_dir)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self.device = self._decoder.device
        self.kv: KVSpec = self._decoder.kv
        self.vocab_size: int = self._decoder.vocab_size
        shape = self.kv.layout(max_model_len=self.max_model_len).shapes[0]
        row_bytes = layers * shape.kv_heads * (shape.head_dim + shape.value_dim) * self._decoder.dtype.itemsize
        capacity = _WINDOWS * config.max_source_positions * row_bytes
        if "cache_bytes" in ctx.options:
            capacity = cache_bytes(ctx)
        self.kept = KeptMedia(frozenset(range(layers)), row_bytes, capacity)
        self.weight_bytes: int = self._decoder.weight_bytes + capacity
        generation = generation_of(ctx.model_dir, config)
        self._facts = speech_facts(read_object(ctx.model_dir / "config.json"), ctx.model_dir)
        self.end_token_ids = end_tokens(generation, self._tokenizer)
        if len(self.end_token_ids) != 1:
            raise ConfigError(
                f"generation_config.json: eos_token_id is {generation.eos_token_id!r}; it must be one token, after "
                "those of words",
                field="eos_token_id",
            )
        values: dict[str, Any] = generation.to_dict()
        self._rule = SpeechRule(
            begin_suppress=list(values.get("begin_suppress_tokens") or ()),
            times=False,
            first_time=self._facts.first_time,
            end=next(iter(self.end_token_ids)),
            latest_begin=values.get("max_initial_timestamp_index"),
        )
        self.default_sampling: SamplingParams = default_sampling(generation)

    def begin(self, request: StageRequest) -> _State:
        return _State()

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Collect the input stage's tokens and the encoder's rows; return the prompt once complete."""
        if upstream == "encoder":
            state.encoded = payload
        else:
            state.asked = payload
        if state.asked is None or state.encoded is None:
            return Fed()
        return Fed(prompt=self._prompt(state.asked, state.encoded))

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._decoder.embed(token_ids)

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (final hidden states [tokens, H], nothing captured)."""
        others = step_windows(batch.prompts, self.kept, self._example)
        return self._decoder.forward(embeds, batch, **others), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._decoder.logits(hidden)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Detokenize, with timestamps written as `<|1.24|>`; readers of the text remove them."""
        pieces: list[str] = []
        words: list[int] = []
        for token in token_ids:
            if token >= self._facts.first_time:
                pieces += [self._words(words, skip_special_tokens), time_mark(token - self._facts.first_time)]
                words = []
            else:
                words.append(token)
        return "".join([*pieces, self._words(words, skip_special_tokens)])

    def _words(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens) if token_ids else ""

    def _prompt(self, asked: Payload, encoded: Payload) -> Prompt:
        ids = asked["token_ids"].tolist()
        rows = encoded["rows"].cpu()  # the engine does not account such device memory
        # the first token's key identifies the window, and so for all following tokens
        first = hashlib.blake2b(encoded["hash"], digest_size=16)
        first.update(b"%d" % ids[0])
        rule = self._rule.copy()
        rule.times = asked["times"]
        return Prompt(
            token_ids=ids,
            identity=[first.digest(), *ids[1:]],
            modality_tokens={"text": len(ids)},
            cross_inputs=Window(encoded["hash"], rows),
            rule=None if asked["detect"] else rule,
        )

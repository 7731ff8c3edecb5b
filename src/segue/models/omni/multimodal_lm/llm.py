"""The stage model of a multimodal language model: reads a prompt with media rows, writes the reply.

T prompt tokens, n rows of one unit, L layers that get deep features, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.kernels.attention.interface import Chunked
from segue.kernels.linear.lora import Lora
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams
from segue.models.omni.multimodal_lm.bidirectional import MaskProbe, Sight
from segue.models.omni.multimodal_lm.loading import (
    axes_of,
    holder_of,
    inner_of,
    load_whole,
    media_tokens,
)
from segue.models.omni.multimodal_lm.processor import Processor
from segue.models.omni.multimodal_lm.token_rows import stand_ins, token_rows
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.deep_features import DEEP, MEDIA, deep_features
from segue.models.shared.decoder.generation import context_length, default_sampling, end_tokens, generation_of
from segue.models.shared.decoder.interface import decoder_of
from segue.models.shared.library import PreTrainedModel
from segue.models.shared.lora import named_adapter, with_adapter
from segue.models.shared.text.prompt_embeds import NO_TOKEN, identity_of
from segue.models.shared.text.tokenizer import decode, load_tokenizer, vocabulary_of


@dataclass(slots=True)
class _State:
    """The inputs of one request that have arrived."""

    from_encoder: bool
    """The request visits the encoder stage: wait for its rows."""
    adapter: Lora | None = None
    prompt: Payload | None = None
    rows: list[Payload] = field(default_factory=list)
    encoder_done: bool = False

    @property
    def ready(self) -> bool:
        return self.prompt is not None and (self.encoder_done or not self.from_encoder)


class LLM:
    """`AutoregressiveModel` over the text decoder of any multimodal model of transformers."""

    conditioned = False
    recordable = True

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint, an unsupported model or option."""
        config = load_config(ctx)
        text = config.get_text_config(decoder=True)
        self.max_model_len: int = context_length(text, ctx.max_model_len)
        model = load_whole(ctx, config)
        self.axes = axes_of(model, text)
        self._sight = Sight()
        """The bidirectional spans of media."""
        self._decoder = self._paged(ctx, model)
        self.lora = self._decoder.lora
        self.library_decoder = self._decoder.model
        self._tokenizer = load_tokenizer(ctx.model_dir)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self.device = self._decoder.device
        self.kv: KVSpec = replace(self._decoder.kv, bidirectional=self._sight.layers(text))
        windows = self.kv.layout(max_model_len=self.max_model_len).windows
        spans = (window.size if isinstance(window, Chunked) else window for window in windows if window is not None)
        self._longest_whole: int = min(spans, default=self.max_model_len)
        self.vocab_size: int = self._decoder.vocab_size
        self.weight_bytes: int = self._decoder.weight_bytes
        generation = generation_of(ctx.model_dir, config)
        self.end_token_ids = end_tokens(generation, self._tokenizer)
        self.default_sampling: SamplingParams = default_sampling(generation)

    def _paged(self, ctx: AutoregressiveContext, model: PreTrainedModel) -> PagedDecoder:
        probe = _probe(ctx, model)
        self._rows = token_rows(probe)
        self._sight = replace(probe, plain=self._rows).sight()
        return PagedDecoder(
            model,
            inner=inner_of(model),
            quantization=ctx.quantization,
            lora=ctx.lora,
            fused=ctx.fused,
            read_as=stand_ins(probe),
            rows=self._rows,
        )

    def begin(self, request: StageRequest) -> _State:
        """Raises `NotFound` for an unknown LoRA adapter."""
        return _State("encoder" in request.upstreams, named_adapter(self.lora, request.request.adapter))

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Collect the input stage's prompt and the encoder's media rows; return the prompt once complete."""
        if upstream == "encoder":
            state.rows += payload["media"]
            state.encoder_done = final
        else:
            state.prompt = payload
        if not (state.ready and state.prompt):
            return Fed()
        prompt, state.rows = self._prompt(state.prompt, state.rows), []  # the rows may be on the device: drop them here
        return Fed(prompt=prompt if state.adapter is None else with_adapter(prompt, state.adapter))

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._decoder.embed(token_ids)

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (final hidden states [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch, **deep_features(batch, embeds)), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._decoder.logits(hidden)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Detokenize; empty if the checkpoint has no tokenizer."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    @torch.inference_mode()
    def _prompt(self, payload: Payload, rows: list[Payload]) -> Prompt:
        ids, units = payload["token_ids"].cpu(), payload["media"]
        check_same_media(units, rows)
        counts = {"text": len(ids)}
        given = payload.get("embeds")
        if given is not None and self._decoder.reads_ids:
            raise InvalidRequest(
                "prompt_embeds are set, but this model's layers also look up the prompt's token ids",
                field="prompt_embeds",
            )
        if self._sight.whole and not units:  # the library does not define the mask of such a prompt
            raise InvalidRequest(
                f"a prompt of this model has media ({', '.join(sorted(self._sight.kinds))}); this one has none",
                field="messages",
            )
        if not units and given is None:
            return Prompt(token_ids=ids.tolist(), modality_tokens=counts)
        embeds = self._rows(ids.clamp(min=0).to(self.device), {unit["kind"] for unit in units})
        if given is not None:
            embeds[(ids == NO_TOKEN).to(self.device)] = given.to(device=self.device, dtype=embeds.dtype)
        media = torch.zeros(len(ids), dtype=torch.bool)
        layers = max((medium["rows"].shape[1] for medium in rows), default=1) - 1
        deep = embeds.new_zeros(len(ids), layers, embeds.shape[1])
        for unit, medium in zip(units, rows, strict=True):
            places = unit["places"].cpu()
            own = medium["rows"].to(device=self.device, dtype=embeds.dtype)
            embeds[places.to(self.device)] = own[:, 0]
            deep[places.to(self.device), : own.shape[1] - 1] = own[:, 1:]
            media[places] = True
            counts[unit["kind"]] = counts.get(unit["kind"], 0) + len(own)
            counts["text"] -= len(own)
        positions = payload.get("positions")
        bidirectional = self._sight.spans(units, len(ids))
        together = max((stop - start for start, stop in bidirectional), default=0)
        if (self._sight.whole or self._sight.beyond) and together > self._longest_whole:
            raise InvalidRequest(
                f"{together} tokens of the prompt form a bidirectional span; this model's sliding windows allow "
                f"{self._longest_whole}",
                field="messages",
            )
        return Prompt(
            token_ids=ids.tolist(),
            embeds=embeds.cpu(),  # the engine does not account device memory that a request holds beyond its KV
            positions=None if positions is None else positions.to(self.device),
            position_delta=payload.get("position_delta", 0),
            identity=_identity(ids, given, units, positions, bidirectional),
            bidirectional=bidirectional,
            modality_tokens=counts,
            extras={MEDIA: media, DEEP: deep[media.to(self.device)].cpu()} if layers else {},
        )


def check_same_media(units: list[Payload], rows: list[Payload]) -> None:
    """Check that the encoder sent the media of the prompt. Raises `StageFailed`."""
    if [unit["hash"] for unit in units] != [medium["hash"] for medium in rows]:
        raise StageFailed(f"the prompt has {len(units)} media, but the encoder sent {len(rows)} that differ")


def _probe(ctx: AutoregressiveContext, model: PreTrainedModel) -> MaskProbe:
    decoder = decoder_of(model)
    dtype = model.get_input_embeddings().weight.dtype
    processor = Processor(ctx.model_dir, media_tokens(ctx))
    return MaskProbe(type(model).__name__, holder_of(model), decoder, processor, model.device, dtype)


def _identity(
    ids: torch.Tensor,
    given: torch.Tensor | None,
    units: list[Payload],
    positions: torch.Tensor | None,
    bidirectional: list[tuple[int, int]],
) -> list[int | bytes]:
    """[T] prefix-cache keys: a text token's id; for a row that the client gave, its digest; for a media row, the digest
    of the medium, the row's index and its position; for bidirectional rows, of the whole span."""
    hashes = iter([] if given is None else identity_of(given.cpu()))
    what: list[int | bytes] = [next(hashes) if token == NO_TOKEN else token for token in ids.tolist()]
    where = [()] * len(ids) if positions is None else positions.T.tolist()
    for unit in units:
        for row, place in enumerate(unit["places"].tolist()):
            digest = hashlib.blake2b(unit["hash"], digest_size=16)
            digest.update(repr((row, where[place])).encode())
            what[place] = digest.digest()
    for start, stop in bidirectional:
        whole = hashlib.blake2b(repr(what[start:stop]).encode(), digest_size=16)
        for place in range(start, stop):
            own = whole.copy()
            own.update(b"%d" % (place - start))
            what[place] = own.digest()
    return what

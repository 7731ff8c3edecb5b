"""The thinker: the language model that reads the prompt and writes the reply.

T prompt tokens, H hidden size, `tokens` all tokens of a flat batch. The decoder is transformers' own; only its
attention is the engine's (`segue_paged`), and only in this decoder: the encoders are a separate stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.kernels.linear.lora import Lora
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen2_5_omni.generation import GENERATE, thinker_ends, thinker_generation
from segue.models.omni.qwen2_5_omni.loading import load_config, load_thinker
from segue.models.omni.qwen2_5_omni.positions import MediumFacts, Positions, facts_of
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.generation import context_length, default_sampling
from segue.models.shared.lora import named_adapter, with_adapter
from segue.models.shared.omni.say import given_reply
from segue.models.shared.text.tokenizer import decode, tokenizer_for, vocabulary_of

MEDIA_ROWS = "media_rows"
"""`Prompt.extras`: [T] bool, true where the embedding is a row of a medium."""


@dataclass(slots=True)
class _State:
    """The inputs of one request that have arrived."""

    from_encoder: bool
    """The request visits the encoder stage: wait for its rows."""
    adapter: Lora | None
    token_ids: torch.Tensor | None = None
    media: list[MediumFacts] = field(default_factory=list)
    use_audio_in_video: bool = False
    reply: list[int] = field(default_factory=list)
    """The text to say, if the request gives it."""
    embeds: list[tuple[str, bytes, torch.Tensor]] = field(default_factory=list)
    """(kind, hash, [n, H]) in prompt order."""
    encoder_done: bool = False

    @property
    def ready(self) -> bool:
        return self.token_ids is not None and (self.encoder_done or not self.from_encoder)


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
        self._positions = Positions(thinker)
        self._tokenizer = tokenizer_for(ctx)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self._kinds = {
            thinker.image_token_id: "image",
            thinker.audio_token_id: "audio",
            thinker.video_token_id: "video",
        }
        self.device = ctx.device
        self.vocab_size: int = text.vocab_size
        self.max_model_len: int = context_length(text, ctx.max_model_len)
        capture_width = text.hidden_size if config.enable_audio_output else 0
        self.kv: KVSpec = replace(self._decoder.kv, capture_width=capture_width, capture_dtype=ctx.dtype)
        self.weight_bytes: int = self._decoder.weight_bytes
        generation = thinker_generation(thinker, ctx.model_dir)
        self.end_token_ids = thinker_ends(generation, thinker, ctx.model_dir, self._tokenizer)
        self.default_sampling: SamplingParams = default_sampling(generation, GENERATE)

    def begin(self, request: StageRequest) -> _State:
        """Raises `NotFound` for an unknown LoRA adapter."""
        return _State("encoder" in request.upstreams, named_adapter(self.lora, request.request.adapter))

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Collect the prompt's facts from the input stage and the media rows from the encoder; return the prompt once
        complete."""
        if upstream == "encoder":
            state.embeds.extend((item["kind"], item["hash"], item["embeds"]) for item in payload["media"])
            state.encoder_done = final
        else:
            state.token_ids = payload["token_ids"].cpu()
            state.media = [facts_of(item) for item in payload["media"]]
            state.use_audio_in_video = bool(payload.get("use_audio_in_video", False))
            state.reply = payload.get("reply", [])
        if not state.ready:
            return Fed()
        prompt, state.embeds = self._prompt(state), []  # the embeddings may be on the device: drop them here
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
        masks = []
        for prompt, start, stop in batch.prompts:
            mask = torch.zeros(stop - start, dtype=torch.bool)
            if prompt is not None and (rows := prompt.extras.get(MEDIA_ROWS)) is not None:
                own = rows[start:stop]
                mask[: len(own)] = own
            masks.append(mask)
        media = torch.cat(masks)
        if not media.any():
            return embeds
        return embeds.masked_fill(media.to(embeds.device)[:, None], 0)

    def _prompt(self, state: _State) -> Prompt:
        ids = state.token_ids
        assert ids is not None
        self._check_ids(ids)
        embeds, media_rows, counts = self._with_media(ids, state)
        positions, delta = self._positions(ids, state.media, use_audio_in_video=state.use_audio_in_video)
        return Prompt(
            token_ids=ids.tolist(),
            embeds=None if embeds is None else embeds.cpu(),
            positions=positions.to(self.device),
            position_delta=delta,
            identity=self._identity(ids, state) if state.media else None,
            modality_tokens=counts,
            reply=given_reply(state.reply, self.end_token_ids),
            extras={MEDIA_ROWS: media_rows} if state.media else {},
        )

    def _check_ids(self, ids: torch.Tensor) -> None:
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.numel():
            raise InvalidRequest(
                f"prompt_token_ids has {int(wrong[0])}; this model's ids are 0 to {self.vocab_size - 1}",
                field="prompt_token_ids",
            )

    @torch.inference_mode()
    def _with_media(self, ids: torch.Tensor, state: _State) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, int]]:
        """(embeddings [T, H] with media rows in place, or None without media; [T] bool, true at media rows; prompt
        tokens per modality)."""
        if [(kind, key) for kind, key, _ in state.embeds] != [(medium.kind, medium.hash) for medium in state.media]:
            raise StageFailed(
                f"the prompt has {len(state.media)} media, but the encoder sent {len(state.embeds)} that differ"
            )
        media_rows = torch.zeros(len(ids), dtype=torch.bool)
        counts = {"text": len(ids)}
        if not state.media:
            return None, media_rows, counts
        embeds = self._decoder.embed(ids.to(self.device))
        for token_id, kind in self._kinds.items():
            own = [rows for of, _, rows in state.embeds if of == kind]
            if not own:
                continue
            places = ids == token_id
            rows = torch.cat([part.to(device=self.device, dtype=embeds.dtype) for part in own])
            if len(rows) != int(places.sum()):
                raise InvalidRequest(
                    f"the prompt has {int(places.sum())} {kind} placeholder tokens; its {kind} content has {len(rows)} "
                    "rows",
                    field="messages",
                )
            embeds[places.to(self.device)] = rows
            media_rows |= places
            counts[kind] = len(rows)
            counts["text"] -= len(rows)
        return embeds, media_rows, counts

    def _identity(self, ids: torch.Tensor, state: _State) -> list[int | bytes]:
        """[T] the prefix-cache key of each token: a text token's id; for a media row, the medium's digest + index."""
        what: list[int | bytes] = list(ids.tolist())
        for token_id, kind in self._kinds.items():
            own = [
                (medium.digest(state.use_audio_in_video), len(rows))
                for medium, (_, _, rows) in zip(state.media, state.embeds, strict=True)
                if medium.kind == kind
            ]
            places = (ids == token_id).nonzero()[:, 0].tolist() if own else []
            named = [digest + index.to_bytes(4, "little") for digest, length in own for index in range(length)]
            for place, name in zip(places, named, strict=True):
                what[place] = name
        return what

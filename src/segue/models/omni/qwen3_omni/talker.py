"""The talker: generates rows of codes for the thinker's reply, taking one token of the reply with each row.

E width of the talker, H of the thinker, G codes per row. The thinker sends a row per token of its sequence: the token's
embedding, at media the hidden state of its layer `accept_hidden_layer`.

Inputs (from `generate` of `Qwen3OmniMoeForConditionalGeneration`), text rows and hidden states projected to E:

    user turns    the rows of all tokens of the prompt's user turns
    assistant     the turn's first three tokens · four pads · text-begin · its fourth token, the reply's first text; to
                  the last six are added the embeddings of nothink, think-begin, think-end, voice, codec pad and begin
    row k         the sum of its codes' embeddings + the turn's token 4 + k; after the last one that the thinker
                  forwarded the text-end row once, then pads until the end

A reply's last token is never forwarded, so never spoken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Draws, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.messages.errors import InvalidRequest, NotFound, StageFailed, nearest
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen3_omni.family import voice_names
from segue.models.omni.qwen3_omni.loading import load_config, load_talker, load_text_rows
from segue.models.omni.qwen3_omni.prompt import positions_of
from segue.models.omni.qwen3_omni.speech import assistant_turn, media_in, user_tokens
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.omni.positions import facts_of
from segue.models.shared.speech.code_predictor import CodePredictor, Filters

_NEVER = -1e30  # finite, because engines treat an infinite logit as a broken forward
_RESERVED = 1024
"""The last ids of its vocabulary: `generate` suppresses them, except for the end token."""
_FILTERS = Filters(top_k=50, top_p=0.8)
"""How `generate` samples the codes after the first, whatever the caller says; greedily if the talker is greedy."""
_LEAD = 4
"""Tokens of the assistant's turn in the prompt."""


@dataclass(slots=True)
class _State:
    """The parts of one request's sequence that have arrived."""

    voice: int
    """Codec id of the voice."""
    taken: int = 0
    """Rows of the thinker's sequence taken so far; repeated earlier rows (the thinker restarted) are dropped."""
    facts: Payload | None = None
    """The thinker's prompt: ids and media."""
    head: list[torch.Tensor] = field(default_factory=list)
    """Rows kept until the prompt can be built."""
    prompted: bool = False


class Talker:
    """`AutoregressiveModel` that yields rows, over the talker and its code predictor; the thinker's rows drive it."""

    axes = 3
    conditioned = True
    recordable = True
    vocabulary = None

    def __init__(self, ctx: AutoregressiveContext) -> None:
        config = load_config(ctx)
        talker, text = config.talker_config, config.talker_config.text_config
        net = load_talker(ctx, config)
        self._config = config
        self.net = net
        self._model = net.model
        self._decoder = PagedDecoder(
            net,
            net.model,
            quantization=ctx.quantization,
            fused=ctx.fused and ctx.group is None,
            rows=net.model.codec_embedding,
            head="codec_head",
            of_ids=self._of_ids,
        )
        self.library_decoder = self._decoder.model
        self._text, self._hidden = net.text_projection, net.hidden_projection
        predictor = net.code_predictor
        self._predictor = CodePredictor(predictor.model, predictor.model.codec_embedding, predictor.lm_head, _FILTERS)
        self.groups: int = talker.num_code_groups
        self.device = ctx.device
        self.dtype = ctx.dtype
        rows = load_text_rows(ctx, config, [config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id])
        with torch.inference_mode():
            self._begin, self._end, self._pad = self._text(rows).split(1)
        self._positions = positions_of(config.thinker_config)
        self._voices: dict[str, int] = dict(talker.speaker_id or {})
        self.voices = voice_names(self._voices)
        self.kv: KVSpec = self._decoder.kv
        own = torch.nn.ModuleList([net.code_predictor, self._text, self._hidden])
        self.weight_bytes: int = self._decoder.weight_bytes + held_bytes(own)
        self.vocab_size: int = text.vocab_size
        self.max_model_len: int = min(ctx.max_model_len or text.max_position_embeddings, text.max_position_embeddings)
        self.end_token_ids = frozenset({talker.codec_eos_token_id})
        spoken = range(min(self.vocab_size - _RESERVED, config.code2wav_config.codebook_size))
        self._codes = len(spoken)
        unspoken = [token for token in range(len(spoken), self.vocab_size) if token not in self.end_token_ids]
        self._unspoken = torch.tensor(unspoken, device=ctx.device)
        self.default_sampling = SamplingParams(
            temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05, max_tokens=4096
        )

    def begin(self, request: StageRequest) -> _State:
        """Raises `NotFound` for an unknown voice, `InvalidRequest` if the request forbids every code."""
        voice = request.request.voice or self.voices[0]
        if voice.lower() not in self._voices:
            raise NotFound(
                f"voice is {voice!r}{nearest(voice, self.voices)}; "
                f"this model speaks with: {', '.join(sorted(self.voices))}",
                field="voice",
            )
        sampling = request.sampling
        suppressed = set(sampling.suppress_tokens or ())
        if suppressed.issuperset(range(self._codes)):
            name = f"sampling.{request.stage}.suppress_tokens"
            raise InvalidRequest(f"{name} leaves none of the {self._codes} codes of the vocoder", field=name)
        if sampling.ignore_eos:
            # an ignored end token yields no audio: it lies outside the vocoder's codebook
            request.sampling = msgspec.structs.replace(
                sampling, suppress_tokens=sorted(suppressed | self.end_token_ids)
            )
        return _State(self._voices[voice.lower()])

    @torch.inference_mode()
    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Rows of the thinker's sequence → the prompt, once the turn's fourth token has arrived, and rows for codes."""
        if (facts := payload.get("prompt")) is not None and state.facts is None:
            state.facts = facts
        rows = self._new_rows(state, payload)
        if rows is not None and final:
            rows = self._spoken(state, rows, payload["reply"])
        fed = Fed()
        if not state.prompted:
            if rows is not None:
                state.head.append(rows)
            if state.facts is None:
                fed.nothing = final
                return fed
            ids = state.facts["token_ids"]
            start = assistant_turn(ids, self._config)
            if state.taken < max(start + _LEAD, len(ids)):
                fed.nothing = final  # a reply of one token has no row, so there is nothing to speak
                return fed
            head = torch.cat(state.head)
            state.head.clear()
            state.prompted = True
            fed.prompt = self._prompt(state, head, start)
            rows = head[start + _LEAD :]
        if rows is not None:
            rows = self._text(rows)
        if final:
            fed.conditioning = self._end if rows is None else torch.cat([rows, self._end])
            fed.tail = self._pad[0]
        else:
            fed.conditioning = rows
        return fed

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n, G] rows of codes, [n, E] rows of the reply → [n, E]."""
        codes = token_ids if token_ids.ndim == 2 else token_ids[:, None]
        rows = [self._model.codec_embedding(codes[:, 0])]
        rows += [self._predictor.embed(group, codes[:, group]) for group in range(1, codes.shape[1])]
        embeds = torch.stack(rows, dim=1).sum(1)  # as in the library: rounded once
        return embeds if conditioning is None else embeds + conditioning

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, E] → (hidden states after the final norm [tokens, E], None)."""
        return self._decoder.forward(embeds, batch), None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, E] → [rows, vocab] float32, without the ids that are neither codes nor the end token."""
        return self._decoder.logits(hidden).index_fill_(1, self._unspoken, _NEVER)

    @torch.inference_mode()
    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, E], [n] codes 0 → [n, G - 1]."""
        return self._predictor(hidden, self._model.codec_embedding(ids), draws)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise StageFailed("the talker makes codes, not text")

    def _of_ids(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Arguments of the library's forward for codes 0 [n], at consecutive positions."""
        positions = torch.arange(len(ids), device=ids.device).expand(self.axes, 1, -1)
        return {"inputs_embeds": self._model.codec_embedding(ids)[None], "position_ids": positions}

    def _new_rows(self, state: _State, payload: Payload) -> torch.Tensor | None:
        """The rows of a chunk that were not taken before, [k, H] or None; marks them as taken."""
        rows = payload.get("rows")
        if rows is None:
            return None
        start = payload["rows_start"]
        if start > state.taken:
            raise StageFailed(f"the thinker's rows {state.taken} to {start - 1} did not arrive")
        fresh = rows[state.taken - start :]
        if not len(fresh):
            return None
        state.taken += len(fresh)
        return fresh.to(device=self.device, dtype=self.dtype)

    def _spoken(self, state: _State, rows: torch.Tensor, reply: int) -> torch.Tensor:
        """The rows of the last chunk, without those past the last but one of `reply` tokens."""
        length = 0 if state.facts is None else len(state.facts["token_ids"])
        surplus = max(state.taken - (length + max(reply - 1, 0)), 0)
        state.taken -= surplus
        return rows[: max(len(rows) - surplus, 0)]

    def _prompt(self, state: _State, rows: torch.Tensor, start: int) -> Prompt:
        """Build the prompt from the rows of the thinker's prompt and of the turn's fourth token."""
        assert state.facts is not None
        ids: torch.Tensor = state.facts["token_ids"]
        user = user_tokens(ids, self._config)
        places = user.to(self.device)
        thinker = self._config.thinker_config
        media = torch.isin(
            ids[user], torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id])
        )
        own = rows[: len(ids)][places]
        seen = media.to(self.device)
        embeds = self._text(own)
        if media.any():
            embeds[seen] = self._hidden(own[seen])
        turn = self._text(rows[start : start + _LEAD])
        talker = self._config.talker_config
        specials = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id, state.voice]
        specials += [talker.codec_pad_id, talker.codec_bos_id]
        assistant = torch.cat([turn[:3], self._pad.expand(4, -1), self._begin, turn[3:]])
        assistant[3:] += self._model.codec_embedding(torch.tensor(specials, device=self.device))
        length = len(embeds) + len(assistant)
        positions, delta = None, 0
        if used := media_in(state.facts["media"], ids, user, self._config):
            pads = torch.full((len(assistant),), self._config.tts_pad_token_id)
            # the library does not tell the talker of audio in videos
            positions, delta = self._positions(
                torch.cat([ids[user], pads]),
                [facts_of(item) for item in used],
                use_audio_in_video=False,
            )
            positions = positions.to(self.device)
        return Prompt(
            token_ids=[talker.codec_pad_id] * length,  # never drawn, so that no penalty refers to it
            embeds=torch.cat([embeds, assistant]).cpu(),  # device memory belongs to keys and values
            positions=positions,
            position_delta=delta,
            identity=(),  # these rows belong to this request alone, so no prefix is shared
        )

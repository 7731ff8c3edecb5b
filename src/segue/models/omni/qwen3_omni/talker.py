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

from dataclasses import dataclass

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen3_omni.family import voice_names
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoePreTrainedModelForConditionalGeneration
from segue.models.omni.qwen3_omni.loading import load_config, load_talker
from segue.models.omni.qwen3_omni.speech import assistant_turn, media_in, user_tokens
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.omni.positions import facts_of, positions_of
from segue.models.shared.omni.reply import ThinkerRows, load_text_rows
from segue.models.shared.speech.code_predictor import CodePredictor, Filters
from segue.models.shared.speech.talker import RowTalker, unknown_voice

_FILTERS = Filters(top_k=50, top_p=0.8)
"""How `generate` samples the codes after the first, whatever the caller says; greedily if the talker is greedy."""
_LEAD = 4
"""Tokens of the assistant's turn in the prompt."""


@dataclass(slots=True)
class _State:
    """The parts of one request's sequence that have arrived."""

    voice: int
    """Codec id of the voice."""
    rows: ThinkerRows
    facts: Payload | None = None
    """The thinker's prompt: ids and media."""
    prompted: bool = False


class Talker(RowTalker):
    """`AutoregressiveModel` that yields rows, over the talker and its code predictor; the thinker's rows drive it."""

    axes = 3

    def __init__(self, ctx: AutoregressiveContext) -> None:
        config = load_config(ctx)
        talker, text = config.talker_config, config.talker_config.text_config
        net = load_talker(ctx, config)
        self._config = config
        self.net = net
        self._embedding = net.model.codec_embedding
        decoder = PagedDecoder(
            net,
            net.model,
            quantization=ctx.quantization,
            fused=ctx.fused and ctx.group is None,
            rows=self._embedding,
            head="codec_head",
            of_ids=self._of_ids,
        )
        self.library_decoder = decoder.model
        predictor = net.code_predictor
        super().__init__(
            ctx,
            decoder,
            CodePredictor(predictor.model, predictor.model.codec_embedding, predictor.lm_head, _FILTERS),
            talker.codec_eos_token_id,
            config.code2wav_config.codebook_size,
            text.max_position_embeddings,
        )
        self._text, self._hidden = net.text_projection, net.hidden_projection
        rows = load_text_rows(ctx, config, [config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id])
        with torch.inference_mode():
            self._begin, self._end, self._pad = self._text(rows).split(1)
        self._positions = positions_of(Qwen3OmniMoePreTrainedModelForConditionalGeneration, config.thinker_config)
        self._voices: dict[str, int] = dict(talker.speaker_id or {})
        self.voices = voice_names(self._voices)
        own = torch.nn.ModuleList([predictor, self._text, self._hidden])
        self.weight_bytes: int = decoder.weight_bytes + held_bytes(own)
        self.default_sampling = SamplingParams(
            temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05, max_tokens=4096
        )

    def begin(self, request: StageRequest) -> _State:
        """Raises `NotFound` for an unknown voice, `InvalidRequest` if the request forbids every code."""
        voice = request.request.voice or self.voices[0]
        if voice.lower() not in self._voices:
            raise unknown_voice(voice, self.voices)
        self._codes.admit(request)
        return _State(self._voices[voice.lower()], ThinkerRows(request.request_id))

    @torch.inference_mode()
    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Rows of the thinker's sequence → the prompt, once the turn's fourth token has arrived, and rows for codes."""
        if (facts := payload.get("prompt")) is not None and state.facts is None:
            state.facts = facts
        ids: torch.Tensor | None = None if state.facts is None else state.facts["token_ids"]
        rows = state.rows.take(payload, self.device, self.dtype)
        if rows is not None and final:
            rows = state.rows.spoken(rows, 0 if ids is None else len(ids), payload["reply"])
        fed = Fed()
        if not state.prompted:
            start = 0 if ids is None else assistant_turn(ids, self._config)
            head = state.rows.beginning(rows, None if ids is None else max(start + _LEAD, len(ids)))
            if head is None:
                fed.nothing = final  # a reply of one token has no row, so there is nothing to speak
                return fed
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

    def _of_ids(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Arguments of the library's forward for codes 0 [n], at consecutive positions."""
        positions = torch.arange(len(ids), device=ids.device).expand(self.axes, 1, -1)
        return {"inputs_embeds": self._embedding(ids)[None], "position_ids": positions}

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
        assistant[3:] += self._embedding(torch.tensor(specials, device=self.device))
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

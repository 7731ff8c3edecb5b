"""The talker: generates codec tokens for the thinker's reply, taking one row of the reply with each code.

E width of the thinker (the talker's `embedding_size`), H the talker's hidden size, T tokens of the thinker's prompt,
r_0 … r_{n-2} rows of the thinker's reply of n tokens (the last token is never forwarded and has no row).

Inputs (from `generate` of `Qwen2_5OmniForConditionalGeneration`, and `forward` of its talker):

    prompt   T rows of the thinker's prompt · voice + embed(codec pad) · r_0 + embed(codec bos)
    code k   embed(code k) + r_{k+1}; after the last row the text-end embedding once, then text padding until the end

each sum projected from E to H.

**Two forms of the prompt.** `generate` of newer transformers (including 5.23) drops an attention mask of ones, and the
talker's `forward` mistakes the missing mask for a later step: it then adds neither codec embedding and numbers the
prompt's tokens consecutively, ignoring media. A padded prompt still gets both, as in training. The default is what the
installed library does for one request; the option `prompt_form` chooses (`FORMS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.kernels.prepare import prepared_bytes
from segue.messages.errors import ConfigError, StageFailed, nearest
from segue.messages.sampling import SamplingParams, merged
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniConfig
from segue.models.omni.qwen2_5_omni.loading import load_config, load_speakers, load_talker
from segue.models.omni.qwen2_5_omni.probe import generate_drops_mask
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.generation import context_length
from segue.models.shared.omni.reply import ThinkerRows, load_text_rows
from segue.models.shared.speech.talker import SpokenCodes, unknown_voice

FORMS = ("library", "trained")
"""`library`: as the installed `generate` does for an unpadded prompt · `trained`: codec embeddings and M-RoPE."""

# the talker's config repeats these; its positions equal the thinker's only if they agree
_SHARED = (
    "position_id_per_seconds",
    "seconds_per_chunk",
    "image_token_index",
    "audio_token_index",
    "video_token_index",
)


@dataclass(slots=True)
class _State:
    """The parts of one request's reply that have arrived."""

    voice: str
    rows: ThinkerRows
    length: int | None = None
    """T: tokens of the thinker's prompt."""
    positions: torch.Tensor | None = None
    position_delta: int = 0
    prompted: bool = False


class Talker:
    """`AutoregressiveModel` over the talker; the thinker's rows drive it."""

    axes = 3
    conditioned = True
    recordable = True
    vocabulary = None

    def __init__(self, ctx: AutoregressiveContext) -> None:
        config = load_config(ctx)
        talker = config.talker_config
        check_shared(config)
        self._net = load_talker(ctx, config)
        no_rows = torch.zeros(1, 1, talker.embedding_size, device=ctx.device, dtype=ctx.dtype)
        self._decoder = PagedDecoder(
            self._net,
            self._net.model,
            quantization=ctx.quantization,
            fused=ctx.fused and ctx.group is None,
            rows=lambda ids: self.embed(ids, None),
            head="codec_head",
            of_ids=lambda ids: {"input_ids": ids[None], "thinker_reply_part": no_rows},
        )
        self.library_decoder = self._decoder.model
        project = self._net.thinker_to_talker_proj
        self.width: int = talker.embedding_size
        speakers = load_speakers(ctx, config)
        ids = [talker.tts_text_end_token_id, talker.tts_text_pad_token_id, *(s.bos_token for s in speakers.values())]
        rows = load_text_rows(ctx, config, ids)
        self._text_end, self._text_pad = rows[:1], rows[1]
        self._voices = dict(zip(speakers, rows[2:].split(1), strict=True))
        self._trained_form = prompt_form(ctx) == "trained" or not generate_drops_mask()
        self._codec_bos: int = talker.tts_codec_start_token_id
        self._codec_pad: int = talker.tts_codec_pad_token_id
        self._codec_mask: int = talker.tts_codec_mask_token_id
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.kv: KVSpec = self._decoder.kv
        self.weight_bytes: int = self._decoder.weight_bytes + held_bytes(project) + prepared_bytes(project)
        self.vocab_size: int = talker.vocab_size
        self.max_model_len: int = context_length(talker, ctx.max_model_len)
        self.end_token_ids = frozenset({talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id})
        codes: int = config.token2wav_config.dit_config.num_embeds + 1
        self._codes = SpokenCodes(codes, self.vocab_size, self.end_token_ids, ctx.device)
        self.default_sampling = merged(
            family=SamplingParams(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, max_tokens=4096)
        )

    def begin(self, request: StageRequest) -> _State:
        """Raises `NotFound` for an unknown voice, `InvalidRequest` if the request forbids every code."""
        voice = request.request.voice or next(iter(self._voices))
        if voice not in self._voices:
            raise unknown_voice(voice, self._voices)
        self._codes.admit(request)
        return _State(voice, ThinkerRows(request.request_id))

    @torch.inference_mode()
    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Rows of the thinker's sequence → the prompt, once the reply's first row has arrived, and rows for codes."""
        if (facts := payload.get("prompt")) is not None and state.length is None:
            state.length = facts["length"]
            state.positions = facts["positions"].to(self.device)
            state.position_delta = facts["position_delta"]
        rows = state.rows.take(payload, self.device, self.dtype)
        if rows is not None and final:
            rows = state.rows.spoken(rows, state.length or 0, payload["first_index"] + len(payload["reply_ids"]))
        fed = Fed()
        if not state.prompted:
            needed = None if state.length is None else state.length + 1
            head = state.rows.beginning(rows, needed)
            if head is None:
                fed.nothing = final  # a reply of one token has no row, so there is nothing to speak
                return fed
            state.prompted = True
            fed.prompt = self._prompt(state, head[:needed])
            rows = head[needed:]
        fed.conditioning = rows
        if final:
            fed.conditioning = self._text_end if rows is None else torch.cat([rows, self._text_end])
            fed.tail = self._text_pad
        return fed

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] codes, [n, E] rows of the reply → [n, H]."""
        embeds = self._net.model.embed_tokens(token_ids)
        if conditioning is not None:
            embeds = embeds + conditioning
        return self._net.thinker_to_talker_proj(embeds)

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (hidden states after the final norm [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch), None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32.

        Masks ids that are neither vocoder codes nor end tokens: the codec's start token (suppressed in `generate` too)
        and the ids next to it, on which the vocoder in `generate` fails.
        """
        return self._codes.only(self._decoder.logits(hidden))

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise StageFailed("the talker makes codes, not text")

    def _prompt(self, state: _State, rows: torch.Tensor) -> Prompt:
        """Build the prompt from [T + 1, E]: the prompt's rows and r_0."""
        length = state.length
        assert length is not None
        assert state.positions is not None
        ends = torch.cat([self._voices[state.voice], rows[length:]])
        positions, delta = torch.arange(length + 2, device=self.device).expand(3, -1), 0
        if self._trained_form:
            codec = torch.tensor([self._codec_pad, self._codec_bos], device=self.device)
            ends = ends + self._net.model.embed_tokens(codec)
            delta = state.position_delta
            positions = torch.cat([state.positions, positions[:, length:] + delta], dim=1)
        return Prompt(
            token_ids=[self._codec_mask] * length + [self._codec_pad, self._codec_bos],
            embeds=self._net.thinker_to_talker_proj(torch.cat([rows[:length], ends])),
            positions=positions,
            position_delta=delta,
            identity=(),  # these rows belong to this request alone, so no prefix is shared
        )


def prompt_form(ctx: LoadContext) -> str:
    """The deployment's choice among `FORMS`. Raises `ConfigError` for any other."""
    form = ctx.options.get("prompt_form", FORMS[0])
    if form not in FORMS:
        raise ConfigError(f"prompt_form is {form!r}{nearest(str(form), FORMS)}", field="prompt_form")
    return form


def check_shared(config: Qwen2_5OmniConfig) -> None:
    """Raise `ConfigError` if thinker and talker would compute different positions for the prompt's tokens."""
    thinker, talker = config.thinker_config.to_dict(), config.talker_config.to_dict()
    thinker["spatial_merge_size"] = config.thinker_config.vision_config.spatial_merge_size
    thinker["hidden_size"], talker["hidden_size"] = (
        config.thinker_config.text_config.hidden_size,
        talker["embedding_size"],
    )
    for name in (*_SHARED, "spatial_merge_size", "hidden_size"):
        if thinker.get(name) != talker.get(name):
            raise ConfigError(
                f"config.json: the thinker's {name} is {thinker.get(name)!r}, the talker's {talker.get(name)!r}; "
                "they must be equal"
            )

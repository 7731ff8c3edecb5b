"""The talker: generates rows of codes for the text of its prompt.

H its hidden size, G codes per row, T positions of the prompt. Inputs (from `generate` of the package):

    prompt   text embedding, projected to H, + codec embedding where the position has a codec id
    row k    the sum of its codes' embeddings + the projected embedding of the text padding; of a text that is appended
             to, of the text's token k + 1, of its end after the last, and only then of the padding
"""

from __future__ import annotations

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.kernels.prepare import DECODE_ROWS, Plan, prepare, prepared_bytes
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.speech.code_predictor import CodePredictor, Filters
from segue.models.shared.speech.talker import RowTalker
from segue.models.speech.qwen3_tts.config import Sampling, read_config, read_sampling, read_vocoder
from segue.models.speech.qwen3_tts.input import NONE
from segue.models.speech.qwen3_tts.loading import load_talker

_SHORTEST = 2
"""Least tokens of an utterance, the end token included, in the package."""


def _filters(sampling: Sampling) -> Filters:
    """How the codes after the first are drawn, whatever the caller says; greedily if code 0 is."""
    if not sampling.subtalker_dosample:
        return Filters(top_k=1)
    return Filters(sampling.subtalker_temperature, sampling.subtalker_top_k, sampling.subtalker_top_p)


class Talker(RowTalker):
    """`AutoregressiveModel` that yields rows."""

    axes = 1

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint."""
        config = read_config(ctx.model_dir)
        talker, codec = config.talker_config, read_vocoder(ctx.model_dir).decoder_config
        if codec.num_quantizers != talker.num_code_groups:
            raise ConfigError(
                f"{ctx.model_dir}: the talker makes {talker.num_code_groups} codes per row, the speech tokenizer takes "
                f"{codec.num_quantizers}",
                field="num_code_groups",
            )
        net = load_talker(ctx, config)
        self.net = net
        decoder = PagedDecoder(net.decoder, quantization=ctx.quantization, fused=ctx.fused)
        own, sampling = net.code_predictor, read_sampling(ctx.model_dir)
        prepare(own, ctx.device, Plan(rows=DECODE_ROWS))
        predictor = CodePredictor(
            own.model, own.codec_embedding, own.lm_head, _filters(sampling), own.small_to_mtp_projection
        )
        longest = talker.max_position_embeddings
        super().__init__(ctx, decoder, predictor, talker.codec_eos_token_id, codec.codebook_size, longest)
        self.voices = config.voices
        self.weight_bytes: int = held_bytes(net) + prepared_bytes(net)
        self._codec_pad: int = talker.codec_pad_id
        with torch.inference_mode():
            marks = torch.tensor([config.tts_eos_token_id, config.tts_pad_token_id], device=ctx.device)
            self._end, self._pad = self._text(marks).split(1)
        self.default_sampling = SamplingParams(
            temperature=sampling.temperature if sampling.do_sample else 0.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_new_tokens,
            min_tokens=_SHORTEST,
        )

    def begin(self, request: StageRequest) -> None:
        """Raises `InvalidRequest` if the request forbids every code."""
        self._codes.admit(request)

    @torch.inference_mode()
    def feed(self, state: None, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """The prompt from the input stage; of an open request, then more of its text, and its end."""
        if "text_ids" not in payload:
            if "following" not in payload:
                return Fed(conditioning=self._end, tail=self._pad[0])
            return Fed(conditioning=self._rows(payload["following"]))
        prompt = self._prompt(payload["text_ids"].cpu(), payload["codec_ids"].cpu())
        if "following" not in payload:
            return Fed(prompt=prompt, tail=self._pad[0])
        return Fed(prompt=prompt, conditioning=self._rows(payload["following"]))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor | None:
        """[n] text ids → [n, H]; None for none."""
        return self._text(ids.to(self.device)) if len(ids) else None

    def _prompt(self, text_ids: torch.Tensor, codec_ids: torch.Tensor) -> Prompt:
        """[T], [T] on the host."""
        embeds = self._text(text_ids.to(self.device))
        coded = codec_ids != NONE
        embeds[coded.to(self.device)] += self._decoder.embed(codec_ids[coded].to(self.device))
        length = len(text_ids)
        ids = zip(text_ids.tolist(), codec_ids.tolist(), strict=True)
        return Prompt(
            token_ids=[self._codec_pad] * length,  # never drawn, so that no penalty refers to it
            embeds=embeds.cpu(),  # device memory belongs to keys and values
            identity=[text.to_bytes(4, "little") + codec.to_bytes(4, "little", signed=True) for text, codec in ids],
            modality_tokens={"text": length},
        )

    def _text(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] text ids → [n, H]."""
        rows: torch.Tensor = self.net.text_projection(self.net.text_embedding(ids))
        return rows

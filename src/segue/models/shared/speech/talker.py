"""What talkers have in common: stage models whose code 0 is drawn from the logits of a decoder.

n sequences, E width of the decoder, G codes per row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Draws, FlatBatch, KVSpec
from segue.engines.contract import StageRequest
from segue.messages.errors import InvalidRequest, NotFound, StageFailed, nearest
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.speech.code_predictor import CodePredictor

NEVER = -1e30
"""Logit of an id that must not be drawn: finite, because engines treat an infinite one as a broken forward."""
_RESERVED = 1024
"""The last ids of the vocabulary of Qwen3's talkers: `generate` suppresses them, except for the end token."""


def unknown_voice(voice: str, known: Collection[str]) -> NotFound:
    """The error for a voice that is not one of `known`."""
    return NotFound(
        f"voice is {voice!r}{nearest(voice, known)}; this model speaks with: {', '.join(sorted(known))}", field="voice"
    )


class SpokenCodes:
    """The ids that a talker draws: the vocoder's codes, the first of the vocabulary, and the end tokens."""

    def __init__(self, count: int, vocab_size: int, ends: frozenset[int], device: torch.device) -> None:
        """`count`: codes of the vocoder."""
        self.count, self.ends = count, ends
        others = [token for token in range(count, vocab_size) if token not in ends]
        self._others = torch.tensor(others, dtype=torch.long, device=device)

    def only(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, vocab], changed in place: no other id can be drawn."""
        return logits.index_fill_(1, self._others, NEVER)

    def admit(self, request: StageRequest) -> None:
        """Apply `ignore_eos` of the request's sampling. Raises `InvalidRequest` if it forbids every code."""
        sampling = request.sampling
        suppressed = set(sampling.suppress_tokens or ())
        if suppressed.issuperset(range(self.count)):
            name = f"sampling.{request.stage}.suppress_tokens"
            raise InvalidRequest(f"{name} leaves none of the {self.count} codes of the vocoder", field=name)
        if sampling.ignore_eos:
            # an ignored end token yields no audio: it lies outside the vocoder's codebook
            request.sampling = msgspec.structs.replace(sampling, suppress_tokens=sorted(suppressed | self.ends))


class RowTalker:
    """The part of an `AutoregressiveModel` that Qwen3's talkers share. They yield rows: the decoder's logits give code
    0, a code predictor the others; the next input is the sum of the codes' embeddings and a row of the text to say.

    Families add `axes`, `weight_bytes`, `default_sampling`, `begin` and `feed`.
    """

    conditioned = True
    recordable = True
    vocabulary = None

    def __init__(
        self,
        ctx: AutoregressiveContext,
        decoder: PagedDecoder,
        predictor: CodePredictor,
        end_token: int,
        codebook: int,
        longest: int,
    ) -> None:
        """`codebook`: codes of the vocoder's first codebook. `longest`: positions that the decoder has."""
        self._decoder, self._predictor = decoder, predictor
        self.groups: int = predictor.groups
        self.device, self.dtype = ctx.device, ctx.dtype
        self.kv: KVSpec = decoder.kv
        self.vocab_size: int = decoder.vocab_size
        self.max_model_len: int = min(ctx.max_model_len or longest, longest)
        self.end_token_ids = frozenset({end_token})
        count = min(self.vocab_size - _RESERVED, codebook)
        self._codes = SpokenCodes(count, self.vocab_size, self.end_token_ids, ctx.device)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n, G] rows of codes, [n, E] rows of the text → [n, E]."""
        codes = token_ids if token_ids.ndim == 2 else token_ids[:, None]
        rows = [self._decoder.embed(codes[:, 0])]
        rows += [self._predictor.embed(group, codes[:, group]) for group in range(1, codes.shape[1])]
        embeds = torch.stack(rows, dim=1).sum(1)  # as in the library: rounded once
        return embeds if conditioning is None else embeds + conditioning

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, E] → (hidden states after the final norm [tokens, E], nothing captured)."""
        return self._decoder.forward(embeds, batch), None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, E] → [n, vocab] float32, without the ids that are neither codes nor the end token."""
        return self._codes.only(self._decoder.logits(hidden))

    @torch.inference_mode()
    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, E], [n] codes 0 → [n, G - 1]."""
        return self._predictor(hidden, self._decoder.embed(ids), draws)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise StageFailed("the talker makes codes, not text")

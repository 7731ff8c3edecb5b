"""The language model: reads a text, and generates rows of codes, one code per delayed codebook.

T prompt tokens, H width, K codebooks.

Inputs (from `HiggsAudioV2ForConditionalGeneration`): text tokens by their own embedding; a row of codes as the sum of
its codes' embeddings. Rows of codes take the audio layers of each block (norms and feed-forward), text the others;
attention is shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from segue.engines.autoregressive.contract import AutoregressiveContext, Draws, Fed, FlatBatch, KVSpec, Prompt
from segue.engines.contract import Payload, StageRequest
from segue.kernels.prepare import prepared_bytes
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.generation import context_length, default_sampling, generation_of
from segue.models.speech.higgs_audio_v2.heads import Heads, repetition_rule
from segue.models.speech.higgs_audio_v2.loading import load_config, load_language_model

_NEUTRAL = {
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "suppress_tokens": ([],),
    "allowed_token_ids": (),
    "logit_bias": ({},),
    "bad_words": ([],),
}
"""Sampling parameters that the library refuses for this model, and the values at which they do nothing."""


class LLM:
    """`AutoregressiveModel` that yields rows, drawn by head."""

    axes = 1
    conditioned = False
    recordable = True
    vocabulary = None

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable or unsupported checkpoint."""
        config = load_config(ctx)
        generation = generation_of(ctx.model_dir, config)
        net = load_language_model(ctx, config)
        self.net = net
        self._decoder = PagedDecoder(
            net,
            net.model,
            quantization=ctx.quantization,
            fused=ctx.fused and ctx.group is None,
            head="audio_lm_head",
            of_ids=lambda ids: {"inputs_embeds": net.model.embed_tokens(ids)[None]},
        )
        self.library_decoder = self._decoder.model
        self._heads = Heads(net.audio_lm_head, config, repetition_rule(generation))
        self.groups: int = config.num_codebooks
        self.looks_back = self._heads.looks_back
        self.draws_per_row = self._heads.draws_per_row
        self._end: int = config.audio_stream_eos_id
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.kv: KVSpec = self._decoder.kv
        whole = nn.ModuleList([net.model, net.audio_lm_head])
        self.weight_bytes: int = held_bytes(whole) + prepared_bytes(whole)
        self.vocab_size: int = config.codebook_size
        self.max_model_len: int = context_length(config, ctx.max_model_len)
        self.end_token_ids: frozenset[int] = frozenset()  # a code 0 ends nothing
        self.default_sampling: SamplingParams = default_sampling(generation)

    def begin(self, request: StageRequest) -> None:
        """Raises `InvalidRequest` for a sampling parameter that the model does not have."""
        for name, values in _NEUTRAL.items():
            given = getattr(request.sampling, name)
            if given is not None and given not in values:
                raise InvalidRequest(
                    f"sampling.llm.{name} is {given!r}; this model draws a code per codebook, and takes temperature, "
                    "top_k and top_p only",
                    field=f"sampling.llm.{name}",
                )

    @torch.inference_mode()
    def feed(self, state: None, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """The text's ids → the prompt."""
        ids: torch.Tensor = payload["token_ids"]
        prompt = Prompt(
            token_ids=[0] * len(ids),  # text ids are no codes
            embeds=self.embed(ids.to(self.device), None).cpu(),  # device memory belongs to keys and values
            identity=ids.tolist(),
            modality_tokens={"text": len(ids)},
        )
        return Fed(prompt=prompt)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n, K] rows of codes, or [n] text ids → [n, H]."""
        if token_ids.ndim == 1:
            return self._decoder.embed(token_ids)
        rows: torch.Tensor = self.net.model.embed_audio_tokens(token_ids)
        return rows

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (hidden states after the final norm [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch, audio_input_ids_mask=_audio(batch)), None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, codes] float32 of codebook 0."""
        return self._heads.logits(hidden)[:, 0].contiguous()

    @torch.inference_mode()
    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, H], [n] codes 0 → [n, K]."""
        return self._heads(hidden, ids, draws)

    def ends(self, row: Sequence[int]) -> bool:
        """Whether the utterance ends with this row of codes."""
        return all(code == self._end for code in row)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise StageFailed("the language model makes codes, not text")


def _audio(batch: FlatBatch) -> torch.Tensor | None:
    """[1, tokens] bool: which tokens of a batch are rows of codes; None: all of them."""
    kinds: list[bool] = []
    for prompt, start, stop in batch.prompts:
        text = 0 if prompt is None else max(min(len(prompt.token_ids), stop) - start, 0)
        kinds += [False] * text + [True] * (stop - start - text)
    kinds += [True] * (len(batch.token_ids) - len(kinds))  # padding
    if all(kinds):
        return None
    return torch.tensor([kinds], device=batch.token_ids.device)

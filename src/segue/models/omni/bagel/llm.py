"""The stage that reads a prompt with rows of images, and writes the reply or lends what it read to the denoiser.

n patches of an image, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec
from segue.engines.contract import Payload, StageRequest
from segue.kernels.attention.prefix_attention import PrefixStep
from segue.messages.errors import StageFailed
from segue.messages.sampling import SamplingParams
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.decoder import BOTH, UNDERSTANDING, Experts
from segue.models.omni.bagel.drawing.reading import ImageReading
from segue.models.omni.bagel.loading import load_language_model, load_latent_space
from segue.models.omni.bagel.prompt.passages import END, MARKS, Block, Marks, Passages
from segue.models.omni.bagel.prompt.prompts import experts_of, prompt_of
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.text.tokenizer import decode, load_tokenizer, vocabulary_of

DENOISER = "denoiser"


@dataclass(slots=True)
class _State:
    """The inputs of one request that have arrived."""

    from_encoder: bool
    """The request visits the encoder stage: wait for its rows."""
    prompt: Payload | None = None
    rows: list[Payload] = field(default_factory=list)
    encoder_done: bool = False


class LLM:
    """`AutoregressiveModel` over the decoder; `ReadsContexts` for images.

    In a worker without the denoiser it has the understanding experts only.
    """

    axes = 1
    conditioned = False
    recordable = True

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint."""
        self.config = config = read_config(ctx.model_dir)
        draws = DENOISER in ctx.same_worker.stages
        net = load_language_model(ctx, config, BOTH if draws else UNDERSTANDING)
        self._decoder = PagedDecoder(net, quantization=ctx.quantization, fused=ctx.fused)
        self._tokenizer = load_tokenizer(ctx.model_dir)
        self.vocabulary = vocabulary_of(self._tokenizer)
        self.embed_ids = self._decoder.embed
        self.device = self._decoder.device
        self.dtype = self._decoder.dtype
        self.kv: KVSpec = replace(self._decoder.kv, bidirectional=frozenset(range(config.llm.num_hidden_layers)))
        self.vocab_size: int = self._decoder.vocab_size
        self.weight_bytes: int = self._decoder.weight_bytes
        if draws:
            self.space = load_latent_space(ctx, config)
            self.weight_bytes += held_bytes(self.space)
        longest = config.llm.max_position_embeddings
        self.max_model_len: int = min(ctx.max_model_len or longest, longest)
        ids = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        if self._tokenizer is not None:
            self.marks = Marks(*(ids[mark] for mark in MARKS))
        self.end_token_ids = frozenset({ids[END]} if END in ids else ())
        self.default_sampling = SamplingParams(temperature=0.0)  # as the reference answers

    def reading(self, request: StageRequest) -> ImageReading | None:
        """The reading of a request whose image the denoiser draws."""
        return ImageReading(self, request) if DENOISER in request.downstreams else None

    def begin(self, request: StageRequest) -> _State:
        return _State("encoder" in request.upstreams)

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Collect the input stage's prompt and the encoder's rows; return the prompt once complete."""
        if upstream == "encoder":
            state.rows += payload["media"]
            state.encoder_done = final
        else:
            state.prompt = payload
        if state.prompt is None or (state.from_encoder and not state.encoder_done):
            return Fed()
        given, rows, state.rows = state.prompt, state.rows, []  # the rows may be on the device: drop them here
        media = given["media"]
        if [image["hash"] for image in media] != [image["hash"] for image in rows]:
            raise StageFailed(f"the prompt has {len(media)} images, but the encoder sent {len(rows)} that differ")
        blocks = [Block(image["span"][0], image["span"][1], number) for number, image in enumerate(media)]
        passages = Passages(given["token_ids"].tolist(), given["positions"][0].tolist(), blocks)
        passages.next = given["position_delta"] + len(passages.ids)

        def image(block: Block) -> tuple[torch.Tensor, bytes]:
            return rows[block.image]["rows"], media[block.image]["hash"]

        return Fed(prompt=prompt_of(passages, self.embed_ids, image, self.device))

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._decoder.embed(token_ids)

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (final hidden states [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch, experts=experts_of(batch, self.device)), None

    @torch.inference_mode()
    def forward_after(
        self, rows: torch.Tensor, positions: torch.Tensor, step: PrefixStep, experts: Experts
    ) -> torch.Tensor:
        """Rows [n, H] at positions [n] that follow prefixes in the cache → final hidden states [n, H]. Writes
        nothing."""
        batch = FlatBatch(positions, None, positions[None], step)
        return self._decoder.forward(rows, batch, experts=experts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._decoder.logits(hidden)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Detokenize; empty if the checkpoint has no tokenizer."""
        return decode(self._tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that the model wrote: special tokens in it are special."""
        assert self._tokenizer is not None, "only messages and prompts, which are text, ask for images"
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

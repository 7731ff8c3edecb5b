"""The three stages of a model whose decoder attends to images by cross-attention (Llama 3.2 Vision).

Images of such a model do not replace token rows: an image's token has an ordinary embedding, and some decoder layers
attend to the encoder states instead of to tokens. Those layers are the library's, and so are the keys and values that
they compute (`step_images`); the library's processor decides which encoder states a token sees (`shown`).

T prompt tokens, m images, n rows of one image, H hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from segue.engines.autoregressive.contract import AutoregressiveContext, FlatBatch, Prompt
from segue.engines.contract import Payload
from segue.kernels.attention.paged_attention import library_attention
from segue.messages.errors import ConfigError
from segue.models.omni.multimodal_lm.bidirectional import FAILURES, moved
from segue.models.omni.multimodal_lm.cross.shown import KIND, MASK, identity_of, seen_tiles, shown_by, units_by_image
from segue.models.omni.multimodal_lm.cross.step_images import HeldLayer, step_images
from segue.models.omni.multimodal_lm.encoder import Encoder
from segue.models.omni.multimodal_lm.input import InputProcessor
from segue.models.omni.multimodal_lm.llm import LLM, check_same_media
from segue.models.omni.multimodal_lm.loading import holder_of, inner_of, layers_across, media_tokens, taken_by
from segue.models.omni.multimodal_lm.processor import Processed, Processor
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.decoder import PagedDecoder, check_same
from segue.models.shared.decoder.interface import cannot_be_served, decoder_of, seen_by
from segue.models.shared.decoder.kept_media import KeptMedia
from segue.models.shared.encoder_cache import cache_bytes
from segue.models.shared.library import PreTrainedModel

STATES = "cross_attention_states"
"""The decoder's argument for encoder states: [tiles of all images, patches, H]."""
_IMAGES = 8
"""Default number of large images whose keys and values are kept."""
_NEVER = -1e30
"""Logit of tokens for which the head has no row."""


class CrossInput(InputProcessor):
    """The generic input stage, except that an image is one token, and each token has its visible part of each image."""

    takes_embeds = False
    _least = 1

    def _units(self, made: Processed, count: Mapping[str, int]) -> list[Payload]:
        return units_by_image(made)

    def _extra_entries(self, ids: list[int], media: Sequence[tuple[int, Processed]]) -> Payload:
        return seen_tiles(len(ids), media)

    def _moved(self, made: Processed, origin: list[int]) -> Processed:
        tensors = made.tensors[KIND]
        return replace(made, tensors={KIND: {**tensors, MASK: tensors[MASK][:, origin]}})


class CrossEncoder(Encoder):
    """`ModuleModel` over the vision encoder: runs the library's forward, with a hook that captures the cross-attention
    inputs of its decoder."""

    def _cost(self, unit: Payload) -> int:
        """Number of tiles: each is an image to the encoder, however small the medium was."""
        return int(unit["tensors"]["pixel_values"].shape[1])

    def _encode(self, units: Sequence[Payload]) -> list[torch.Tensor]:
        """Units in one call → [n, H] each."""
        tensors = {key: torch.cat([unit["tensors"][key] for unit in units])[None] for key in units[0]["tensors"]}
        ids = torch.cat([unit["ids"] for unit in units]).to(self.device)[None]
        with seen_by(self._decoder) as seen:
            self._inner(
                input_ids=ids,
                use_cache=False,
                **taken_by(self._inner.forward, moved(tensors, self.device, self.dtype)),
            )
        if seen[0].get(STATES) is None:
            raise cannot_be_served(self._kind, f"it passes no {STATES} to its decoder")
        rows = seen[0][STATES].flatten(0, 1)
        return [own.clone() for own in rows.chunk(len(units))]

    def _see(self, processor: Processor) -> None:
        """No bidirectional spans: images do not replace token rows."""

    def _both_ways(self, made: Processed, kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        units = units_by_image(made)
        return torch.cat(self._encode(units)), torch.cat([self._encode([unit])[0] for unit in units])


class CrossLLM(LLM):
    """`AutoregressiveModel` over a decoder with cross-attention to images.

    Option: `cache_bytes`, for keys and values of images; they count to `weight_bytes`, because they use the same
    memory.
    """

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unsupported model, and if the logits of a text with images differ from those of
        the library's forward."""
        super().__init__(ctx)
        self.weight_bytes += self._kept.capacity
        lacking = media_tokens(ctx)[KIND] + 1 - self.vocab_size
        self._lacking = max(0, lacking)
        """Number of image token ids beyond the head's vocabulary: prompts contain them, so they count as vocabulary."""
        self.vocab_size += self._lacking

    def _paged(self, ctx: AutoregressiveContext, model: PreTrainedModel) -> PagedDecoder:
        if ctx.lora is not None:  # keys and values of images are kept across requests, whatever adapter they have
            raise ConfigError(
                f"{type(model).__name__} takes no LoRA adapters: its layers attend to images", field="lora"
            )
        layers = layers_across(load_config(ctx))
        example = _Example(ctx, model)
        decoder = PagedDecoder(
            model, inner=inner_of(model), quantization=ctx.quantization, fused=ctx.fused, across=layers
        )
        config = model.config.get_text_config(decoder=True)
        something = torch.ones(1, device=decoder.device)
        self._held = [HeldLayer(something, something)] * config.num_hidden_layers
        shape = next(shape for shape in decoder.kv.shapes if shape.kv_heads)
        row_bytes = len(layers) * shape.kv_heads * (shape.head_dim + shape.value_dim) * decoder.dtype.itemsize
        largest = example.shown_rows * row_bytes
        capacity = cache_bytes(ctx) if "cache_bytes" in ctx.options else _IMAGES * largest
        self._kept = KeptMedia(layers, row_bytes, capacity)
        prompt = self._with_images(example.payload, example.media, decoder)
        ids = example.payload["token_ids"].to(decoder.device)
        positions = torch.arange(len(ids), device=decoder.device)[None]
        batch = FlatBatch(ids, None, positions, None, [(prompt, 0, len(ids))])
        with torch.inference_mode(), library_attention():
            hidden = decoder.forward(decoder.embed(ids), batch, **self._looks(batch, decoder.dtype))
        coarse = ctx.quantization != "none"  # the example ran over the weights as they were
        check_same(type(model).__name__, decoder.logits(hidden), example.logits, decoder.dtype, coarse=coarse)
        return decoder

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, H] → (final hidden states [tokens, H], nothing captured)."""
        return self._decoder.forward(embeds, batch, **self._looks(batch, embeds.dtype)), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        made = self._decoder.logits(hidden)
        return pad(made, (0, self._lacking), value=_NEVER) if self._lacking else made

    @torch.inference_mode()
    def _prompt(self, payload: Payload, rows: list[Payload]) -> Prompt:
        check_same_media(payload["media"], rows)
        if not rows:
            ids = payload["token_ids"].tolist()
            return Prompt(token_ids=ids, modality_tokens={"text": len(ids)})
        return self._with_images(payload, rows, self._decoder)

    def _with_images(self, payload: Payload, rows: list[Payload], decoder: PagedDecoder) -> Prompt:
        ids, units = payload["token_ids"].cpu(), payload["media"]
        # on the host: the engine does not account device memory that a request holds beyond its keys and values
        shown = shown_by(payload, [{**medium, "rows": medium["rows"].cpu()} for medium in rows])
        return Prompt(
            token_ids=ids.tolist(),
            identity=identity_of(ids, units, shown),
            modality_tokens={"text": len(ids) - len(units), KIND: len(units)},
            cross_inputs=shown,
        )

    def _looks(self, batch: FlatBatch, dtype: torch.dtype) -> dict[str, Any]:
        return step_images(batch.prompts, batch.positions[0], self._kept, self._held, dtype)


class _Example:
    """Runs a text with small images through the library's whole forward, with the library's own attention."""

    def __init__(self, ctx: AutoregressiveContext, model: PreTrainedModel) -> None:
        processor = Processor(ctx.model_dir, media_tokens(ctx))
        text, images = processor.examples(KIND)
        made = processor(text, {KIND: images})
        tensors = moved(made.tensors[KIND], model.device, model.dtype)
        try:
            with torch.inference_mode(), seen_by(decoder_of(model)) as seen:
                out = model(
                    input_ids=torch.tensor([made.ids], device=model.device),
                    use_cache=False,
                    **taken_by(holder_of(model).forward, tensors),
                )
            states: torch.Tensor = seen[0][STATES]
        except FAILURES as error:
            raise cannot_be_served(
                type(model).__name__, f"its forward does not accept {KIND} as its processor returns it ({error})"
            ) from error
        self.logits: torch.Tensor = out.logits[0].float()
        """[T, vocab]"""
        units = units_by_image(made)
        rows = states.flatten(0, 1).chunk(len(units))
        self.media: list[Payload] = [
            {"kind": KIND, "hash": unit["hash"], "rows": own} for unit, own in zip(units, rows, strict=True)
        ]
        self.shown_rows = len(rows[0])
        """n, the same for all images."""
        tiles = seen_tiles(len(made.ids), [(0, made)])
        self.payload: Payload = {"token_ids": torch.tensor(made.ids), "media": units, **tiles}

"""The three stages of a model whose decoder looks at pictures by cross-attention (Llama 3.2 Vision).

Its pictures put no rows in the places of tokens: a picture's token has an embedding like any other, and some layers of
the decoder attend to what the encoder gave, and not to tokens. Those layers are the library's, and so are the keys and
values that they make (`step_pictures`); what a token sees is said by the library's processor (`shown`).

T prompt tokens, m pictures, n rows of one picture, H hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from segue.engines.autoregressive.contract import FlatBatch, Prompt
from segue.engines.contract import LoadContext, Payload
from segue.kernels.paged_attention import library_attention
from segue.models.decoder import PagedDecoder
from segue.models.decoder_load import check_same
from segue.models.encoder_cache import cache_bytes
from segue.models.interface import cannot_be_served, decoder_of, seen_by
from segue.models.kept_media import KeptMedia
from segue.models.library import PreTrainedModel
from segue.models.multimodal_lm.encoder import Encoder
from segue.models.multimodal_lm.input import InputProcessor
from segue.models.multimodal_lm.llm import LLM, check_same_media
from segue.models.multimodal_lm.loading import holder_of, inner_of, layers_across, media_tokens, taken_by
from segue.models.multimodal_lm.mutual import FAILURES, moved
from segue.models.multimodal_lm.processor import Processed, Processor
from segue.models.multimodal_lm.shown import KIND, identity_of, seen_tiles, shown_by, units_by_picture
from segue.models.multimodal_lm.step_pictures import HeldLayer, step_pictures
from segue.models.pretrained import load_config

STATES = "cross_attention_states"
"""What such a decoder takes: [tiles of all pictures, patches, H]."""
_PICTURES = 8
"""So many large pictures have their keys and values kept where the deployment does not say."""
_NEVER = -1e30
"""The logit of a token that the head has no row for."""


class CrossInput(InputProcessor):
    """As the others', but for what a picture is: one token, and what each token sees of it."""

    _least = 1

    def _units(self, made: Processed, count: Mapping[str, int]) -> list[Payload]:
        return units_by_picture(made)

    def _beside(self, made: Processed) -> Payload:
        return seen_tiles(made)


class CrossEncoder(Encoder):
    """`ModuleAdapter` over the vision encoder: the library's forward, and a hook that sees what it gives its decoder to
    look at."""

    def _cost(self, unit: Payload) -> int:
        """Tiles, each of which is a picture to the encoder, however small the medium was."""
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
            raise cannot_be_served(self._kind, f"it gives its decoder no {STATES}")
        rows = seen[0][STATES].flatten(0, 1)
        return [own.clone() for own in rows.chunk(len(units))]

    def _see(self, processor: Processor) -> None:
        """No token sees another: pictures stand in no place."""

    def _both_ways(self, made: Processed, kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        units = units_by_picture(made)
        return torch.cat(self._encode(units)), torch.cat([self._encode([unit])[0] for unit in units])


class CrossLLM(LLM):
    """`AutoregressiveAdapter` over a decoder that looks at pictures.

    Option: `cache_bytes`, for keys and values of pictures; they are part of `weight_bytes`, as they are taken out of
    the same memory.
    """

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` as other models do, and where a text with pictures gives other logits than the library's
        forward."""
        super().__init__(ctx)
        self.weight_bytes += self._kept.capacity
        lacking = media_tokens(ctx)[KIND] + 1 - self.vocab_size
        self._lacking = max(0, lacking)
        """Tokens of pictures, behind those that the head writes: they are in prompts, so they must count."""
        self.vocab_size += self._lacking

    def _paged(self, ctx: LoadContext, model: PreTrainedModel) -> PagedDecoder:
        layers = layers_across(load_config(ctx))
        example = _Example(ctx, model)
        decoder = PagedDecoder(model, inner=inner_of(model), fused=ctx.fused, across=layers)
        config = model.config.get_text_config(decoder=True)
        something = torch.ones(1, device=decoder.device)
        self._held = [HeldLayer(something, something)] * config.num_hidden_layers
        shape = next(shape for shape in decoder.kv.shapes if shape.kv_heads)
        row_bytes = len(layers) * shape.kv_heads * (shape.head_dim + shape.value_dim) * decoder.dtype.itemsize
        largest = example.shown_rows * row_bytes
        capacity = cache_bytes(ctx) if "cache_bytes" in ctx.options else _PICTURES * largest
        self._kept = KeptMedia(layers, row_bytes, capacity)
        prompt = self._with_pictures(example.payload, example.media, decoder)
        ids = example.payload["token_ids"].to(decoder.device)
        positions = torch.arange(len(ids), device=decoder.device)[None]
        batch = FlatBatch(ids, None, positions, None, [(prompt, 0, len(ids))])
        with torch.inference_mode(), library_attention():
            hidden = decoder.forward(decoder.embed(ids), batch, **self._looks(batch, decoder.dtype))
        check_same(type(model).__name__, decoder.logits(hidden), example.logits, decoder.dtype, coarse=False)
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
        return self._with_pictures(payload, rows, self._decoder)

    def _with_pictures(self, payload: Payload, rows: list[Payload], decoder: PagedDecoder) -> Prompt:
        ids, units = payload["token_ids"].cpu(), payload["media"]
        # on the host: a device's memory has no place in its books for what a request holds beside its keys and values
        shown = shown_by(payload, [{**medium, "rows": medium["rows"].cpu()} for medium in rows])
        return Prompt(
            token_ids=ids.tolist(),
            identity=identity_of(ids, units, shown),
            modality_tokens={"text": len(ids) - len(units), KIND: len(units)},
            beside=shown,
        )

    def _looks(self, batch: FlatBatch, dtype: torch.dtype) -> dict[str, Any]:
        return step_pictures(batch.prompts, batch.positions[0], self._kept, self._held, dtype)


class _Example:
    """A text with small pictures in it through the library's whole forward, under the library's own attention."""

    def __init__(self, ctx: LoadContext, model: PreTrainedModel) -> None:
        processor = Processor(ctx.model_dir, media_tokens(ctx))
        text, pictures = processor.examples(KIND)
        made = processor(text, {KIND: pictures})
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
                type(model).__name__, f"its forward does not take {KIND} as its processor makes it ({error})"
            ) from error
        self.logits: torch.Tensor = out.logits[0].float()
        """[T, vocab]"""
        units = units_by_picture(made)
        rows = states.flatten(0, 1).chunk(len(units))
        self.media: list[Payload] = [
            {"kind": KIND, "hash": unit["hash"], "rows": own} for unit, own in zip(units, rows, strict=True)
        ]
        self.shown_rows = len(rows[0])
        """n, which is the same for all pictures."""
        self.payload: Payload = {"token_ids": torch.tensor(made.ids), "media": units, **seen_tiles(made)}

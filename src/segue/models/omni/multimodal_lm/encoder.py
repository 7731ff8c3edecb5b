"""Run the encoders of a model as a stage of their own: the library's own forward, up to its text decoder.

The forward runs on the placeholder tokens of media alone; a hook captures the arguments that it would pass to the
decoder. So the same code serves every model that replaces token rows, with or without deep features, and a model that
does anything else is detected and refused at load.

n placeholder tokens, L layers that get deep features (mostly 0), H hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.kernels.prepare import Plan, prepare
from segue.messages.errors import ConfigError, StageFailed
from segue.models.omni.multimodal_lm.bidirectional import FAILURES, MaskProbe, is_causal, moved
from segue.models.omni.multimodal_lm.loading import (
    DEEP_ARGUMENTS,
    forget_embedding,
    holder_of,
    load_without_layers,
    media_tokens,
    rope_index_of,
    taken_by,
)
from segue.models.omni.multimodal_lm.processor import Processed, Processor
from segue.models.omni.multimodal_lm.units import units_of
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.interface import cannot_be_served, decoder_of, seen_by
from segue.models.shared.decoder.layer_inputs import takes_ids_again
from segue.models.shared.decoder.tolerance import difference, tolerance
from segue.models.shared.encoder_cache import EncoderCache, cache_bytes

PATCHES = 256
"""Typical number of rows per encoder call; CPU linear layers choose their weight layout for it."""
_HARMLESS = frozenset(
    ("input_ids", "inputs_embeds", "position_ids", "use_cache", "return_dict", "cache_position", "logits_to_keep")
)


class Encoder:
    """`ModuleModel` over all encoders of a model."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for a model in which media do more than replace token rows."""
        self.device = ctx.device
        self.dtype = ctx.dtype
        self.cache = EncoderCache(cache_bytes(ctx))
        model = load_without_layers(ctx)
        self._kind = type(model).__name__
        self._own_positions = rope_index_of(model) is not None
        self._decoder = decoder_of(model)
        self._inner: nn.Module = holder_of(model)
        self._harmless = _HARMLESS | DEEP_ARGUMENTS | {"attention_mask"}
        if takes_ids_again(self._decoder, load_config(ctx).get_text_config(decoder=True)):
            # the llm stage handles these
            self._harmless |= {"per_layer_inputs"}
        processor = Processor(ctx.model_dir, media_tokens(ctx))
        forget_embedding(model)
        linears = (part for part in self._inner.named_modules() if isinstance(part[1], nn.Linear))
        nothing = {name for name, linear in linears if not linear.weight.numel()}  # of layers that were not loaded
        prepare(self._inner, ctx.device, Plan(rows=PATCHES, keep=nothing))
        self._bidirectional: frozenset[str] = frozenset()
        self._try_out(processor)

    def warm_up(self) -> None:
        """Nothing to do: media of each kind were encoded at load."""

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The input stage's chunk → one item per unit, in order."""
        works = [self._work(state, unit) for unit in payload["media"]]
        if final:
            if not works:
                works = [Work(state, None, bucket="none")]
            works[-1].last = True
        return works

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """Encode the units of one bucket together; equal units, and those in the cache, only once."""
        units = {(unit["kind"], unit["hash"]): unit for work in works if (unit := work.item) is not None}
        rows = self.cache.through(units, self._encode)
        return [Result(_payload(work.item, rows)) for work in works]

    def end(self, state: str) -> None:
        """Nothing to free: no state is kept per request."""

    def _work(self, request_id: str, unit: Payload) -> Work:
        known = (unit["kind"], unit["hash"]) in self.cache
        return Work(request_id, unit, bucket=_bucket(unit), cost=1 if known else self._cost(unit), ordered=False)

    def _cost(self, unit: Payload) -> int:
        """Number of rows that its encoding yields."""
        return max(1, len(unit["ids"]))

    def _encode(self, units: Sequence[Payload]) -> list[torch.Tensor]:
        """Encode units of one bucket in one call → [n, 1 + L, H] each."""
        ids = torch.cat([unit["ids"] for unit in units])
        first = units[0]["tensors"]
        if len(units) == 1:
            tensors = first
        else:
            tensors = {key: torch.cat([unit["tensors"][key] for unit in units]) for key in first}
        rows = self._rows(ids, tensors, units[0]["kind"])
        return [own.clone() for own in rows.split([len(unit["ids"]) for unit in units])]

    def _rows(self, ids: torch.Tensor, tensors: dict[str, Any], kind: str) -> torch.Tensor:
        """Placeholder ids [n] and the processor's tensors → [n, 1 + L, H]."""
        positions = torch.arange(len(ids), device=self.device)[None]
        with seen_by(self._decoder) as seen:
            self._inner(
                input_ids=ids.to(self.device)[None],
                position_ids=positions,
                use_cache=False,
                **taken_by(self._inner.forward, moved(tensors, self.device, self.dtype)),
            )
        given = seen[0]
        self._check_given(given, positions, kind)
        rows = given["inputs_embeds"][0]
        if int(rows.isnan().any(-1).sum()):
            raise StageFailed(f"{self._kind} has no rows of {kind} for some of its placeholder tokens")
        deep = given.get("deepstack_visual_embeds") or []
        return torch.stack([rows, *(layer.to(rows.dtype) for layer in deep)], dim=1)

    def _check_given(self, given: dict[str, Any], positions: torch.Tensor, kind: str) -> None:
        """Refuse decoder arguments besides the rows that the llm stage cannot reproduce."""
        if kind not in self._bidirectional and not is_causal(given.get("attention_mask"), self._decoder.config):
            raise cannot_be_served(self._kind, f"it passes its own attention masks for {kind} to its decoder")
        for name in sorted(given.keys() - self._harmless):
            if given[name] is not None and given[name] is not False:
                raise cannot_be_served(self._kind, f"it passes {name!r} to its decoder along with media")
        places = given.get("position_ids")
        if places is not None and not self._own_positions and not bool((places == positions).all()):
            raise cannot_be_served(self._kind, "it passes its own positions for media")

    @torch.inference_mode()
    def _try_out(self, processor: Processor) -> None:
        """Encode two small media of each kind, as one prompt's and each alone. Raises `ConfigError` if the model fails
        to, or the results differ."""
        self._see(processor)
        for kind in processor.kinds:
            try:
                text, media = processor.examples(kind)
                made = processor(text, {kind: media})
                whole, alone = self._both_ways(made, kind, len(media))
            except ConfigError:
                raise
            except (*FAILURES, StageFailed) as error:
                raise cannot_be_served(self._kind, f"its forward does not encode a {kind} alone ({error})") from error
            off = difference(alone, whole)
            if not off <= tolerance(self.dtype):
                raise cannot_be_served(
                    self._kind, f"it encodes {kind} differently in a batch than alone (by {off:.1e})"
                )

    def _see(self, processor: Processor) -> None:
        probe = MaskProbe(self._kind, self._inner, self._decoder, processor, self.device, self.dtype)
        self._bidirectional = probe.sight().kinds

    def _both_ways(self, made: Processed, kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of `count` media of a kind, encoded together and one by one."""
        [whole] = self._encode(units_of(made, {kind: count}, split=False))
        return whole, torch.cat([self._encode([unit])[0] for unit in units_of(made, {kind: count})])


def _bucket(unit: Payload) -> Any:
    if unit["alone"]:
        return unit["hash"]
    shapes = sorted((key, str(value.dtype), tuple(value.shape[1:])) for key, value in unit["tensors"].items())
    return unit["kind"], tuple(shapes)


def _payload(unit: Payload | None, rows: dict[tuple[str, bytes], torch.Tensor]) -> Payload:
    if unit is None:
        return {"media": []}
    return {"media": [{"kind": unit["kind"], "hash": unit["hash"], "rows": rows[unit["kind"], unit["hash"]]}]}

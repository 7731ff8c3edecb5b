"""The stage model of text embeddings: runs batches of texts through the library's model, then pools and projects the
hidden states as the checkpoint states.

B texts of a call, T tokens of the longest, H hidden size, D the vector's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import ConfigError, InvalidRequest, wrong
from segue.models.registry import read_config
from segue.models.shared.checkpoint.checkpoint import Checkpoint, load_module
from segue.models.shared.checkpoint.pretrained import load_config, load_model
from segue.models.shared.library import AutoModel
from segue.models.shared.text.batches import bucket, padded
from segue.models.text.text_embedding.recipe import Dense, read_recipe

_UNUSED = ("pooler.",)
"""BERT's head over its first token, which sentence-transformers does not use and many checkpoints lack."""


@dataclass(frozen=True, slots=True)
class _Text:
    """One text, and the requested length of its vector."""

    ids: torch.Tensor
    """[tokens] long, on the CPU."""
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """The state of a request, from `begin` on."""

    request_id: str
    dimensions: int | None = None


class Embedder:
    """`ModuleModel`: one item per text; texts of similar length share a call."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint or an unsupported model."""
        config = load_config(ctx)
        self._recipe = read_recipe(ctx.model_dir, read_config(ctx.model_dir))
        self.dimensions = self._width(config.hidden_size)
        config.use_cache = False
        self._model = load_model(ctx, config, AutoModel, unused=_UNUSED)
        self._then = [None if step is None else _load_dense(ctx, step) for step in self._recipe.then]
        self._pad: int = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
        self._device = ctx.device

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Embed one short text."""
        self._embed([torch.zeros(bucket(1), dtype=torch.long)])

    def begin(self, request: StageRequest) -> tuple[_Asked, list[Work]]:
        """Raises `InvalidRequest` if the model's vectors cannot be truncated to the requested length."""
        asked = request.request.options.get("dimensions")
        if asked is None or asked == self.dimensions:
            return _Asked(request.request_id), []
        if type(asked) is not int or asked < 1:
            raise wrong("dimensions", asked, "a positive integer")
        if not self._recipe.cuttable:
            raise InvalidRequest(
                f"dimensions is {asked}; this model's vectors have {self.dimensions} and cannot be cut",
                field="dimensions",
            )
        allowed = self._recipe.dimensions
        if asked > self.dimensions or (allowed is not None and asked not in allowed):
            right = f"at most {self.dimensions}" if allowed is None else f"one of {sorted(allowed)}"
            raise wrong("dimensions", asked, right)
        return _Asked(request.request_id, asked), []

    def feed(self, state: _Asked, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """The text's ids → one item."""
        text = _Text(payload["token_ids"].cpu(), state.dimensions)
        length = len(text.ids)
        return [Work(state.request_id, text, bucket=bucket(length), cost=length, last=True)]

    def end(self, state: _Asked) -> None:
        """Nothing to free: no state is kept per request."""

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """Texts → `{"embedding": [D] float32}`."""
        texts: list[_Text] = [work.item for work in works]
        vectors = self._embed([text.ids for text in texts])
        return [
            Result({"embedding": self._cut(vector, text.dimensions)}, prompt_tokens=len(text.ids))
            for vector, text in zip(vectors, texts, strict=True)
        ]

    def _embed(self, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[B, D] float32."""
        ids, mask = (tensor.to(self._device) for tensor in padded(texts, self._pad))
        hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        vectors = torch.cat([POOL[mode](hidden, mask) for mode in self._recipe.pooling], dim=-1)
        for layer in self._then:
            vectors = normalized(vectors) if layer is None else layer(vectors)
        return vectors

    def _cut(self, vector: torch.Tensor, dimensions: int | None) -> torch.Tensor:
        if dimensions is None:
            return vector
        vector = vector[:dimensions]
        return normalized(vector) if None in self._recipe.then else vector

    def _width(self, hidden: int) -> int:
        width = hidden * len(self._recipe.pooling)
        for step in self._recipe.then:
            if step is not None:
                if step.in_features != width:
                    raise ConfigError(
                        f"{step.directory}: takes vectors of {step.in_features}; those before it have {width}",
                        field="model",
                    )
                width = step.out_features
        return width


def normalized(vectors: torch.Tensor) -> torch.Tensor:
    """Scale to length 1: [..., D]."""
    return nn.functional.normalize(vectors, dim=-1)


# --- pooling: hidden states [B, T, H] and mask [B, T] (1 where a token is) → [B, H] ----------------------------------


def _first(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[:, 0]


def _last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(dim=1) - 1]


def _max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask[..., None] == 0, -1e9).max(dim=1).values


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def _mean_by_root(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).sqrt()


def _weighted(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Weight token i by i (SGPT: Muennighoff, 2022, §3.1)."""
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (hidden * weights[..., None]).sum(dim=1) / weights.sum(dim=1, keepdim=True)


POOL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted,
    "lasttoken": _last,
}


class _DenseLayer(nn.Module):
    """A dense layer in the format of sentence-transformers: [..., in] → [..., out]."""

    def __init__(self, dense: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias)
        self._squash = dense.activation == "tanh"

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        out = self.linear(vectors)
        return out.tanh() if self._squash else out


def _load_dense(ctx: LoadContext, dense: Dense) -> nn.Module:
    checkpoint = None if ctx.load_format == "dummy" else Checkpoint(dense.directory)
    return load_module(ctx, lambda: _DenseLayer(dense), lambda name: [name], checkpoint=checkpoint, dtype=torch.float32)

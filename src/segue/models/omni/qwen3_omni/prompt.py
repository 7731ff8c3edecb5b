"""Build the thinker's prompt: media rows in the place of their placeholders, positions, and identities for caching.

T prompt tokens, n rows of one medium, L layers that get deep features, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from segue.engines.autoregressive.contract import Prompt
from segue.engines.contract import Payload
from segue.messages.errors import InvalidRequest, StageFailed
from segue.models.omni.qwen3_omni.library import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
)
from segue.models.shared.decoder.deep_features import DEEP, MEDIA
from segue.models.shared.omni.positions import MediumFacts, Positions, RopeIndex, facts_of

ROWS = "rows"
"""`Prompt.extras`: [T] bool, true where the embedding is a row of a medium."""
FACTS = "facts"
"""`Prompt.extras`: the `MediumFacts` of the prompt's media."""


class _Index(Qwen3OmniMoePreTrainedModelForConditionalGeneration):
    """A thinker without weights, for its `get_rope_index`."""

    def __init__(self, config: Qwen3OmniMoeThinkerConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.vision_config.spatial_merge_size


def positions_of(config: Qwen3OmniMoeThinkerConfig) -> Positions:
    """Computes positions by the library's own `get_rope_index`; the talker's are those of the thinker."""
    return Positions(cast(RopeIndex, _Index(config)))


@dataclass(slots=True)
class Arrived:
    """The inputs of one request that have arrived."""

    from_encoder: bool
    """The request visits the encoder stage: wait for its rows."""
    token_ids: torch.Tensor | None = None
    media: list[MediumFacts] = field(default_factory=list)
    use_audio_in_video: bool = False
    reply: list[int] = field(default_factory=list)
    """The text to say, if the request gives it."""
    rows: list[tuple[str, bytes, torch.Tensor]] = field(default_factory=list)
    """(kind, hash, [n, 1 + L, H]; of audio [n, 1, H]) in prompt order."""
    encoder_done: bool = False

    def take(self, upstream: str, payload: Payload, *, final: bool) -> None:
        """Add one chunk."""
        if upstream == "encoder":
            self.rows.extend((item["kind"], item["hash"], item["embeds"]) for item in payload["media"])
            self.encoder_done = final
        else:
            self.token_ids = payload["token_ids"].cpu()
            self.media = [facts_of(item) for item in payload["media"]]
            self.use_audio_in_video = bool(payload.get("use_audio_in_video", False))
            self.reply = payload.get("reply", [])

    @property
    def ready(self) -> bool:
        return self.token_ids is not None and (self.encoder_done or not self.from_encoder)


class Prompts:
    """Builds the prompts of one thinker."""

    def __init__(
        self, config: Qwen3OmniMoeThinkerConfig, embed: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        """`embed`: [n] ids → [n, H]."""
        self._positions = positions_of(config)
        self._embed = embed
        self._device = device
        self._vocab: int = config.text_config.vocab_size
        self._kinds: Mapping[int, str] = {
            config.image_token_id: "image",
            config.audio_token_id: "audio",
            config.video_token_id: "video",
        }

    @torch.inference_mode()
    def __call__(self, arrived: Arrived) -> Prompt:
        """Raises `InvalidRequest` for ids and media that do not match, `StageFailed` for rows of other media."""
        ids = arrived.token_ids
        assert ids is not None
        self._check_ids(ids)
        if [(kind, key) for kind, key, _ in arrived.rows] != [(medium.kind, medium.hash) for medium in arrived.media]:
            raise StageFailed(
                f"the prompt has {len(arrived.media)} media, but the encoder sent {len(arrived.rows)} that differ"
            )
        if not arrived.media:
            return Prompt(token_ids=ids.tolist(), modality_tokens={"text": len(ids)})
        places = self._places(ids, arrived)
        # on the host: the engine does not account device memory that a request holds beyond its KV
        embeds = self._embed(ids.to(self._device)).cpu()
        layers = max(rows.shape[1] for _, _, rows in arrived.rows) - 1
        deep = embeds.new_zeros(len(ids), layers, embeds.shape[1])
        seen = torch.zeros(len(ids), dtype=torch.bool)
        for kind, where in places.items():
            own = torch.cat([rows for of, _, rows in arrived.rows if of == kind]).to(embeds)
            embeds[where] = own[:, 0]
            deep[where, : own.shape[1] - 1] = own[:, 1:]
            seen |= where if own.shape[1] > 1 else False
        counts = {kind: int(where.sum()) for kind, where in places.items()}
        positions, delta = None, 0
        if places.keys() - {"audio"}:
            positions, delta = self._positions(ids, arrived.media, use_audio_in_video=arrived.use_audio_in_video)
            positions = positions.to(self._device)
        return Prompt(
            token_ids=ids.tolist(),
            embeds=embeds,
            positions=positions,
            position_delta=delta,
            identity=self._identity(ids, arrived),
            modality_tokens={"text": len(ids) - sum(counts.values()), **counts},
            extras={ROWS: torch.stack(list(places.values())).any(0), FACTS: arrived.media}
            | ({MEDIA: seen, DEEP: deep[seen]} if layers else {}),
        )

    def _check_ids(self, ids: torch.Tensor) -> None:
        wrong = ids[(ids < 0) | (ids >= self._vocab)]
        if wrong.numel():
            raise InvalidRequest(
                f"prompt_token_ids has {int(wrong[0])}; this model's ids are 0 to {self._vocab - 1}",
                field="prompt_token_ids",
            )

    def _places(self, ids: torch.Tensor, arrived: Arrived) -> dict[str, torch.Tensor]:
        """Kind of media in the prompt → [T] bool, true at its rows."""
        places = {}
        for token, kind in self._kinds.items():
            rows = [len(rows) for of, _, rows in arrived.rows if of == kind]
            if not rows:
                continue
            places[kind] = ids == token
            if sum(rows) != int(places[kind].sum()):
                raise InvalidRequest(
                    f"the prompt has {int(places[kind].sum())} {kind} placeholder tokens; its {kind} content has "
                    f"{sum(rows)} rows",
                    field="messages",
                )
        return places

    def _identity(self, ids: torch.Tensor, arrived: Arrived) -> Sequence[int | bytes]:
        """[T] the prefix-cache key of each token: a text token's id; for a media row, the medium's digest + index."""
        what: list[int | bytes] = list(ids.tolist())
        for token, kind in self._kinds.items():
            media = zip(arrived.media, arrived.rows, strict=True)
            own = [
                (medium.digest(arrived.use_audio_in_video), len(rows))
                for medium, (_, _, rows) in media
                if medium.kind == kind
            ]
            places = (ids == token).nonzero()[:, 0].tolist() if own else []
            named = [digest + index.to_bytes(4, "little") for digest, length in own for index in range(length)]
            for place, name in zip(places, named, strict=True):
                what[place] = name
        return what

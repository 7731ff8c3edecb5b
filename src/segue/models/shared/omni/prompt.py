"""The thinker's prompt: what arrives of it, and where the rows of its media go.

T prompt tokens, n rows of one medium.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from segue.engines.autoregressive.contract import FlatBatch
from segue.engines.contract import Payload
from segue.kernels.linear.lora import Lora
from segue.messages.errors import InvalidRequest, StageFailed
from segue.models.shared.omni.positions import MediumFacts, facts_of

MEDIA_ROWS = "media_rows"
"""`Prompt.extras`: [T] bool, true where the embedding is a row of a medium."""


@dataclass(slots=True)
class Arrived:
    """The inputs of one request that have arrived."""

    from_encoder: bool
    """The request visits the encoder stage: wait for its rows."""
    adapter: Lora | None = None
    token_ids: torch.Tensor | None = None
    media: list[MediumFacts] = field(default_factory=list)
    use_audio_in_video: bool = False
    reply: list[int] = field(default_factory=list)
    """The text to say, if the request gives it."""
    rows: list[tuple[str, bytes, torch.Tensor]] = field(default_factory=list)
    """(kind, hash, [n, …]) in prompt order."""
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


class MediaPlaces:
    """Finds the places of media in the prompts of one thinker."""

    def __init__(self, config: Any) -> None:
        """`config`: the thinker's."""
        self._vocab: int = config.text_config.vocab_size
        self._kinds: dict[int, str] = {
            config.image_token_id: "image",
            config.audio_token_id: "audio",
            config.video_token_id: "video",
        }

    def __call__(self, ids: torch.Tensor, arrived: Arrived) -> dict[str, torch.Tensor]:
        """Kind of media in the prompt → [T] bool, true at its rows. Raises `InvalidRequest` for ids and media that do
        not match, `StageFailed` for rows of other media."""
        wrong = ids[(ids < 0) | (ids >= self._vocab)]
        if wrong.numel():
            raise InvalidRequest(
                f"prompt_token_ids has {int(wrong[0])}; this model's ids are 0 to {self._vocab - 1}",
                field="prompt_token_ids",
            )
        if [(kind, key) for kind, key, _ in arrived.rows] != [(medium.kind, medium.hash) for medium in arrived.media]:
            raise StageFailed(
                f"the prompt has {len(arrived.media)} media, but the encoder sent {len(arrived.rows)} that differ"
            )
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

    def identity(self, ids: torch.Tensor, arrived: Arrived) -> list[int | bytes]:
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


def by_modality(ids: torch.Tensor, places: dict[str, torch.Tensor]) -> dict[str, int]:
    """Prompt tokens of each modality."""
    counts = {kind: int(where.sum()) for kind, where in places.items()}
    return {"text": len(ids) - sum(counts.values()), **counts}


def media_rows(places: dict[str, torch.Tensor]) -> torch.Tensor:
    """[T] bool, true at the rows of media, of which there is at least one."""
    return torch.stack(list(places.values())).any(0)


def media_rows_of(batch: FlatBatch) -> torch.Tensor | None:
    """[tokens of the batch] bool, true at media rows; None if there is none."""
    masks = []
    for prompt, start, stop in batch.prompts:
        mask = torch.zeros(stop - start, dtype=torch.bool)
        if prompt is not None and (rows := prompt.extras.get(MEDIA_ROWS)) is not None:
            mask[: len(rows[start:stop])] = rows[start:stop]
        masks.append(mask)
    media = torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool)
    return media if media.any() else None

"""The encoder stage: as the library encodes, alone or batched; and its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qwen2_5_omni_family import CASES, context, input_payload, library_model, processed, stage_request

from segue.engines.contract import Payload
from segue.engines.module.contract import Work
from segue.engines.module.engine import ModuleEngine
from segue.messages.errors import ConfigError, StageFailed
from segue.models.omni.qwen2_5_omni.encoder import Encoder

MIXED = next(case for case in CASES if case.name == "mixed")


@pytest.fixture(scope="module")
def media(tiny_dir: Path) -> list[Payload]:
    """Two images, a clip and two recordings of different sizes."""
    return input_payload(processed(tiny_dir, MIXED), MIXED)["media"]


@pytest.fixture
def encoder(tiny_dir: Path) -> Encoder:
    return Encoder(context(tiny_dir, "encoder"))


def works_of(encoder: Encoder, media: list[Payload], name: str = "r", *, final: bool = True) -> list[Work]:
    state, ready = encoder.begin(stage_request("encoder", upstreams={"input"}, request_id=name))
    assert ready == []
    return encoder.feed(state, "input", {"media": media}, final=final)


def rows_of(encoder: Encoder, works: list[Work]) -> list[torch.Tensor]:
    rows = []
    for result in encoder.run(works):
        assert result.error is None
        assert result.payload is not None
        [item] = result.payload["media"]
        rows.append(item["embeds"])
    return rows


def by_bucket(works: list[Work]) -> dict[Any, list[Work]]:
    buckets: dict[Any, list[Work]] = {}
    for work in works:
        buckets.setdefault(work.bucket, []).append(work)
    return buckets


def test_one_item_per_medium_the_last_one_final(encoder: Encoder, media: list[Payload]) -> None:
    works = works_of(encoder, media)
    assert [work.bucket for work in works] == ["vision", "vision", "vision", "audio", "audio"]
    assert [work.last for work in works] == [False] * 4 + [True]
    assert all(work.request_id == "r" for work in works)
    assert [work.cost for work in works] == [
        len(item["pixel_values"]) if item["kind"] != "audio" else item["input_features"].shape[1] for item in media
    ]
    assert not any(work.last for work in works_of(encoder, media, final=False))


def test_media_of_one_request_share_calls_and_keep_their_order(tiny_dir: Path, media: list[Payload]) -> None:
    engine = ModuleEngine(Encoder(context(tiny_dir, "encoder")))
    engine.add(stage_request("encoder", upstreams={"input"}))
    engine.feed("r", "input", {"media": media}, final=True)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert engine.stats()["calls_total"] == 2  # the images and the clip, then the recordings
    assert [output.payload["media"][0]["hash"] for output in outputs if output.payload] == [m["hash"] for m in media]


def test_rows_are_the_librarys(tiny_dir: Path, encoder: Encoder, media: list[Payload]) -> None:
    inputs = processed(tiny_dir, MIXED)
    thinker = library_model(tiny_dir).thinker
    with torch.no_grad():
        images = thinker.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        videos = thinker.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"]).pooler_output
        audio = thinker.get_audio_features(inputs["input_features"], inputs["feature_attention_mask"]).last_hidden_state
    works = works_of(encoder, media)
    mine = [rows_of(encoder, [work])[0] for work in works]
    for own, theirs in zip(mine[:3], [*images, *videos], strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(mine[3:]), audio, atol=1e-5, rtol=0)
    assert all(rows.std() > 0.01 for rows in mine)


def test_batched_is_as_alone(tiny_dir: Path, media: list[Payload]) -> None:
    alone_encoder, batched_encoder = (Encoder(context(tiny_dir, "encoder")) for _ in range(2))
    alone = [rows_of(alone_encoder, [work])[0] for work in works_of(alone_encoder, media)]
    for works in by_bucket(works_of(batched_encoder, media)).values():
        for work, rows in zip(works, rows_of(batched_encoder, works), strict=True):
            index = next(i for i, item in enumerate(media) if item["hash"] == work.item.hash)
            torch.testing.assert_close(rows, alone[index], atol=1e-5, rtol=0)


def test_other_content_gives_other_rows(tiny_dir: Path, encoder: Encoder, media: list[Payload]) -> None:
    changed = {**media[0], "hash": b"other", "pixel_values": media[0]["pixel_values"].flip(0)}
    first, second = (rows_of(encoder, works_of(encoder, [item]))[0] for item in (media[0], changed))
    assert (first - second).abs().max() > 0.01


def test_known_media_are_not_encoded_again(encoder: Encoder, media: list[Payload]) -> None:
    first = rows_of(encoder, works_of(encoder, media[:1]))[0]
    blank = {**media[0], "pixel_values": torch.zeros_like(media[0]["pixel_values"])}
    [work] = works_of(encoder, [blank], "again")
    assert work.cost == 1
    assert torch.equal(rows_of(encoder, [work])[0], first)
    assert encoder.cache.hits == 1


def test_equal_media_in_one_call_are_encoded_once(encoder: Encoder, media: list[Payload]) -> None:
    twice = [*works_of(encoder, media[:1], "a"), *works_of(encoder, media[:1], "b")]
    first, second = rows_of(encoder, twice)
    assert first is second


def test_the_cache_keeps_the_latest_used_within_its_bytes(tiny_dir: Path, media: list[Payload]) -> None:
    images = media[:2]
    unbounded = Encoder(context(tiny_dir, "encoder"))
    sizes = [rows_of(unbounded, works_of(unbounded, [item]))[0].nbytes for item in media[:3]]
    encoder = Encoder(context(tiny_dir, "encoder", options={"cache_bytes": sizes[0] + sizes[1]}))
    for item in images:
        rows_of(encoder, works_of(encoder, [item]))
    assert encoder.cache.bytes == sizes[0] + sizes[1]
    rows_of(encoder, works_of(encoder, images[:1]))  # used again: the other one is the oldest now
    third = {**images[1], "hash": b"third"}
    rows_of(encoder, works_of(encoder, [third]))
    kept = {key for key in ((item["kind"], item["hash"]) for item in [*images, third]) if key in encoder.cache}
    assert kept == {("image", images[0]["hash"]), ("image", b"third")}
    assert encoder.cache.bytes <= encoder.cache.capacity
    rows_of(encoder, works_of(encoder, [media[2]]))  # larger than the whole cache
    assert ("video", media[2]["hash"]) not in encoder.cache


def test_no_cache(tiny_dir: Path, media: list[Payload]) -> None:
    encoder = Encoder(context(tiny_dir, "encoder", options={"cache_bytes": 0}))
    first = rows_of(encoder, works_of(encoder, media[:1]))[0]
    assert torch.equal(rows_of(encoder, works_of(encoder, media[:1]))[0], first)
    assert encoder.cache.bytes == encoder.cache.hits == 0


@pytest.mark.parametrize("value", [-1, "much", 1.5])
def test_an_impossible_cache(tiny_dir: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="cache_bytes"):
        Encoder(context(tiny_dir, "encoder", options={"cache_bytes": value}))


def test_a_request_without_media_ends_at_once(encoder: Encoder) -> None:
    [work] = works_of(encoder, [])
    assert work.last
    [result] = encoder.run([work])
    assert result.payload == {"media": []}


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "image", "hash": b"x", "pixel_values": torch.zeros(15, 1176), "grid_thw": [1, 4, 4]},
        {"kind": "image", "hash": b"x", "pixel_values": torch.zeros(16, 7), "grid_thw": [1, 4, 4]},
        {"kind": "video", "hash": b"x", "pixel_values": torch.zeros(0, 1176), "grid_thw": [0, 4, 4]},
        {"kind": "audio", "hash": b"x", "input_features": torch.zeros(64, 100)},
        {"kind": "audio", "hash": b"x", "input_features": torch.zeros(128, 0)},
    ],
)
def test_shapes_that_cannot_be_are_refused(encoder: Encoder, wrong: Payload) -> None:
    with pytest.raises(StageFailed, match=f"{wrong['kind']} of shape"):
        works_of(encoder, [wrong])


def test_many_recordings_of_all_lengths_batched_as_alone(tiny_dir: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    recordings = [
        {
            "kind": "audio",
            "hash": bytes([n % 256, n // 256]),
            "input_features": torch.randn(128, n, generator=generator),
        }
        for n in (8, 99, 100, 101, 200, 201, 399, 400, 523)
    ]
    alone = Encoder(context(tiny_dir, "encoder", options={"cache_bytes": 0}))
    apart = [rows_of(alone, [work])[0] for work in works_of(alone, recordings)]
    together = rows_of(alone, works_of(alone, recordings))
    for own, batched in zip(apart, together, strict=True):
        torch.testing.assert_close(batched, own, atol=1e-5, rtol=0)

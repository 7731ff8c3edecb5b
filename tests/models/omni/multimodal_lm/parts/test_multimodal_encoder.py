"""The encoder stage of models that see or hear: rows as the library makes them, once per medium; and the language
model's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from multimodal_family import Case, Stages, context, library_model, processed, request_of, sent, stage_request

from segue.engines.contract import Payload
from segue.messages.errors import ConfigError, StageFailed
from segue.models.omni.multimodal_lm.encoder import Encoder
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from segue.models.shared.checkpoint.checkpoint import held_bytes

MIXED = Case("mixed", "is the image out of the clip?", (("image", 8), ("video", 9), ("image", 10)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3-vl")
    tiny.make("qwen3-vl", made)
    return made


@pytest.fixture(scope="module")
def stages(directory: Path) -> Stages:
    return Stages(directory)


def rows_of(encoder: Encoder, payload: Payload) -> list[torch.Tensor]:
    works = encoder.feed("r", "input", {"media": payload["media"]}, final=True)
    buckets: dict[Any, list[Any]] = {}
    for work in works:
        buckets.setdefault(work.bucket, []).append(work)
    made = {}
    for own in buckets.values():
        for work, result in zip(own, encoder.run(own), strict=True):
            assert result.payload is not None
            made[id(work)] = result.payload["media"][0]["rows"]
    return [made[id(work)] for work in works]


def test_rows_and_deep_features_are_the_librarys(directory: Path, stages: Stages) -> None:
    inputs = processed(directory, MIXED)
    with torch.inference_mode():
        model = library_model(directory).model
        seen = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        moved = model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    expected = [
        torch.stack([rows, *(layer[index] for layer in features.deepstack_features)], dim=1)
        for features in (seen, moved)
        for index, rows in enumerate(features.pooler_output)
    ]
    payload = stages.input.process(request_of(MIXED))
    assert [unit["kind"] for unit in payload["media"]] == ["image", "image", "video"]
    for ours, theirs in zip(rows_of(stages.encoder, payload), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_what_was_seen_before_is_not_encoded_again(directory: Path, stages: Stages) -> None:
    encoder = Encoder(context(directory, "encoder"))
    payload = stages.input.process(request_of(MIXED))
    first = rows_of(encoder, payload)
    assert encoder.cache.hits == 0
    assert all(one is other for one, other in zip(first, rows_of(encoder, payload), strict=True))
    assert encoder.cache.hits == 3
    assert encoder.feed("r", "input", {"media": payload["media"]}, final=True)[0].cost == 1


def test_it_holds_no_layers_of_the_decoder(stages: Stages) -> None:
    layers = held_bytes(stages.llm._decoder.model.layers)
    assert not len(stages.encoder._decoder.layers)
    assert stages.llm.weight_bytes > layers
    names = [name for name, _ in stages.llm._decoder._head.named_modules()]
    assert not any("visual" in name for name in names)


def test_a_text_has_one_empty_item(stages: Stages) -> None:
    [work] = stages.encoder.feed("r", "input", {"media": []}, final=True)
    [result] = stages.encoder.run([work])
    assert work.last
    assert result.payload == {"media": []}


@pytest.mark.parametrize("wrong", [-1, "1GB"])
def test_cache_bytes_is_a_number(directory: Path, wrong: object) -> None:
    with pytest.raises(ConfigError, match="cache_bytes"):
        Encoder(context(directory, "encoder", options={"cache_bytes": wrong}))


def test_what_each_token_of_a_prompt_is(stages: Stages) -> None:
    payload = stages.input.process(request_of(MIXED))
    state = stages.llm.begin(stage_request("r", frozenset({"input", "encoder"})))
    chunks = stages.encoded(payload)
    for chunk, final in chunks:
        assert stages.llm.feed(state, "encoder", chunk, final=final).prompt is None
    prompt = stages.llm.feed(state, "input", sent("input", "llm", payload), final=True).prompt
    assert prompt is not None
    assert prompt.identity is not None
    places = {int(place) for unit in payload["media"] for place in unit["places"]}
    assert {place for place, what in enumerate(prompt.identity) if isinstance(what, bytes)} == places
    assert len({what for what in prompt.identity if isinstance(what, bytes)}) == len(places)
    counts = prompt.modality_tokens
    assert sum(counts.values()) == len(prompt.token_ids)
    assert counts["image"] + counts["video"] == len(places)
    assert prompt.positions is not None
    assert prompt.position_delta == int(prompt.positions.max()) + 1 - len(prompt.token_ids)


def test_rows_of_other_media_than_the_prompts(stages: Stages) -> None:
    payload = stages.input.process(request_of(MIXED))
    chunks = stages.encoded(payload)
    state = stages.llm.begin(stage_request("r", frozenset({"input", "encoder"})))
    stages.llm.feed(state, "input", sent("input", "llm", payload), final=True)
    stages.llm.feed(state, "encoder", chunks[0][0], final=False)
    with pytest.raises(StageFailed, match="the prompt has 3 media, but the encoder sent 2 that differ"):
        stages.llm.feed(state, "encoder", chunks[2][0], final=True)

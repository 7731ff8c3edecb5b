"""Prompts of text or token ids with media beside them: what the input stage makes of the same chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multimodal_family import FAMILIES, Case, beside, cases_of, context, request_of

from segue.messages.errors import InvalidRequest
from segue.messages.request import Message, Request
from segue.models.omni.multimodal_lm.input import InputProcessor
from segue.models.omni.multimodal_lm.stages import STAGE_MODELS
from segue.models.omni.multimodal_lm.tiny import presets as tiny

IMAGES = Case("images", "how do these differ", (("image", 1), ("image", 2)))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, InputProcessor]:
    made: dict[str, InputProcessor] = {}
    for family in FAMILIES:
        directory: Path = tmp_path_factory.mktemp(family)
        tiny.make(family, directory)
        made[family] = STAGE_MODELS["input"](context(directory, "input"))
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_with_media_are_the_chat(stages: dict[str, InputProcessor], family: str) -> None:
    for case in cases_of(family):
        if case.media:
            beside(stages[family], case)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_clients_ids_stay_as_they_are(stages: dict[str, InputProcessor], family: str) -> None:
    """Ids that no text is tokenized to: what a model wrote need not be."""
    stage = stages[family]
    kind = "audio" if family == "qwen2-audio" else "image"
    media = [Message("user", [*request_of(Case("two", "?", ((kind, 1), (kind, 2)))).media()])]
    letters = stage._processor.tokenizer.convert_tokens_to_ids(["t", "h", "e"])
    sample = stage._processor.plain(stage._processor.sample(kind), add_special_tokens=False)
    ids = [*letters, *sample, *letters[::-1], *sample, *letters]
    assert ids != stage._processor.plain(stage._processor.tokenizer.decode(ids), add_special_tokens=False)
    made = stage.process(Request(request_id="r", prompt_token_ids=ids, messages=media))["token_ids"].tolist()
    assert [token for token in made if token in letters] == [*letters, *letters[::-1], *letters]
    again = stage.process(Request(request_id="r", prompt_token_ids=made, messages=media))
    assert again["token_ids"].tolist() == made


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        (
            {"prompt_token_ids": [5, "image", 6]},
            "prompt_token_ids",
            r"has 1 placeholder for image, but multi_modal_data has 2 image: write one for each, or exactly as many as "
            r"they take, in one run each: \d+, \d+",
        ),
        ({"prompt_token_ids": [5, "image", 6, "image", "image"]}, "prompt_token_ids", "has 3 placeholders for image"),
        ({"prompt_token_ids": [5, 6]}, "prompt_token_ids", "has 0 placeholders for image"),
        ({"prompt_token_ids": ["video", "image", "image"]}, "prompt_token_ids", "has 1 placeholder for video, but"),
        ({"prompt": "see <|image_pad|>"}, "prompt", "has 1 placeholder for image, but multi_modal_data has 2 image"),
        ({"prompt": "see"}, "prompt", "has 0 placeholders for image, but multi_modal_data has 2 image: write one"),
    ],
)
def test_placeholders_that_do_not_fit_are_counted(
    stages: dict[str, InputProcessor], given: dict[str, Any], field: str, says: str
) -> None:
    stage = stages["qwen3-vl"]
    places: dict[Any, int] = stage._processor.placeholder_ids
    if ids := given.get("prompt_token_ids"):
        given = {"prompt_token_ids": [places.get(token, token) for token in ids]}
    request = Request(request_id="r", messages=[Message("user", [*request_of(IMAGES).media()])], **given)
    with pytest.raises(InvalidRequest, match=f"{field} {says}") as caught:
        stage.process(request)
    assert caught.value.field == field


def test_placeholders_without_media_are_refused(stages: dict[str, InputProcessor]) -> None:
    stage = stages["gemma3-vision"]
    for token in (stage._processor.placeholder_ids["image"], stage._processor.rows["image"]):
        with pytest.raises(InvalidRequest, match="has 1 placeholder for image, but multi_modal_data has 0 image: send"):
            stage.process(Request(request_id="r", prompt_token_ids=[5, token]))
        request = Request(request_id="r", prompt_token_ids=[5, token], modalities=["tokens"])
        assert stage.process(request)["tokens"]["token_ids"] == [5, token]  # only their text is asked
    request = request_of(IMAGES)
    ids = [5, stage._processor.placeholder_ids["image"]]
    with pytest.raises(InvalidRequest, match="has 1 placeholder for image, but multi_modal_data has 2 image: write"):
        stage.process(Request(request_id="r", prompt_token_ids=ids, messages=[Message("user", [*request.media()])]))


def test_embeddings_are_refused_where_layers_attend_to_images(stages: dict[str, InputProcessor]) -> None:
    with pytest.raises(InvalidRequest, match="takes no prompt_embeds"):
        stages["llama3.2-vision"].process(Request(request_id="r", prompt_embeds=b"x"))


def test_media_in_a_chat_do_not_go_with_a_prompt(stages: dict[str, InputProcessor]) -> None:
    request = request_of(IMAGES)  # text among the media
    request.prompt = "see"
    with pytest.raises(InvalidRequest, match="give either messages or prompt, not both"):
        stages["qwen3-vl"].process(request)

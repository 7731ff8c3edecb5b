"""What vllm-omni's clients send: understood, or refused in words that say what to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_service import FakeService, Live, live
from painter import painter

from segue.messages.limits import RequestLimits
from segue.messages.request import MediaPart

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Say"}]}
THINKER = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 2048, "seed": 42, "detokenize": True}
TALKER = {"temperature": 0.9, "top_k": 40, "seed": 42, "detokenize": True, "stop_token_ids": [8294, 7]}
"""As its example for Qwen2.5-Omni has them."""


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    service = FakeService()
    service.card.gives = frozenset({"text", "audio"})
    service.card.vocab_sizes = {"thinker": 1000, "talker": 300}
    with live(service) as server:
        yield server


@pytest.fixture(scope="module")
def paints() -> Iterator[Live]:
    with live(painter()) as server:
        yield server


def ask(server: Live, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={**ASKED, **body}, timeout=120)


def test_sampling_of_each_stage_in_order(server: Live) -> None:
    assert ask(server, modalities=["text", "audio"], sampling_params_list=[THINKER, TALKER, THINKER]).status_code == 200
    sampling = server.service.requests[-1].sampling
    assert set(sampling) == {"thinker", "talker"}, "and the vocoder does not sample"
    assert (sampling["thinker"].max_tokens, sampling["thinker"].top_k, sampling["thinker"].seed) == (2048, -1, 42)
    assert (sampling["talker"].temperature, sampling["talker"].stop_token_ids) == (0.9, [7]), "it has 300 tokens"
    assert ask(server, sampling_params_list=[None, {"top_k": 3}]).status_code == 200
    assert server.service.requests[-1].sampling["talker"].top_k == 3


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"sampling_params_list": [{}, {}, {}, {}]}, "sampling_params_list", "thinker, talker, vocoder"),
        ({"sampling_params_list": [{}, {"top_q": 1}]}, "sampling_params_list[1].top_q", "did you mean"),
        ({"sampling_params_list": [{}, {}, {"top_p": 7}]}, "sampling_params_list[2].top_p", "at most 1"),
        ({"sampling_params_list": [{}], "sampling": {}}, "sampling", "give one"),
        ({"mm_processor_kwargs": {"fps": 2}}, "mm_processor_kwargs.fps", "use_audio_in_video"),
        (
            {"mm_processor_kwargs": {"use_audio_in_video": True}, "options": {"use_audio_in_video": False}},
            "mm_processor_kwargs.use_audio_in_video",
            "options.use_audio_in_video",
        ),
        ({"extra_body": {"top_k": 3}}, "extra_body", "put its keys at the top level"),
    ],
)
def test_what_is_wrong_is_named(server: Live, body: dict[str, Any], param: str, says: str) -> None:
    answer = ask(server, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert says in answer.json()["error"]["message"]


def test_the_audio_of_a_video(server: Live) -> None:
    for heard in (True, False):
        assert ask(server, mm_processor_kwargs={"use_audio_in_video": heard}).status_code == 200
        assert server.service.requests[-1].options == {"use_audio_in_video": heard}


def test_so_many_frames_of_a_video(server: Live) -> None:
    video: dict[str, Any] = {"url": "data:video/mp4;base64,AAAA", "num_frames": 16}
    messages = [{"role": "user", "content": [{"type": "video_url", "video_url": video}]}]
    assert ask(server, messages=messages).status_code == 200
    [part] = server.service.requests[-1].messages[0].content
    assert isinstance(part, MediaPart)
    assert part.frames == 16
    video["num_frames"] = 0
    assert ask(server, messages=messages).json()["error"]["param"] == "messages[0].content[0].video_url.num_frames"


def test_images_where_its_clients_read_them(paints: Live) -> None:
    """They send `extra_body` as it stands, and read `content`."""
    extra = {"height": 32, "width": 48, "num_inference_steps": 3, "seed": 5, "num_outputs_per_prompt": 2}
    [choice] = ask(paints, extra_body=extra).json()["choices"]
    content = choice["message"]["content"]
    assert [part["image_url"]["url"][:22] for part in content] == ["data:image/png;base64,"] * 2
    assert content == choice["message"]["images"]
    request = paints.service.requests[-1]
    assert request.diffusion is not None
    assert (request.diffusion.height, request.diffusion.num_images_per_prompt, request.seed) == (32, 2, 5)
    twice = ask(paints, extra_body={"height": 32}, height=48)
    assert twice.json()["error"]["param"] == "extra_body.height"


def test_null_says_nothing(server: Live, paints: Live) -> None:
    answer = ask(server, mm_processor_kwargs={"use_audio_in_video": None}, options={"use_audio_in_video": True})
    assert answer.status_code == 200
    assert server.service.requests[-1].options == {"use_audio_in_video": True}
    image = {"model": "painter", "modalities": ["image"]}
    answer = ask(paints, **image, seed=7, extra_body={"seed": None, "height": 64, "width": 64})
    assert answer.status_code == 200, answer.text
    assert paints.service.requests[-1].seed == 7
    assert ask(paints, **image, extra_body={"sead": None}).json()["error"]["param"] == "sead"


def test_sampling_of_each_stage_within_the_deployments_limits(server: Live) -> None:
    listed = [{"stop": [f"a{index}" for index in range(17)]}]
    assert "at most 16" in ask(server, sampling_params_list=listed).json()["error"]["message"]
    service = FakeService()
    service.card.limits = RequestLimits(max_stop_strings=17)
    with live(service) as wider:
        assert ask(wider, sampling_params_list=listed).status_code == 200

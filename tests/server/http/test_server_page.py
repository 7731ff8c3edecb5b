"""The page's script, driven with stubs for the browser's parts against a live server."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from collections.abc import AsyncGenerator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import FakeService, live, speak
from filmer import filmer
from painter import paint, painter, pixels
from PIL import Image

from segue.messages.deltas import Delta
from segue.messages.request import MediaPart, Request, TextPart
from segue.server.settings import ServerSettings

NODE = shutil.which("node")


pytestmark = pytest.mark.skipif(NODE is None, reason="no node to run the page's script with")


def driven(url: str, *arguments: str) -> dict[str, Any]:
    """What the page shows after one turn."""
    assert NODE is not None
    driver = Path(__file__).with_name("page_driver.mjs")
    with as_file(files("segue.server.page").joinpath("static/index.html")) as page:
        run = subprocess.run(
            [NODE, str(driver), str(page), url, *arguments], capture_output=True, text=True, timeout=240, check=False
        )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_page_sends_an_image_streams_text_and_plays_audio() -> None:
    with live(FakeService()) as server:
        seen = driven(server.url)
    assert (seen["model"], seen["voices"], seen["outputs"]) == ("fake-omni", 2, 3)
    assert seen["examples"] == []
    assert seen["sent"] == [["turn user", "hi", ["img", "blob:3"]]]
    assert seen["said"] == "Hello, world"
    assert re.fullmatch(r"TTFT [\d.]+ s · TTFA [\d.]+ s · JCT [\d.]+ s", seen["facts"])
    assert seen["played"] == {"samples": 7200, "pieces": 3, "rate": 24000}
    assert seen["audio"] == f"blob:{44 + 2 * 7200}", "what was heard can be played again"
    [request] = server.service.requests
    assert (request.modalities, request.voice) == (["text", "audio"], "Ben")
    image, text = request.messages[0].content
    assert isinstance(image, MediaPart)
    assert (image.kind, image.data, text) == ("image", b"\0\0\0", TextPart("hi"))


def test_the_page_shows_images_and_how_far_they_are() -> None:
    with live(painter()) as server:
        seen = driven(server.url, "none")
    assert not seen["errors"]
    [shown] = seen["images"]
    kind, _, data = shown.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert np.array_equal(np.asarray(image), pixels(0, 64, 96)), "the image has taken the preview's place"
    assert seen["progress"] == [1]
    assert re.fullmatch(r"preview [\d.]+ s · image [\d.]+ s · JCT [\d.]+ s", seen["facts"])
    [request] = server.service.requests
    assert request.diffusion is not None
    assert (request.prompt, request.diffusion.num_inference_steps, request.diffusion.partial_images) == ("hi", 4, 3)


def test_the_page_shows_a_video(tmp_path: Path) -> None:
    with live(filmer(), ServerSettings(drain_seconds=1, video_dir=tmp_path)) as server:
        seen = driven(server.url, "none")
        [job] = httpx.get(f"{server.url}/v1/videos", timeout=120).json()["data"]
    assert not seen["errors"]
    [video] = tmp_path.glob("*/video.mp4")
    assert seen["videos"] == [f"blob:{video.stat().st_size}"]
    assert (job["status"], job["prompt"]) == ("completed", "hi")


EXAMPLES = [
    {
        "title": "How many?",
        "messages": [
            {"role": "system", "content": "Count."},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "scene.png"}},
                    {"type": "input_audio", "input_audio": {"data": "question.wav"}},
                    {"type": "text", "text": "How many?"},
                ],
            },
        ],
    },
    {"title": "Draw", "prompt": "two red circles"},
    {"title": "Edit", "prompt": "make it green", "image": "scene.png"},
]


async def speak_or_paint(request: Request) -> AsyncGenerator[Delta]:
    async for delta in (paint if request.modalities == ["image"] else speak)(request):
        yield delta


def test_the_page_sends_the_models_own_examples(tmp_path: Path) -> None:
    service = FakeService(speak_or_paint)
    service.card.root = str(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "examples.json").write_text(json.dumps(EXAMPLES))
    (tmp_path / "examples" / "scene.png").write_bytes(b"scene")
    (tmp_path / "examples" / "question.wav").write_bytes(b"question")
    scene, question = (base64.b64encode(data).decode() for data in (b"scene", b"question"))
    with live(service) as server:
        edited = driven(server.url, "Draw", "Edit")
        asked = driven(server.url, "How many?", "Edit", "How many?")
    assert edited["examples"] == ["Try:", "How many?", "Draw", "Edit"]
    assert not edited["errors"] + asked["errors"]
    assert edited["sent"] == [["turn user", "make it green", ["img", f"data:image/png;base64,{scene}"]]]
    assert len(edited["images"]) == 1
    assert asked["sent"] == [
        ["turn system", "Count."],
        [
            "turn user",
            "How many?",
            ["img", f"data:image/png;base64,{scene}"],
            ["audio", f"data:audio/wav;base64,{question}"],
        ],
    ], "each is a conversation of its own"
    assert asked["said"] == "Hello, world"
    draw, edit, _, _, ask = service.requests
    assert (draw.prompt, draw.modalities, edit.prompt, edit.modalities) == (
        "two red circles", ["image"], "make it green", ["image"],
    )  # fmt: skip
    assert [(part.kind, part.data) for part in edit.messages[0].content if isinstance(part, MediaPart)] == [
        ("image", b"scene")
    ]
    assert ask.modalities == ["text", "audio"], "what it takes to talk is chosen again"
    system, user = ask.messages
    assert system.content == [TextPart("Count.")]
    assert [part.data for part in user.content if isinstance(part, MediaPart)] == [b"scene", b"question"]

"""The page's script, driven with stubs for the browser's parts against a live server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import as_file, files
from pathlib import Path

import pytest
from fake_service import FakeService, live

from segue.messages.request import MediaPart, TextPart

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node to run the page's script with")
def test_the_page_sends_a_picture_streams_text_and_plays_audio() -> None:
    assert NODE is not None
    driver = Path(__file__).with_name("page_driver.mjs")
    with live(FakeService()) as server, as_file(files("segue.server").joinpath("static/index.html")) as page:
        run = subprocess.run(
            [NODE, str(driver), str(page), server.url], capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert (seen["model"], seen["voices"], seen["outputs"]) == ("fake-omni", 2, 3)
    assert seen["said"] == "Hello, world"
    assert re.fullmatch(r"TTFT [\d.]+ s · TTFA [\d.]+ s · JCT [\d.]+ s", seen["facts"])
    assert seen["played"] == {"samples": 7200, "pieces": 3, "rate": 24000}
    assert seen["audio"] == f"blob:{44 + 2 * 7200}", "what was heard can be played again"
    [request] = server.service.requests
    assert (request.modalities, request.voice) == (["text", "audio"], "Ben")
    picture, text = request.messages[0].content
    assert isinstance(picture, MediaPart)
    assert (picture.kind, picture.data, text) == ("image", b"\0\0\0", TextPart("hi"))

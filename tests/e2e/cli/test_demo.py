"""What `examples/demo.py` asks of its server."""

from __future__ import annotations

import runpy
import warnings

import pytest
from server_process import ASSETS, NAME, Served

DEMO = ASSETS.parent / "examples" / "demo.py"


@pytest.fixture(scope="module")
def server(plain_server: Served) -> Served:
    return plain_server


def test_the_model_hears_the_video_it_is_asked_about(server: Served) -> None:
    """The demo's request has more tokens than the same one without its options: those of the audio."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # matplotlib's own imports
        demo = runpy.run_path(str(DEMO))
    video = demo["of_user"](demo["prompts"]()["video with audio"])
    asked = demo["request"](demo["Ask"]("video", video, ("text",)))
    asked |= {"model": NAME, "max_tokens": 1, **asked.pop("extra_body")}
    tokens = []
    with server.client() as http:
        for fields in (asked, {**asked, "options": {}}):
            answer = http.post("/v1/chat/completions", json=fields)
            assert answer.status_code == 200, answer.text
            tokens.append(answer.json()["usage"]["prompt_tokens"])
    heard, unheard = tokens
    assert heard > unheard + 10

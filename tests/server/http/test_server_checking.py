"""A media host that answers slowly keeps nobody waiting but those who named it."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fake_service import FakeService, live, sent

from segue.media.sources import MediaPolicy
from segue.messages.errors import InvalidRequest
from segue.server.http.checking import THREADS
from segue.server.openai.images.request import EditBody, edited_images
from segue.server.openai.videos.request import video_request
from segue.server.settings import ServerSettings

MODEL = "fake-omni"


def turns(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}


def edit(url: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "a boat", "image": url}


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", turns), ("/v1/chat/completions", turns), ("/v1/images/edits", edit)]
)
def test_a_slow_host_keeps_nobody_else_waiting(path: str, body: Any) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=THREADS) as host:
        host.settimeout(120)
        at = f"127.0.0.1:{host.getsockname()[1]}"
        policy = MediaPolicy(http_hosts=frozenset({"127.0.0.1"}), http_seconds=600)
        server = stack.enter_context(live(FakeService(), ServerSettings(drain_seconds=1, media=policy)))
        waiting = [stack.enter_context(sent(server.port, path, body(f"http://{at}/a.png"))) for _ in range(THREADS)]
        asked = [stack.enter_context(host.accept()[0]) for _ in waiting]
        # a body so large is decoded on a thread
        large = {"model": MODEL, "prompt": "a" * (1 << 20)}
        assert httpx.post(f"{server.url}/v1/completions", json=large, timeout=120).status_code == 200
        for connection in asked:
            connection.close()
        for client in waiting:
            assert client.recv(16).split()[1] == b"400"


def edited(url: str, settings: ServerSettings) -> object:
    return edited_images(EditBody(prompt="a boat", image=url), FakeService().card, settings)


def filmed(url: str, settings: ServerSettings) -> object:
    card = FakeService().card
    card.gives = frozenset({"video"})
    return video_request({"prompt": "a boat", "input_reference": url}, card, settings)


@pytest.mark.parametrize("asked", [edited, filmed])
def test_all_images_of_a_request_are_fetched_in_one_time(asked: Any) -> None:
    """As those of messages are; each alone has far longer."""
    with socket.create_server(("127.0.0.1", 0)) as host:
        url = f"http://127.0.0.1:{host.getsockname()[1]}/a.png"
        media = MediaPolicy(http_hosts=frozenset({"127.0.0.1"}), http_seconds=600, request_seconds=0.1)
        with pytest.raises(InvalidRequest, match="took longer than allowed"):
            asked(url, ServerSettings(media=media))

"""/v1/videos as the official client uses it."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_service import FakeService, Gate, Live, live
from filmer import FPS, filmer, frames
from PIL import Image
from video_jobs import URL, client_of, created, decoded, ended, serving, until

from segue.media.encode import encode_image
from segue.messages.deltas import Delta
from segue.messages.errors import Overloaded
from segue.messages.request import MediaPart, Request

# OpenAI has taken its own model back; the client of it still works
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
IMAGE = encode_image(frames(0, 1, 16, 16).tobytes(), 16, 16, "png")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("videos")) as server:
        yield server


def test_made_watched_fetched_deleted(client: openai.OpenAI, server: Live) -> None:
    video = client.videos.create_and_poll(
        prompt="a boat", model="filmer", size="64x32", seconds="2", extra_body={"seed": 3}, poll_interval_ms=10
    )  # type: ignore[call-overload]
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert (video.size, video.seconds) == ("64x32", f"{17 / FPS:g}")
    assert video.completed_at is not None
    assert video.created_at <= video.completed_at <= time.time()
    shown, rate = decoded(client.videos.download_content(video.id).read())
    assert rate == FPS
    assert shown.shape == (17, 32, 64, 3)
    assert np.abs(shown - frames(3, 17, 32, 64)).max() <= 8, "H.264 loses a little"
    thumbnail = client.videos.download_content(video.id, variant="thumbnail").read()
    with Image.open(io.BytesIO(thumbnail)) as image:
        assert (image.format, image.size) == ("WEBP", (64, 32))
    [request] = [one for one in server.service.requests if one.seed == 3 and one.modalities == ["video"]]
    assert request.diffusion is not None
    assert (request.diffusion.seconds, request.diffusion.width, request.diffusion.height) == (2.0, 64, 32)
    deleted = client.videos.delete(video.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)


def test_images_to_begin_and_to_end_with(client: openai.OpenAI, http: httpx.Client, server: Live) -> None:
    video = client.videos.create(prompt="x", input_reference=("a.png", IMAGE))
    [message] = server.service.requests[-1].messages
    assert message.content == [MediaPart("image", IMAGE, field="input_reference")]
    assert ended(http, video.id)["status"] == "completed"
    answer = http.post(URL, data={"prompt": "x"}, files={"input_reference": IMAGE, "last_image": IMAGE})
    assert answer.status_code == 200, answer.text
    about = answer.json()["id"].replace("_", "-")
    [message] = next(one for one in server.service.requests if one.request_id.startswith(about)).messages
    assert [part.role for part in message.content if isinstance(part, MediaPart)] == ["", "last_image"]


def test_progress(http: httpx.Client, tmp_path: Path) -> None:
    """Of the steps, while it runs; there is no content until it is done."""
    door = tmp_path / "door"
    video = created(http, prompt=f"wait for {door}")
    running = until(http, video["id"], lambda video: video["progress"] == 50)
    assert running["status"] == "in_progress"
    early = http.get(f"{URL}/{video['id']}/content")
    assert (early.status_code, early.json()["error"]["code"]) == (404, "not_found")
    door.touch()
    assert ended(http, video["id"])["progress"] == 100


def test_pages(http: httpx.Client, client: openai.OpenAI) -> None:
    made = [created(http)["id"] for _ in range(3)]
    newest = http.get(URL, params={"limit": 2}).json()
    assert [video["id"] for video in newest["data"]] == [made[2], made[1]]
    assert (newest["has_more"], newest["first_id"], newest["last_id"]) == (True, made[2], made[1])
    older = http.get(URL, params={"after": made[1], "limit": 1}).json()
    assert [video["id"] for video in older["data"]] == [made[0]]
    everything = [video.id for video in client.videos.list(limit=2, order="asc")]
    assert everything[-3:] == made, "the client turns the pages"
    assert len(everything) == len(set(everything))
    for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}):
        assert http.get(URL, params=query).json()["error"]["param"] == next(iter(query))
    assert http.get(URL, params={"after": "video_x"}).status_code == 404
    error = http.get(URL, params={"before": made[0]}).json()["error"]
    assert (error["param"], error["code"]) == ("before", "invalid_value"), error


def test_what_takes_a_video_is_refused_by_name(http: httpx.Client, client: openai.OpenAI) -> None:
    """OpenAI's endpoints, as its client calls them; with one output in both spellings a job begins."""
    video = created(http, n=1, num_videos_per_prompt=1)
    with pytest.raises(openai.BadRequestError, match="seed") as remix:
        client.videos.remix(video["id"], prompt="a ship")
    assert remix.value.code == "unsupported_parameter"
    for path in ("edits", "extensions", "characters"):
        answer = http.post(f"{URL}/{path}", json={"prompt": "a ship", "video": {"id": video["id"]}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert http.post(f"{URL}/{video['id']}", json={}).status_code == 405


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"size": "50x32"}, 400, "size", "48 or 64"),
        ({"seconds": "long"}, 400, "seconds", "number"),
        ({"seconds": -1}, 400, "seconds", "above 0"),
        ({"seconds": 1, "num_frames": 9}, 400, "seconds", "left out"),
        ({"num_images_per_prompt": 2}, 400, "num_images_per_prompt", "one video"),
        ({"num_videos_per_prompt": 3}, 400, "num_videos_per_prompt", "start one job per video"),
        ({"n": 2}, 400, "n", "start one job per video"),
        ({"num_videos": 2}, 400, "num_videos", "start one job per video"),
        ({"image": "data:,"}, 400, "image", "input_reference"),
        ({"duration": 2}, 400, "duration", "here: seconds"),
        ({"steps": 2}, 400, "steps", "here: num_inference_steps"),
        ({"remix_id": "video_1"}, 400, "remix_id", "not from videos"),
        ({"partial_images": 2}, 400, "partial_images", "previews"),
        ({"input_reference": {"file_id": "file-1"}}, 400, "input_reference", "image_url"),
        ({"input_reference": 7}, 400, "input_reference", "file or a URL"),
        ({"prompt": "x" * 40_000}, 400, "prompt", "32000"),
        ({"fsp": 8}, 400, "fsp", "fps"),
        ({"fps": 1e308}, 400, "fps", "from 0.01 to 1000"),
        ({"fps": 1e-9}, 400, "fps", "from 0.01 to 1000"),
        ({"model": "other"}, 404, "model", "filmer"),
    ],
)
def test_refused(http: httpx.Client, fields: dict[str, Any], status: int, param: str, says: str) -> None:
    """At once, and no job is left of it."""
    before = http.get(URL, params={"limit": 1}).json()["first_id"]
    answer = http.post(URL, json={"prompt": "a boat", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert says in error["message"]
    assert http.get(URL, params={"limit": 1}).json()["first_id"] == before


def test_variants_and_names_that_are_not_there(http: httpx.Client) -> None:
    video = created(http)
    ended(http, video["id"])
    for variant, code in (("spritesheet", "unsupported_parameter"), ("vdeo", "invalid_value")):
        error = http.get(f"{URL}/{video['id']}/content", params={"variant": variant}).json()["error"]
        assert (error["param"], error["code"]) == ("variant", code)
    for call in (http.get, http.delete):
        assert call(f"{URL}/video_0").status_code == 404
    assert http.get(f"{URL}/..%2f..%2fetc/content").status_code == 404


def test_a_part_of_a_file(http: httpx.Client) -> None:
    url = f"{URL}/{ended(http, created(http)['id'])['id']}/content"
    whole = http.get(url)
    size, tag = len(whole.content), whole.headers["etag"]
    head = http.head(url)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(size))
    for asked, first, last in (("bytes=0-9", 0, 9), ("Bytes = 5-", 5, size - 1), ("bytes=-7", size - 7, size - 1)):
        part = http.get(url, headers={"Range": asked})
        assert (part.status_code, part.headers["content-range"]) == (206, f"bytes {first}-{last}/{size}")
        assert part.content == whole.content[first : last + 1]
    assert http.get(url, headers={"Range": "bytes=1-2", "If-Range": tag}).status_code == 206
    assert http.get(url, headers={"Range": "bytes=9-1", "If-Range": '"another"'}).content == whole.content
    for asked in (
        f"bytes={size}-", "bytes=9-1", "bytes=-0", "bytes=-", "bytes=", "bytes", "words=1-2", "bytes=a-b",
        "bytes=0-1,5-6", "bytes=1-2-3", "bytes=" + "9" * 40 + "-", "bytes=0x1-5", "bytes=--5",
    ):  # fmt: skip
        answer = http.get(url, headers={"Range": asked})
        error = answer.json()["error"]
        assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}"), asked
        assert (error["param"], error["code"]) == ("Range", "range_not_satisfiable")


def test_jobs_wait_for_room_in_the_stages(tmp_path: Path) -> None:
    """Not for a time, but for the queue."""
    service, full, waited = filmer(), threading.Event(), threading.Event()
    script, gate = service.script, Gate()

    async def crowded(request: Request) -> AsyncGenerator[Delta]:
        if full.is_set() and "tokens" not in request.modalities:
            raise Overloaded("the queue is full")
        async with aclosing(script(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def room() -> None:
        waited.set()
        await gate.wait()

    service.script, service.room = crowded, room  # type: ignore[method-assign]
    full.set()
    with serving(tmp_path, service) as server, client_of(server.url) as http:
        video = created(http)
        assert waited.wait(120)
        assert http.get(f"{URL}/{video['id']}").json()["status"] == "in_progress"
        full.clear()
        gate.open()
        assert ended(http, video["id"])["status"] == "completed"


def test_a_job_that_fails_says_why(http: httpx.Client) -> None:
    video = ended(http, created(http, prompt="break")["id"])
    assert (video["status"], video["error"]) == ("failed", {"code": "stage_failed", "message": "it broke"})


def test_deleting_ends_what_runs(http: httpx.Client, server: Live, tmp_path: Path) -> None:
    video = created(http, prompt=f"wait for {tmp_path / 'never'}")
    until(http, video["id"], lambda video: video["progress"] == 50)
    assert http.delete(f"{URL}/{video['id']}").json()["deleted"]
    while server.service.cancelled.get(timeout=120).replace("-", "_") != video["id"]:
        pass  # what other tests broke off


def test_a_whole_chat_carries_no_video(http: httpx.Client, server: Live) -> None:
    """It is refused before a video is made that nobody gets."""
    server.service.requests.clear()
    for more in ({}, {"modalities": ["video"]}, {"stream": False}):
        asked = {"model": "filmer", "messages": [{"role": "user", "content": "a boat"}], **more}
        answer = http.post("/v1/chat/completions", json=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "modalities"), error
        assert "POST /v1/videos" in error["message"]
    assert server.service.requests == []


def test_a_streamed_chat_carries_fragments(http: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "a boat"}], "stream": True, "num_frames": 5}
    lines = http.post("/v1/chat/completions", json=asked).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    videos = [delta["video"] for delta in deltas if "video" in delta]
    made, fps = decoded(b"".join(base64.b64decode(video["data"]) for video in videos))
    assert (len(made), fps, [video["frames"] for video in videos]) == (5, FPS, [5])


def test_a_model_that_makes_no_video() -> None:
    with live(FakeService()) as server, client_of(server.url) as http:
        for answer in (http.get(URL), http.post(URL, json={"prompt": "x"}), http.get(f"{URL}/video_0")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")

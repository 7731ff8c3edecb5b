"""The model's own examples, as `/page/examples` gives them to the page."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import FakeService, live

from segue.messages.request import MediaPart

PNG, WAV, MP4 = b"\x89PNG scene", b"RIFF question", b"ftyp clip"
ASK = {"title": "Ask", "prompt": "Hi"}


def data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def service(model: Path, examples: object) -> FakeService:
    """Of a model whose directory has these examples, and media beside them."""
    folder = model / "examples"
    folder.mkdir(parents=True)
    (folder / "examples.json").write_bytes(examples if isinstance(examples, bytes) else json.dumps(examples).encode())
    for name, data in (("scene.png", PNG), ("question.WAV", WAV), ("clip.mp4", MP4)):
        (folder / name).write_bytes(data)
    fake = FakeService()
    fake.card.root = str(model)
    return fake


def offered(fake: FakeService) -> list[dict[str, Any]]:
    with live(fake) as server:
        answer = httpx.get(f"{server.url}/page/examples", timeout=120)
    assert answer.status_code == 200
    return answer.json()["data"]


def looks(name: object, **more: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": name, **more}}


def asks(*content: object, role: str = "user") -> dict[str, Any]:
    return {"title": "Look", "messages": [{"role": role, "content": [*content]}]}


def test_messages_have_their_media_in_them_and_can_be_sent(tmp_path: Path) -> None:
    parts = [
        looks("scene.png"),
        {"type": "video_url", "video_url": {"url": "clip.mp4", "num_frames": 2}},
        {"type": "input_audio", "input_audio": {"data": "question.WAV"}},
        {"type": "text", "text": "How many?"},
    ]
    given = asks(*parts)
    given["messages"].insert(0, {"role": "system", "content": "Count."})
    fake = service(tmp_path, [given | {"answer": "Three."}])
    with live(fake) as server:
        [example] = httpx.get(f"{server.url}/page/examples", timeout=120).json()["data"]
        sent = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": example["messages"]}, timeout=120)
        assert sent.status_code == 200, sent.text
    assert (example["title"], example["answer"]) == ("Look", "Three.")
    image, video, audio, text = example["messages"][1]["content"]
    assert image["image_url"] == {"url": data_url("image/png", PNG)}
    assert video["video_url"] == {"url": data_url("video/mp4", MP4), "num_frames": 2}
    assert audio["input_audio"] == {"data": base64.b64encode(WAV).decode(), "format": "wav"}
    assert text == parts[-1]
    system, user = fake.requests[0].messages
    assert system.role == "system"
    assert [part.data for part in user.content if isinstance(part, MediaPart)] == [PNG, MP4, WAV]


def test_prompts_have_their_image_in_them(tmp_path: Path) -> None:
    edit = {"title": "Edit", "prompt": "make it green", "image": "scene.png", "size": "128x96", "steps": 20}
    assert offered(service(tmp_path, [ASK, edit])) == [ASK, edit | {"image": data_url("image/png", PNG)}]


def test_a_model_without_examples_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeService()
    fake.card.root = str(tmp_path)
    assert offered(fake) == offered(FakeService()) == []
    assert "example" not in caplog.text


NAME = "it must be the name of a file beside examples.json (png, jpg, jpeg, webp, gif)"
LINK = "it must be a file of this folder, and no link to another place"
WRONG: list[tuple[object, str]] = [
    (5, "it is 5; it must be an object"),
    ({"title": "a", "promt": "b"}, "it has no field 'promt'; did you mean 'prompt'?"),
    ({"title": " ", "prompt": "b"}, "title is ' '; it must be a text"),
    ({"title": "a", "prompt": ["b"]}, "prompt is ['b']; it must be a text"),
    ({"prompt": "b"}, "it has prompt; it must have title, and messages or prompt"),
    (ASK | asks("b"), "it has title, prompt, messages; it must have title, and messages or prompt"),
    (asks() | {"image": "scene.png"}, "image is given with messages"),
    ({"title": "a", "messages": 7}, "messages is 7; it must be a list of messages"),
    ({"title": "a", "messages": ["b"]}, "messages[0] is 'b'; it must be an object"),
    (asks({"type": "text", "text": "b"}, role="usr"), "messages[0].role is 'usr', no known role; did you mean 'user'?"),
    (asks({"type": "image", "image": "scene.png"}), "messages[0].content[0].type is 'image'; it must be one of text,"),
    (asks(looks("scene.png", detial="low")), "messages[0].content[0].image_url has no field 'detial'; did you mean"),
    (asks({"type": "image_url", "image_url": None}), "messages[0].content[0].image_url is missing"),
    (asks(looks("no.png")), "messages[0].content[0].image_url.url is '"),
    (asks(looks("../secret.png")), f"messages[0].content[0].image_url.url is '../secret.png'; {NAME}"),
    (ASK | {"size": "big"}, "size is 'big'; it must be WIDTHxHEIGHT in pixels, e.g. 1024x1024"),
    (ASK | {"size": 128}, "size is 128; it must be WIDTHxHEIGHT"),
    (ASK | {"steps": 0}, "steps is 0; it must be a whole number from 1 on"),
    (ASK | {"steps": True}, "steps is True; it must be a whole number from 1 on"),
    (ASK | {"image": "/etc/secret.png"}, f"image is '/etc/secret.png'; {NAME}"),
    (ASK | {"image": "in/scene.png"}, f"image is 'in/scene.png'; {NAME}"),
    (ASK | {"image": "..\\secret.png"}, f"image is '..\\\\secret.png'; {NAME}"),
    (ASK | {"image": "a\0.png"}, f"image is 'a\\x00.png'; {NAME}"),
    (ASK | {"image": "http://localhost/a.png"}, f"image is 'http://localhost/a.png'; {NAME}"),
    (ASK | {"image": ".."}, f"image is '..'; {NAME}"),
    (ASK | {"image": None}, f"image is None; {NAME}"),
    (ASK | {"image": "examples.json"}, f"image is 'examples.json'; {NAME}"),
    (ASK | {"image": "question.WAV"}, f"image is 'question.WAV'; {NAME}"),
    (ASK | {"image": "link.png"}, f"image is 'link.png'; {LINK}"),
    (ASK | {"image": "loop.png"}, "loop.png', which cannot be read: "),
    (ASK | {"image": "pipe.png"}, "pipe.png'; it must be a regular file"),
    (ASK | {"image": "big.png"}, "image is 'big.png', too large a file; it must have at most 4194304 bytes"),
    (asks(looks("half.png"), looks("no.png")), "no.png', which cannot be read: No such file or directory"),
    (asks(looks("half.png"), looks("half.png")), "content[1].image_url.url is 'half.png', too large a file"),
]


def test_wrong_examples_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    half = ASK | {"image": "half.png"}
    fake = service(tmp_path / "model", [*(example for example, _ in WRONG), half, half, ASK])
    folder = tmp_path / "model" / "examples"
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "model" / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to("../secret.png")
    (folder / "loop.png").symlink_to("loop.png")
    os.mkfifo(folder / "pipe.png")
    for name, size in (("big.png", (4 << 20) + 1), ("half.png", 3 << 20)):
        with (folder / name).open("wb") as file:
            file.truncate(size)
    assert [example.get("image", "")[:15] for example in offered(fake)] == ["data:image/png;", ""]
    logged = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(logged) == len(WRONG) + 1, "those before it are right, but leave no room for half of the bytes again"
    for index, (line, (_, says)) in enumerate(zip(logged, WRONG, strict=False)):
        assert line.startswith(f"{folder / 'examples.json'}: example {index} is left out: ")
        assert says in line
    assert f"example {len(WRONG) + 1} is left out: image is 'half.png', too large a file" in logged[-1]


def test_a_medium_that_the_model_does_not_take_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = service(tmp_path, [ASK | {"image": "scene.png"}])
    fake.card.takes = frozenset({"text"})
    assert offered(fake) == []
    assert "image is 'scene.png', but this model takes only: text" in caplog.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'[{"title": }]', "the body is not JSON: JSON is malformed"),
        (b'[{"title": "\xff"}]', "the body is not JSON"),
        (b"[" * 10_000, "the body is nested too deeply"),
        (b'{"title": "a"}', "the file's content is {'title': 'a'}; it must be a list of examples"),
        (b"", "an empty file"),
        (b" " * ((4 << 20) + 1), "the file is 'examples.json', too large a file; it must have at most 4194304 bytes"),
    ],
    ids=("json", "utf-8", "deep", "object", "empty", "large"),
)
def test_a_wrong_file_stops_no_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, says: str
) -> None:
    assert offered(service(tmp_path, content)) == []
    [line] = [record.getMessage() for record in caplog.records if "example" in record.getMessage()]
    assert line.startswith(f"{tmp_path}/examples/examples.json: no example is offered: ")
    assert says in line


def test_links_lead_only_to_the_blobs_of_the_hubs_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "models--me--mine"
    model = cache / "snapshots" / "0123"
    fake = service(model, [ASK | {"image": "scene.png"}, ASK | {"image": "clip.png"}])
    (cache / "blobs").mkdir()
    for index, path in enumerate((model / "examples" / "examples.json", model / "examples" / "scene.png")):
        blob = cache / "blobs" / str(index)
        path.rename(blob)
        path.symlink_to(f"../../../blobs/{index}")
    (cache / "clip.png").write_bytes(b"secret")
    (model / "examples" / "clip.png").symlink_to("../../../clip.png")
    assert offered(fake) == [ASK | {"image": data_url("image/png", PNG)}]
    assert f"example 1 is left out: image is 'clip.png'; {LINK}" in caplog.text


def test_the_folder_itself_is_no_link_to_another_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = service(tmp_path / "other", [ASK])
    model = tmp_path / "model"
    model.mkdir()
    (model / "examples").symlink_to(tmp_path / "other" / "examples")
    fake.card.root = str(model)
    assert offered(fake) == []
    assert f"the file is 'examples.json'; {LINK}" in caplog.text

"""Messages in OpenAI's form and in transformers' become parts; what is wrong is named by its path."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import itertools
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from segue.media.parts import PYTHON_POLICY, MediaPolicy, messages_from, multi_modal_parts
from segue.media.sources import _PinnedConnection
from segue.messages.errors import InvalidRequest, NotFound, TooLarge
from segue.messages.request import ArrayInfo, MediaPart, Message, TextPart

CLOSED = MediaPolicy()


def only(part: object, policy: MediaPolicy = CLOSED) -> Any:
    [message] = messages_from([{"role": "user", "content": [part]}], policy)
    [made] = message.content
    return made


def url_part(url: str, kind: str = "image") -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def refused(messages: object, policy: MediaPolicy = CLOSED) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        messages_from(messages, policy)
    assert caught.value.field, "an error names its field"
    assert caught.value.field.rpartition(".")[0] in caught.value.message
    return caught.value


def refused_part(part: object, policy: MediaPolicy = CLOSED) -> InvalidRequest:
    return refused([{"role": "user", "content": [part]}], policy)


# ---- text and roles


def test_strings_and_text_parts_are_text() -> None:
    made = messages_from(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, "there"]},
            {"role": "assistant", "content": "Hello"},
        ],
        CLOSED,
    )
    assert made == [
        Message("system", [TextPart("Be brief.")]),
        Message("user", [TextPart("Hi"), TextPart("there")]),
        Message("assistant", [TextPart("Hello")]),
    ]


def test_a_reply_can_be_sent_back_as_it_came() -> None:
    audio = {"id": "audio-1", "data": "UklGRg==", "expires_at": 1, "transcript": "Hello"}
    reply = {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": None, "audio": audio}
    assert messages_from([reply], CLOSED) == [Message("assistant", [TextPart("Hello")])]
    assert messages_from([{**reply, "content": None}], CLOSED) == [Message("assistant", [TextPart("Hello")])]


def called(arguments: object) -> list[dict[str, object]]:
    return [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}]


def test_calls_and_what_they_gave_go_to_the_template() -> None:
    messages = messages_from(
        [
            *called('{"at": "sea"}'),
            {"role": "tool", "tool_call_id": "1", "content": "a ship", "name": "f"},
            {"role": "assistant", "content": "A ship.", "reasoning": "Hm.", "tool_calls": [], "refusal": None},
            *called(""),
        ],
        PYTHON_POLICY,
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"at": "sea"}}}
    assert messages[0] == Message("assistant", [], {"tool_calls": [call]})
    assert messages[1] == Message("tool", [TextPart("a ship")], {"tool_call_id": "1", "name": "f"})
    assert messages[2] == Message("assistant", [TextPart("A ship.")], {"reasoning_content": "Hm."})
    assert messages[3].extra["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", '{"at": "se', "[]", "3", "null", "[" * 100_000])
def test_a_call_that_is_no_json_does_not_end_the_conversation(arguments: str) -> None:
    """The model wrote it, or was cut off: templates print objects, so it is an empty one."""
    [message] = messages_from(called(arguments), CLOSED)
    assert message.extra["tool_calls"][0]["function"]["arguments"] == {}


def test_what_clients_note_for_other_services_is_left_out() -> None:
    noted = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "Hi", **noted}
    refusal = {"type": "refusal", "refusal": "No."}
    made = messages_from(
        [
            {"role": "user", "content": [text], **noted},
            {"role": "assistant", "content": [refusal], "reasoning_details": [], "thinking_blocks": []},
        ],
        CLOSED,
    )
    assert made == [Message("user", [TextPart("Hi")]), Message("assistant", [TextPart("No.")])]


@pytest.mark.parametrize(
    ("messages", "field", "says"),
    [
        (7, "messages", "must be a list"),
        ("hello", "messages", "must be a list"),
        ([], "messages", "at least one"),
        ([3], "messages[0]", "must be an object"),
        ([{"role": "usr", "content": "x"}], "messages[0].role", "did you mean 'user'"),
        ([{"role": "bot", "content": "x"}], "messages[0].role", "known: assistant, developer"),
        ([{"content": "x"}], "messages[0].role", "None"),
        ([{"role": "user", "content": None}], "messages[0].content", "string or a list of parts"),
        ([{"role": "user", "contents": "x"}], "messages[0].contents", "did you mean 'content'"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", "must be a string"),
        ([{"role": "user", "content": "x", "refusal": "no"}], "messages[0].refusal", "not supported"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls", "does not go with role"),
        ([{"role": "user", "content": "x", "tool_call_id": "a"}], "messages[0].tool_call_id", "does not go with role"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0]", 'with "function"'),
        ([{"role": "assistant", "content": "x", "tool_calls": 3}], "messages[0].tool_calls", "list of calls"),
        (called([]), "messages[0].tool_calls[0].function.arguments", "JSON of an object"),
        (called('{"a": "\\ud800"}'), "messages[0]", "surrogate"),
        (called('{"a": 1' + "0" * 30 + "}"), "messages[0]", "too large"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]", "must be a string or an object"),
        ([{"role": "user", "content": [{"type": "txt"}]}], "messages[0].content[0].type", "did you mean 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "must be a string"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content", "surrogate"),
    ],
)
def test_a_wrong_message_is_named(messages: object, field: str, says: str) -> None:
    error = refused(messages)
    assert error.field == field
    assert says in error.message


# ---- what the request carries


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_data_urls_are_taken(kind: str) -> None:
    url = f"data:{kind}/x;base64,{base64.b64encode(b'bytes of a file').decode()}"
    assert only(url_part(url, kind)) == MediaPart(kind, b"bytes of a file", field="messages[0].content[0]")  # type: ignore[arg-type]
    assert only({"type": kind, kind: url}).data == b"bytes of a file"
    assert only({"type": kind, "url": "data:,a%20b"}).data == b"a b"


def test_embeddings_stand_for_a_text() -> None:
    expected = TextPart("", b"PK..", "messages[0].content[0]")
    assert only({"type": "prompt_embeds", "data": base64.b64encode(b"PK..").decode()}) == expected
    assert only({"type": "prompt_embeds", "data": b"PK.."}) == expected
    rows = only({"type": "prompt_embeds", "data": np.ones((2, 3), np.float32)})
    assert safetensors.numpy.load(rows.embeds)["prompt_embeds"].shape == (2, 3)


def test_input_audio_is_taken() -> None:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}}
    assert only(part) == MediaPart("audio", b"RIFF", field="messages[0].content[0]")


@pytest.mark.parametrize(
    ("part", "field", "says"),
    [
        ({"type": "input_audio", "input_audio": "x"}, "input_audio", "must be an object"),
        ({"type": "input_audio", "input_audio": {"data": "!!", "format": "wav"}}, "input_audio.data", "not base64"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio.data", "empty"),
        ({"type": "input_audio", "input_audio": {"data": 3}}, "input_audio.data", "must be the base64"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wave"}}, "input_audio.format", "'wav'"),
        ({"type": "image_url", "image_url": "http://x"}, "image_url", "must be an object"),
        ({"type": "image_url", "image_url": {}}, "image_url.url", "data: URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png"}}, "image_url.url", "data:<type>;base64"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,AA==", "detail": "low"}}, "image_url.detail", "low"),
        ({"type": "image_url", "image_url": {"uri": "x"}}, "image_url.uri", "did you mean 'url'"),
        ({"type": "image_url", "image_url": {"url": "ftp://x/y"}}, "image_url.url", "not ftp://"),
        ({"type": "image_url", "image_url": {"url": "http://[::1/y"}}, "image_url.url", "not a URL"),
        ({"type": "image_url", "image_url": {"url": "http://h:99999/"}}, "image_url.url", "not a URL"),
        ({"type": "image", "image": 5}, "image", "must be a PIL image"),
        ({"type": "image"}, "image", "has no source"),
        ({"type": "prompt_embeds"}, "data", "is missing"),
        ({"type": "prompt_embeds", "data": "!!"}, "data", "not base64"),
        ({"type": "prompt_embeds", "data": [[1.0]]}, "data", "must be float32 or float16"),
        ({"type": "prompt_embeds", "prompt_embeds": "AA=="}, "prompt_embeds", "has no field"),
        ({"type": "video", "video": "data:,a", "path": "b"}, "video", "video and path"),
    ],
)
def test_a_wrong_part_is_named(part: object, field: str, says: str) -> None:
    error = refused_part(part)
    assert error.field == f"messages[0].content[0].{field}"
    assert says in error.message


def test_a_part_over_the_limit_is_too_large() -> None:
    policy = MediaPolicy(max_bytes=10)
    fits = base64.b64encode(b"x" * 10).decode()
    assert len(only(url_part(f"data:;base64,{fits}"), policy).data) == 10
    over = base64.b64encode(b"x" * 11).decode()
    for part in (url_part(f"data:;base64,{over}"), url_part("data:," + "x" * 11)):
        error = refused_part(part, policy)
        assert isinstance(error, TooLarge)
        assert "max_media_bytes" in error.message


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(refused_part(url_part("data:;base64," + "?" * 100_000)).message) < 400


# ---- files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "below").mkdir(parents=True)
    (root / "below" / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "media2").write_bytes(b"a sibling whose name begins alike")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "dirlink").symlink_to(tmp_path)
    (root / "good_link").symlink_to(root / "below" / "a b.png")
    (root / "loop").symlink_to(root / "loop")
    return root


@pytest.mark.parametrize(
    "form", ["{root}/below/a b.png", "below/a b.png", "file://{root}/below/a%20b.png", "good_link"]
)
def test_files_below_the_root_are_read(root: Path, form: str) -> None:
    assert only(url_part(form.format(root=root)), MediaPolicy(media_root=root)).data == b"inside"


@pytest.mark.parametrize(
    "path", ["{root}/../secret", "../secret", "link", "dirlink/secret", "/etc/passwd", "{root}2", "/", ".", "loop",
             "below/none.png", "a\0b", "x" * 5000, "file://host/below"],
)  # fmt: skip
def test_nothing_else_is_read(root: Path, path: str) -> None:
    error = refused_part(url_part(path.format(root=root)), MediaPolicy(media_root=root))
    assert error.field == "messages[0].content[0].image_url.url"
    assert "outside" not in error.message
    assert error.message.count("image_url.url is") == 1, "said once"


def test_what_lies_outside_is_refused_alike_whether_it_exists_or_not(root: Path) -> None:
    policy = MediaPolicy(media_root=root)
    there, missing = (refused_part(url_part(path), policy).message for path in ("../secret", "../secreT"))
    assert there.lower() == missing.lower()


def test_without_a_root_no_file_is_read_over_http(root: Path) -> None:
    assert "no media root" in refused_part(url_part(str(root / "below" / "a b.png"))).message


def test_a_fifo_does_not_hang_the_reader(root: Path) -> None:
    import os

    os.mkfifo(root / "pipe")
    assert "regular file" in refused_part(url_part("pipe"), MediaPolicy(media_root=root)).message


def test_a_python_caller_reads_any_path_as_text_or_path(root: Path) -> None:
    file = root / "below" / "a b.png"
    for source in (str(file), file, f"file://{root}/below/a%20b.png", root / "link"):
        assert only({"type": "image", "image": source}, PYTHON_POLICY).data in (b"inside", b"outside")
    assert isinstance(refused_part({"type": "audio", "path": str(root / "none")}, PYTHON_POLICY), NotFound)


# ---- http


class _Media(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/ok":
            self._answer(200, b"fetched")
        elif self.path == "/big":
            self._answer(200, b"x" * 100_000)
        elif self.path == "/moved":
            self._answer(302, b"", Location="/ok")
        elif self.path == "/away":
            self._answer(302, b"", Location="http://elsewhere.test/ok")
        elif self.path == "/file":
            self._answer(302, b"", Location="file:///etc/passwd")
        elif self.path == "/round":
            self._answer(302, b"", Location="/round")
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x")
            self.wfile.flush()
            self.connection.recv(1)  # until the other side gives up
        elif self.path in ("/trickle", "/trickling-head"):
            self.send_response(200)
            self.end_headers() if self.path == "/trickle" else self.flush_headers()
            with contextlib.suppress(OSError):  # until the other side gives up
                for number in itertools.count():
                    self.wfile.write(b"x" if self.path == "/trickle" else b"X-%d: y\r\n" % (number % 10))
                    self.wfile.flush()
                    select.select([self.connection], [], [], 0.02)
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def media_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Media) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


LISTED = MediaPolicy(http_hosts=frozenset({"127.0.0.1"}), max_bytes=1000)


def test_a_listed_host_is_fetched_and_redirects_followed_on_it(media_url: str) -> None:
    assert only(url_part(f"{media_url}/ok"), LISTED).data == b"fetched"
    assert only(url_part(f"{media_url}/moved", "video"), LISTED).data == b"fetched"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/away", "'elsewhere.test' is not on this server's list"),
        ("/file", "only http(s) is fetched"),
        ("/round", "redirects more than 3 times"),
        ("/none", "answered 404"),
        ("/big", "max_media_bytes"),
    ],
)
def test_a_fetch_stays_within_its_limits(media_url: str, path: str, says: str) -> None:
    error = refused_part(url_part(media_url + path), LISTED)
    assert says in error.message
    assert error.field == "messages[0].content[0].image_url.url"


def test_a_server_that_stalls_is_given_up(media_url: str) -> None:
    policy = MediaPolicy(http_hosts=LISTED.http_hosts, http_seconds=0.2)
    for path in ("slow", "trickle", "trickling-head"):
        assert "took longer than allowed" in refused_part(url_part(f"{media_url}/{path}"), policy).message


def test_a_deadline_that_passes_while_connecting_ends_the_fetch(
    media_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, over = socket.create_connection, threading.Event()
    end = _PinnedConnection._end

    def late(*given: Any, **named: Any) -> socket.socket:
        assert over.wait(60)
        return connect(*given, **named)

    def ending(connection: _PinnedConnection) -> None:
        end(connection)
        over.set()

    monkeypatch.setattr(socket, "create_connection", late)
    monkeypatch.setattr(_PinnedConnection, "_end", ending)
    policy = MediaPolicy(http_hosts=LISTED.http_hosts, http_seconds=0.2)
    assert "took longer than allowed" in refused_part(url_part(f"{media_url}/trickle"), policy).message


def test_all_that_a_request_names_is_fetched_in_one_time(media_url: str) -> None:
    policy = MediaPolicy(http_hosts=LISTED.http_hosts, http_seconds=200, request_seconds=0.2)
    assert "took longer than allowed" in refused_part(url_part(f"{media_url}/slow"), policy).message


def test_a_name_that_does_not_come_to_an_address_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    known = threading.Event()

    def unknown(*_: object, **__: object) -> list[Any]:
        known.wait()
        raise socket.gaierror("nobody knows it")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    policy = MediaPolicy(http_hosts=frozenset({"elsewhere.test"}), http_seconds=0.2)
    try:
        assert "took longer than allowed" in refused_part(url_part("http://elsewhere.test/x"), policy).message
    finally:
        known.set()


def test_media_are_counted_before_any_is_read() -> None:
    parts = [url_part("/no/such/file")] * 65
    with pytest.raises(InvalidRequest, match="65 media parts; at most 64"):
        messages_from([{"role": "user", "content": parts}], MediaPolicy(allow_paths=True))


def test_hosts_are_off_by_default_and_private_addresses_need_their_own_entry(media_url: str) -> None:
    assert "fetches no URLs" in refused_part(url_part(f"{media_url}/ok")).message
    by_name = media_url.replace("127.0.0.1", "localhost") + "/ok"
    error = refused_part(url_part(by_name), MediaPolicy(http_hosts=frozenset({"localhost"})))
    assert "private address" in error.message


def test_a_refused_connection_is_the_clients_error() -> None:
    assert "failed" in refused_part(url_part("http://127.0.0.1:1/x"), LISTED).message


# ---- arrays


def test_images_from_python() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    forms: list[object] = [
        pixels,
        Image.fromarray(pixels),
        torch.from_numpy(pixels.copy()),
        torch.from_numpy(pixels.copy()).permute(2, 0, 1),
        pixels.astype(np.float32) / 255,
    ]
    for source in forms:
        part = only({"type": "image", "image": source}, PYTHON_POLICY)
        assert part.array == ArrayInfo("uint8", (4, 6, 3))
        assert part.data == pixels.tobytes()
    assert only({"type": "image", "image": file.getvalue()}).data == file.getvalue()
    gray = only({"type": "image", "image": pixels[..., 0]})
    assert gray.array.shape == (4, 6, 3)


def test_a_transparent_image_is_rgb() -> None:
    assert only({"type": "image", "image": Image.new("RGBA", (2, 2), (9, 8, 7, 0))}).data == bytes([9, 8, 7]) * 4


def test_audio_from_python() -> None:
    samples = np.array([0.0, 0.5, -1.0], np.float32)
    bare = only({"type": "audio", "audio": samples})
    assert bare.array == ArrayInfo("float32", (3,), None)
    assert bare.data == samples.tobytes()
    assert only({"type": "audio", "audio": (samples, 24000)}).array == ArrayInfo("float32", (3,), 24000.0)
    assert only({"type": "audio", "audio": (torch.from_numpy(samples)[None], 8000)}).data == samples.tobytes()
    assert only({"type": "audio", "audio": [0.0, 0.5, -1.0]}).data == samples.tobytes()
    assert only({"type": "audio", "audio": np.array([0, 16384, -32768], np.int16)}).data == samples.tobytes()


def test_films_from_python() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)
    for source in (frames, torch.from_numpy(frames).permute(0, 3, 1, 2), [Image.fromarray(frame) for frame in frames]):
        part = only({"type": "video", "video": source})
        assert part.array == ArrayInfo("uint8", (2, 4, 6, 3), None)
        assert part.data == frames.tobytes()
    assert only({"type": "video", "video": (frames, 12.5)}).array.rate == 12.5
    assert only({"type": "video", "video": b"a file"}).array is None


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("image", np.zeros((2, 2, 4), np.uint8), "shape [2, 2, 4]"),
        ("image", np.zeros((2, 2, 3), np.int64), "holds int64"),
        ("image", np.full((2, 2, 3), 2.0), "outside [0, 1]"),
        ("image", np.zeros((0, 2, 3), np.uint8), "shape [0, 2, 3]"),
        ("image", torch.zeros(2, 2, 3, dtype=torch.bfloat16), "BFloat16"),
        ("image", b"", "empty"),
        ("audio", np.zeros((2, 100), np.float32), "mono"),
        ("audio", np.zeros(0, np.float32), "shape [0]"),
        ("audio", np.array([np.nan]), "NaN"),
        ("audio", np.zeros(3, np.int64), "holds int64"),
        ("audio", (np.zeros(3), -1), "samples per second"),
        ("audio", {"array": 1}, "samples, or (samples, rate)"),
        ("audio", [[1.0], [1.0, 2.0]], "list"),
        ("video", np.zeros((4, 6, 3), np.uint8), "shape [4, 6, 3]"),
        ("video", [], "shape [0]"),
        ("video", [np.zeros((2, 2, 3), np.uint8), np.zeros((3, 2, 3), np.uint8)], "different sizes"),
    ],
)
def test_a_wrong_array_is_named(kind: str, source: object, says: str) -> None:
    error = refused_part({"type": kind, kind: source}, PYTHON_POLICY)
    assert error.field.startswith(f"messages[0].content[0].{kind}")  # type: ignore[union-attr]
    assert says in error.message


# ---- anything at all

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_audio", "video_url", "audio", "image", "video"]) | _JSON},
    optional={
        name: _JSON | st.fixed_dictionaries({"url": st.text(max_size=20) | _JSON})
        for name in ("text", "image_url", "input_audio", "video_url", "image", "audio", "video", "url", "path")
    },
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]) | _JSON, "content": st.lists(_PART | _JSON, max_size=2) | _JSON}
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_MESSAGE | _JSON, max_size=2) | _JSON)
def test_any_json_is_taken_or_refused_by_name(messages: object) -> None:
    refusal: InvalidRequest | None = None
    made: list[Message] = []
    try:
        made = messages_from(messages, CLOSED)
    except InvalidRequest as error:
        refusal = error
    if refusal is not None:
        assert refusal.field
        assert refusal.field.startswith("messages")
    else:
        assert made
        assert all(isinstance(message, Message) for message in made)


# ── media beside a prompt ──────────────────────────────────────────────────────────────────────────────────────────


def test_media_beside_a_prompt_are_the_parts_of_a_chat() -> None:
    image, clip = np.zeros((4, 6, 3), np.uint8), np.zeros((2, 4, 6, 3), np.uint8)
    samples = np.zeros(5, np.float32)
    one = {"image": image, "video": (clip, 2.0), "audio": (samples, 8000)}
    expected = [only({"type": kind, kind: source}, PYTHON_POLICY) for kind, source in one.items()]
    for data in (one, {kind: [source] for kind, source in one.items()}):
        made = multi_modal_parts(data, PYTHON_POLICY)
        assert [(part.kind, part.data, part.array) for part in made] == [
            (part.kind, part.data, part.array) for part in expected
        ]
    frames = [Image.fromarray(frame) for frame in clip]
    assert [part.array for part in multi_modal_parts({"video": frames}, CLOSED)] == [ArrayInfo("uint8", (2, 4, 6, 3))]
    assert [part.array for part in multi_modal_parts({"video": [*clip]}, CLOSED)] == [ArrayInfo("uint8", (2, 4, 6, 3))]
    assert [part.array for part in multi_modal_parts({"image": frames}, CLOSED)] == [ArrayInfo("uint8", (4, 6, 3))] * 2
    assert [part.array for part in multi_modal_parts({"audio": [0.0, 0.5]}, CLOSED)] == [ArrayInfo("float32", (2,))]
    urls = multi_modal_parts({"image": ["data:,a", "data:,b"], "audio": None}, CLOSED)
    assert [(part.data, part.field) for part in urls] == [
        (b"a", "multi_modal_data.image[0]"),
        (b"b", "multi_modal_data.image[1]"),
    ]


@pytest.mark.parametrize(
    ("data", "field", "says"),
    [
        ("data:,a", "multi_modal_data", "must be an object: kind of media"),
        ({"images": "data:,a"}, "multi_modal_data.images", "did you mean 'image'"),
        ({"image": "photo.jpg"}, "multi_modal_data.image", "reads no files"),
        ({"image": ["data:,a", 5]}, "multi_modal_data.image[1]", "is a int; it must be a PIL image"),
        ({"image": {"image_embeds": np.zeros((2, 8))}}, "multi_modal_data.image", "is a dict; it must be a PIL image"),
        ({"image": ["data:,a"] * 65}, "multi_modal_data", "has 65 media parts; at most 64"),
    ],
)
def test_wrong_media_beside_a_prompt_are_named(data: object, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        multi_modal_parts(data, CLOSED)
    assert caught.value.field == field

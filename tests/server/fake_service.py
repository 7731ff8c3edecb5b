"""A `Service` that plays scripts, and a real server on a loopback port in front of it."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from segue.media.files import PREVIEW, FileSet
from segue.messages.deltas import (
    AudioDelta,
    Delta,
    Finished,
    ImageDelta,
    RequestMetrics,
    TextDelta,
    TokensDelta,
    Usage,
    VideoDelta,
)
from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.request import Appended, Message, Request, TextPart
from segue.orchestrator.service import Health, ModelCard, MovedWorker, ReplicaHealth, StageHealth
from segue.server.serve import http_server, listen
from segue.server.settings import ServerSettings

RATE = 24000
Script = Callable[[Request], AsyncGenerator[Delta]]


def samples(seed: int = 0, count: int = 2400) -> np.ndarray:
    """Audio with an rms of about 0.2."""
    return (0.3 * np.sin(np.arange(count) * (0.05 + 0.01 * seed))).astype(np.float32)


def audio(seed: int = 0, count: int = 2400) -> AudioDelta:
    return AudioDelta("vocoder", samples(seed, count).tobytes(), RATE)


def finished(reason: str = "stop") -> Finished:
    return Finished(
        reason,
        {"thinker": [5, 6, 7], "talker": [1, 2]},
        Usage(
            prompt_tokens=10,
            cached_tokens=4,
            prompt_modalities={"text": 7, "image": 3},
            completion_modalities={"text": 3, "audio": 2},
        ),
        RequestMetrics(jct=2.0, ttft=0.5, ttfa=1.0, audio_seconds=4.0, spans=[("thinker", "decode", 0.1, 0.9)]),
    )


async def speak(request: Request) -> AsyncGenerator[Delta]:
    """Text, and audio where wanted, in turns; first the prompt's tokens, where they are wanted."""
    if "tokens" in request.modalities:
        ids = request.prompt_token_ids or [100 + ord(letter) for letter in request.prompt or "?"]
        letters = [chr(token - 100) if 100 < token < 228 else "?" for token in ids]
        yield TokensDelta("input", ids, letters, "".join(letters))
        if request.modalities == ["tokens"]:
            yield finished()
            return
    for index, word in enumerate(("Hello", ", ", "world")):
        yield TextDelta("thinker", word, [5 + index])
        if "audio" in request.modalities:
            yield audio(index)
    if "image" in request.modalities:
        yield ImageDelta("painter", bytes(range(12)), 2, 2)
    yield finished()


async def as_files(request: Request, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    """What the output stage makes of the deltas, if the request names formats."""
    files = FileSet(request.formats)
    stages: list[str] = ["nobody"]
    heard = 0
    async for delta in deltas:
        part: dict[str, Any] | None = None
        if isinstance(delta, AudioDelta) and "audio" in request.formats:
            part = {"kind": "audio", "output": 0, "start": heard, "data": delta.array, "sample_rate": delta.sample_rate}
            heard += len(delta.array)
        elif isinstance(delta, ImageDelta) and "image" in request.formats:
            kind = "image" if delta.partial is None else PREVIEW
            part = {"kind": kind, "output": delta.index, "start": delta.partial or 0, "tokens": delta.tokens}
            part["data"] = delta.array[None]
        elif isinstance(delta, VideoDelta) and "video" in request.formats:
            part = {"kind": "video", "output": delta.index, "start": delta.start, "data": delta.array, "fps": delta.fps}
        if part is not None:
            assert isinstance(delta, AudioDelta | ImageDelta | VideoDelta)
            stages = [delta.stage]
            for made in await asyncio.to_thread(files.feed, delta.stage, part):
                yield made
            continue
        if isinstance(delta, Finished):
            for made in await asyncio.to_thread(files.finish, stages):
                yield made
        yield delta


class FakeService:
    """Plays `script` for every request; remembers requests and which were cancelled."""

    def __init__(self, script: Script = speak) -> None:
        self.script = script
        self.card = ModelCard(
            name="fake-omni",
            family="fake",
            takes=frozenset({"text", "image", "audio", "video"}),
            gives=frozenset({"text", "audio", "image"}),
            text_stage="thinker",
            sampling_stages=["thinker", "talker"],
            stages=["thinker", "talker", "vocoder"],
            voices=["Anna", "Ben"],
            options=frozenset({"use_audio_in_video"}),
            max_model_len=1000,
            created=1_700_000_000,
            by_priority=True,
        )
        self.requests: list[Request] = []
        self.cancelled: queue.Queue[str] = queue.Queue()
        self.state = Health(
            True,
            {name: StageHealth("ready", [ReplicaHealth(100 + i, "ready")]) for i, name in enumerate(self.card.stages)},
        )

    def health(self) -> Health:
        return self.state

    async def stream(self, request: Request) -> AsyncGenerator[Delta]:
        self.requests.append(request)
        ended = False
        try:
            async for delta in as_files(request, self.script(request)):
                ended = isinstance(delta, Finished)
                yield delta
            ended = True
        finally:
            if not ended:
                self.cancelled.put(request.request_id)

    async def stream_appended(self, request: Request, pieces: AsyncGenerator[str | Appended]) -> AsyncGenerator[Delta]:
        """Plays the script once for the request, and once for each piece."""
        self.requests.append(request)
        ended = False

        async def played() -> AsyncGenerator[Delta]:
            async for delta in self.script(request):
                if not isinstance(delta, Finished):
                    yield delta
            async for piece in pieces:
                [message] = request.messages
                text = piece if isinstance(piece, str) else piece.prompt or ""
                said = msgspec.structs.replace(request, messages=[Message(message.role, [TextPart(text)])])
                async for delta in self.script(said):
                    if not isinstance(delta, Finished):
                        yield delta
            yield finished()

        try:
            async for delta in as_files(request, played()):
                yield delta
            ended = True
        finally:
            if not ended:
                self.cancelled.put(request.request_id)

    async def room(self) -> None:
        """There is always room, but for scripts that say otherwise."""

    async def load_lora(self, name: str, path: str) -> None:
        if "broken" in path:
            raise InvalidRequest(f"{path}: not there", field="lora_path")
        self.card.adapters[name] = path

    async def unload_lora(self, name: str) -> None:
        if name not in self.card.adapters:
            raise NotFound(f"there is no LoRA adapter {name!r}", field="lora_name")
        del self.card.adapters[name]

    async def move_worker(self, from_stage: str, to_stage: str) -> MovedWorker:
        if from_stage == to_stage:
            raise InvalidRequest(f"from_stage is {from_stage!r}: the last one stays", field="from_stage")
        return MovedWorker(from_stage, to_stage, f"{to_stage}.1-1", 0.5)

    def metrics(self) -> bytes:
        return b"# HELP segue_stage_waiting x\n# TYPE segue_stage_waiting gauge\nsegue_stage_waiting 0.0\n"


class Gate:
    """A door in a script, opened by the test's thread."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.reached = threading.Event()

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached.set()
        await self._open.wait()

    def open(self) -> None:
        assert self.reached.wait(120)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._open.set)


class Live:
    """A running server."""

    def __init__(self, service: FakeService, url: str, port: int) -> None:
        self.service = service
        self.url = url
        self.port = port


def sent(port: int, path: str, body: dict[str, object], *, receive_buffer: int | None = None) -> socket.socket:
    """A raw client that has sent its request, and reads and leaves as the test has it."""
    data = json.dumps(body).encode()
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@contextmanager
def live(service: FakeService, settings: ServerSettings | None = None) -> Iterator[Live]:
    """The real HTTP server in a thread of its own. The socket listens before this returns: no waiting needed."""
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = http_server(service, settings or ServerSettings(drain_seconds=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        yield Live(service, f"http://127.0.0.1:{port}", port)
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive()

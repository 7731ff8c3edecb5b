"""Serves a `Service` over HTTP until a signal, then drains running requests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import uvicorn

from segue.messages.errors import ConfigError
from segue.orchestrator.service import Service
from segue.server.app import create_app
from segue.server.http.connection import WebSocketConnection, connection_class
from segue.server.http.intake import MESSAGE_BYTES
from segue.server.settings import ServerSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_SECONDS = 5.0
"""Seconds for a client to receive the error that ended its request."""


class HttpServer(uvicorn.Server):
    """uvicorn's server; after a signal it returns instead of raising the signal again, so that the caller can stop the
    stages.

    The first signal drains; a second one ends at once. `finish` ends requests that remain after `drain_seconds`.
    """

    def __init__(
        self, config: uvicorn.Config, drain_seconds: float, finish: Callable[[], Awaitable[None]] | None
    ) -> None:
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._finish = finish

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_late())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_late(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        if self._finish is not None:
            await self._finish()
            await asyncio.sleep(_LAST_WORDS_SECONDS)
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # a client that does not read would keep it open for ever

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `ConfigError` that names host and port."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"cannot listen on port {port}: a port is from 0 (any free one) to 65535", field="port")
    try:
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.create_server((host, port), family=facts[0], backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}, port {port}: {error}", field="port") from error
    # accepted sockets inherit it (asyncio sets it only if the protocol is given explicitly): without it Nagle's
    # algorithm and the client's delayed ACK delay every small event by 40 ms
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def http_server(
    service: Service, settings: ServerSettings, finish: Callable[[], Awaitable[None]] | None = None
) -> HttpServer:
    """Create the server: `await server.serve(sockets=[listen(…)])` runs it; `server.should_exit = True` drains and ends
    it.

    `finish`: ends all requests of the service, so that every client gets the reason; without it their connections
    break.
    """
    config = uvicorn.Config(
        create_app(service, settings),
        http=connection_class(settings),
        ws=WebSocketConnection,
        ws_max_size=MESSAGE_BYTES,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
    )
    return HttpServer(config, settings.drain_seconds, finish)


async def serve(service: Service, settings: ServerSettings, on_listening: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; then stop accepting, wait up to `drain_seconds` for running requests, and return.

    `on_listening` gets the URL once connections are accepted; `/health` says when the stages are ready.
    """
    sock = listen(settings.host, settings.port)
    host, port = sock.getsockname()[:2]
    if on_listening is not None:
        on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    await http_server(service, settings).serve(sockets=[sock])

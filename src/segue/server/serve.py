"""Serve a `Service` over HTTP until told to stop, then let running requests end."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from segue.messages.errors import ConfigError
from segue.orchestrator.service import Service
from segue.server.app import create_app
from segue.server.settings import ServerSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HttpServer(uvicorn.Server):
    """uvicorn's server, which returns after a signal instead of raising it again: the caller has stages to stop.

    The first signal drains; a second one ends at once.
    """

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
    # accepted sockets inherit it (asyncio sets it only where the protocol is spelt out): without it Nagle's algorithm
    # and the client's delayed ACK hold every small event back by 40 ms
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def http_server(service: Service, settings: ServerSettings) -> HttpServer:
    """The server object: `await server.serve(sockets=[listen(…)])`; `server.should_exit = True` drains and ends it."""
    config = uvicorn.Config(
        create_app(service, settings),
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )
    return HttpServer(config)


async def serve(service: Service, settings: ServerSettings, on_listening: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM: then stop accepting, let requests end within `drain_seconds`, and return.

    `on_listening` gets the URL once connections are accepted; `/health` says when the stages are ready.
    """
    sock = listen(settings.host, settings.port)
    host, port = sock.getsockname()[:2]
    if on_listening is not None:
        on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    await http_server(service, settings).serve(sockets=[sock])

"""Around every request: its id, the API key, the access log, the counts."""

from __future__ import annotations

import asyncio
import hmac
import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.messages.errors import Cancelled, SegueError, ShuttingDown
from segue.observe.logging import http_request_id, log_event
from segue.observe.metrics import ServerMetrics
from segue.server.disconnect import CLIENT_GONE
from segue.server.errors import MESSAGES, Unauthorized, error_response
from segue.server.vllm import REQUEST_ID

_log = logging.getLogger("segue.access")
_PROTECTED = ("/v1/", "/v2/", "/score", "/rerank", "/classify", "/pooling", "/tokenize", "/detokenize")
"""Beginnings of paths: what makes the stages work or tells of the model (`/tokenizer_info` is among them)."""
_POLLED = frozenset({"/health", "/ping", "/metrics"})
"""Asked for every few seconds by machines: not worth a line each."""


class Door:
    """ASGI middleware; the outermost of ours."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, api_key: str | None) -> None:
        self._app = app
        self._metrics = metrics
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        http_request_id.set(request_id)
        status: int | None = None

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        start = self._metrics.clock()
        try:
            with self._metrics.in_flight.track_inprogress():
                if self._allowed(scope["path"], headers):
                    await self._app(scope, receive, send_noting)
                else:
                    refusal = Unauthorized("the API key is missing or wrong: send Authorization: Bearer <key>")
                    await error_response(refusal, scope["path"])(scope, receive, send_noting)
        except asyncio.CancelledError:
            # by nobody but the server that ends: whoever has heard nothing yet hears why
            if status is None:
                ended_by = ShuttingDown("the server is shutting down")
                await error_response(ended_by, scope["path"])(scope, receive, send_noting)
        except Exception as error:
            # whatever it is, the client gets an answer, and its text stays in the log
            _log.exception("a mistake in the server", exc_info=error)
            if status is not None:
                raise  # too late to say so: the connection breaks off
            answer = SegueError(f"internal error; the server's log has it under request id {request_id}")
            await error_response(answer, scope["path"])(scope, receive, send_noting)
        finally:
            ended = Cancelled.status if CLIENT_GONE in scope else status or 500
            self._note(scope, ended, self._metrics.clock() - start)

    def _allowed(self, path: str, headers: Headers) -> bool:
        if self._api_key is None or not path.startswith(_PROTECTED):
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if path.startswith(MESSAGES) and "x-api-key" in headers:  # as Anthropic's clients send it
            scheme, key = "bearer", headers["x-api-key"]
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._api_key)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # the route's template, not the path: clients must not be able to make labels
        route = scope.get("route")
        endpoint = route.path if isinstance(route, Route) else "none"
        method = scope["method"] if endpoint != "none" else "any"
        self._metrics.http_requests.labels(method, endpoint, str(status)).inc()
        self._metrics.http_seconds.labels(endpoint).observe(seconds)
        client = scope.get("client")
        log_event(
            _log,
            "request",
            {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                "client": client[0] if client else None,
            },
            logging.DEBUG if endpoint in _POLLED else logging.INFO,
        )

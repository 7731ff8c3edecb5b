"""Code around every request: its id, the API key, the access log, the metrics."""

from __future__ import annotations

import asyncio
import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.messages.errors import Cancelled, NotFound, SegueError, ShuttingDown
from segue.observe.logging import http_request_id, log_event
from segue.observe.metrics import ServerMetrics
from segue.server.http.disconnect import CLIENT_GONE
from segue.server.http.errors import MESSAGES, Unauthorized, error_response
from segue.server.http.sites import Sites
from segue.server.settings import ServerSettings
from segue.server.tenants.tenants import Call, Tenants, calling
from segue.server.vllm.parameters import REQUEST_ID

_log = logging.getLogger("segue.access")
OPEN = frozenset({"/", "/health", "/ping", "/metrics", "/version", "/openapi.json"})
"""Endpoints without a key. All others make the stages work, or reveal the model or clients."""
_POLLED = frozenset({"/health", "/ping", "/metrics"})
"""Endpoints that machines poll every few seconds; they are logged at level debug."""
_STARTS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
"""Messages that begin an answer, or accept a websocket."""


class Door:
    """ASGI middleware; the outermost one but for CORS. A websocket's handshake passes the same checks as other
    requests, and a refused one has the same answer."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, settings: ServerSettings, tenants: Tenants) -> None:
        self._app = app
        self._metrics = metrics
        self._sites = Sites(settings)
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        websocket = scope["type"] == "websocket"
        method = "GET" if websocket else scope["method"]  # a websocket's handshake is a GET
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        http_request_id.set(request_id)
        status: int | None = None
        call: Call | None = None

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                status = message.get("status", 101)
                said = MutableHeaders(scope=message)
                said["X-Request-Id"] = request_id
                if call is not None and (websocket or method == "POST"):
                    said.update(call.account.headers())
            elif message["type"] == "websocket.close" and status is None:
                if _answers(scope):  # the framework knows no such route
                    raise NotFound(f"no such websocket: {scope['path']}")
                status = 403
            await send(message)

        start = self._metrics.clock()
        try:
            with self._metrics.in_flight.track_inprogress():
                try:
                    self._sites.check(method, headers)
                    if self._tenants and scope["path"] not in OPEN:
                        call = self._call(scope, headers, counted=websocket or method == "POST")
                        calling.set(call)
                        call.enter()
                except SegueError as refusal:
                    await _refuse(refusal, scope, receive, send_noting)
                else:
                    await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            # only the stopping server cancels here: clients without an answer yet get the reason
            if status is None:
                ended_by = ShuttingDown("the server is shutting down")
                await _refuse(ended_by, scope, receive, send_noting)
        except Exception as error:
            # the client gets an answer whatever the error is, and the error's text stays in the log
            _log.exception("a bug in the server", exc_info=error)
            if status is not None:
                raise  # too late for an error answer: the connection breaks off
            answer = SegueError(f"internal error; the server's log has it under request id {request_id}")
            await _refuse(answer, scope, receive, send_noting)
        finally:
            if call is not None:
                call.release()
            ended = Cancelled.status if CLIENT_GONE in scope else status or 500
            self._note(scope, method, ended, self._metrics.clock() - start, call)

    def _call(self, scope: Scope, headers: Headers, *, counted: bool) -> Call:
        """The tenant's call for this request. Raises `Unauthorized`."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scope["path"].startswith(MESSAGES) and "x-api-key" in headers:  # Anthropic's clients send this header
            scheme, key = "bearer", headers["x-api-key"]
        account = self._tenants.by_key(key.strip()) if scheme.lower() == "bearer" else None
        if account is None:
            raise Unauthorized("the API key is missing or wrong: send Authorization: Bearer <key>")
        # a request that ends another one must not wait for a slot
        return Call(account, counted=counted and not scope["path"].endswith("/cancel"))

    def _note(self, scope: Scope, method: str, status: int, seconds: float, call: Call | None) -> None:
        # the route's template, not the path: clients must not be able to create metric labels
        route = scope.get("route")
        endpoint = route.path if isinstance(route, Route | WebSocketRoute) else "none"
        label = method if endpoint != "none" else "any"
        self._metrics.http_requests.labels(label, endpoint, str(status)).inc()
        self._metrics.http_seconds.labels(endpoint).observe(seconds)
        client = scope.get("client")
        log_event(
            _log,
            "request",
            {
                "method": method,
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 4),
                "client": client[0] if client else None,
                **({"tenant": call.name} if call is not None and call.name else {}),
            },
            logging.DEBUG if endpoint in _POLLED else logging.INFO,
        )


async def _refuse(error: SegueError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error. A server that cannot answer a handshake with a body answers it with 403."""
    if _answers(scope):
        await error_response(error, scope["path"])(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})


def _answers(scope: Scope) -> bool:
    """Whether a refused request can have a body."""
    return scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {})

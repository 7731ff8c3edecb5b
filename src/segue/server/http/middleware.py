"""Code around every request: its id, the API key, the access log, the metrics."""

from __future__ import annotations

import asyncio
import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from segue.messages.errors import Cancelled, SegueError, ShuttingDown
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


class Door:
    """ASGI middleware; the outermost one of this application."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, settings: ServerSettings, tenants: Tenants) -> None:
        self._app = app
        self._metrics = metrics
        self._sites = Sites(settings)
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # its handshake would pass none of the checks below
            await send({"type": "websocket.close", "code": 1008, "reason": "this server takes no websockets"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        http_request_id.set(request_id)
        status: int | None = None
        call: Call | None = None

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                said = MutableHeaders(scope=message)
                said["X-Request-Id"] = request_id
                if call is not None and scope["method"] == "POST":
                    said.update(call.account.headers())
            await send(message)

        start = self._metrics.clock()
        try:
            with self._metrics.in_flight.track_inprogress():
                try:
                    self._sites.check(scope["method"], headers)
                    if self._tenants and scope["path"] not in OPEN:
                        call = self._call(scope, headers)
                        calling.set(call)
                        call.enter()
                except SegueError as refusal:
                    await error_response(refusal, scope["path"])(scope, receive, send_noting)
                else:
                    await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            # only the stopping server cancels here: clients without an answer yet get the reason
            if status is None:
                ended_by = ShuttingDown("the server is shutting down")
                await error_response(ended_by, scope["path"])(scope, receive, send_noting)
        except Exception as error:
            # the client gets an answer whatever the error is, and the error's text stays in the log
            _log.exception("a bug in the server", exc_info=error)
            if status is not None:
                raise  # too late for an error answer: the connection breaks off
            answer = SegueError(f"internal error; the server's log has it under request id {request_id}")
            await error_response(answer, scope["path"])(scope, receive, send_noting)
        finally:
            if call is not None:
                call.release()
            ended = Cancelled.status if CLIENT_GONE in scope else status or 500
            self._note(scope, ended, self._metrics.clock() - start, call)

    def _call(self, scope: Scope, headers: Headers) -> Call:
        """The tenant's call for this request. Raises `Unauthorized`."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scope["path"].startswith(MESSAGES) and "x-api-key" in headers:  # Anthropic's clients send this header
            scheme, key = "bearer", headers["x-api-key"]
        account = self._tenants.by_key(key.strip()) if scheme.lower() == "bearer" else None
        if account is None:
            raise Unauthorized("the API key is missing or wrong: send Authorization: Bearer <key>")
        # a request that ends another one must not wait for a slot
        return Call(account, counted=scope["method"] == "POST" and not scope["path"].endswith("/cancel"))

    def _note(self, scope: Scope, status: int, seconds: float, call: Call | None) -> None:
        # the route's template, not the path: clients must not be able to create metric labels
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
                **({"tenant": call.name} if call is not None and call.name else {}),
            },
            logging.DEBUG if endpoint in _POLLED else logging.INFO,
        )

"""Converts every error to OpenAI's error object, or Anthropic's on its endpoints.

Also lists endpoints of OpenAI's and Anthropic's APIs that this server lacks, with their alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute

from segue.messages.errors import InvalidRequest, NotFound, Overloaded, SegueError, nearest

_OPENAI = {
    "/v1/responses/compact": "send /v1/responses the items to remember, or previous_response_id",
    "/v1/conversations": "continue a stored response with previous_response_id of /v1/responses",
    "/v1/assistants": "send instructions and tools with each request to /v1/responses",
    "/v1/threads": "continue a stored response with previous_response_id of /v1/responses",
    "/v1/audio/voice_consents": "a voice is one of the model's: GET /v1/audio/voices",
    "/v1/realtime": "send recordings to /v1/chat/completions as input_audio, and stream the answer",
    "/v1/files": "send media within a request, as data: URLs",
    "/v1/uploads": "send media within a request, as data: URLs",
    "/v1/vector_stores": "make embeddings with /v1/embeddings, and store them elsewhere",
    "/v1/batches": "send the requests concurrently: the server batches them, and priority lets others go first",
    "/v1/images/variations": "send the image to /v1/images/edits",
    "/v1/fine_tuning": "",
    "/v1/moderations": "a classifier answers /v1/classify",
    "/v1/containers": "",
    "/v1/evals": "",
    "/v1/organization": "",
    "/v1/chatkit": "",
    "/v1/skills": "",
}
_UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket"}
_ANTHROPIC = {
    "/v1/messages/batches": "send the messages concurrently: the server batches them",
    "/v1/complete": "send POST /v1/messages",
}


def known_elsewhere(method: str, path: str) -> str | None:
    """The error message for an endpoint of another API, or one below it; None if the path is not one of theirs."""
    for whose, known in (("OpenAI", _OPENAI), ("Anthropic", _ANTHROPIC)):
        for endpoint, instead in known.items():
            if path == endpoint or path.startswith(f"{endpoint}/"):
                said = f"no such endpoint: {method} {path}; {whose} has {endpoint}, this server does not"
                return f"{said}: {instead}" if instead else said
    return None


class ModelNotFound(NotFound):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


class Unauthorized(SegueError):
    """The API key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(SegueError):
    """The API key is valid, but does not allow this."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class Unsupported(InvalidRequest):
    """A known parameter that this server does not support."""

    code = "unsupported_parameter"


def not_for_this_model(why: str) -> Unsupported:
    """The error of an endpoint that the model cannot serve; `why`: what the model does not do."""
    return Unsupported(f"this model {why}; this server does not support that endpoint for it", field="model")


class UnsupportedMediaType(InvalidRequest):
    """The body's declared type is not one that the endpoint takes, or the body is compressed."""

    status = 415
    code = "unsupported_media_type"


class UploadTimeout(SegueError):
    """The client did not send its request in time."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"

    def __init__(self, part: str, seconds: float, rate: int | None = None) -> None:
        """`part`: the part that did not arrive within `seconds`, or after that at `rate` bytes per second."""
        right = f"within {seconds:g} seconds" + ("" if rate is None else f", nor at {rate} bytes per second")
        super().__init__(f"the {part} of the request did not arrive completely {right} (upload_seconds)")


class Busy(Overloaded):
    """This server has reached its limit of connections or of bodies."""

    status = 503
    type = "server_error"
    code = "server_busy"


class CrossSite(SegueError):
    """A web page of another site sent the request, and CORS does not allow that site."""

    status = 403
    type = "invalid_request_error"
    code = "cross_site"


class RateLimited(SegueError):
    """The tenant of the key has reached a limit."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        """`retry_after`: seconds."""
        super().__init__(message)
        self.retry_after = retry_after


class UnknownHost(SegueError):
    """`Host` is not a name of this server."""

    status = 421
    type = "invalid_request_error"
    code = "unknown_host"


class RangeNotSatisfiable(SegueError):
    """`Range` asks for a part that the file does not have, or for several parts."""

    status = 416
    type = "invalid_request_error"
    code = "range_not_satisfiable"

    def __init__(self, message: str, *, size: int) -> None:
        """`size`: of the file, in bytes."""
        super().__init__(message, field="Range")
        self.size = size


class StorageFull(SegueError):
    """This server's disk has no space for the file."""

    status = 507
    code = "storage_full"


MESSAGES = "/v1/messages"
"""Paths of Anthropic's API, whose errors have Anthropic's form."""
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status → Anthropic's `error.type`; other statuses below 500 use that of 400, from 500 on `api_error`."""


def error_body(error: SegueError, path: str = "") -> dict[str, Any]:
    """OpenAI's error object, or Anthropic's at `path`s of its API. `stage` is additional, and present only if a stage
    failed."""
    if path.startswith(MESSAGES):
        return _of_messages(error.status, error.message)
    body = {"message": error.message, "type": error.type, "param": error.field, "code": error.code}
    if error.stage is not None:
        body["stage"] = error.stage
    return {"error": body}


def _of_messages(status: int, message: str) -> dict[str, Any]:
    kind = _KINDS.get(status, _KINDS[400] if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: SegueError, path: str = "") -> Response:
    """The answer to a request (to `path`) that failed before any output was sent."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = "1"
    if isinstance(error, RateLimited):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UploadTimeout):
        headers["Connection"] = "close"  # the rest of the body must not be read as another request
    if isinstance(error, RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.size}"
    return json_response(error_body(error, path), error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer in OpenAI's form if the application or the framework refuses a request."""
    app.add_exception_handler(SegueError, _on_segue_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


def _on_segue_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SegueError)
    return error_response(error, request.url.path)


def _methods(request: Request) -> list[str]:
    """All methods of a path."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


def _on_http_exception(request: Request, error: Exception) -> Response:
    """Convert the framework's own refusals: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    status, headers = error.status_code, error.headers
    message, code = str(error.detail), "http_error"
    if status in (404, 405) and (said := known_elsewhere(method, path)) is not None:
        # also for a 405 that comes only from a route with a variable in this place
        message, code, status, headers = said, "unknown_url", 404, None
    elif any(isinstance(route, WebSocketRoute) and route.path == path for route in request.app.routes):
        message, code, status, headers = f"{path} is a websocket: connect to it", "upgrade_required", 426, _UPGRADE
    elif status == 404:
        paths = {route.path for route in request.app.routes if isinstance(route, Route)}
        message, code = f"no such endpoint: {method} {path}{nearest(path, paths)}", "unknown_url"
    elif status == 405:
        allowed = ", ".join(_methods(request))  # the framework lists only the first route's methods
        headers = {"Allow": allowed}
        message, code = f"{path} takes {allowed}, not {method}", "method_not_allowed"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    if path.startswith(MESSAGES):
        body = _of_messages(status, message)
    return json_response(body, status, headers)

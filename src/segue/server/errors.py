"""Errors at the door: everything leaves as OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from segue.messages.errors import InvalidRequest, NotFound, Overloaded, SegueError, nearest
from segue.server.not_here import known_elsewhere


class ModelNotFound(NotFound):
    """The request names a model this server does not serve."""

    code = "model_not_found"


class Unauthorized(SegueError):
    """The API key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Unsupported(InvalidRequest):
    """A parameter of OpenAI's that is known and cannot be honoured."""

    code = "unsupported_parameter"


def not_for_this_model(why: str) -> Unsupported:
    """The refusal of an endpoint that is of no use to the model; `why`: what this model does not do."""
    return Unsupported(f"this model {why}; this server does not support that endpoint for it", field="model")


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared as what the endpoint takes, or is compressed."""

    status = 415
    code = "unsupported_media_type"


class UploadTimeout(SegueError):
    """The client did not send its request in time."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"

    def __init__(self, part: str, seconds: float) -> None:
        """`part`: what did not come within so many `seconds`."""
        super().__init__(f"the {part} of the request did not come whole within {seconds:g} seconds (upload_seconds)")


class CrossSite(SegueError):
    """A form that a web page of another site sent."""

    status = 403
    type = "invalid_request_error"
    code = "cross_site"


class RangeNotSatisfiable(SegueError):
    """`Range` asks for a part that a file has not, or for several."""

    status = 416
    type = "invalid_request_error"
    code = "range_not_satisfiable"

    def __init__(self, message: str, *, size: int) -> None:
        """`size`: bytes of the file."""
        super().__init__(message, field="Range")
        self.size = size


class StorageFull(SegueError):
    """What is to be kept has no room on this server's disk."""

    status = 507
    code = "storage_full"


MESSAGES = "/v1/messages"
"""Where the API is Anthropic's, and so are errors."""
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
"""HTTP status → Anthropic's `error.type`; others below 500 are of 400, and `api_error` from there on."""


def error_body(error: SegueError, path: str = "") -> dict[str, Any]:
    """OpenAI's error object, or Anthropic's at `path`s of its API; `stage` is ours, and there only where a stage
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
    """The answer to a request (to `path`) that failed before anything of it was sent."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = "1"
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UploadTimeout):
        headers["Connection"] = "close"  # what still comes is not read as another request
    if isinstance(error, RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.size}"
    return json_response(error_body(error, path), error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer in OpenAI's form what the application or the framework refuses."""
    app.add_exception_handler(SegueError, _on_segue_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


def _on_segue_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SegueError)
    return error_response(error, request.url.path)


def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    status, headers = error.status_code, error.headers
    message, code = str(error.detail), "http_error"
    if status in (404, 405) and (said := known_elsewhere(method, path)) is not None:
        # 405: where a route with a variable has the path as one of its own
        message, code, status, headers = said, "unknown_url", 404, None
    elif status == 404:
        paths = {route.path for route in request.app.routes if isinstance(route, Route)}
        message, code = f"no such endpoint: {method} {path}{nearest(path, paths)}", "unknown_url"
    elif status == 405:
        allowed = (headers or {}).get("Allow", "another method")
        message, code = f"{path} takes {allowed}, not {method}", "method_not_allowed"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    if path.startswith(MESSAGES):
        body = _of_messages(status, message)
    return json_response(body, status, headers)

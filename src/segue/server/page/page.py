"""`GET /`: a web page to try the model. It is one file that loads nothing from other sites."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data: blob:; media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_page(app: FastAPI) -> None:
    """Add the endpoint. The file is read once."""
    html = files("segue.server.page").joinpath("static/index.html").read_bytes()

    @app.get("/")
    async def index() -> Response:
        return Response(html, headers=_HEADERS, media_type="text/html; charset=utf-8")

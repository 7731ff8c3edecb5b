"""`GET /`: a web page to try the model. It is one file that loads nothing from other sites.

`GET /page/examples`: the examples in the model's directory, which the page offers.
"""

from __future__ import annotations

from importlib.resources import files

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from segue.orchestrator.service import ModelCard
from segue.server.page.examples import read_examples
from segue.server.settings import ServerSettings

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src 'self' data: blob:; media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_page(app: FastAPI, card: ModelCard, settings: ServerSettings) -> None:
    """Add the endpoints. Their files are read once, here."""
    html = files("segue.server.page").joinpath("static/index.html").read_bytes()
    offered = msgspec.json.encode({"object": "list", "data": read_examples(card, settings)})

    @app.get("/")
    async def index() -> Response:
        return Response(html, headers=_HEADERS, media_type="text/html; charset=utf-8")

    @app.get("/page/examples")
    async def examples() -> Response:
        return Response(offered, media_type="application/json")

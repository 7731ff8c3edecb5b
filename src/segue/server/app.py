"""The HTTP application over a `Service`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.chat_completions import add_chat_completions
from segue.server.checking import Checking
from segue.server.completions import add_completions
from segue.server.embeddings import add_embeddings
from segue.server.errors import install_error_handlers
from segue.server.health import add_health
from segue.server.images import add_images
from segue.server.lora import add_lora
from segue.server.messages import add_messages
from segue.server.metrics import add_metrics
from segue.server.middleware import Door
from segue.server.models import add_models
from segue.server.openapi import add_openapi
from segue.server.page import add_page
from segue.server.pooling import add_pooling
from segue.server.responses import Responses, add_responses
from segue.server.scores import add_scores
from segue.server.settings import ServerSettings
from segue.server.tokenize import add_tokenize
from segue.server.transcriptions import add_transcriptions
from segue.server.videos import Videos, add_videos


def create_app(service: Service, settings: ServerSettings | None = None) -> FastAPI:
    """All endpoints. The service must live on the event loop that serves the application.

    Raises `ConfigError` where jobs of video cannot be kept.
    """
    settings = settings or ServerSettings()
    own, checking = ServerMetrics(), Checking()
    responses = Responses(service, settings, own)
    videos = Videos(service, settings, own) if "video" in service.card.gives else None

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncGenerator[None]:
        async with videos.running() if videos is not None else nullcontext(), responses.background.running():
            yield

    app = FastAPI(
        title="Segue", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=running
    )
    add_chat_completions(app, service, settings, own, checking)
    add_responses(app, service, settings, own, checking, responses)
    add_messages(app, service, settings, own, checking)
    add_completions(app, service, settings, own)
    add_tokenize(app, service, settings, checking)
    add_embeddings(app, service, settings, own)
    add_pooling(app, service, settings, own)
    add_scores(app, service, settings, own)
    add_images(app, service, settings, own, checking)
    add_transcriptions(app, service, settings, own)
    add_videos(app, service, settings, checking, videos)
    add_models(app, service, settings)
    add_lora(app, service, settings)
    add_health(app, service)
    add_metrics(app, service, own)
    add_openapi(app)
    add_page(app)
    install_error_handlers(app)
    app.add_middleware(Door, metrics=own, api_key=settings.api_key)
    if settings.allow_origins:  # outside the door: a browser asks whether it may ask without the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(settings.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app

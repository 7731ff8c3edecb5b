"""The HTTP application over a `Service`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.anthropic.endpoint import add_messages
from segue.server.http.checking import Checking
from segue.server.http.errors import install_error_handlers
from segue.server.http.intake import Intake
from segue.server.http.middleware import Door
from segue.server.openai.audio.speech import add_speech
from segue.server.openai.audio.speech_session import add_speech_stream
from segue.server.openai.audio.transcriptions import add_transcriptions
from segue.server.openai.chat.endpoint import add_chat_completions
from segue.server.openai.chat.session import add_chat_stream
from segue.server.openai.completions.endpoint import add_completions
from segue.server.openai.embeddings import add_embeddings
from segue.server.openai.images.endpoint import add_images
from segue.server.openai.models import add_models
from segue.server.openai.responses.endpoint import Responses, add_responses
from segue.server.openai.videos.endpoint import Videos, add_videos
from segue.server.operations.health import add_health, add_metrics
from segue.server.operations.moves import add_moves
from segue.server.operations.openapi import add_openapi
from segue.server.page.page import add_page
from segue.server.settings import ServerSettings
from segue.server.tenants.service import TenantService
from segue.server.tenants.tenants import RATE_HEADERS, Tenants
from segue.server.vllm.lora import add_lora
from segue.server.vllm.pooling import add_pooling
from segue.server.vllm.scores import add_scores
from segue.server.vllm.tokenize import add_tokenize


def create_app(service: Service, settings: ServerSettings | None = None) -> FastAPI:
    """Build the application with all endpoints. The service must run on the event loop that serves the application.

    Raises `ConfigError` if video jobs cannot be stored.
    """
    settings = settings or ServerSettings()
    limits = service.card.limits
    media = replace(settings.media, max_items=limits.max_media_parts)
    settings = replace(settings, limits=limits, media=media)
    own, checking = ServerMetrics(), Checking()
    tenants = Tenants(settings.tenants, settings.api_key)
    if tenants:
        service = TenantService(service, tenants)
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
    add_chat_stream(app, service, settings, own, checking)
    add_responses(app, service, settings, own, checking, responses)
    add_messages(app, service, settings, own, checking)
    add_completions(app, service, settings, own)
    add_tokenize(app, service, settings, checking)
    add_embeddings(app, service, settings, own)
    add_pooling(app, service, settings, own)
    add_scores(app, service, settings, own)
    add_images(app, service, settings, own, checking)
    add_speech(app, service, settings, own, checking)
    add_speech_stream(app, service, settings, own, checking)
    add_transcriptions(app, service, settings, own)
    add_videos(app, service, settings, checking, videos)
    add_models(app, service, settings)
    add_lora(app, service, settings)
    add_health(app, service)
    add_metrics(app, service, own)
    add_moves(app, service, settings)
    add_openapi(app)
    add_page(app, service.card, settings)
    install_error_handlers(app)
    app.add_middleware(Intake, most=settings.max_bodies_bytes)
    app.add_middleware(Door, metrics=own, settings=settings, tenants=tenants)
    if settings.allow_origins:  # outside the door, because browsers send preflight requests without the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(settings.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
        )
    return app

"""`/v1/videos`, as in OpenAI's API: creates, reports, returns and deletes jobs."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import FileResponse, Response

from segue.graph.parts import TOKENS
from segue.media.write_video import check_video_encoder
from segue.messages.errors import NotFound, SegueError, shown, wrong
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import ModelCard, Service
from segue.server.http.body import check_names
from segue.server.http.checking import Checking
from segue.server.http.disconnect import while_connected
from segue.server.http.errors import RangeNotSatisfiable, Unsupported, json_response, not_for_this_model
from segue.server.http.multipart import read_values
from segue.server.http.paging import listed, page_of
from segue.server.openai.videos.request import FILES, VideoBody, as_written, video_request
from segue.server.openai.videos.runner import VideoRunner
from segue.server.openai.videos.store import THUMBNAIL, VIDEO, VideoJob, VideoStore
from segue.server.settings import ServerSettings
from segue.server.tenants.tenants import caller

_RANGE = re.compile(r"bytes\s*=\s*(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})", re.IGNORECASE)
_VARIANTS = {"video": (VIDEO, "video/mp4"), "thumbnail": (THUMBNAIL, "image/webp")}


class Videos:
    """The video jobs of a running server."""

    def __init__(self, service: Service, settings: ServerSettings, metrics: ServerMetrics) -> None:
        """Raises `ConfigError` if jobs cannot be stored, or videos cannot be written."""
        check_video_encoder()
        self.store = VideoStore(
            settings.video_dir or default_directory(service.card),
            max_jobs=settings.max_videos,
            max_bytes=settings.max_video_bytes,
        )
        keyed = settings.api_key is not None or bool(settings.tenants)
        self.runner = VideoRunner(service, self.store, metrics, keyed=keyed)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run the waiting jobs until the server stops."""
        self.runner.start()
        try:
            yield
        finally:
            await self.runner.stop()
            self.store.close()


def default_directory(card: ModelCard) -> Path:
    """The directory in which servers of this model keep their jobs (XDG Base Directory Specification: state)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "segue" / "videos" / re.sub(r"[^\w.-]", "_", card.name)


def add_videos(
    app: FastAPI, service: Service, settings: ServerSettings, checking: Checking, videos: Videos | None
) -> None:
    """Add the endpoints. `videos`: None if the model makes none."""

    def kept() -> Videos:
        if videos is None:
            raise not_for_this_model("makes no video")
        return videos

    @app.post("/v1/videos")
    async def create(http: HttpRequest) -> Response:
        values = await read_values(http, settings, VideoBody, FILES)
        job, request = await checking.run(video_request, values, service.card, settings)
        await while_connected(http.receive, _check(job, request, service))
        job.owner = caller()
        await asyncio.to_thread(kept().store.create, job, request)
        kept().runner.submit(job)
        return json_response(_object(job))

    @app.get("/v1/videos")
    async def all_videos(http: HttpRequest) -> Response:
        check_names(http.query_params, ("after", "limit", "order"))
        jobs = [_object(job) for job in kept().store.jobs(caller())]
        return json_response(listed(jobs, page_of(http.query_params), "video"))

    @app.get("/v1/videos/{video_id}")
    async def one_video(video_id: str) -> Response:
        return json_response(_object(kept().store.job(video_id, caller())))

    @app.head("/v1/videos/{video_id}/content")
    @app.get("/v1/videos/{video_id}/content")
    async def content(video_id: str, http: HttpRequest) -> Response:
        check_names(http.query_params, ("variant",))
        store, job = kept().store, kept().store.job(video_id, caller())
        variant = http.query_params.get("variant", "video")
        if variant == "spritesheet":
            raise Unsupported("variant is 'spritesheet'; it must be video or thumbnail", field="variant")
        if variant not in _VARIANTS:
            raise wrong("variant", variant, "video or thumbnail")
        if job.status != "completed":
            raise NotFound(f"the video is {job.status}; it is available once its status is completed", field="video_id")
        name, media_type = _VARIANTS[variant]
        path = store.path(job, name)
        try:
            stat = await asyncio.to_thread(path.stat)
        except OSError as error:
            raise NotFound(f"the {variant} no longer exists", field="video_id") from error
        answer = FileResponse(path, media_type=media_type, stat_result=stat)
        whole = http.headers.get("if-range") not in (None, answer.headers["etag"], answer.headers["last-modified"])
        if not whole and (asked := http.headers.get("range")) is not None:
            _check_range(asked, stat.st_size)
        return answer

    @app.post("/v1/videos/{video_id}/remix", include_in_schema=False)
    async def remix(video_id: str) -> Response:
        raise Unsupported(
            "this server makes no video from a video: for a similar one, send POST /v1/videos the parameters of the "
            "first, with its seed (which the job reports) and another prompt",
            field="video_id",
        )

    @app.post("/v1/videos/edits", include_in_schema=False)
    @app.post("/v1/videos/extensions", include_in_schema=False)
    @app.post("/v1/videos/characters", include_in_schema=False)
    async def of_videos() -> Response:
        raise Unsupported("this server makes no video from a video: send POST /v1/videos a text, or an image as well")

    @app.delete("/v1/videos/{video_id}")
    async def delete(video_id: str) -> Response:
        await kept().runner.delete(kept().store.job(video_id, caller()))
        return json_response({"id": video_id, "object": "video.deleted", "deleted": True})


def _check_range(asked: str, size: int) -> None:
    """Check that `Range` asks for one part of the file (RFC 9110, section 14.2). Raises `RangeNotSatisfiable`."""
    match = _RANGE.fullmatch(asked.strip())
    wrong = f"Range is {shown(asked)}; "
    if match is None or not (match["first"] or match["last"]):
        raise RangeNotSatisfiable(wrong + "it must be one range of bytes, e.g. bytes=0-999", size=size)
    first, last = match["first"], match["last"]
    if int(first or 0) >= size or (first and last and int(last) < int(first)) or (not first and not int(last)):
        raise RangeNotSatisfiable(f"{wrong}the file has only {size} bytes", size=size)


async def _check(job: VideoJob, request: Request, service: Service) -> None:
    """Run only the input stage, so that an invalid request is refused now and not by a failed job."""
    seen = msgspec.structs.replace(request, request_id=f"{request.request_id}-check", modalities=[TOKENS])
    try:
        async with aclosing(service.stream(seen)) as deltas:
            async for _ in deltas:
                pass
    except SegueError as error:
        raise as_written(error, job.size, job.seconds, request.options) from error


def _object(job: VideoJob) -> dict[str, Any]:
    """OpenAI's video object; `seed` is additional."""
    return {
        "id": job.id,
        "object": "video",
        "model": job.model,
        "status": job.status,
        "progress": job.progress,
        "created_at": int(job.created),
        "completed_at": None if job.completed is None else int(job.completed),
        "expires_at": None,
        "prompt": job.prompt,
        "size": job.size,
        "seconds": job.seconds,
        "remixed_from_video_id": None,
        "seed": job.seed,
        "error": None if job.error is None else {"code": job.error.code, "message": job.error.message},
    }

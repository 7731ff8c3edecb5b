"""Runs video jobs, a few at a time, and writes their files."""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from io import BufferedWriter
from pathlib import Path

import msgspec

from segue.messages.deltas import EncodedDelta, ProgressDelta
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import Overloaded, SegueError, ShuttingDown, StageFailed
from segue.messages.formats import Format
from segue.messages.request import Request
from segue.observe.metrics import ServerMetrics
from segue.orchestrator.service import Service
from segue.server.generation.generations import run_generations
from segue.server.openai.videos.request import as_written
from segue.server.openai.videos.store import THUMBNAIL, VIDEO, JobError, VideoJob, VideoStore
from segue.server.tenants.tenants import calling

AT_ONCE = 4
"""Most jobs in the stages at a time; the others wait in order."""

log = logging.getLogger("segue.server")


class VideoRunner:
    """Runs the unfinished jobs of a store. Used on the event loop of the service."""

    def __init__(self, service: Service, store: VideoStore, metrics: ServerMetrics, *, keyed: bool) -> None:
        """`keyed`: the server requires keys, so a job runs as the tenant that owns it, or without one."""
        self._service = service
        self._keyed = keyed
        self._store = store
        self._metrics = metrics
        self._room = asyncio.Semaphore(AT_ONCE)
        self._running: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Resume the jobs of an earlier server."""
        for job in self._store.jobs():
            if not job.ended:
                self.submit(job)

    async def stop(self) -> None:
        """Stop running jobs; they run again later."""
        running = [job for job in self._store.jobs() if job.id in self._running]
        await self._cancel(list(self._running.values()))
        for job in running:
            await self._put_back(job)

    async def _put_back(self, job: VideoJob) -> None:
        """Return a job to the queue for the next server; the stop does not count as the job's failure."""
        if not job.ended:
            job.status, job.progress, job.attempts = "queued", 0, max(0, job.attempts - 1)
            with suppress(OSError):
                await asyncio.to_thread(self._store.update, job)

    def submit(self, job: VideoJob) -> None:
        """Run a job when its turn comes."""
        call = calling.get()
        call.hold()
        task = asyncio.create_task(self._run(job))
        self._running[job.id] = task
        task.add_done_callback(lambda _: call.release())
        task.add_done_callback(lambda _: self._running.pop(job.id, None))

    async def delete(self, job: VideoJob) -> None:
        """Cancel a job if it is running, and delete it."""
        if (task := self._running.get(job.id)) is not None:
            await self._cancel([task])
        await asyncio.to_thread(self._store.delete, job)

    @staticmethod
    async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: VideoJob) -> None:
        async with self._room:
            try:
                await self._make(job)
            except ShuttingDown:
                await self._put_back(job)
            except SegueError as error:
                said = as_written(error, job.size, job.seconds)
                await self._fail(job, JobError(said.code, said.message))
            except OSError as error:
                await self._fail(job, JobError("storage_full", f"the video cannot be written: {error.strerror}"))
            except Exception:
                # clients that wait get an answer whatever the error is, and its text stays in the log
                log.exception("a bug in the server")
                await self._fail(job, JobError("internal_error", f"internal error; the server's log has it: {job.id}"))

    async def _fail(self, job: VideoJob, error: JobError) -> None:
        log.warning("%s failed: %s", job.id, error.message)
        await asyncio.to_thread(self._store.fail, job, error)

    async def _make(self, job: VideoJob) -> None:
        try:
            request = await asyncio.to_thread(self._store.request, job)
        except (ValueError, OSError) as error:
            raise StageFailed(f"the job's request can no longer be read: {error}") from error
        job.status, job.attempts = "in_progress", job.attempts + 1
        await asyncio.to_thread(self._store.update, job)
        params = request.diffusion or DiffusionParams()
        if self._keyed:  # without keys, the `user` of a request is not a tenant
            request.tenant = job.owner
        request.diffusion = msgspec.structs.replace(params, progress=True)
        while True:
            try:
                await self._write(job, request)
            except Overloaded:
                await self._service.room()
            else:
                break
        await asyncio.to_thread(self._store.complete, job)

    async def _write(self, job: VideoJob, request: Request) -> None:
        """Write the video and its poster into the job's partial files."""
        request.formats = {"video": Format(name="mp4", poster=True)}
        parts = {"video": _Part(self._store.part(job, VIDEO)), "poster": _Part(self._store.part(job, THUMBNAIL))}
        # one thread, so that a cancelled call has ended before the files are closed
        with ThreadPoolExecutor(1, thread_name_prefix="segue-video") as thread:
            loop = asyncio.get_running_loop()
            whole = False
            try:
                async with aclosing(
                    run_generations(self._service, [request], self._metrics, {}, timed=False)
                ) as deltas:
                    async for _, delta in deltas:
                        if isinstance(delta, ProgressDelta):
                            job.progress = max(job.progress, min(99, 100 * delta.step // delta.steps))
                        elif isinstance(delta, EncodedDelta):
                            await loop.run_in_executor(thread, parts[delta.kind].write, delta.data)
                            if delta.kind == "video":
                                job.size = f"{delta.facts['width']}x{delta.facts['height']}"
                                job.seconds = f"{delta.facts['frames'] / delta.facts['fps']:g}"
                whole = True
            finally:
                for part in parts.values():
                    await loop.run_in_executor(thread, part.close, whole)
        if not parts["video"].begun:
            raise StageFailed("the model gave no frames")


class _Part:
    """A file that is being written. Blocking. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BufferedWriter | None = None

    @property
    def begun(self) -> bool:
        return self._file is not None

    def write(self, data: bytes) -> None:
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115  `close` closes it
        self._file.write(data)

    def close(self, whole: bool) -> None:
        """Close the file. If it is `whole`, flush it to disk, else delete it."""
        if self._file is None:
            return
        try:
            if whole:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
            if not whole:
                self._path.unlink(missing_ok=True)

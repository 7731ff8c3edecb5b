"""Jobs of video on disk: they outlive the server.

One folder per job: `job.json` (what is known of it), `request` (what runs, its seed and pictures included) and, once it
is done, `video.mp4` and `thumbnail.webp`. A folder is written whole under a name with a dot and then renamed, a file as
`….part`; so what has its right name is whole, whenever the power went off. Nobody but the server's user can read them:
they hold what clients asked for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from segue.messages.errors import ConfigError, NotFound, Overloaded, shown
from segue.messages.request import Request
from segue.server.errors import StorageFull

Status = Literal["queued", "in_progress", "completed", "failed"]
VIDEO, THUMBNAIL = "video.mp4", "thumbnail.webp"
MAX_ATTEMPTS = 3
"""Starts of a job; it may be what brings the server down."""
_JOB, _REQUEST, _PART = "job.json", "request", ".part"
_PRIVATE, _PRIVATE_FILE = 0o700, 0o600
_ID = re.compile(r"video_[0-9a-f]{32}")
_LEFTOVER = re.compile(r"\.(?:new|gone)-video_[0-9a-f]{32}")

log = logging.getLogger("segue.server")


class JobError(msgspec.Struct, frozen=True):
    """Why a job failed."""

    code: str
    message: str


class Job(msgspec.Struct, kw_only=True):
    """What is known of a job."""

    id: str
    model: str
    """As the client named it."""
    prompt: str
    created: float
    """Unix time."""
    seed: int
    size: str
    """`WIDTHxHEIGHT`; `auto` until the model has said it."""
    seconds: str
    status: Status = "queued"
    progress: int = 0
    """Percent; what is on disk may be behind."""
    completed: float | None = None
    error: JobError | None = None
    attempts: int = 0
    nbytes: int = 0
    """Of the folder."""

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed")


class VideoStore:
    """The jobs in a directory. Its calls may wait for the disk: make them off the event loop."""

    def __init__(self, directory: Path, *, max_jobs: int, max_bytes: int) -> None:
        """Makes the directory, takes it for this process alone, and reads what is there. Raises `ConfigError`."""
        self._directory = directory
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            directory.mkdir(_PRIVATE, parents=True, exist_ok=True)
            self._held = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"--video-dir {str(directory)!r} cannot be used: {error.strerror}", field="video_dir"
            ) from error
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._held)
            raise ConfigError(
                f"--video-dir {str(directory)!r} is in use by another server; give this one its own", field="video_dir"
            ) from error
        self._jobs = {job.id: job for job in sorted(self._read_all(), key=lambda job: (job.created, job.id))}

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._held)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def jobs(self) -> list[Job]:
        """All of them, the oldest first."""
        return list(self._jobs.values())

    def job(self, job_id: str) -> Job:
        """Raises `NotFound`."""
        if (job := self._jobs.get(job_id)) is None:
            raise NotFound(f"there is no video {shown(job_id)}", field="video_id")
        return job

    def request(self, job: Job) -> Request:
        """What runs. Raises `ValueError` or `OSError` where it cannot be read (any more)."""
        return msgspec.msgpack.decode((self._directory / job.id / _REQUEST).read_bytes(), type=Request)

    def path(self, job: Job, name: str) -> Path:
        """A file of a job: `VIDEO` or `THUMBNAIL`."""
        return self._directory / job.id / name

    def part(self, job: Job, name: str) -> Path:
        """Where a file is written, until `complete` gives it its name."""
        return self._directory / job.id / (name + _PART)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def create(self, job: Job, request: Request) -> None:
        """Keep a new job; the oldest finished ones make room. Raises `Overloaded`, `StorageFull`."""
        data = msgspec.msgpack.encode(request)
        with self._lock:
            self._make_room(len(data), jobs=1)
            job.nbytes = len(data)
            new = self._directory / f".new-{job.id}"
            try:
                new.mkdir(_PRIVATE)
                _write(new / _REQUEST, data)
                _write(new / _JOB, msgspec.json.encode(job))
                new.rename(self._directory / job.id)
            except OSError as error:
                shutil.rmtree(new, ignore_errors=True)
                raise StorageFull(f"the video cannot be kept: {error.strerror}") from error
            self._jobs[job.id] = job

    def update(self, job: Job) -> None:
        """Write down how it stands. Raises `OSError`; what is on disk is then what it was."""
        with self._lock:
            if job.id in self._jobs:
                part = self.part(job, _JOB)
                try:
                    _write(part, msgspec.json.encode(job))
                    part.rename(self.path(job, _JOB))
                except OSError:
                    part.unlink(missing_ok=True)
                    raise

    def complete(self, job: Job) -> None:
        """The parts are whole: give them their names, and let the job be completed. Raises `OSError`, `StorageFull`."""
        parts = [self.part(job, name) for name in (THUMBNAIL, VIDEO)]
        nbytes = sum(part.stat().st_size for part in parts)
        with self._lock:
            self._make_room(nbytes)
        for part in parts:
            part.chmod(_PRIVATE_FILE)
            part.rename(part.with_suffix(""))
        done = msgspec.structs.replace(
            job, status="completed", progress=100, completed=time.time(), nbytes=job.nbytes + nbytes
        )
        self.update(done)
        for name in ("status", "progress", "completed", "nbytes"):
            setattr(job, name, getattr(done, name))

    def fail(self, job: Job, error: JobError) -> None:
        """Let it be failed, also where the disk does not take that; what was written of the video is gone."""
        for name in (VIDEO, THUMBNAIL):
            self.part(job, name).unlink(missing_ok=True)
            self.path(job, name).unlink(missing_ok=True)
        job.status, job.error, job.completed = "failed", error, time.time()
        try:
            self.update(job)
        except OSError as trouble:
            log.warning("%s failed, and that cannot be written down: %s", job.id, trouble)

    def delete(self, job: Job) -> None:
        """Forget it."""
        with self._lock:
            self._remove(job)

    def _remove(self, job: Job) -> None:
        if self._jobs.pop(job.id, None) is not None:
            gone = self._directory / f".gone-{job.id}"
            with suppress(FileNotFoundError):  # someone else took it away
                (self._directory / job.id).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _make_room(self, nbytes: int, jobs: int = 0) -> None:
        """Drop finished jobs, the oldest first, until so much more fits."""
        if nbytes > self._max_bytes:
            raise StorageFull(f"the video takes {nbytes} bytes; at most {self._max_bytes} are kept (--max-video-bytes)")
        ended = [job for job in self._jobs.values() if job.ended]
        while len(self._jobs) + jobs > self._max_jobs or self._used() + nbytes > self._max_bytes:
            if not ended:
                raise Overloaded(
                    f"{len(self._jobs)} videos are waited for, as many as are kept (--max-videos, --max-video-bytes); "
                    "try again later"
                )
            self._remove(ended.pop(0))

    def _used(self) -> int:
        return sum(job.nbytes for job in self._jobs.values())

    # ── the start ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_all(self) -> list[Job]:
        """What an earlier server left, half-written things thrown away."""
        jobs = []
        for folder in self._directory.iterdir():
            if _LEFTOVER.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
            elif _ID.fullmatch(folder.name) and not folder.is_symlink():  # or what it leads to would be changed
                with suppress(PermissionError):  # of another user, who has let us in
                    folder.chmod(_PRIVATE)
                for part in folder.glob(f"*{_PART}"):
                    part.unlink(missing_ok=True)
                try:
                    job = msgspec.json.decode((folder / _JOB).read_bytes(), type=Job)
                except (OSError, msgspec.DecodeError) as error:
                    log.warning("%s is left alone: %s", folder, error)
                    continue
                if job.id != folder.name:
                    log.warning("%s is left alone: it says that it is %s", folder, shown(job.id))
                    continue
                jobs.append(self._as_found(job))
        return jobs

    def _as_found(self, job: Job) -> Job:
        """A job is done where its files are there, else it runs again, a few times."""
        if job.status == "completed" and not self.path(job, VIDEO).exists():
            job.status, job.error = "failed", JobError("lost", "the file is not there any more")
        elif not job.ended and job.attempts >= MAX_ATTEMPTS:
            job.status = "failed"
            job.error = JobError("interrupted", f"the server ended {job.attempts} times while it made this video")
            job.completed = time.time()
        elif not job.ended:
            job.status, job.progress = "queued", 0
        return job


def _write(path: Path, data: bytes) -> None:
    """All of it, down to the disk."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, _PRIVATE_FILE)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

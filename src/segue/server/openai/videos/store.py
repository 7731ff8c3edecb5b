"""Stores video jobs on disk, where they survive the server.

Each job has a folder: `job.json` (its state), `request` (the request to run, seed and images included) and, when it is
done, `video.mp4` and `thumbnail.webp`. A folder is written under a name with a dot and then renamed, a file as
`….part`. So everything under its final name is complete, even after a power failure. Only the server's user can read
the files, because they hold clients' data.
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
from segue.server.http.errors import StorageFull

Status = Literal["queued", "in_progress", "completed", "failed"]
VIDEO, THUMBNAIL = "video.mp4", "thumbnail.webp"
MAX_ATTEMPTS = 3
"""Most starts of a job; the job itself may be the reason that the server crashes."""
_JOB, _REQUEST, _PART = "job.json", "request", ".part"
_PRIVATE, _PRIVATE_FILE = 0o700, 0o600
_ID = re.compile(r"video_[0-9a-f]{32}")
_LEFTOVER = re.compile(r"\.(?:new|gone)-video_[0-9a-f]{32}")

log = logging.getLogger("segue.server")


class JobError(msgspec.Struct, frozen=True):
    """The reason of a job's failure."""

    code: str
    message: str


class VideoJob(msgspec.Struct, kw_only=True):
    """The state of a job."""

    id: str
    model: str
    """The model as the client named it."""
    prompt: str
    created: float
    """Unix time."""
    seed: int
    size: str
    """`WIDTHxHEIGHT`; `auto` until the model has chosen it."""
    seconds: str
    status: Status = "queued"
    progress: int = 0
    """Percent; the copy on disk may be older."""
    completed: float | None = None
    error: JobError | None = None
    attempts: int = 0
    nbytes: int = 0
    """Size of the folder."""
    owner: str = ""
    """The tenant whose key created it."""

    @property
    def ended(self) -> bool:
        return self.status in ("completed", "failed")


class VideoStore:
    """The jobs in a directory. Its methods may block on the disk: call them off the event loop."""

    def __init__(self, directory: Path, *, max_jobs: int, max_bytes: int) -> None:
        """Create the directory, lock it for this process, and read its jobs. Raises `ConfigError`."""
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
        """Release the directory for other processes."""
        os.close(self._held)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def jobs(self, owner: str | None = None) -> list[VideoJob]:
        """The jobs of an owner, or all, oldest first."""
        return [job for job in list(self._jobs.values()) if owner is None or job.owner == owner]

    def job(self, job_id: str, owner: str) -> VideoJob:
        """A job of an owner. Raises `NotFound`."""
        if (job := self._jobs.get(job_id)) is None or job.owner != owner:
            raise NotFound(f"there is no video {shown(job_id)}", field="video_id")
        return job

    def request(self, job: VideoJob) -> Request:
        """The job's request. Raises `ValueError` or `OSError` if it can no longer be read."""
        return msgspec.msgpack.decode((self._directory / job.id / _REQUEST).read_bytes(), type=Request)

    def path(self, job: VideoJob, name: str) -> Path:
        """Path of a job's file: `VIDEO` or `THUMBNAIL`."""
        return self._directory / job.id / name

    def part(self, job: VideoJob, name: str) -> Path:
        """Path of a file while it is written; `complete` renames it."""
        return self._directory / job.id / (name + _PART)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def create(self, job: VideoJob, request: Request) -> None:
        """Store a new job; the oldest finished ones are dropped first. Raises `Overloaded`, `StorageFull`."""
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

    def update(self, job: VideoJob) -> None:
        """Write a job's state to disk. Raises `OSError`; the old state then stays on disk."""
        with self._lock:
            if job.id in self._jobs:
                part = self.part(job, _JOB)
                try:
                    _write(part, msgspec.json.encode(job))
                    part.rename(self.path(job, _JOB))
                except OSError:
                    part.unlink(missing_ok=True)
                    raise

    def complete(self, job: VideoJob) -> None:
        """Rename the complete files and mark the job as completed. Raises `OSError`, `StorageFull`."""
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

    def fail(self, job: VideoJob, error: JobError) -> None:
        """Mark a job as failed, even if the disk cannot be written, and remove its partial files."""
        for name in (VIDEO, THUMBNAIL):
            self.part(job, name).unlink(missing_ok=True)
            self.path(job, name).unlink(missing_ok=True)
        job.status, job.error, job.completed = "failed", error, time.time()
        try:
            self.update(job)
        except OSError as trouble:
            log.warning("%s failed, and its state cannot be written: %s", job.id, trouble)

    def delete(self, job: VideoJob) -> None:
        """Delete a job."""
        with self._lock:
            self._remove(job)

    def _remove(self, job: VideoJob) -> None:
        if self._jobs.pop(job.id, None) is not None:
            gone = self._directory / f".gone-{job.id}"
            with suppress(FileNotFoundError):  # another process removed it
                (self._directory / job.id).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _make_room(self, nbytes: int, jobs: int = 0) -> None:
        """Drop finished jobs, oldest first, until `nbytes` more fit."""
        if nbytes > self._max_bytes:
            raise StorageFull(
                f"the video takes {nbytes} bytes; at most {self._max_bytes} are stored (--max-video-bytes)"
            )
        ended = [job for job in self._jobs.values() if job.ended]
        while len(self._jobs) + jobs > self._max_jobs or self._used() + nbytes > self._max_bytes:
            if not ended:
                raise Overloaded(
                    f"{len(self._jobs)} videos are unfinished; no more fit (--max-videos, --max-video-bytes); "
                    "try again later",
                )
            self._remove(ended.pop(0))

    def _used(self) -> int:
        return sum(job.nbytes for job in self._jobs.values())

    # ── the start ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_all(self) -> list[VideoJob]:
        """Read the jobs of an earlier server and remove incomplete files."""
        jobs = []
        for folder in self._directory.iterdir():
            if _LEFTOVER.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
            elif _ID.fullmatch(folder.name) and not folder.is_symlink():  # never change a symlink's target
                try:
                    job = msgspec.json.decode((folder / _JOB).read_bytes(), type=VideoJob)
                except (OSError, msgspec.DecodeError) as error:
                    log.warning("%s is ignored: %s", folder, error)
                    continue
                if job.id != folder.name:
                    log.warning("%s is ignored: its job.json names %s", folder, shown(job.id))
                    continue
                with suppress(PermissionError):  # a directory of another user who gave us access
                    folder.chmod(_PRIVATE)
                for part in folder.glob(f"*{_PART}"):
                    part.unlink(missing_ok=True)
                jobs.append(self._as_found(job))
        return jobs

    def _as_found(self, job: VideoJob) -> VideoJob:
        """The state of a job at startup: done if its files exist, else to run again, a few times at most."""
        if job.status == "completed" and not self.path(job, VIDEO).exists():
            job.status, job.error = "failed", JobError("lost", "the file no longer exists")
        elif not job.ended and job.attempts >= MAX_ATTEMPTS:
            job.status = "failed"
            job.error = JobError("interrupted", f"the server ended {job.attempts} times while it made this video")
            job.completed = time.time()
        elif not job.ended:
            job.status, job.progress = "queued", 0
        return job


def _write(path: Path, data: bytes) -> None:
    """Write a whole file and flush it to disk."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, _PRIVATE_FILE)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

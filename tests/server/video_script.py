"""Run by `video_jobs.process` as a process of its own, to be killed: serves the filmer from a directory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from filmer import filmer

from segue.server.serve import serve
from segue.server.settings import ServerSettings


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


settings = ServerSettings(port=0, drain_seconds=1, video_dir=Path(sys.argv[1]))
asyncio.run(serve(filmer(), settings, on_listening=say))

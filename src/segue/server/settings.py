"""What the operator decides about the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from segue.media.sources import MediaPolicy


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Every default is safe on a shared network: no files, no fetching; the address is this machine's own."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    served_names: tuple[str, ...] = ()
    """Names clients may ask for; empty: the model card's own."""
    tool_parser: str | None = None
    """How the model writes tool calls, by a name of `CALL_FORMATS`; None: as its chat template says."""
    api_key: str | None = None
    """Where set, `/v1/*` needs `Authorization: Bearer <key>`."""
    allow_origins: frozenset[str] = frozenset()
    """Sites whose web pages may ask this server (CORS), as browsers write them: `https://app.example.org`; `*`: any."""
    media: MediaPolicy = field(default_factory=MediaPolicy)
    allow_runtime_lora: bool = False
    """Clients may have LoRA adapters loaded from any directory of this machine, and unloaded."""
    video_dir: Path | None = None
    """Where jobs of video are kept, over restarts; None: under the user's state directory, by the model's name."""
    max_videos: int = 256
    """Jobs of video; the oldest finished ones make room for new ones."""
    max_video_bytes: int = 16 << 30
    """Of all jobs of video together, on disk."""
    max_responses: int = 1024
    """Of `/v1/responses`, kept in memory to be gone on from; the oldest make room for new ones."""
    max_response_bytes: int = 256 << 20
    """Of all responses that are kept and their conversations together."""
    max_body_bytes: int = 384 << 20
    """Of one HTTP request; base64 makes a file a third larger."""
    upload_seconds: float = 600.0
    """How long a request may take to come, from its first byte to its last."""
    stall_seconds: float = 60.0
    """A streaming client that takes nothing for so long is taken for gone."""
    drain_seconds: float = 30.0
    """How long running requests may go on once the server is told to stop."""

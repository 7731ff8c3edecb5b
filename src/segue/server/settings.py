"""The operator's settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from segue.media.sources import MediaPolicy
from segue.messages.limits import RequestLimits
from segue.server.tenants.tenants import Tenant


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings with safe defaults for a shared network: no file access, no fetching, only this machine's own
    address."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    served_names: tuple[str, ...] = ()
    """Names that clients may use for the model; empty: the model card's."""
    tool_parser: str | None = None
    """The format of the model's tool calls, a name of `CALL_FORMATS`; None: as in its chat template."""
    api_key: str | None = field(default=None, repr=False)
    """A key for everyone: if set, all endpoints but `segue.server.http.middleware.OPEN` need `Authorization: Bearer
    <key>`."""
    tenants: tuple[Tenant, ...] = ()
    """Keys of several tenants; each tenant sees only its own jobs, responses and adapters."""
    allow_origins: frozenset[str] = frozenset()
    """Sites whose web pages may send requests (CORS), in the form of `Origin`: `https://app.example.org`; `*`: any."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names that `Host` may be, in addition to addresses and this machine's own names: `ai.example.org`,
    `*.example.org` (all names below it), `*` (any)."""
    media: MediaPolicy = field(default_factory=MediaPolicy)
    limits: RequestLimits = field(default_factory=RequestLimits)
    """Limits on each request; the application uses those of its service."""
    allow_voice_cloning: bool = False
    """Clients may request speech in the voice of a recording, if the model supports it."""
    allow_runtime_lora: bool = False
    """Clients may load LoRA adapters from any directory of this machine, and unload them."""
    allow_moves: bool = False
    """Operators may move workers from stage to stage."""
    video_dir: Path | None = None
    """Where video jobs are stored across restarts; None: in the user's state directory, by the model's name."""
    max_videos: int = 256
    """Most video jobs; the oldest finished ones are dropped first."""
    max_video_bytes: int = 16 << 30
    """Most bytes of all video jobs together, on disk."""
    max_responses: int = 1024
    """Most stored responses of `/v1/responses`, in memory; the oldest are dropped first."""
    max_response_bytes: int = 256 << 20
    """Most bytes of all stored responses and their conversations together."""
    max_body_bytes: int = 384 << 20
    """Most bytes of one HTTP request; base64 makes a file a third larger."""
    max_bodies_bytes: int = 2 << 30
    """Most bytes of the bodies of all unanswered requests together; and, apart from these, of a message of each
    websocket."""
    max_connections: int = 4096
    """Most open connections; fewer if this process may open fewer files."""
    upload_seconds: float = 600.0
    """Most seconds for a request to arrive, from its first byte to its last."""
    upload_grace: float = 20.0
    """Seconds in which a request may arrive at any speed."""
    upload_rate: int = 1024
    """Average bytes per second at which it must arrive after that."""
    stall_seconds: float = 60.0
    """A streaming client that reads nothing for this long counts as disconnected. Also the longest silence in a text
    that is said while it arrives, and of a websocket that waits for the client."""
    drain_seconds: float = 30.0
    """How long running requests may continue after the server was asked to stop."""

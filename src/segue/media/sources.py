"""Fetch the bytes of a media part from a data URL, a file or HTTP, as far as a `MediaPolicy` allows."""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import math
import os
import queue
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from segue.messages.errors import InvalidRequest, NotFound, TooLarge, shown, wrong

_BLOCK = 1 << 18
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True)
class MediaPolicy:
    """The sources that a request may make this process read. The default allows only data within the request itself."""

    allow_paths: bool = False
    """Allow any file path (a Python caller reads with its own rights)."""
    media_root: Path | None = None
    """Allow file paths below this directory, symbolic links resolved; relative paths start here."""
    http_hosts: frozenset[str] = frozenset()
    """Hosts that http(s) URLs may name. A host that resolves to a private address needs that address listed too."""
    max_items: int = 64
    """Media parts of one request."""
    max_bytes: int = 256 << 20
    """Bytes of one part, as a file or as a raw array."""
    http_seconds: float = 20.0
    """Time for one URL, from the lookup of its host to its last byte, redirects included."""
    request_seconds: float = 60.0
    """Time for all URLs of one request together."""
    until: float = math.inf
    """Deadline of the current request, by `time.monotonic`."""

    def begun(self) -> MediaPolicy:
        """Return the policy for one request, whose time starts now."""
        return replace(self, until=time.monotonic() + self.request_seconds)


PYTHON_POLICY = MediaPolicy(allow_paths=True, max_bytes=4 << 30)
"""For callers of the Python API."""


def check_size(size: int, policy: MediaPolicy, field: str) -> None:
    """Raise `TooLarge` if a part exceeds `max_bytes`."""
    if size > policy.max_bytes:
        raise TooLarge(f"{field} has {size} bytes; at most {policy.max_bytes} (max_media_bytes)", field=field)


def check_items(count: int, policy: MediaPolicy, field: str) -> None:
    """Raise `InvalidRequest` for more media parts than `max_items`, before any of them is read."""
    if count > policy.max_items:
        raise InvalidRequest(
            f"{field} has {count} media parts; at most {policy.max_items} are taken (limits.max_media_parts)",
            field=field,
        )


def from_base64(text: str, policy: MediaPolicy, field: str) -> bytes:
    """Decode standard base64, padded, with line breaks allowed."""
    check_size(len(text) * 3 // 4 - 2, policy, field)
    try:
        data = base64.b64decode(text.translate(_NO_BREAKS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{field} is {shown(text)}, not base64 ({error})", field=field) from error
    if not data:
        raise InvalidRequest(f"{field} is empty; it must be base64 of a file", field=field)
    check_size(len(data), policy, field)
    return data


_NO_BREAKS = {ord("\r"): None, ord("\n"): None}


def read_source(source: str, policy: MediaPolicy, field: str) -> bytes:
    """Return the bytes of a URL or path. Blocking: call it off the event loop.

    Raises `InvalidRequest` (`NotFound`, `TooLarge`) that names `field`, the value and the remedy.
    """
    if source[:5].lower() == "data:":
        return _from_data_url(source, policy, field)
    scheme = source.partition("://")[0].lower() if "://" in source else ""
    if scheme in ("http", "https"):
        return _from_http(source, policy, field)
    if scheme == "file":
        parts = _split(source, field)
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{field} is {shown(source)}; a file URL names no host: file:///path", field=field)
        return read_path(unquote(parts.path), policy, field)
    if scheme:
        raise InvalidRequest(
            f"{field} is {shown(source)}; use a data: URL, an http(s) URL or a file path, not {scheme}://", field=field
        )
    return read_path(source, policy, field)


def _split(url: str, field: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # parsed lazily: a bad port raises here
    except ValueError as error:
        raise InvalidRequest(f"{field} is {shown(url)}, not a URL ({error})", field=field) from error
    return parts


def _from_data_url(url: str, policy: MediaPolicy, field: str) -> bytes:
    header, comma, body = url[5:].partition(",")
    if not comma:
        raise InvalidRequest(f"{field} is {shown(url)}; a data URL reads data:<type>;base64,<data>", field=field)
    if header.lower().endswith(";base64"):
        return from_base64(unquote(body) if "%" in body else body, policy, field)
    check_size(len(body) // 3, policy, field)
    data = unquote_to_bytes(body)
    if not data:
        raise InvalidRequest(f"{field} is a data URL without data", field=field)
    check_size(len(data), policy, field)
    return data


def read_path(path: str | os.PathLike[str], policy: MediaPolicy, field: str) -> bytes:
    """Read a regular file, if the policy allows it."""
    name = os.fspath(path)
    if not policy.allow_paths and policy.media_root is None:
        raise InvalidRequest(
            f"{field} is {shown(name)}; this server reads no files (no media root is set): "
            "send a data: URL with base64",
            field=field,
        )
    try:
        real = _resolved(name, policy, field)
        # nonblocking: a FIFO must not hang the reader; no link: the path is already resolved
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except InvalidRequest:
        raise  # it is a ValueError too, but already explains itself
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise NotFound(f"{field} is {shown(name)}, which cannot be read: {reason}", field=field) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise wrong(field, name, "a regular file")
        check_size(facts.st_size, policy, field)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(policy.max_bytes + 1)
    finally:
        os.close(descriptor)
    check_size(len(data), policy, field)
    if not data:
        raise InvalidRequest(f"{field} is {shown(name)}, an empty file", field=field)
    return data


def _resolved(name: str, policy: MediaPolicy, field: str) -> str:
    """Return the real path, which must be below the root. The error is the same whether the file exists or not."""
    if policy.allow_paths:
        return os.path.realpath(os.path.expanduser(name))
    assert policy.media_root is not None
    root = os.path.realpath(policy.media_root)
    real = os.path.realpath(os.path.join(root, name))
    if os.path.commonpath([root, real]) != root:
        raise InvalidRequest(f"{field} is {shown(name)}, which is not below the media root", field=field)
    return real


def _from_http(url: str, policy: MediaPolicy, field: str) -> bytes:
    deadline = min(time.monotonic() + policy.http_seconds, policy.until)
    here = url
    for _ in range(_MAX_REDIRECTS + 1):
        parts = _split(here, field)
        try:
            address = _allowed_address(parts, policy, deadline, field)
            answer = _get(parts, address, policy, deadline, field)
        except (OSError, http.client.HTTPException) as error:
            what = "took longer than allowed" if isinstance(error, TimeoutError) else f"failed: {error!r}"
            raise InvalidRequest(f"{field}: fetching {shown(here)} {what}", field=field) from error
        if isinstance(answer, bytes):
            return answer
        here = urljoin(here, answer.location)
    raise InvalidRequest(f"{field}: {shown(url)} redirects more than {_MAX_REDIRECTS} times", field=field)


@dataclass(frozen=True)
class _Redirect:
    location: str


def _allowed_address(parts: SplitResult, policy: MediaPolicy, deadline: float, field: str) -> str:
    """Return the address to connect to, resolved only once, so that the checked address is also the one used. Raises
    `InvalidRequest`, and `TimeoutError` at the deadline."""
    host = (parts.hostname or "").lower()
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidRequest(f"{field} leads to {shown(parts.geturl())}; only http(s) is fetched", field=field)
    if not policy.http_hosts:
        raise InvalidRequest(
            f"{field} is {shown(parts.geturl())}; this server fetches no URLs: send a data: URL with base64",
            field=field,
        )
    if host not in {name.lower() for name in policy.http_hosts}:
        raise InvalidRequest(f"{field}: host {host!r} is not on this server's list of media hosts", field=field)
    found = _looked_up(host, parts.port or parts.scheme, deadline)
    if isinstance(found, Exception):
        raise InvalidRequest(f"{field}: host {host!r} does not resolve ({found})", field=field) from found
    address = found
    if not ipaddress.ip_address(address.partition("%")[0]).is_global and address not in policy.http_hosts:
        raise InvalidRequest(f"{field}: host {host!r} resolves to a private address, which is not allowed", field=field)
    return address


def _looked_up(host: str, port: int | str, deadline: float) -> str | Exception:
    """Return the first address of a host, or the error of the lookup. Raises `TimeoutError`; the system's resolver has
    its own time limits and cannot be interrupted, so it then finishes on its thread."""
    answer: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def look() -> None:
        try:
            answer.put(str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]))
        except (OSError, UnicodeError) as error:
            answer.put(error)

    threading.Thread(target=look, name="segue-resolve", daemon=True).start()
    try:
        return answer.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to a given address, even if the name resolves to another one by now."""

    def __init__(self, parts: SplitResult, address: str, timeout: float) -> None:
        secure = parts.scheme == "https"
        super().__init__(parts.hostname or "", parts.port or (443 if secure else 80), timeout=timeout)
        self._address = address
        self._tls = ssl.create_default_context() if secure else None
        self._wire: socket.socket | None = None
        """The socket; `sock` becomes None when http.client gives the socket to a response without a length."""
        self._over = False

    def connect(self) -> None:
        self.sock = self._wire = socket.create_connection((self._address, self.port), timeout=self.timeout)
        if self._over:  # the deadline passed before there was a socket to shut down
            raise TimeoutError
        if self._tls is not None:
            secure = self._tls.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock = self._wire = secure
            secure.do_handshake()

    @contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """End every wait inside the block at the deadline with `TimeoutError`; a socket's own timeout restarts with
        each byte."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            if self._over:
                raise TimeoutError from error
            raise
        finally:
            timer.cancel()
        if self._over:  # a truncated response may look complete
            raise TimeoutError

    def _end(self) -> None:
        self._over = True
        if self._wire is not None:
            with suppress(OSError):  # already closed
                socket.socket.shutdown(self._wire, socket.SHUT_RDWR)  # SSLSocket's own shutdown is not thread-safe


def _get(parts: SplitResult, address: str, policy: MediaPolicy, deadline: float, field: str) -> bytes | _Redirect:
    """Send one GET without cookies or credentials. Raises `TimeoutError` at the deadline."""
    connection = _PinnedConnection(parts, address, max(deadline - time.monotonic(), 0.001))
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with connection.until(deadline):
            connection.request("GET", target, headers={"User-Agent": "segue", "Accept-Encoding": "identity"})
            with connection.getresponse() as answer:
                location = answer.getheader("Location")
                if answer.status in _REDIRECTS and location:
                    return _Redirect(location)
                if answer.status != 200:
                    raise NotFound(f"{field}: {shown(parts.geturl())} answered {answer.status}", field=field)
                data = bytearray()
                while block := answer.read1(_BLOCK):
                    data += block
                    check_size(len(data), policy, field)
                return bytes(data)
    finally:
        connection.close()

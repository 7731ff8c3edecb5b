"""Where the bytes of a media part come from: data URL, file, HTTP; each within what a `MediaPolicy` allows."""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from segue.messages.errors import InvalidRequest, NotFound, TooLarge, shown, wrong

_BLOCK = 1 << 18
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True)
class MediaPolicy:
    """What a request may make this process read. The default reads nothing but what the request itself carries."""

    allow_paths: bool = False
    """Any file path (a Python caller reads with its own rights)."""
    media_root: Path | None = None
    """File paths below this directory, symbolic links resolved; relative paths start here."""
    http_hosts: frozenset[str] = frozenset()
    """Hosts that http(s) URLs may name. A host that resolves to a private address needs that address listed too."""
    max_bytes: int = 256 << 20
    """Of one part, as a file or as a raw array."""
    http_seconds: float = 20.0
    """For one URL, redirects included."""


PYTHON_POLICY = MediaPolicy(allow_paths=True, max_bytes=4 << 30)
"""For callers of the Python API."""


def check_size(size: int, policy: MediaPolicy, field: str) -> None:
    """Raise `TooLarge` where a part exceeds `max_bytes`."""
    if size > policy.max_bytes:
        raise TooLarge(f"{field} has {size} bytes; at most {policy.max_bytes} (max_media_bytes)", field=field)


def from_base64(text: str, policy: MediaPolicy, field: str) -> bytes:
    """Standard base64, padded, line breaks allowed."""
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
    """The bytes a URL or path stands for. Blocking: call it off the event loop.

    Raises `InvalidRequest` (`NotFound`, `TooLarge`) that names `field`, the value and what would be right.
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
        _ = parts.port  # parsed lazily: a bad port is found here
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
    """A regular file, where the policy lets paths be read."""
    name = os.fspath(path)
    if not policy.allow_paths and policy.media_root is None:
        raise InvalidRequest(
            f"{field} is {shown(name)}; this server reads no files (no media root is set): "
            "send a data: URL with base64",
            field=field,
        )
    try:
        real = _resolved(name, policy, field)
        # not blocking: a FIFO must not hang the reader; no link: it was resolved already
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except InvalidRequest:
        raise  # a ValueError too, and says what it is
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
    """The real path, checked against the root. What lies outside is refused alike whether it exists or not."""
    if policy.allow_paths:
        return os.path.realpath(os.path.expanduser(name))
    assert policy.media_root is not None
    root = os.path.realpath(policy.media_root)
    real = os.path.realpath(os.path.join(root, name))
    if os.path.commonpath([root, real]) != root:
        raise InvalidRequest(f"{field} is {shown(name)}, which is not below the media root", field=field)
    return real


def _from_http(url: str, policy: MediaPolicy, field: str) -> bytes:
    deadline = time.monotonic() + policy.http_seconds
    here = url
    for _ in range(_MAX_REDIRECTS + 1):
        parts = _split(here, field)
        address = _allowed_address(parts, policy, field)
        try:
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


def _allowed_address(parts: SplitResult, policy: MediaPolicy, field: str) -> str:
    """The address to connect to. Resolved here once, so that the checked address is the one that is used."""
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
    try:
        found = socket.getaddrinfo(host, parts.port or parts.scheme, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"{field}: host {host!r} does not resolve ({error})", field=field) from error
    address = str(found[0][4][0])
    if not ipaddress.ip_address(address.partition("%")[0]).is_global and address not in policy.http_hosts:
        raise InvalidRequest(f"{field}: host {host!r} resolves to a private address; that is refused", field=field)
    return address


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to a given address, whatever the name resolves to by now."""

    def __init__(self, parts: SplitResult, address: str, timeout: float) -> None:
        secure = parts.scheme == "https"
        super().__init__(parts.hostname or "", parts.port or (443 if secure else 80), timeout=timeout)
        self._address = address
        self._tls = ssl.create_default_context() if secure else None

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), timeout=self.timeout)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)


def _get(parts: SplitResult, address: str, policy: MediaPolicy, deadline: float, field: str) -> bytes | _Redirect:
    """One GET without cookies or credentials; the deadline holds against a server that trickles."""
    connection = _PinnedConnection(parts, address, max(deadline - time.monotonic(), 0.001))
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", target, headers={"User-Agent": "segue", "Accept-Encoding": "identity"})
        sock = connection.sock
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
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if answer.isclosed():  # with the last block, in newer versions of Python, and the socket with it
                    break
                sock.settimeout(left)
            return bytes(data)
    finally:
        connection.close()

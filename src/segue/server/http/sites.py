"""Decides which requests are answered at all, by their `Host` and by the web page that sent them.

Any web page can make a browser send requests, also to servers that only this machine or its network can reach. Two
checks keep such pages out. `Host`: a page whose own name was made to resolve to this machine (DNS rebinding) is
recognised by that name. `Origin` and `Sec-Fetch-Site`, which pages cannot forge: the request of another site's page is
refused unless CORS allows the site. Other programs send neither header and are not affected.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers

from segue.messages.errors import shown
from segue.server.http.errors import CrossSite, UnknownHost
from segue.server.settings import ServerSettings

_PRIVATE = (".local", ".internal")
"""Suffixes that public DNS never has (RFC 6762; ICANN's resolution 2024.07.29.06)."""


class Sites:
    """The `Host` and `Origin` checks of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        own = socket.gethostname().lower()
        short = own.partition(".")[0]
        self._names = {"localhost", own, short, f"{short}.local", settings.host.lower()}
        self._suffixes: tuple[str, ...] = (".localhost",)
        for name in settings.allowed_hosts:
            if name.startswith("*."):
                self._suffixes += (name[1:].lower(),)
            else:
                self._names.add(name.lower())
        self._loopback = _is_loopback(settings.host)
        self._origins = settings.allow_origins

    def check(self, method: str, headers: Headers) -> None:
        """Raise `UnknownHost` or `CrossSite`."""
        host = headers.get("host")
        if host and not self.serves(name := host_name(host)):
            raise UnknownHost(
                f"Host is {shown(name)}, which is not an address or name of this server: to allow it, start the server "
                f"with --allowed-host {name if name.isprintable() and len(name) < 100 else 'NAME'}"
            )
        self._check_page(method, headers, host)

    def serves(self, name: str) -> bool:
        """Whether requests for this name or address are answered. All addresses are, because no page can have another
        machine's address as its site."""
        if "*" in self._names or name in self._names or name.endswith(self._suffixes) or _is_address(name):
            return True
        # beyond this machine, services have names of the local network, which no page of the internet can have
        return not self._loopback and ("." not in name or name.endswith(_PRIVATE))

    def _check_page(self, method: str, headers: Headers, host: str | None) -> None:
        if "*" in self._origins:
            return
        origin, said = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is None:
            # without Origin, a page can embed a resource or follow a link; only the link is harmless
            followed = headers.get("sec-fetch-mode") == "navigate" and method in ("GET", "HEAD")
            if said in ("cross-site", "same-site") and not followed:
                raise CrossSite(
                    "the request comes from a web page of another site (Sec-Fetch-Site), which gives no Origin"
                )
            return
        same = said == "same-origin" or (host and origin.partition("://")[2].lower() == host.lower())
        if not same and origin not in self._origins:
            raise CrossSite(
                f"Origin is {shown(origin)}, a web page of another site: to allow it, start the server "
                "with --allow-origin and this value"
            )


def host_name(host: str) -> str:
    """The name or address in a `Host`, without its port, in lower case."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach this listening address."""
    name = host.lower()
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)

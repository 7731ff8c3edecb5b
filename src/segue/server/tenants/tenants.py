"""Tenants, identified by API key, with their limits and shares.

A `Call` is one HTTP request of a tenant. It is current (`calling`) in everything that the request starts, including
background jobs. These hold it, so that the limit of concurrent requests includes jobs whose client does not wait.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from segue.server.http.errors import RateLimited

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
"""OpenAI's headers, for the limits that are set."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """The owner of requests with any of its keys. None: no limit."""

    name: str
    """Empty if there is only one key, for everyone."""
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    """SHA-256 of each key."""
    share: float = 1.0
    """Weight in fair scheduling: a tenant with 2 gets twice the share of one with 1."""
    priority: bool = False
    """Its requests may have a priority, if the deployment schedules by priority."""
    operator: bool = False
    """It may move workers."""
    max_requests: int | None = None
    """Most concurrent requests."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers together."""


def digest(key: str) -> bytes:
    """SHA-256 of a key; the server keeps only this."""
    return hashlib.sha256(key.encode()).digest()


class Bucket:
    """An allowance per minute: full at first, refilled evenly. Its level may become negative."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock()

    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / 60)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Take from the allowance; a negative amount is returned to it."""
        self._level = min(self.limit, self.level() - amount)

    def seconds_until(self, level: float) -> float:
        """Seconds until the allowance reaches a level."""
        return max(0.0, (level - self.level()) * 60 / self.limit)


class Account:
    """A tenant's usage."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = time.monotonic) -> None:
        self.tenant = tenant
        self.running = 0
        limits = {"requests": tenant.requests_per_minute, "tokens": tenant.tokens_per_minute}
        self._buckets = {kind: Bucket(limit, clock) for kind, limit in limits.items() if limit is not None}

    def admit(self) -> None:
        """Count a request. Raises `RateLimited`."""
        tenant = self.tenant
        if tenant.max_requests is not None and self.running >= tenant.max_requests:
            raise RateLimited(
                f"{self.running} requests of {tenant.name!r} are running or waiting, as many as it may have at once "
                "(max_requests); try again when one has ended"
            )
        self.count()

    def count(self) -> None:
        """Count a request towards the rate, also one within a call that runs already. Raises `RateLimited`."""
        tenant = self.tenant
        for kind, bucket in self._buckets.items():
            if (wait := bucket.seconds_until(1)) > 0:
                raise RateLimited(
                    f"{tenant.name!r} has used its {bucket.limit} {kind} per minute ({kind}_per_minute); try again in "
                    f"{math.ceil(wait)} s",
                    retry_after=wait,
                )
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)

    @property
    def counts_tokens(self) -> bool:
        return "tokens" in self._buckets

    def charge(self, tokens: float) -> None:
        """Charge tokens; a negative number corrects an earlier charge."""
        if tokens and "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)

    def headers(self) -> dict[str, str]:
        """The limits and their current state as OpenAI's headers."""
        said = {}
        for kind, bucket in self._buckets.items():
            said[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            said[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level())))
            said[f"x-ratelimit-reset-{kind}"] = _duration(bucket.seconds_until(bucket.limit))
        return said


def _duration(seconds: float) -> str:
    """`1m30s`, `2.5s`, `120ms`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


class Call:
    """One HTTP request of a tenant. If `counted`, it counts as a concurrent request until its last holder releases
    it."""

    def __init__(self, account: Account, *, counted: bool) -> None:
        self.account = account
        self._counted = counted
        self._holders = 0

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.account.tenant.name

    def enter(self) -> None:
        """Start the call, within the tenant's limits. Raises `RateLimited`; then `release` does nothing."""
        if self._counted:
            self.account.admit()
        self.hold()

    def hold(self) -> None:
        self._holders += 1
        if self._counted and self._holders == 1:
            self.account.running += 1

    def release(self) -> None:
        if self._holders:
            self._holders -= 1
            if self._counted and not self._holders:
                self.account.running -= 1


NOBODY = Call(Account(Tenant(name="", priority=True, operator=True)), counted=False)
"""The call if there are no keys, or for jobs that an earlier server began."""
calling: ContextVar[Call] = ContextVar("calling", default=NOBODY)
"""The HTTP request that is being answered."""


def caller() -> str:
    """The name of the calling tenant."""
    return calling.get().name


class Tenants:
    """All tenants of a server, by key; empty if the server requires no key."""

    def __init__(self, tenants: tuple[Tenant, ...], api_key: str | None) -> None:
        """`api_key`: a key for everyone."""
        if api_key is not None:
            tenants = (*tenants, Tenant(name="", digests=(digest(api_key),), priority=True, operator=True))
        self._accounts = {tenant.name: Account(tenant) for tenant in tenants}

    def __bool__(self) -> bool:
        return bool(self._accounts)

    def by_key(self, key: str) -> Account | None:
        """The account of a key. Every stored key is compared, in constant time."""
        given, found = digest(key), None
        for account in self._accounts.values():
            for known in account.tenant.digests:
                if hmac.compare_digest(given, known):
                    found = account
        return found

    def account(self, name: str) -> Account:
        """The account of a tenant, which may have no key any more."""
        return self._accounts.get(name) or Account(Tenant(name=name))

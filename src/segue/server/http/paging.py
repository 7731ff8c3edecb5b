"""Pages of a list, as in OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from segue.messages.errors import NotFound, shown, wrong

MAX_LISTED = 100
"""OpenAI's limit."""
_LISTED = 20


@dataclass(frozen=True)
class Page:
    """The part of a list that a client wants."""

    after: str | None
    limit: int
    descending: bool


def page_of(query: Mapping[str, str]) -> Page:
    """The page that a URL's query asks for. Raises `InvalidRequest`."""
    order, limit = query.get("order", "desc"), query.get("limit", str(_LISTED))
    if order not in ("asc", "desc"):
        raise wrong("order", order, "asc or desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= MAX_LISTED):
        raise wrong("limit", limit, f"from 1 to {MAX_LISTED}")
    return Page(query.get("after"), int(limit), order == "desc")


def listed(entries: list[dict[str, Any]], page: Page, what: str) -> dict[str, Any]:
    """A page of entries. `entries`: oldest first, each with an `id`; `what`: name of one entry, for errors. Raises
    `NotFound`."""
    if page.descending:
        entries = entries[::-1]
    if page.after is not None:
        place = next((index for index, entry in enumerate(entries) if entry["id"] == page.after), None)
        if place is None:
            raise NotFound(f"after is {shown(page.after)}, but there is no such {what}", field="after")
        entries = entries[place + 1 :]
    some = entries[: page.limit]
    return {
        "object": "list",
        "data": some,
        "first_id": some[0]["id"] if some else None,
        "last_id": some[-1]["id"] if some else None,
        "has_more": len(some) < len(entries),
    }

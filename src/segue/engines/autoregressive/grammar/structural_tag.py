"""Structural tags: free text with parts, each between its own marks, that follow a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from segue.engines.autoregressive.grammar.json_schema import parsed, unsupported
from segue.messages.errors import InvalidRequest


def structural_tag(given: dict[str, Any] | str, field: str) -> str:
    """The text that xgrammar compiles. `given`: `{"format": ...}` as in xgrammar, or `{"structures": [{"begin",
    "schema", "end"}, ...], "triggers": [...]}` as in early vLLM. Raises `InvalidRequest`."""
    tag = parsed(given, field)
    if not isinstance(tag, dict) or ("format" in tag) == ("structures" in tag):
        raise InvalidRequest(
            f'{field} must be {{"type": "structural_tag", "format": …}}, or {{"structures": […], "triggers": […]}}',
            field=field,
        )
    form = tag["format"] if "format" in tag else _triggered(tag, field)
    try:
        for path, schema in schemas_in(form):
            if (wrong := unsupported(schema)) is not None:
                raise InvalidRequest(f"{field}.format{path} has {wrong}", field=field)
        return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from error


def _triggered(tag: dict[str, Any], field: str) -> dict[str, Any]:
    """Convert the older syntax to the newer one."""
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise InvalidRequest(f"{field}.structures must be a list, with at least one entry", field=f"{field}.structures")
    if not isinstance(triggers, list) or not triggers:
        raise InvalidRequest(f"{field}.triggers must be a list, with at least one entry", field=f"{field}.triggers")
    tags = []
    for index, one in enumerate(structures):
        place = f"{field}.structures[{index}]"
        if not isinstance(one, dict) or set(one) != {"begin", "schema", "end"}:
            raise InvalidRequest(f'{place} must be {{"begin": …, "schema": …, "end": …}}', field=place)
        content = {"type": "json_schema", "json_schema": parsed(one["schema"], f"{place}.schema")}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def schemas_in(form: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, schema) of every JSON part."""
    if isinstance(form, list):
        for index, below in enumerate(form):
            yield from schemas_in(below, f"{path}[{index}]")
    elif isinstance(form, dict):
        for name, below in form.items():
            if name == "json_schema":
                yield f"{path}.{name}", below
            else:
                yield from schemas_in(below, f"{path}.{name}")

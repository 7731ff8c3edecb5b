"""Reads API keys from a file: one key, or those of several tenants.

A file with one word, as secrets are mounted, is a key for everyone. Otherwise it is YAML, a mapping of tenants:

    alice:
      key: sk-alice-…                  # or a list of keys, all valid
      share: 2                         # of stages with `scheduling: fair`; default: 1
      priority: true                   # its requests may have a priority; default: false
      operator: true                   # it may move workers; default: false
      max_requests: 8                  # at once
      requests_per_minute: 600
      tokens_per_minute: 100000
    bob:
      sha256: 2bd806c9…                # of a key, in hexadecimal; or a list

Messages name only lines and fields: a value, or a tenant's name, could be a misplaced key.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from segue.graph.deployment.section import Section
from segue.messages.errors import ConfigError, nearest
from segue.server.tenants.tenants import Tenant, digest

KEYS = ("key", "sha256", "share", "priority", "operator", "max_requests", "requests_per_minute", "tokens_per_minute")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
"""No slash: adapter names are prefixed with the tenant's name and a slash."""
KEY = re.compile(r"[\x21-\x7e]+")
"""The form of an API key from any source."""
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_COUNT = "an integer of at least 1"
_RIGHT = {
    "share": "a number above 0 and at most 1000",
    "priority": "true or false",
    "operator": "true or false",
    "max_requests": _COUNT,
    "requests_per_minute": _COUNT,
    "tokens_per_minute": _COUNT,
}

log = logging.getLogger("segue.server")


def read_keys(path: Path) -> tuple[Tenant, ...]:
    """The tenants of a file. Raises `ConfigError` with file, line and field. Warns if other users can read keys."""
    try:
        text = path.read_text()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--api-keys {str(path)!r} cannot be read: {why}", field="api_keys") from error
    word = text.strip()
    if KEY.fullmatch(word) and not word.startswith("{"):
        tenants: tuple[Tenant, ...] = (Tenant(name="", digests=(digest(word),), priority=True, operator=True),)
        plain = True
    else:
        tenants, plain = _tenants(path, text)
    if mode & stat.S_IROTH and plain:
        log.warning("the keys in %s can be read by every user of this machine: chmod 600 it, or give sha256", path)
    return tenants


def _tenants(path: Path, text: str) -> tuple[tuple[Tenant, ...], bool]:
    """The tenants, and whether any gives a key in plain text instead of its hash."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise _wrong(path, mark.line if mark else 0, "this is not YAML") from None  # the cause's text may contain a key
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise _wrong(path, 0, "it must be a mapping of tenants, or one key and nothing else")
    tenants: list[Tenant] = []
    plain = False
    lines: dict[bytes, int] = {}
    for name, fields in _pairs(path, root, "tenant"):
        line = name.start_mark.line
        if not _NAME.fullmatch(name.value):
            raise _wrong(path, line, "a tenant's name must be of letters, digits and ._@-, at most 64")
        if not isinstance(fields, yaml.MappingNode):
            raise _wrong(path, line, "a tenant must be a mapping, with key or sha256 in it")
        tenant = _tenant(path, name, fields)
        for known in tenant.digests:
            if known in lines:
                raise _wrong(path, line, f"a key of this tenant was given in line {lines[known] + 1} already")
            lines[known] = line
        tenants.append(tenant)
        plain = plain or any(field.value == "key" for field, _ in fields.value)
    return tuple(tenants), plain


def _tenant(path: Path, name: yaml.ScalarNode, node: yaml.MappingNode) -> Tenant:
    nodes = {key.value: (key, value) for key, value in _pairs(path, node, "field")}
    for field, (at, _) in nodes.items():
        if field not in KEYS:
            raise _wrong(path, at.start_mark.line, f"a tenant has no such field{nearest(field, KEYS)}")
    digests = [
        *(digest(text) for text in _texts(path, nodes, "key", KEY, "visible ASCII characters")),
        *(bytes.fromhex(text) for text in _texts(path, nodes, "sha256", _SHA256, "64 hexadecimal digits")),
    ]
    if not digests:
        raise _wrong(path, name.start_mark.line, "this tenant has no key; it must have key or sha256")
    values = {field: _value(path, field, *nodes[field]) for field in _RIGHT if field in nodes}
    section = Section("", values, KEYS)
    try:
        return Tenant(
            name=name.value,
            digests=tuple(digests),
            share=section.number("share", 1.0, most=1000),
            priority=section.flag("priority", False),
            operator=section.flag("operator", False),
            max_requests=section.integer("max_requests", None),
            requests_per_minute=section.integer("requests_per_minute", None),
            tokens_per_minute=section.integer("tokens_per_minute", None),
        )
    except ConfigError as error:
        field = error.field or ""
        raise _wrong(path, nodes[field][0].start_mark.line, f"{field} must be {_RIGHT[field]}") from None


def _value(path: Path, field: str, at: yaml.ScalarNode, node: yaml.Node) -> Any:
    """The number or flag of a field. With an explicit tag (`!!bool x`) PyYAML raises its converter's exceptions, and
    its own errors quote the line, which may contain a key."""
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise _wrong(path, at.start_mark.line, f"{field} must be {_RIGHT[field]}") from None


def _texts(
    path: Path,
    nodes: dict[str, tuple[yaml.ScalarNode, yaml.Node]],
    field: str,
    form: re.Pattern[str],
    right: str,
) -> Iterator[str]:
    """One text or a list of texts, unconverted: a key of digits is text too."""
    if field not in nodes:
        return
    node = nodes[field][1]
    for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(one, yaml.ScalarNode) or not form.fullmatch(one.value):
            raise _wrong(path, one.start_mark.line, f"{field} must be {right}, or a list of such")
        yield one.value


def _pairs(path: Path, node: yaml.MappingNode, what: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _wrong(path, key.start_mark.line, f"a {what} must be text")
        if key.value in seen:
            raise _wrong(path, key.start_mark.line, f"this {what} is written twice")
        seen.add(key.value)
        yield key, value


def _wrong(path: Path, line: int, message: str) -> ConfigError:
    """An error at a line, counted from 0."""
    return ConfigError(f"--api-keys {str(path)!r}, line {line + 1}: {message}", field="api_keys")

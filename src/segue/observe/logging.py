"""Structured log lines: one per event, with the id of the HTTP request they belong to."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

http_request_id: ContextVar[str | None] = ContextVar("http_request_id", default=None)
"""`X-Request-Id` of the request this task works for."""

_LOGGERS = ("segue", "uvicorn.error")

_LIBRARIES = ("torch", "transformers")
"""Loggers to which their libraries give handlers of their own when they are imported."""


class _Formatter(logging.Formatter):
    """Base of the formatters. `worker`: name of the process, added to each line; empty: none."""

    def __init__(self, worker: str = "") -> None:
        super().__init__()
        self._of = {"worker": worker} if worker else {}

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the structured fields of a log record."""
        return {**_fields(record), **self._of}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(record.__dict__.get("fields") or {})
    request_id = http_request_id.get()
    if request_id is not None:
        fields.setdefault("request_id", request_id)
    return fields


class JsonFormatter(_Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the event's fields, traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(_Formatter):
    """For people: local time, level, message, then `key=value`; values are quoted, so a line stays one line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        fields = "".join(f" {key}={_plain(value)}" for key, value in self.fields(record).items())
        message = record.getMessage()
        if record.name == "py.warnings":  # it has a line of source code, too
            message = " ".join(message.split())
        line = f"{when} {record.levelname.lower():7} {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _plain(value: object) -> str:
    text = str(value)
    return text if text and all(c.isprintable() and c not in ' "=' for c in text) else json.dumps(text)


def configure_logging(
    level: str = "info", *, as_json: bool = False, stream: TextIO | None = None, worker: str = ""
) -> None:
    """Send the logs of this program and its HTTP server to `stream` (stderr), and what other libraries warn of, unless
    the program has a handler for them. Calling it again replaces the handler. `worker`: name of this process, added to
    each line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(worker) if as_json else TextFormatter(worker))
    root = logging.getLogger()
    if all(isinstance(other.formatter, _Formatter) for other in root.handlers):
        of_others = logging.StreamHandler(handler.stream)
        of_others.setFormatter(handler.formatter)
        of_others.setLevel(logging.WARNING)
        root.handlers = [of_others]
        for name in _LIBRARIES:
            library = logging.getLogger(name)
            library.handlers, library.propagate = [], True
        logging.captureWarnings(True)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def configured() -> tuple[str, bool] | None:
    """Return (level, as JSON) as set by `configure_logging`, so that workers log alike; None if it was not called in
    this process."""
    logger = logging.getLogger(_LOGGERS[0])
    kinds = [handler.formatter for handler in logger.handlers if isinstance(handler.formatter, _Formatter)]
    return (logging.getLevelName(logger.level).lower(), isinstance(kinds[0], JsonFormatter)) if kinds else None


def log_event(logger: logging.Logger, message: str, fields: Mapping[str, Any], level: int = logging.INFO) -> None:
    """Log `message` with structured fields."""
    logger.log(level, message, extra={"fields": dict(fields)})

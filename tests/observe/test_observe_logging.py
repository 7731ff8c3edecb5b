"""Log lines carry their fields and the request's id, one line each whatever a client sends."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import copy_context

import pytest

from segue.observe.logging import configure_logging, configured, http_request_id, log_event

LOGGERS = ("segue", "uvicorn.error")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    before = [(logging.getLogger(name), logging.getLogger(name).handlers) for name in LOGGERS]
    yield io.StringIO()
    for logger, handlers in before:
        logger.handlers, logger.propagate = handlers, True
        logger.setLevel(logging.NOTSET)


def test_json_lines(stream: io.StringIO) -> None:
    configure_logging("debug", as_json=True, stream=stream)
    log_event(logging.getLogger("segue.x"), "hello", {"status": 200, "path": "/a\nb"}, logging.DEBUG)
    line = json.loads(stream.getvalue())
    assert (line["level"], line["logger"], line["message"]) == ("debug", "segue.x", "hello")
    assert (line["status"], line["path"]) == (200, "/a\nb")
    assert line["time"].endswith("+00:00")


def test_the_request_id_is_that_of_the_task(stream: io.StringIO) -> None:
    configure_logging(as_json=True, stream=stream)

    def work() -> None:
        http_request_id.set("id-7")
        logging.getLogger("segue.y").info("inside")

    copy_context().run(work)
    logging.getLogger("segue.y").info("outside")
    inside, outside = (json.loads(line) for line in stream.getvalue().splitlines())
    assert inside["request_id"] == "id-7"
    assert "request_id" not in outside


def test_text_lines_stay_lines(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    log_event(logging.getLogger("segue.z"), "request", {"path": '/a\nb "c"', "status": 404, "empty": ""})
    [line] = stream.getvalue().splitlines()
    assert line.endswith('request path="/a\\nb \\"c\\"" status=404 empty=""')


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_is_kept(stream: io.StringIO, as_json: bool) -> None:
    configure_logging(as_json=as_json, stream=stream)
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("segue.z").error("oh", exc_info=sys.exc_info())
    assert "KeyError: 'gone'" in stream.getvalue()


def test_levels_hold_and_configuring_again_replaces(stream: io.StringIO) -> None:
    configure_logging("info", stream=stream)
    configure_logging("warning", stream=stream)
    logging.getLogger("segue.q").info("no")
    logging.getLogger("segue.q").warning("yes")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_a_worker_is_told_how_and_says_who_it_is(stream: io.StringIO, as_json: bool) -> None:
    assert configured() is None
    configure_logging("debug", as_json=as_json, stream=stream, worker="llm.0-1")
    assert configured() == ("debug", as_json)
    logging.getLogger("segue.q").warning("oh")
    line = stream.getvalue().rstrip("\n")
    assert json.loads(line)["worker"] == "llm.0-1" if as_json else line.endswith("oh worker=llm.0-1")

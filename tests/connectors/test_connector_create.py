"""Connectors by name."""

from typing import Any

import pytest

from segue.connectors.create import create
from segue.connectors.inproc import InProcessConnector
from segue.connectors.mooncake.library import load
from segue.connectors.shm.connector import SharedMemoryConnector
from segue.messages.errors import ConfigError


def test_the_kinds() -> None:
    one = create("inproc", "", {"max_bytes": 100})
    two = create("shm", "create", {"pool_bytes": 4096, "shm_threshold_bytes": 10, "max_bytes": 8192})
    assert isinstance(one, InProcessConnector)
    assert isinstance(two, SharedMemoryConnector)
    one.close()
    two.close()


def test_what_is_missing_of_mooncake_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'segue\[mooncake\]'"):
        load("no_such_module")


@pytest.mark.parametrize(
    ("kind", "extra", "field", "said"),
    [
        ("shn", {}, "name", "did you mean 'shm'"),
        ("pigeon", {}, "name", "known: inproc, mooncake_engine, mooncake_store, nixl, shm, tcp"),
        ("shm", {"shm_treshold_bytes": 1}, "shm_treshold_bytes", "did you mean 'shm_threshold_bytes'"),
        ("inproc", {"pool_bytes": 1}, "pool_bytes", "no key 'pool_bytes'"),
        ("shm", {"pool_bytes": "64M"}, "pool_bytes", "'64M'; it must be a whole number"),
        ("shm", {"pool_bytes": True}, "pool_bytes", "True; it must be a whole number"),
        ("shm", {"pool_bytes": 100}, "pool_bytes", "at least a page"),
        ("shm", {"max_bytes": 5000}, "max_bytes", "at least pool_bytes"),
        ("shm", {"shm_threshold_bytes": -1}, "shm_threshold_bytes", "0 or more"),
        ("inproc", {"max_bytes": 0}, "max_bytes", "at least 1"),
        ("mooncake_engine", {"protocol": 1}, "protocol", "1; it must be text"),
        ("mooncake_engine", {"protocol": "udp"}, "protocol", "'udp'; it must be one of tcp, rdma"),
        ("mooncake_engine", {"max_bytes": 0}, "max_bytes", "at least 1"),
        ("mooncake_store", {"segment": 5}, "segment", "at least 1 MiB"),
        ("mooncake_store", {"master": "10.0.0.1"}, "master", "'10.0.0.1'; it must be HOST:PORT"),
        ("mooncake_store", {"master": "127.0.0.1:1"}, "master", "no Mooncake master answers at 127.0.0.1:1"),
    ],
)
def test_mistakes_name_the_key(kind: str, extra: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        create(kind, "create", extra)
    assert caught.value.field == field

"""A worker's inbox can be woken from another thread; lost connections to other hosts are reported."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import zmq

from segue.messages.addresses import Network, protect
from segue.worker.edges.peers import Peers


def test_waking_ends_a_wait_and_brings_no_message(tmp_path: Path) -> None:
    peers = Peers(f"ipc://{tmp_path}/inbox")
    try:
        thread = threading.Thread(target=peers.wake)
        thread.start()
        assert list(peers.receive(wait=True)) == []
        thread.join()
        peers.wake()
        peers.send(f"ipc://{tmp_path}/inbox", b"a message")
        found: list[bytes] = []
        while not found:
            found += peers.receive(wait=True)
        assert found == [b"a message"]
    finally:
        peers.close()


def test_waking_what_is_closed_does_nothing(tmp_path: Path) -> None:
    peers = Peers(f"ipc://{tmp_path}/inbox")
    peers.close()
    peers.wake()


def test_a_lost_connection_to_another_host_is_reported_and_its_return_too(tmp_path: Path) -> None:
    """And not that the peer is there for the first time."""
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context:

        def inbox(port: str) -> zmq.Socket[bytes]:
            socket = context.socket(zmq.PULL)
            protect(socket, public, secret, listens=True)
            socket.bind(f"tcp://127.0.0.1:{port}")
            return socket

        peers = Peers(f"ipc://{tmp_path}/inbox", Network("here", "127.0.0.1", public, secret, os.urandom(32)))
        try:
            other = inbox("*")
            where = other.last_endpoint.decode()
            address = f"there ipc:///nowhere {where}"
            peers.send(address, b"1")
            assert other.recv() == b"1"
            assert peers.changes() == []
            other.close(linger=0)
            assert changed(peers) == [(address, False)]
            other = inbox(where.rpartition(":")[2])
            assert changed(peers) == [(address, True)]
            peers.send(address, b"2")
            assert other.recv() == b"2"
            peers.forget(address)
            other.close(linger=0)
            peers.wake()
            assert list(peers.receive(wait=True)) == []
            assert peers.changes() == []
        finally:
            peers.close()


def changed(peers: Peers) -> list[tuple[str, bool]]:
    """Wait for the next change."""
    while not (found := peers.changes()):
        assert list(peers.receive(wait=True)) == []
    return found

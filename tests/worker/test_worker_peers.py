"""A worker's inbox can be woken from another thread."""

from __future__ import annotations

import threading
from pathlib import Path

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

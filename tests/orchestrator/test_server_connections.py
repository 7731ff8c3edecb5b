"""What the server and the processes of other hosts do when messages between them are lost with a connection."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from segue.messages.addresses import SERVER, Network, joined, port_of, protect
from segue.messages.connection import InOrder, Numbers
from segue.messages.join import (
    BEAT_SECONDS,
    Beat,
    Fenced,
    Join,
    Leave,
    Listen,
    News,
    NodeReady,
    ToServer,
    Welcome,
    encode,
    to_agent,
    to_server,
    wire_version,
)
from segue.messages.process import Exited
from segue.orchestrator.workers.nodes.agent import Agent
from segue.orchestrator.workers.nodes.node_placement import NodePlacement, curve_keys
from segue.orchestrator.workers.outgoing import Outgoing
from segue.orchestrator.workers.placement import LocalPlacement
from segue.orchestrator.workers.versions import version_of_segue
from segue.worker.edges.peers import Peers

TOKEN = "a token of the tests"
PATIENCE = 60.0


class Relay:
    """Passes connections on to a port of this host, until it is told to swallow what comes and to break them."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._swallows = threading.Event()
        self.swallowed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink, source is near), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, forward: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if forward and self._swallows.is_set():
                    self.swallowed.set()
                else:
                    sink.sendall(data)

    def lose(self, send: Callable[[], None]) -> None:
        """Lose what `send` sends, and the connections."""
        self._swallows.set()
        send()
        assert self.swallowed.wait(PATIENCE)
        self.cut()
        self._swallows.clear()

    def cut(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self._listener.close()
        self.cut()


def network(node: str) -> Network:
    public, secret = curve_keys(TOKEN)
    return Network(node, "127.0.0.1", public, secret, bytes(32))


@contextmanager
def relayed(port: int) -> Iterator[Relay]:
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()


def port_in(address: str) -> int:
    return int(address.rpartition(":")[2])


def next_of(peers: Peers) -> tuple[list[bytes], list[tuple[str, bool]]]:
    """Wait until there is a message, or news of a connection."""
    while True:
        messages, news = list(peers.receive(wait=True)), peers.changes()
        if messages or news:
            return messages, news


def test_a_worker_that_missed_a_message_of_the_server_handles_none_after_it(tmp_path: Path) -> None:
    here = f"{SERVER} ipc://{tmp_path}/server tcp://127.0.0.1:1"
    peers = Peers(f"ipc://{tmp_path}/inbox", network("away"), server=here, name="tone.0-1")
    with zmq.Context() as context, relayed(port_in(peers.address)) as relay:
        out = Outgoing(context, network(SERVER))
        try:
            through = joined(network("away"), "ipc:///nowhere", f"tcp://127.0.0.1:{relay.port}")
            for data in (b"1", b"2"):
                out.send(through, data)
                assert next_of(peers) == ([data], [])
            assert out.lost() == []
            relay.lose(lambda: out.send(through, b"3"))
            while out.lost() != [through]:  # the server has noticed by itself
                time.sleep(0)
            out.send(through, b"4")
            assert next_of(peers) == ([], [(here, False)]), "as if the connection to the server had been lost"
            out.send(through, b"5")
            peers.wake()
            assert list(peers.receive(wait=True)) == []
            assert peers.changes() == [], "it is told once"
        finally:
            out.close()
            peers.close(patience=0)


def test_messages_of_a_worker_that_do_not_follow_are_known_by_their_number(tmp_path: Path) -> None:
    """And other workers' are not numbered."""
    keys = network("away")
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        protect(inbox, keys.public, keys.secret, listens=True)
        inbox.bind("tcp://127.0.0.1:*")
        with relayed(port_of(inbox)) as relay:
            here = joined(network(SERVER), "ipc:///nowhere", f"tcp://127.0.0.1:{relay.port}")
            peers = Peers(f"ipc://{tmp_path}/inbox", keys, server=here, name="tone.0-1")
            try:
                numbers = InOrder()

                def follows() -> bool:
                    number, name, data = inbox.recv_multipart()
                    assert name == b"tone.0-1"
                    assert data == b"x"
                    return numbers.follows(number)

                peers.send(here, b"x")
                assert follows()
                relay.lose(lambda: peers.send(here, b"x"))
                assert next_of(peers) == ([], [(here, False)])
                peers.send(here, b"x")
                assert not follows()
                peers.send(here, b"x")
                assert not follows(), "nor any after it"
                peers.send(peers.address, b"to itself")
                while not (found := next_of(peers)[0]):
                    pass
                assert found == [b"to itself"]
            finally:
                peers.close(patience=0)


def test_numbers_follow_one_another_beyond_a_byte() -> None:
    numbers, seen = Numbers(), InOrder()
    assert all(seen.follows(numbers.next()) for _ in range(300))
    numbers.next()
    assert not seen.follows(numbers.next())
    assert not seen.follows(numbers.next())


# ── a node ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_whose_messages_were_lost_is_lost_itself(lost: int) -> None:
    """It has sent two messages, of which one or none is missing."""

    async def body() -> list[str]:
        events: asyncio.Queue[str] = asyncio.Queue()
        port = free_port()
        made = NodePlacement(
            LocalPlacement([], gpus=False, on_spawned=_nothing, on_exit=_nothing, on_lost=_nothing),
            Listen("127.0.0.1", port, TOKEN),
            ["away"],
            Welcome(0, [], False),
            on_spawned=_nothing,
            on_exit=lambda worker, how: events.put_nowait(f"{worker} {how}"),
            on_node=lambda node: events.put_nowait(f"{node} joined"),
            on_node_lost=lambda node, why: events.put_nowait(f"{node} lost: {why}"),
        )
        await made.start()
        context = zmq.asyncio.Context()
        sock = context.socket(zmq.DEALER)
        try:
            protect(sock, *curve_keys(TOKEN), listens=False)
            sock.connect(f"tcp://127.0.0.1:{port}")

            async def tell(message: ToServer) -> None:
                await sock.send(encode(message))

            await tell(Join("away", version_of_segue(), wire_version()))
            welcome = to_agent.decode(await asyncio.wait_for(sock.recv(), PATIENCE))
            assert isinstance(welcome, Welcome)
            of = welcome.generation
            await tell(NodeReady(of, "/nowhere", "127.0.0.1"))
            await tell(Beat(of, 1))
            if not lost:
                await tell(News(of, Exited("tone.0-1", 1, "exit 1")))
            await tell(Beat(of, 2))
            if not lost:
                await tell(Leave(of))
            found = [await asyncio.wait_for(events.get(), PATIENCE) for _ in range(2 if lost else 3)]
            while not isinstance(to_agent.decode(await asyncio.wait_for(sock.recv(), PATIENCE)), Fenced):
                pass
            return found
        finally:
            sock.close(linger=0)
            context.term()
            await made.close()

    if lost:
        assert asyncio.run(body()) == ["away joined", "away lost: messages of it were lost with its connection"]
    else:
        assert asyncio.run(body()) == ["away joined", "tone.0-1 exit 1", "away lost: it has left"]


@pytest.mark.slow
def test_a_node_that_missed_an_order_ends_its_generation_and_joins_anew() -> None:
    async def body() -> None:
        context = zmq.asyncio.Context()
        sock = context.socket(zmq.ROUTER)
        protect(sock, *curve_keys(TOKEN), listens=True)
        sock.bind("tcp://127.0.0.1:*")
        agent = asyncio.create_task(
            Agent("127.0.0.1", port_of(sock), TOKEN, "away", address="127.0.0.1", models={}).run()
        )

        async def until(kind: type) -> tuple[bytes, ToServer]:
            while True:
                who, data = await asyncio.wait_for(sock.recv_multipart(), PATIENCE)
                if isinstance(said := to_server.decode(data), kind):
                    return who, said

        async def beat(who: bytes) -> None:
            """Say how many orders were sent, as the server does."""
            while True:
                await sock.send_multipart([who, encode(Beat(1, orders))])
                await asyncio.sleep(BEAT_SECONDS)

        orders, tasks = 0, [agent]
        try:
            who, _ = await until(Join)
            await sock.send_multipart([who, encode(Welcome(1, [], False, wire_version()))])
            tasks.append(asyncio.create_task(beat(who)))
            await until(NodeReady)
            _, said = await until(Beat)
            assert said == Beat(1, 1), "it is there, and has said that it is ready"
            orders = 1  # which does not come
            assert (await until(Leave))[1] == Leave(1)
            other, _ = await until(Join)
            assert other != who
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            sock.close(linger=0)
            context.term()

    asyncio.run(body())


def _nothing(*_: object) -> None:
    """Not looked at here."""

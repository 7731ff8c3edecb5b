"""A node and a server whose messages differ refuse each other, also if one of them is too old to state its version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from segue.graph.deployment.deployment import Hardware
from segue.messages.addresses import port_of, protect
from segue.messages.errors import ConfigError
from segue.messages.join import Join, Listen, Refused, Welcome, encode, schema_hash, to_agent, to_server, wire_version
from segue.orchestrator.workers.nodes.agent import Agent
from segue.orchestrator.workers.nodes.node_placement import NodePlacement, curve_keys
from segue.orchestrator.workers.placement import LocalPlacement
from segue.orchestrator.workers.versions import version_of_segue

TOKEN = "a token of the tests"
TOLD = "different commits of this version of Segue"


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        return sock.bind_to_random_port("tcp://127.0.0.1")


def no_gpu(node: str, hardware: Hardware) -> None:
    if not hardware.gpus:
        raise ConfigError(f"stage 'talker' is on cuda:0 of node {node!r}, which has no GPU")


def placement(port: int, check: Callable[[str, Hardware], object] = lambda node, hardware: None) -> NodePlacement:
    def nothing(*told: object) -> None:
        pass

    local = LocalPlacement([], gpus=False, on_spawned=nothing, on_exit=nothing, on_lost=lambda: None)
    return NodePlacement(
        local,
        Listen("127.0.0.1", port, TOKEN),
        ["node1"],
        Welcome(0, [], False),
        check=check,
        on_spawned=nothing,
        on_exit=nothing,
        on_node=nothing,
        on_node_lost=nothing,
    )


async def answers(port: int, *asked: dict[str, Any]) -> list[Any]:
    """What the server says to each of these messages of a node."""
    context = zmq.asyncio.Context()
    sock = context.socket(zmq.DEALER)
    protect(sock, *curve_keys(TOKEN), listens=False)
    sock.connect(f"tcp://127.0.0.1:{port}")
    found = []
    for message in asked:
        await sock.send(msgspec.msgpack.encode(message))
        found.append(to_agent.decode(await asyncio.wait_for(sock.recv(), 60)))
    sock.close(linger=0)
    context.term()
    return found


@pytest.mark.slow
def test_a_server_refuses_nodes_with_other_messages() -> None:
    join = {"type": "Join", "node": "node1", "version": version_of_segue()}

    async def body() -> list[Any]:
        port = free_port()
        server = placement(port)
        await server.start()
        try:
            return await answers(port, join, {**join, "wire": "0123456789abcdef"}, {**join, "wire": wire_version()})
        finally:
            await server.close()

    older, other, same = asyncio.run(body())
    for refused in (older, other):
        assert isinstance(refused, Refused)
        assert refused.final
        assert TOLD in refused.reason
    assert isinstance(same, Welcome)
    assert same.wire == wire_version()


@pytest.mark.slow
def test_a_server_refuses_a_node_whose_hardware_lacks_what_a_stage_needs() -> None:
    join = {"type": "Join", "node": "node1", "version": version_of_segue(), "wire": wire_version()}
    hardware = {"cpus": 2, "memory_bytes": 1 << 30, "gpus": [], "gpu_names": [], "gpu_notes": []}

    async def body() -> list[Any]:
        port = free_port()
        server = placement(port, no_gpu)
        await server.start()
        try:
            return await answers(
                port, {**join, "hardware": hardware}, {**join, "hardware": {**hardware, "gpus": [1 << 30]}}
            )
        finally:
            await server.close()

    refused, welcome = asyncio.run(body())
    assert refused == Refused("stage 'talker' is on cuda:0 of node 'node1', which has no GPU", final=True)
    assert isinstance(welcome, Welcome)


@pytest.mark.parametrize("wire", ["", "0123456789abcdef"])
def test_a_node_leaves_a_server_with_other_messages(wire: str) -> None:
    async def body() -> Join:
        context = zmq.asyncio.Context()
        sock = context.socket(zmq.ROUTER)
        protect(sock, *curve_keys(TOKEN), listens=True)
        sock.bind("tcp://127.0.0.1:*")
        agent = asyncio.create_task(
            Agent("127.0.0.1", port_of(sock), TOKEN, "node1", address="127.0.0.1", models={}).run()
        )
        try:
            who, asked = await asyncio.wait_for(sock.recv_multipart(), 60)
            await sock.send_multipart([who, encode(Welcome(1, [], False, wire))])
            with pytest.raises(ConfigError, match=TOLD):
                await asyncio.wait_for(agent, 60)
            return to_server.decode(asked)
        finally:
            agent.cancel()
            sock.close(linger=0)
            context.term()

    said = asyncio.run(body())
    assert said.hardware is not None
    assert said.hardware.cpus > 0
    assert said == Join("node1", version_of_segue(), wire_version(), said.hardware)


class Inner(msgspec.Struct):
    numbers: list[int]


class Message(msgspec.Struct, tag=True):
    """What is compared."""

    text: str
    inner: Inner | None = None


OTHERS = {
    "a field more": [("text", str), ("inner", Inner | None, None), ("more", int, 0)],
    "a field less": [("text", str)],
    "another name": [("words", str), ("inner", Inner | None, None)],
    "another type": [("text", bytes), ("inner", Inner | None, None)],
    "another order": [("inner", Inner | None), ("text", str)],
    "required": [("text", str), ("inner", Inner | None)],
}


@pytest.mark.parametrize("what", OTHERS)
def test_each_change_of_a_message_is_another_version(what: str) -> None:
    other = msgspec.defstruct("Message", OTHERS[what], tag=True)
    same = msgspec.defstruct("Message", [("text", str), ("inner", Inner | None, None)], tag=True)
    assert schema_hash(other) != schema_hash(same) == schema_hash(Message)


def test_a_change_within_a_message_is_another_version() -> None:
    inner = msgspec.defstruct("Inner", [("numbers", list[float])])
    outer = msgspec.defstruct("Message", [("text", str), ("inner", inner | None, None)], tag=True)
    assert schema_hash(outer) != schema_hash(Message)

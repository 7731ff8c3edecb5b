"""The TCP connector: who may fetch, what a dead or silent peer costs, what the wire may change."""

import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_values import same
from taking import KEY, take, until

from segue.connectors.base import Arrived, Coming, Gone
from segue.connectors.device.staging import Chunk, PageLocks
from segue.connectors.fetching import Buffers
from segue.connectors.narrow import narrowed, upcast
from segue.connectors.tcp.connector import TcpConnector
from segue.connectors.tcp.producer import send_as_written
from segue.connectors.tcp.wire import MAGIC, NONCE
from segue.messages.errors import ConfigError

MIB = 1 << 20
HERE = "127.0.0.1"


@pytest.fixture
def ends() -> Iterator[tuple[TcpConnector, TcpConnector]]:
    producer = TcpConnector(HERE, KEY, inline_threshold_bytes=0)
    consumer = TcpConnector(HERE, KEY, inline_threshold_bytes=0)
    yield producer, consumer
    consumer.close()
    producer.close()


def numbers(size: int) -> dict[str, Any]:
    return {"x": torch.arange(size // 8)}


def put(producer: TcpConnector, payload: dict[str, Any], request: str = "r") -> dict[str, Any]:
    ok, _, metadata = producer.put("a", "b", request, payload)
    assert ok
    assert metadata is not None
    return metadata


def fate(consumer: TcpConnector, metadata: dict[str, Any], request: str = "r") -> Arrived | Gone:
    woken = threading.Event()
    while isinstance(found := consumer.fetch("a", "b", request, metadata, woken.set), Coming):
        assert woken.wait(30)
        woken.clear()
    return found


def test_a_fetch_does_not_wait(ends: tuple[TcpConnector, TcpConnector]) -> None:
    """The producer that the metadata name accepts, and says nothing."""
    producer, consumer = ends
    with socket.create_server((HERE, 0)) as silent:
        metadata = {**put(producer, numbers(MIB)), "port": silent.getsockname()[1]}
        for _ in range(3):
            assert consumer.fetch("a", "b", "r", metadata, lambda: None) == Coming()
        other = put(producer, numbers(MIB), "other")
        consumer.release("r", metadata)
        # `other` has the same pool, hence the same line: a producer has one address
        assert consumer.fetch("a", "b", "other", other, lambda: None) == Coming()


def test_what_is_copied_is_sent_while_the_rest_is_not() -> None:
    here, there = socket.socketpair()
    written = [threading.Event() for _ in range(3)]
    data = memoryview(bytearray(b"abc"))
    chunks = [Chunk(data[place : place + 1], event.wait) for place, event in enumerate(written)]
    sender = threading.Thread(target=send_as_written, args=(here, [b"head ", *chunks[:2], b" and ", chunks[2], b"."]))
    with here, there:
        sender.start()
        assert there.recv(100) == b"head "
        for event, sent in zip(written, (b"a", b"b and ", b"c."), strict=True):
            event.set()
            found = b""
            while len(found) < len(sent):
                found += there.recv(100)
            assert found == sent
        sender.join()


class Refusing:
    """A driver that locks no pages."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def current(self) -> nullcontext[None]:
        return nullcontext()

    def status(self, name: str, *_: object) -> int:
        self.calls.append(name)
        return 1


def test_buffers_whose_pages_cannot_be_locked_are_used_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    driver = Refusing()
    locks = PageLocks(driver)  # type: ignore[arg-type]
    buffers = Buffers(locks.lock, locks.unlock)
    first = buffers.take(MIB)
    first[:5] = b"hello"
    assert "not page-locked: cuMemHostRegister returned 1" in caplog.text
    buffers.give(first)
    assert buffers.take(MIB) is first
    locks.unlock(first)
    assert driver.calls == ["cuMemHostRegister_v2", "cuMemHostUnregister"]
    first.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_arrive_in_page_locked_memory() -> None:
    producer, consumer = (TcpConnector(HERE, KEY, inline_threshold_bytes=0, page_locked=True) for _ in range(2))
    values = torch.randn(3, MIB + 5, device="cuda")
    try:
        for number in range(3):  # the later ones in buffers that are used again
            metadata = put(producer, {"x": values[:, number:], "y": values.half().t()}, str(number))
            values = values * 2  # after the copies, in the same stream
            found = fate(consumer, metadata, str(number))
            assert isinstance(found, Arrived)
            assert torch.equal(found.payload["x"].cuda() * 2, values[:, number:])
            consumer.release(str(number), metadata)
    finally:
        consumer.close()
        producer.close()


def test_a_stranger_gets_nothing(ends: tuple[TcpConnector, TcpConnector]) -> None:
    producer, consumer = ends
    metadata = put(producer, numbers(MIB))
    stranger = TcpConnector(HERE, bytes(32))
    try:
        found = fate(stranger, metadata)
        assert isinstance(found, Gone)
        assert "fetch from 127.0.0.1" in found.reason
    finally:
        stranger.close()
    assert isinstance(fate(consumer, metadata), Arrived), "the stranger did not use it up"


def test_an_impostor_is_believed_nothing(ends: tuple[TcpConnector, TcpConnector]) -> None:
    """Something that listens at a producer's address and does not know the key: it gets proofs of ours, no trust."""
    producer, consumer = ends
    metadata = put(producer, numbers(MIB))
    with socket.create_server((HERE, 0)) as listening:

        def pretend() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.sendall(MAGIC + bytes(NONCE))
                sock.recv(4096)
                sock.sendall(metadata["pool"] + bytes(32))
                sock.recv(4096)

        thread = threading.Thread(target=pretend)
        thread.start()
        found = fate(consumer, {**metadata, "port": listening.getsockname()[1]})
        thread.join()
    assert isinstance(found, Gone)
    assert "does not know the key" in found.reason


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n" * 40, bytes(NONCE + 32)])
def test_garbage_at_the_door_harms_nobody(ends: tuple[TcpConnector, TcpConnector], garbage: bytes) -> None:
    producer, consumer = ends
    metadata = put(producer, numbers(MIB))
    with socket.create_connection((HERE, metadata["port"])) as sock:
        sock.sendall(garbage)
        assert isinstance(fate(consumer, metadata), Arrived)


def test_a_producer_that_has_ended_is_named(ends: tuple[TcpConnector, TcpConnector]) -> None:
    producer, consumer = ends
    first, second = put(producer, numbers(MIB)), put(producer, numbers(MIB))
    assert isinstance(fate(consumer, first), Arrived)
    producer.close()
    found = fate(consumer, second)
    assert isinstance(found, Gone)
    assert f"127.0.0.1:{first['port']}" in found.reason


def fetching() -> int:
    return sum(thread.name == "segue-fetch" for thread in threading.enumerate())


def test_producers_that_have_ended_leave_no_thread_and_no_socket() -> None:
    before = fetching()
    consumer = TcpConnector(HERE, KEY, inline_threshold_bytes=0)
    try:
        for asked in (0, 1):  # the consumer asks the dead producer once more, or never again
            for _ in range(4):
                producer = TcpConnector(HERE, KEY, inline_threshold_bytes=0)
                sent = [put(producer, numbers(MIB)) for _ in range(3)]
                assert isinstance(fate(consumer, sent[0]), Arrived)
                producer.close()
                assert all(isinstance(fate(consumer, one), Gone) for one in sent[1:][: 2 * asked])
            until(lambda: fetching() <= before + 1)
    finally:
        consumer.close()
    assert fetching() == before


def test_metadata_of_a_producer_whose_port_another_has_now(ends: tuple[TcpConnector, TcpConnector]) -> None:
    producer, consumer = ends
    metadata = put(producer, numbers(MIB))
    found = fate(consumer, {**metadata, "pool": bytes(8)})
    assert isinstance(found, Gone)
    assert "another one listens there" in found.reason


def test_a_payload_whose_connection_broke_waits_again(ends: tuple[TcpConnector, TcpConnector]) -> None:
    """A consumer dies in the middle of a fetch; its successor gets the whole payload."""
    from segue.connectors.tcp.wire import GET, REQUEST, as_consumer, receive

    producer, consumer = ends
    metadata = put(producer, numbers(64 * MIB))
    with socket.create_connection((HERE, metadata["port"])) as sock:
        as_consumer(sock, KEY)
        sock.sendall(REQUEST.pack(GET, metadata["number"]))
        receive(sock, 1000)
        assert isinstance(fate(consumer, metadata), Gone), "it is being sent to another"
    consumer.release("r")
    until(lambda: isinstance(fate_again(consumer, metadata), Arrived))


def fate_again(consumer: TcpConnector, metadata: dict[str, Any]) -> Arrived | Gone:
    consumer.release("r")
    return fate(consumer, metadata)


def test_what_is_put_and_not_fetched_is_bounded() -> None:
    producer = TcpConnector(HERE, KEY, max_bytes=3 * MIB)
    consumer = TcpConnector(HERE, KEY)
    try:
        sent = [put(producer, numbers(MIB), f"r{n}") for n in range(2)]
        ok, size, metadata = producer.put("a", "b", "r2", numbers(MIB))
        assert (ok, metadata) == (False, None)
        assert size > MIB
        assert isinstance(fate(consumer, sent[0], "r0"), Arrived)
        until(lambda: producer.put("a", "b", "r2", numbers(MIB))[0])
        producer.release("r1")
        put(producer, numbers(MIB), "r3")
    finally:
        consumer.close()
        producer.close()


def test_buffers_are_used_again(ends: tuple[TcpConnector, TcpConnector]) -> None:
    producer, consumer = ends
    places = set()
    for _ in range(4):
        found = take(consumer, "a", "b", "r", put(producer, numbers(5 * MIB)))
        assert found is not None
        assert same(found[0], numbers(5 * MIB))
        places.add(found[0]["x"].data_ptr())
        del found
        consumer.release("r")
    assert len(places) == 1


trees = st.recursive(
    st.one_of(
        st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16]).map(
            lambda dtype: torch.arange(5).sub(2).mul(1.2345678).to(dtype)
        ),
        st.integers(-5, 5),
        st.text(max_size=3),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=2), trees, max_size=3))
def test_bfloat16_on_the_wire_changes_float32_alone_and_by_its_stated_error(payload: dict[str, Any]) -> None:
    got = upcast(narrowed(payload))
    check(got, payload)


def check(got: Any, sent: Any) -> None:
    if isinstance(sent, torch.Tensor) and sent.dtype == torch.float32:
        assert got.dtype == torch.float32
        assert bool(((got - sent).abs() <= 2**-8 * sent.abs()).all())
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key in sent:
            check(got[key], sent[key])
    elif isinstance(sent, list | tuple):
        assert type(got) is type(sent)
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            check(one, other)
    else:
        assert same(got, sent)


@pytest.mark.parametrize("threshold", [0, MIB])
def test_only_the_edges_that_ask_travel_as_bfloat16(threshold: int) -> None:
    producer = TcpConnector(HERE, KEY, inline_threshold_bytes=threshold, as_bfloat16=frozenset({("a", "b")}))
    consumer = TcpConnector(HERE, KEY)
    sent = {"x": torch.linspace(-3, 3, 10_000)}
    try:
        for target, exact in (("b", False), ("c", True)):
            ok, size, metadata = producer.put("a", target, "r", sent)
            assert ok
            assert (size < 30_000) is not exact
            found = take(consumer, "a", target, "r", metadata)
            assert found is not None
            assert torch.equal(found[0]["x"], sent["x"]) is exact
            assert torch.allclose(found[0]["x"], sent["x"], rtol=2**-8, atol=0)
    finally:
        consumer.close()
        producer.close()


def test_the_interface_must_be_one_of_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on '192\.0\.2\.1'"):
        TcpConnector("192.0.2.1", KEY)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 32"):
        TcpConnector(HERE, b"short")

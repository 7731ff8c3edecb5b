"""What only shared memory has: growth, the hand-over of descriptors, other users, damage."""

import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from taking import take

from segue.connectors.payload import PayloadError
from segue.connectors.shm.connector import SharedMemoryConnector
from segue.connectors.shm.handover import HandOver, Line
from segue.connectors.shm.pool import Pool
from segue.connectors.shm.segment import PAGE, RECEIVERS, Segment
from segue.messages.errors import ConfigError

ID = b"pool-id!"


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(4 * PAGE, 16 * PAGE)
    yield made
    made.audit()
    made.close()


@pytest.fixture
def address(pool: Pool) -> Iterator[str]:
    name = f"pool-{os.getpid()}"
    server = HandOver(name, ID, pool, lambda generation, receiver: None)
    yield name
    server.close()


@pytest.fixture
def ends() -> Iterator[tuple[SharedMemoryConnector, SharedMemoryConnector]]:
    made = [SharedMemoryConnector(f"{side}-{os.getpid()}", pool_bytes=1 << 20, max_bytes=1 << 20) for side in "pc"]
    yield made[0], made[1]
    for connector in made:
        connector.close()


def test_the_pool_grows_by_steps_up_to_its_limit(pool: Pool) -> None:
    assert pool.bytes_resident == 4 * PAGE
    for n in range(4):
        assert pool.allocate(f"r{n}", 4 * PAGE) is not None
        assert pool.bytes_resident == 4 * PAGE * (n + 1)
    assert pool.allocate("r", 1) is None
    pool.release("r2")
    found = pool.allocate("r", PAGE + 1)
    assert found is not None
    assert (found[0].segment, found[0].page, found[0].pages) == (2, 0, 2)


def test_empty_segments_make_room_for_a_large_payload_and_come_back(pool: Pool) -> None:
    for n in range(4):
        assert pool.allocate(f"r{n}", 3 * PAGE) is not None
    for n in range(1, 4):
        pool.release(f"r{n}")
    assert pool.allocate("large", 16 * PAGE) is None, "r0 is still there"
    large = pool.allocate("large", 12 * PAGE)
    assert large is not None
    large[1][:] = b"x" * (12 * PAGE)
    assert pool.bytes_resident == 16 * PAGE
    pool.audit()
    pool.release("large")
    for n in range(1, 4):
        assert pool.allocate(f"r{n}", 3 * PAGE) is not None
        pool.audit()
    assert pool.bytes_resident <= 16 * PAGE


def test_no_memory_is_like_a_full_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    assert pool.allocate("r", 4 * PAGE) is not None
    assert pool.allocate("r", PAGE) is None
    with pytest.raises(ConfigError, match="pool_bytes is 4096: No space"):
        SharedMemoryConnector("no-memory", pool_bytes=4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_that_was_emptied_is_filled_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here because the large segment, for which the small ones made room, then could not be had."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    for n in range(4):
        assert pool.allocate(f"r{n}", 3 * PAGE) is not None
    for n in range(1, 4):
        pool.release(f"r{n}")
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert pool.allocate("large", 12 * PAGE) is None
    assert pool.bytes_resident == 4 * PAGE
    found = pool.allocate("r", 3 * PAGE)
    assert found is not None
    assert (found[0].segment, found[0].page) == (1, 0)
    assert bytes(found[1]) == bytes(3 * PAGE)
    assert pool.bytes_resident == 8 * PAGE


def test_a_withdrawn_slot_is_free_and_withdrawing_again_does_nothing(pool: Pool) -> None:
    found = pool.allocate("r", PAGE)
    assert found is not None
    pool.withdraw(found[0].generation)
    pool.withdraw(found[0].generation)
    assert pool.bytes_in_use == 0


def test_the_audit_sees_a_word_that_is_nobodys(pool: Pool) -> None:
    segment = pool.segment(0)
    assert segment is not None
    assert segment.swap(2, 0, 99 * RECEIVERS)
    with pytest.raises(AssertionError, match="page 2"):
        pool.audit()
    assert segment.swap(2, 99 * RECEIVERS, 0)


def test_many_allocations_are_found_free_a_few_at_a_time() -> None:
    pool = Pool(256 * PAGE, 256 * PAGE)
    segment = pool.segment(0)
    assert segment is not None
    slots = [found[0] for n in range(200) if (found := pool.allocate("r", PAGE)) is not None]
    for slot in slots:  # as a receiver would, once it had taken them
        assert segment.swap(slot.page, slot.generation * RECEIVERS, 0)
    found = pool.allocate("next", PAGE)
    assert found is not None
    assert found[0].page < 200, "released memory is used before fresh"
    pool.release("r")
    assert pool.bytes_in_use == PAGE
    pool.audit()
    pool.close()


def test_a_file_that_is_too_short_is_not_mapped() -> None:
    fd = os.memfd_create("short")
    with pytest.raises(ValueError, match="mmap length"):
        Segment(fd, 4)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_nobody_can_shorten_a_segment() -> None:
    segment = Segment.create(2)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, PAGE)
    segment.close()
    assert not segment.swap(0, 0, 1)


def test_a_segment_is_handed_over_once_and_unknown_ones_never(pool: Pool, address: str) -> None:
    line = Line.open(address)
    assert line is not None
    assert (line.pool_id, line.receiver, line.dropped) == (ID, 1, False)
    segment = line.segment(0)
    assert segment is not None
    assert segment is line.segment(0)
    assert segment.pages == 4
    assert line.segment(1) is None
    found = pool.allocate("r", 10)
    assert found is not None
    found[1][:] = b"0123456789"
    assert segment.view(0, 10) == b"0123456789"
    line.close()


def test_a_receiver_that_talks_nonsense_harms_nobody(pool: Pool, address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0segue-shm-{address}")
        assert stranger.recv(100)[:8] == ID
        stranger.send(b"?!")
        assert stranger.recv(100) == b""
    line = Line.open(address)
    assert line is not None
    assert line.segment(0) is not None
    line.close()


def test_a_receiver_that_leaves_without_reading(pool: Pool, address: str) -> None:
    for packets in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(f"\0segue-shm-{address}")
            for _ in range(packets):
                stranger.send(struct.pack("<BQ", 0, 0))
    line = Line.open(address)
    assert line is not None
    assert line.segment(0) is not None
    line.close()


def test_a_producer_that_says_nothing_is_none() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0segue-shm-silent-{os.getpid()}")
        listener.listen()
        client = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        client.communicate()
    assert Line.open(f"silent-{os.getpid()}") is None


def test_an_answer_that_comes_too_late_is_kept_for_the_next_call() -> None:
    """And the line is not dropped for it: that would free what this side still looks at."""
    segments = [Segment.create(1), Segment.create(2)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0segue-shm-late-{os.getpid()}")
        listener.listen()
        assert Line.open(f"late-{os.getpid()}", patience_s=0.01) is None
        listener.accept()[0].close()
        opened: list[Line | None] = []
        opener = threading.Thread(target=lambda: opened.append(Line.open(f"late-{os.getpid()}", patience_s=240)))
        opener.start()
        producer, _ = listener.accept()
        producer.send(ID + struct.pack("<I", 1))
        opener.join()
        line = opened[0]
        assert line is not None
        line.connection.settimeout(0.01)
        assert line.segment(0) is None
        for index in (0, 0, 1):
            socket.send_fds(producer, [struct.pack("<IQ", index, index + 1)], [segments[index].reopen()])
        assert not line.dropped
        found = line.segment(1)
        assert found is not None
        assert found.pages == 2
        first = line.segment(0)
        assert first is not None
        assert first.pages == 1
        producer.close()
        assert line.dropped
        line.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_nothing(pool: Pool, address: str) -> None:
    script = (
        "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        f"s.connect('\\0segue-shm-{address}'); s.settimeout(240); print(s.recv(100))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "b''\n" or "reset" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_users_producer_is_not_believed() -> None:
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        f"s.bind('\\0segue-shm-squatter-{os.getpid()}'); s.listen(); print('ready', flush=True); c, _ = s.accept();"
        "c.send(b'12345678' + bytes(4)); sys.stdin.read()"
    )
    squatter = subprocess.Popen([sys.executable, "-I", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert squatter.stdin is not None
    assert squatter.stdout is not None
    assert squatter.stdout.readline() == b"ready\n"
    assert Line.open(f"squatter-{os.getpid()}") is None
    squatter.communicate()


def test_a_name_in_use_or_impossible_is_an_error(pool: Pool, address: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="already in use"):
        SharedMemoryConnector(address, pool_bytes=4096)
    for name in ("", "x" * 97):
        with pytest.raises(ConfigError, match="1 to 96 bytes"):
            SharedMemoryConnector(name, pool_bytes=4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_reserved_memory_is_written_in_place(ends: tuple[SharedMemoryConnector, SharedMemoryConnector]) -> None:
    producer, consumer = ends
    like = {"x": torch.empty(200, 300, dtype=torch.bfloat16, device="meta"), "step": 3, "name": b"n"}
    found = producer.reserve("a", "b", "r", like)
    assert found is not None
    views, size, metadata = found
    assert size > 120_000
    views["x"].fill_(2.5)
    del views
    received = take(consumer, "a", "b", "r", metadata)
    assert received is not None
    assert torch.equal(received[0]["x"], torch.full((200, 300), 2.5, dtype=torch.bfloat16))
    assert (received[0]["step"], received[0]["name"]) == (3, b"n")
    consumer.release("r")
    assert producer.reserve("a", "b", "r", {"x": torch.empty(1 << 19, dtype=torch.uint8, device="meta")}) is not None
    assert producer.reserve("a", "b", "r", {"x": torch.empty(1 << 19, dtype=torch.uint8, device="meta")}) is None
    producer.release("r")
    assert producer.bytes_in_use == 0


def test_a_put_that_fails_in_the_middle_frees_its_slot(
    ends: tuple[SharedMemoryConnector, SharedMemoryConnector],
) -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        ends[0].put("a", "b", "r", {"x": torch.empty(100_000, device="meta")})
    assert ends[0].bytes_in_use == 0


def test_damaged_slots_and_metadata(ends: tuple[SharedMemoryConnector, SharedMemoryConnector]) -> None:
    producer, consumer = ends
    metadata = producer.put("a", "b", "r", {"x": torch.zeros(100_000, dtype=torch.uint8)})[2]
    assert metadata is not None
    for change in ({"size": 1 << 30}, {"page": 1 << 40}):
        with pytest.raises(PayloadError, match="outside"):
            take(consumer, "a", "b", "r", {**metadata, **change})
    for change in (
        {"generation": 0},
        {"generation": -1},
        {"segment": -1},
        {"segment": 2**40},
        {"page": -1},
        {"size": -5},
    ):
        with pytest.raises(PayloadError, match="broken metadata"):
            take(consumer, "a", "b", "r", {**metadata, **change})
    for change in (
        {"page": 1},
        {"generation": 9},
        {"segment": 7},
    ):
        assert take(consumer, "a", "b", "r", {**metadata, **change}) is None
    assert take(consumer, "a", "b", "r", {**metadata, "address": "nobody"}) is not None, "the pool is mapped already"
    consumer.release("r")
    assert take(consumer, "a", "b", "r", {**metadata, "pool": b"other", "address": "nobody"}) is None
    found = producer.reserve("a", "b", "r", {"x": torch.zeros(100_000, dtype=torch.uint8)})
    assert found is not None
    with pytest.raises(PayloadError):
        take(consumer, "a", "b", "r", {**found[2], "size": 30})
    assert producer.bytes_in_use == 0, "what cannot be read is not held"


def test_no_descriptors_left_is_a_failed_get(ends: tuple[SharedMemoryConnector, SharedMemoryConnector]) -> None:
    producer, consumer = ends
    metadata = producer.put("a", "b", "r", {"x": torch.zeros(100_000, dtype=torch.uint8)})[2]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open("/dev/null", os.O_RDONLY)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 2, hard))
    try:
        assert take(consumer, "a", "b", "r", metadata) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = take(consumer, "a", "b", "r", metadata)
    assert found is not None

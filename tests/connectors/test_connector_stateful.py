"""Many interleaved requests: each connector against a dict, by Hypothesis."""

from itertools import count
from typing import Any, ClassVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from taking import KEY, take, until

from segue.connectors.create import Network, create
from segue.connectors.device.memfd import MemfdMemory
from segue.connectors.device.memory import DeviceMemory

KIB = 1024
_names = (f"stateful-{number}" for number in count())


class Against(RuleBasedStateMachine):
    """`put` holds what the producer could still take back, `taken` what the consumer holds."""

    kind: ClassVar[str]
    inline_below: ClassVar[int]
    device: ClassVar[DeviceMemory | None] = None
    host: ClassVar[str] = "127.0.0.1"
    extra: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        extra = {"max_bytes": 512 * KIB}
        if self.kind == "shm":
            extra |= {"pool_bytes": 128 * KIB, "shm_threshold_bytes": self.inline_below}
            extra |= {"cuda_pool_bytes": 256 * KIB}
        elif self.kind != "inproc":
            extra |= {"inline_threshold_bytes": self.inline_below}
        extra |= self.extra
        network = Network(self.host, KEY)
        self.producer: Any = create(self.kind, next(_names), extra, self.device, network)
        self.consumer: Any = (
            self.producer if self.kind == "inproc" else create(self.kind, next(_names), extra, self.device, network)
        )
        self.numbers = count(1)
        self.put: dict[int, tuple[str, dict[str, Any], dict[str, Any]]] = {}
        self.taken: dict[int, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
        self.gone: list[tuple[str, dict[str, Any]]] = []

    requests = st.sampled_from(["r0", "r1", "r2"])

    @rule(request=requests, size=st.sampled_from([0, 10, 1000, 5000, 30_000, 60_000, 120_000]))
    def puts(self, request: str, size: int) -> None:
        number = next(self.numbers)
        payload = {"x": torch.full((size,), number, dtype=torch.int32), "n": number}
        ok, _, metadata = self.producer.put("a", "b", request, payload)
        if ok:
            self.put[number] = request, payload, metadata
        else:
            assert metadata is None
            # over a network, the producer may not know yet what was fetched
            assert self.put or self.taken or self.producer.reach == "network", "an empty pool takes anything"

    @precondition(lambda self: self.put)
    @rule(data=st.data())
    def gets(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.put)))
        request, payload, metadata = self.put.pop(number)
        found = take(self.consumer, "a", "b", request, metadata)
        assert found is not None
        self.taken[number] = request, payload, metadata, found[0]

    @precondition(lambda self: self.gone or self.taken)
    @rule(data=st.data())
    def gets_what_is_gone(self, data: st.DataObject) -> None:
        known = self.gone + [(request, metadata) for request, _, metadata, _ in self.taken.values()]
        request, metadata = data.draw(st.sampled_from(known))
        assert take(self.consumer, "a", "b", request, metadata) is None

    @rule(request=requests)
    def producer_releases(self, request: str) -> None:
        self.producer.release(request)
        self.forget(request, put=True, taken=self.producer is self.consumer)

    @rule(request=requests)
    def consumer_releases(self, request: str) -> None:
        self.consumer.release(request)
        self.forget(request, put=self.producer is self.consumer, taken=True)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def consumer_releases_one(self, data: st.DataObject) -> None:
        request, _, metadata, _ = self.taken.pop(data.draw(st.sampled_from(sorted(self.taken))))
        self.consumer.release(request, metadata)
        if metadata["kind"] != "inline":
            self.gone.append((request, metadata))

    def forget(self, request: str, *, put: bool, taken: bool) -> None:
        for number in [n for n in self.put if put and self.put[n][0] == request]:
            if self.put[number][2]["kind"] != "inline":  # that one cannot be called back
                self.gone.append((request, self.put.pop(number)[2]))
        for number in [n for n in self.taken if taken and self.taken[n][0] == request]:
            metadata = self.taken.pop(number)[2]
            if metadata["kind"] != "inline":
                self.gone.append((request, metadata))

    @invariant()
    def what_is_held_is_whole(self) -> None:
        for _, sent, _, received in self.taken.values():
            assert received["n"] == sent["n"]
            assert torch.equal(received["x"], sent["x"])

    @invariant()
    def books_are_right(self) -> None:
        if self.kind == "shm":
            self.producer.audit()

    def teardown(self) -> None:
        for request in ("r0", "r1", "r2"):
            self.consumer.release(request)
            self.producer.release(request)
        until(lambda: self.producer.bytes_in_use == 0)
        self.producer.close()
        self.consumer.close()


class InProcess(Against):
    kind = "inproc"
    inline_below = 0


class SharedMemory(Against):
    kind = "shm"
    inline_below = 2000


class OverTcp(Against):
    kind = "tcp"
    inline_below = 2000


class WithDevice(SharedMemory):
    device = MemfdMemory()


class WithUnreachableDevice(SharedMemory):
    device = MemfdMemory(reachable=False)


TestInProcess = InProcess.TestCase
TestSharedMemory = SharedMemory.TestCase
TestOverTcp = OverTcp.TestCase
TestWithDevice = WithDevice.TestCase
TestWithUnreachableDevice = WithUnreachableDevice.TestCase
TestInProcess.settings = TestSharedMemory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestOverTcp.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestWithDevice.settings = TestWithUnreachableDevice.settings = TestInProcess.settings

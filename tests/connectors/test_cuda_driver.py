"""What is asked of the CUDA driver, and what is made of its answers: against a driver of dictionaries.

Copies, which need a device and torch's streams, are tested on a machine that has them (`test_connector_device`)."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from segue.connectors.device.cuda import GRANULE, CudaError, CudaMemory, Driver, cuda_memory
from segue.kernels.device import DeviceLost, device_lost, out_of_memory
from segue.worker.stage import as_stage_error

OUT_OF_MEMORY = 2
INVALID_CONTEXT = 201
INVALID_VALUE = 1
ILLEGAL_ADDRESS = 700


class FakeDriver:
    """The calls of libcuda that are used, over numbers; `failing` maps a call to the code it returns."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.contexts: list[int] = []
        self.allocated: dict[int, int] = {}
        self.opened: dict[int, bytes] = {}

    def __getitem__(self, name: str) -> Callable[..., int]:
        def called(*arguments: Any) -> int:
            if name in self.failing:
                return self.failing[name]
            if name.startswith(("cuMem", "cuIpc")) and not self.contexts:
                return INVALID_CONTEXT
            getattr(self, name)(*arguments)
            return 0

        return called

    def cuInit(self, flags: ctypes.c_uint) -> None:
        assert flags.value == 0

    def cuDeviceGet(self, out: Any, ordinal: ctypes.c_int) -> None:
        out._obj.value = 100 + ordinal.value

    def cuDevicePrimaryCtxRetain(self, out: Any, device: ctypes.c_int) -> None:
        out._obj.value = 1000 + device.value

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:
        assert context.value is not None
        self.contexts.append(context.value)

    def cuCtxPopCurrent_v2(self, out: Any) -> None:
        out._obj.value = self.contexts.pop()

    def cuMemAlloc_v2(self, out: Any, size: ctypes.c_size_t) -> None:
        out._obj.value = 0x7000_0000_0000 + len(self.allocated) * GRANULE
        self.allocated[out._obj.value] = size.value

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> None:
        del self.allocated[address.value]

    def cuIpcGetMemHandle(self, out: Any, address: ctypes.c_uint64) -> None:
        ctypes.memmove(ctypes.addressof(out._obj), b"\0h" + address.value.to_bytes(8, "little") + bytes(54), 64)

    def cuIpcOpenMemHandle_v2(self, out: Any, handle: ctypes.Structure, flags: ctypes.c_uint) -> None:
        assert flags.value == 1
        out._obj.value = 0x5000 + len(self.opened)
        self.opened[out._obj.value] = bytes(handle)

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> None:
        del self.opened[address.value]

    def cuGetErrorString(self, code: ctypes.c_int, out: Any) -> None:
        out._obj.value = {
            OUT_OF_MEMORY: b"out of memory",
            INVALID_VALUE: b"invalid argument",
            ILLEGAL_ADDRESS: b"an illegal memory access was encountered",
        }.get(code.value)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def memory_of(driver: FakeDriver) -> CudaMemory:
    return CudaMemory(Driver(driver, torch.device("cuda:3")))  # type: ignore[arg-type]


def test_what_is_exported_is_opened_and_both_are_given_back(driver: FakeDriver) -> None:
    memory = memory_of(driver)
    exported = memory.export(GRANULE + 1)
    assert exported is not None
    assert list(driver.allocated.values()) == [2 * GRANULE], "whole granules"
    assert len(exported.handle) == 64
    assert exported.handle.startswith(b"\0h"), "zeros are part of a handle"
    imported = memory.open(exported.handle)
    assert imported is not None
    assert list(driver.opened.values()) == [exported.handle]
    imported.close()
    driver.failing = {"cuIpcCloseMemHandle": INVALID_VALUE}  # its exporter has died
    imported.close()
    exported.close()
    assert not driver.opened
    assert not driver.allocated
    assert not driver.contexts, "every call leaves the thread's context as it was"


def test_owned_is_what_lies_on_the_very_device(driver: FakeDriver) -> None:
    assert not memory_of(driver).owns(torch.zeros(1))
    assert not memory_of(driver).owns(torch.zeros(1, device="meta"))


def test_what_the_driver_refuses_is_none(driver: FakeDriver) -> None:
    memory = memory_of(driver)
    driver.failing = {"cuMemAlloc_v2": OUT_OF_MEMORY}
    assert memory.export(1000) is None
    driver.failing = {"cuIpcGetMemHandle": INVALID_VALUE}
    assert memory.export(1000) is None
    assert not driver.allocated
    driver.failing = {"cuIpcOpenMemHandle_v2": INVALID_CONTEXT}
    assert memory.open(bytes(64)) is None
    assert memory.open(b"of something else") is None
    assert not driver.contexts


def test_what_must_not_fail_says_what_failed(driver: FakeDriver) -> None:
    driver.failing = {"cuInit": 12345}
    with pytest.raises(CudaError, match=r"CUDA error: unknown error \(cuInit returned 12345\)"):
        memory_of(driver)


@pytest.mark.parametrize(
    ("status", "lost", "lacking"),
    [(ILLEGAL_ADDRESS, True, False), (OUT_OF_MEMORY, False, True), (INVALID_VALUE, False, False)],
)
def test_an_error_that_stays_ends_the_process(driver: FakeDriver, status: int, lost: bool, lacking: bool) -> None:
    """By the words that the device errors of other libraries have, too."""
    exported = memory_of(driver).export(1000)
    assert exported is not None
    driver.failing = {"cuMemcpyDtoH_v2": status}
    with pytest.raises(CudaError) as caught:
        exported.read_into(0, memoryview(bytearray(10)))
    assert (device_lost(caught.value), out_of_memory(caught.value)) == (lost, lacking)
    if lost:
        with pytest.raises(DeviceLost):
            as_stage_error(caught.value, "talker")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_no_driver_no_memory() -> None:
    assert cuda_memory(torch.device("cuda:0")) is None

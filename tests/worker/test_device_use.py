"""A worker takes its CUDA device, or says why it cannot; what stands for `torch.cuda` is given."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from segue.messages.errors import ConfigError
from segue.worker.process.device import work_on


@dataclass
class Driver:
    compiled: bool = True
    bad_fork: bool = False
    error: Exception | None = None
    current: list[torch.device] = field(default_factory=list)

    def _is_compiled(self) -> bool:
        return self.compiled

    def _is_in_bad_fork(self) -> bool:
        return self.bad_fork

    def device_count(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        if self.error is not None:
            raise self.error
        self.current.append(device)


GPU = torch.device("cuda:1")


def test_it_becomes_the_current_device() -> None:
    driver = Driver()
    work_on(torch.device("cpu"), driver)
    assert not driver.current
    work_on(GPU, driver)
    assert driver.current == [GPU]


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (Driver(compiled=False), "cuda:1 cannot be used: torch .* is a build for CPUs; install one for CUDA"),
        (Driver(bad_fork=True), "CUDA was initialised before this worker was forked.*libnvidia-ml.so.1"),
        (
            Driver(error=RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nmore")),
            r"too old \(found version 11040\). \(torch .* sees 1 devices with CUDA_VISIBLE_DEVICES='0'\)",
        ),
        (Driver(error=torch.AcceleratorError("CUDA error: invalid device ordinal")), "invalid device ordinal"),
        (Driver(error=AssertionError("\nFound no NVIDIA driver on your system.")), "used: Found no NVIDIA driver"),
    ],
)
def test_why_it_cannot_be_used(driver: Driver, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        work_on(GPU, driver, {"CUDA_VISIBLE_DEVICES": "0"})
    assert caught.value.field == "devices"
    assert "\n" not in caught.value.message


def test_this_build_of_torch_is_asked() -> None:
    """What torch calls its own functions is not public: a version that calls them otherwise must fail here."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert torch.cuda._is_in_bad_fork() is False
    with pytest.raises(ConfigError, match="cuda:1 cannot be used"):
        work_on(GPU)

"""transformers can be imported beside a torchvision whose operators do not load; kernels divide their work."""

import pytest

from segue.kernels.torchvision_shim import ensure_torchvision

ensure_torchvision()


@pytest.fixture(autouse=True)
def _two_threads(two_threads: None) -> None:
    """Of each kernel."""

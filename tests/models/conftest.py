"""The tiny Qwen2.5-Omni checkpoint, made once for all tests of the family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def omni_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from segue.models.qwen2_5_omni import tiny

    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("qwen2_5_omni")
    tiny.make(directory)
    return directory

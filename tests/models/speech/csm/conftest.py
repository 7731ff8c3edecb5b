"""The tiny checkpoint that the tests of this family share."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.models.speech.csm.tiny import presets as tiny


@pytest.fixture(scope="package")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("csm")
    tiny.make(directory)
    return directory

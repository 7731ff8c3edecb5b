"""The tiny checkpoint that the tests of this family share."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.models.speech.pocket_tts.tiny import presets as tiny


@pytest.fixture(scope="package")
def pocket_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pocket-tts")
    tiny.make(directory)
    return directory

"""The hop benchmark runs, between two real processes, and writes what it prints."""

import json
import os
from pathlib import Path

import pytest

from segue.bench import hop

pytestmark = pytest.mark.slow


def test_it_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hop.json"
    before = len(os.listdir("/proc/self/fd"))
    hop.main(["--mib", "2.5", "--rounds", "3", "--json", str(file)])
    assert len(os.listdir("/proc/self/fd")) <= before
    result = json.loads(file.read_text())
    assert result["bytes"] == 2.5 * 2**20
    assert result["rounds"] == 3
    assert result["machine"]["cores"] >= 1
    assert list(result["rows"]) == ["memcpy", "put", "hop", "in place"]
    assert result["rows"]["memcpy"]["copies"] == 1.0
    assert result["rows"]["hop"]["median_ms"] > result["rows"]["put"]["median_ms"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in result["rows"])


@pytest.mark.nightly  # test_verify replaces nothing else either
def test_it_replaces_only_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"architectures": []}')
    with pytest.raises(SystemExit):
        hop.main(["--mib", "1", "--rounds", "2", "--json", str(file)])
    assert f"would replace a file that is no result: {file}" in capsys.readouterr().err
    assert file.read_text() == '{"architectures": []}'
    file.unlink()
    for _ in range(2):
        hop.main(["--mib", "1", "--rounds", "2", "--json", str(file)])
    assert json.loads(file.read_text())["benchmark"] == "hop"


def test_impossible_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hop.main(["--rounds", "1"])
    assert "at least 2 rounds" in capsys.readouterr().err

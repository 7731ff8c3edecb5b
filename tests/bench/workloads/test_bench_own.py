"""`segue bench own` runs on a small checkpoint: Segue and the author's process do the same work, with equal codes."""

from __future__ import annotations

from pathlib import Path

import pytest

import segue.bench.own
from own_model_package import Author, installed
from segue.bench.harness.results import read_values, result_of
from segue.bench.main import main
from segue.bench.own import ONE, SEGUE, SIZES, STATIC, OwnResult, make_preset
from segue.messages.errors import ConfigError
from segue.models.registry import read_config

MOST_LINES = 220
TWO = f"{SEGUE}, 2 workers"


@pytest.mark.nightly
def test_all_sides_make_the_same_frames(tmp_path: Path) -> None:
    (at := tmp_path / "installed").mkdir()
    with installed(at):
        model = Author(tmp_path / "model").directory
        asked = ["--workers", "1,2", "--concurrency", "1,2", "--requests", "2", "--rounds", "1", "--frames", "2"]
        assert main(["own", "--model", str(model), "--out", str(tmp_path), *asked]) == 0
    file = tmp_path / "own.json"
    result = result_of(read_values(file), OwnResult, file)
    sides = [(row.clients, row.side) for row in result.rows]
    assert sides == [(1, SEGUE), (1, TWO), (1, ONE), (2, SEGUE), (2, TWO), (2, ONE), (2, STATIC)]
    assert all(row.equal == 1 for row in result.rows)
    assert all(0 < row.first_frame.p50 <= row.jct.p50 for row in result.rows)
    [*_, together] = [row for row in result.rows if row.side == SEGUE]
    assert together.first_frame.p50 < together.jct.p50, "the first frame comes before the last"
    assert all(row.pss_bytes > 0 for row in result.rows)
    assert STATIC in file.with_suffix(".md").read_text()


def test_it_is_one_short_file() -> None:
    assert len(Path(str(segue.bench.own.__file__)).read_text().splitlines()) <= MOST_LINES


def test_a_missing_example_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "segue.bench.harness.arguments.find_spec", lambda name: None if name == "action_video" else name
    )
    with pytest.raises(ConfigError, match=r"needs action_video: pip install -e examples/own_model"):
        main(["own"])


def test_presets_are_made_once(tmp_path: Path) -> None:
    (at := tmp_path / "installed").mkdir()
    with installed(at):
        made = {size: make_preset(tmp_path, size) for size in SIZES}
        written = {size: (model / "model.safetensors").stat().st_mtime_ns for size, model in made.items()}
        assert {
            size: (make_preset(tmp_path, size) / "model.safetensors").stat().st_mtime_ns for size in SIZES
        } == written
    trunk = read_config(made["medium"])["trunk"]
    assert (trunk["hidden_size"], trunk["num_hidden_layers"], trunk["num_key_value_heads"]) == (256, 8, 4)

"""`segue verify`, as somebody with a checkpoint of his own runs it: a table, a status, and a file for a bug report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from server_process import segue, tiny


def verify(*arguments: str, expected: int) -> tuple[str, dict[str, Any]]:
    """(what was printed, the JSON)."""
    file = arguments[-1]
    done = segue("verify", *arguments[:-1], "--json", file)
    assert done.returncode == expected, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, json.loads(Path(file).read_text())


def verdicts(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    """By stage and request."""
    return {(row["stage"], row["question"]): row["verdict"] for row in report["rows"]}


@pytest.mark.nightly
def test_speech(tiny_dir: Path, tmp_path: Path) -> None:
    """Tokens, codes and samples of everything that the model takes; neither a path nor a home is told."""
    shown, report = verify(str(tiny_dir), "--quick", str(tmp_path / "report.json"), expected=0)
    assert "about" in shown.split("minutes")[0]
    found = verdicts(report)
    for request in ("short text", "long text", "image", "audio", "video"):
        for stage in ("input", "thinker", "talker", "vocoder"):
            assert found[stage, request] == "equal"
    assert report["versions"]["transformers"]
    text = (tmp_path / "report.json").read_text()
    assert str(tiny_dir) not in text
    assert str(Path.home()) + "/" not in text


def another(model: Path, directory: Path) -> Path:
    """A checkpoint in which one value differs."""
    shutil.copytree(model, directory)
    name = "model.layers.0.mlp.down_proj.weight"
    file = directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name][1, 1] += 2.0
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def against(model: Path, other: Path, file: Path, *, expected: int) -> tuple[str, dict[str, Any]]:
    return verify(str(model), "--against", str(other), "--quick", "--dtype", "float32", str(file), expected=expected)


def test_a_changed_weight(tmp_path: Path) -> None:
    """The library reads another checkpoint than Segue."""
    model = tiny(tmp_path / "model", "qwen3")
    shown, report = against(model, another(model, tmp_path / "other"), tmp_path / "changed.json", expected=1)
    assert "DIFFERENT: Segue does not compute what the library computes" in shown
    found = verdicts(report)
    assert found["input", "long text"] == "equal"
    assert found["llm", "long text"] == "DIFFERENT"


@pytest.mark.nightly
def test_a_library_that_cannot_load(tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", "qwen3")
    other = another(model, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({**json.loads((other / "config.json").read_text()), "vocab_size": 7}))
    shown, _ = against(model, other, tmp_path / "broken.json", expected=2)
    assert "FAILED: long text (float32): the library: it cannot load the checkpoint" in shown
    assert "NOT VERIFIED" in shown
    refused = segue("verify", str(tmp_path / "none"))
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_report_replaces_nothing_that_is_read(tmp_path: Path) -> None:
    """No file of the checkpoint, also where its files are links, as in the cache of a hub; and no deployment."""
    model = tiny(tmp_path / "model", "qwen3")
    config, blob = tmp_path / "deployment.yaml", tmp_path / "blob"
    config.write_text("stages: {llm: {max_batch: 2}}\n")
    shutil.copy(model / "config.json", blob)
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(blob)
    before = {path: path.read_bytes() for path in [*model.iterdir(), config]}
    for file, says in [
        (model / "config.json", "in the directory of the checkpoint"),
        (model / "report.json", "in the directory of the checkpoint"),
        (blob, "in the directory of the checkpoint"),
        (config, "would replace the file of --config"),
        (model, "is a directory"),
        (tmp_path / "none" / "report.json", "does not exist"),
    ]:
        done = segue("verify", str(model), "--config", str(config), "--json", str(file))
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr
    assert {path: path.read_bytes() for path in [*model.iterdir(), config]} == before


@pytest.mark.nightly
@pytest.mark.parametrize(
    "preset",
    ["qwen3", "qwen2.5-vl", "qwen2-audio", "qwen-image", "sdxl", "wan", "whisper", "bert", "bert-classifier", "csm"],
)
def test_of_every_kind(preset: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", preset)
    _, report = verify(str(model), str(tmp_path / "report.json"), expected=0)
    assert {row["verdict"] for row in report["rows"]} <= {"equal", "skipped"}

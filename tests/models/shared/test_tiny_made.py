"""Directories that `segue tiny` and the benchmarks fill: nothing in them is replaced but what they wrote themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.bench.omni.checkpoint import make_preset, make_shape
from segue.cli.main import main
from segue.messages.errors import ConfigError
from segue.models.shared.diffusion.shapes import write_shape as write_image_shape
from segue.models.shared.tiny.made import filled
from segue.models.text.causal_lm.shapes import write_shape as write_text_shape


def fill(directory: Path, **files: str) -> None:
    with filled(directory) as made:
        for name, text in files.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_text(text)


def interrupted(directory: Path) -> None:
    with filled(directory) as new:
        (new / "config.json").write_text("2")
        raise RuntimeError("interrupted")


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def made(directory: Path) -> dict[str, str]:
    return {name: data.decode() for name, data in content(directory).items() if not name.startswith(".segue-tiny")}


def test_its_own_files_are_replaced(tmp_path: Path) -> None:
    """Those of another preset leave nothing behind; a file that somebody removed is no obstacle."""
    tmp_path.joinpath("empty").mkdir()
    fill(tmp_path, **{"config.json": "1", "vae/config.json": "1", "vae/deep/weights": "1", "gone": "1"})
    (tmp_path / "gone").unlink()
    fill(tmp_path, **{"config.json": "2", "unet/config.json": "2"})
    assert made(tmp_path) == {"config.json": "2", "unet/config.json": "2"}
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"empty", "unet"}


@pytest.mark.parametrize("what", ["added", "deep", "changed", "linked", "no record", "another's record"])
def test_files_of_others_are_refused(what: str, tmp_path: Path) -> None:
    directory, record = tmp_path / "model", tmp_path / "model" / ".segue-tiny.json"
    fill(directory, **{"config.json": "1", "model.safetensors": "1"})
    match what:
        case "added":
            (directory / "notes.txt").write_text("mine")
        case "deep":
            (directory / "checkpoint-10").mkdir()
            (directory / "checkpoint-10" / "model.safetensors").write_text("mine")
        case "changed":
            (directory / "model.safetensors").write_text("2")
        case "linked":
            (tmp_path / "elsewhere").mkdir()
            (directory / "data").symlink_to(tmp_path / "elsewhere")
        case "no record":
            record.unlink()
        case "another's record":
            record.write_text("[]")
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="did not write"):
        fill(directory, **{"config.json": "2"})
    assert content(tmp_path) == before


def test_a_file_that_comes_meanwhile_is_kept(tmp_path: Path) -> None:
    fill(tmp_path, **{"config.json": "1"})
    unfinished = filled(tmp_path)
    (unfinished.__enter__() / "config.json").write_text("2")
    (tmp_path / "mine.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'mine\.safetensors'"):
        unfinished.__exit__(None, None, None)
    assert made(tmp_path) == {"config.json": "1", "mine.safetensors": "mine"}


def test_what_is_not_finished_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path, **{"config.json": "1"})
    with pytest.raises(RuntimeError, match="interrupted"):
        interrupted(tmp_path)
    assert made(tmp_path) == {"config.json": "1"}
    (tmp_path / ".segue-tiny-killed").mkdir()
    (tmp_path / ".segue-tiny-killed" / "config.json").write_text("half")
    fill(tmp_path, **{"config.json": "3"})
    assert made(tmp_path) == {"config.json": "3"}
    assert not list(tmp_path.glob(".segue-tiny-*"))


@pytest.mark.parametrize("moved", range(4))
def test_interrupted_while_files_move_it_can_be_filled_again(
    moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, a="1", b="1")
    left, replace = [moved], Path.replace

    def stopped(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            fill(tmp_path, b="2", c="2", d="2")
    fill(tmp_path, b="3")
    assert made(tmp_path) == {"b": "3"}


def test_a_checkpoint_of_the_users_is_refused_by_every_command_that_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is computed; also where a file is missing by which a preset is known to be complete."""
    target = tmp_path / "qwen2.5-omni-tiny"
    names = ("qwen2.5-omni-tiny", "qwen2.5-omni-shape-7b", "shape-tiny", "shape-tiny-image", "qwen-image-tiny")
    for name in (*names, "qwen-image-tiny-bf16", "qwen2-tiny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00002.safetensors").write_bytes(b"trained for weeks")
    before = content(tmp_path)
    for more in ([], ["--size", "small", "--seed", "3"]):
        assert main(["tiny", "qwen2.5-omni", str(target), *more]) == 2
        assert f"{str(target)!r} holds 'model-00001-of-00002.safetensors'" in capsys.readouterr().err
    for make in (
        lambda: make_preset(tmp_path, "tiny"),
        lambda: make_shape(tmp_path, "7b"),
        lambda: write_text_shape(tmp_path, "tiny"),
        lambda: write_image_shape(tmp_path, "tiny-image"),
    ):
        with pytest.raises(ConfigError, match="did not write"):
            make()
    cached = ["--cache", str(tmp_path), "--out", str(tmp_path / "results")]
    for bench in (
        ["text", "--preset", "qwen2-tiny"],
        ["diffusion", "--preset-size", "tiny"],
        ["diffusion", "--preset-size", "tiny", "--kept", "bfloat16", "--losses"],
    ):
        assert main(["bench", *bench, *cached]) == 2
        assert "did not write" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    assert content(tmp_path) == before

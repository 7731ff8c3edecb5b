"""`segue generate` of models that make images or video."""

from __future__ import annotations

import os
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from server_process import segue, tiny

from segue.cli.main import main, parser


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def adapter(model: Path, to: Path) -> None:
    """For the layer that reads the latents, and it shows."""
    [file] = (model / "transformer").glob("*.safetensors")
    with safe_open(file, framework="pt") as weights:
        rows, columns = weights.get_slice("img_in.weight").get_shape()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "transformer.img_in.lora_A.weight": torch.randn(4, columns, generator=generator) / 8,
        "transformer.img_in.lora_B.weight": torch.randn(rows, 4, generator=generator) / 2,
    }
    save_file(tensors, to)


def test_images_are_written(qwen_image_dir: Path, tmp_path: Path) -> None:
    """One file of the name that was given; several with numbers, of which the first is the one alone."""
    asked = ["generate", str(qwen_image_dir), "a red bicycle", "--size", "64x96", "--steps", "3", "--seed", "3"]
    more = ["--true-cfg", "2", "--negative", "grey", "--parameter", "max_sequence_length=64"]
    one = segue(*asked, *more, "-o", str(tmp_path / "out.png"))
    assert one.returncode == 0, one.stderr
    assert one.stdout.split() == [str(tmp_path / "out.png")]
    two = segue(*asked, *more, "-n", "2", "-o", str(tmp_path / "two.webp"))
    assert two.stdout.split() == [str(tmp_path / f"two-{index}.webp") for index in (0, 1)]
    alone, first, second = (read(tmp_path / name) for name in ("out.png", "two-0.webp", "two-1.webp"))
    assert alone.shape == first.shape == (96, 64, 3)
    assert np.abs(alone - first).mean() < np.abs(alone - second).mean() / 2, "webp is lossy"


def test_the_numbered_name_of_an_output_may_be_that_of_an_input(
    qwen_image_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "cat-1.png")
    given = ["--image", str(tmp_path / "cat-1.png"), "-n", "2", "-o", str(tmp_path / "cat.png")]
    assert main(["generate", str(qwen_image_dir), "a cat", *given]) == 2
    assert "cat-1.png', which the request reads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --output with one of .png, .webp, .jpg, .jpeg"),
        (["-o", "x.xyz"], "not a file that this model writes; use one of .png"),
        (["-o", "x.wav"], "not a file that this model writes; use one of .png"),
        (["-o", "x.mp4"], "not a file that this model writes; use one of .png"),
        (["-o", "no/x.png"], "there is no directory 'no'"),
        (["-o", "x.png", "--size", "65x64"], "--size 65x64: width is 65; this model needs a multiple of 16"),
        (["-o", "x.png", "--size", "65x104"], "--size 64x96 would work"),
        (["-o", "x.png", "--size", "4096x4112"], "at most 4194304 (max_output_pixels)"),
        (["-o", "x.png", "--steps", "0"], "--steps: num_inference_steps is 0; it must be at least 1"),
        (["-o", "x.png", "--lora", "nope:0.5"], "--lora 'nope:0.5' is neither an adapter of the deployment (none)"),
        (["-o", "x.png", "--lora", "no/x"], "there is no such file or directory"),
        (["-o", "x.png", "--mask", "m.png"], "give --image, too"),
        (["-o", "x.png", "--image", "x.png", "--mask", "m.png"], "'m.png' is not a readable image"),
    ],
)
def test_refused_before_anything_starts(
    qwen_image_dir: Path, arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(qwen_image_dir), "hi", *arguments]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert says in said.err
    assert len(said.err.splitlines()) == 1, "no bar of a stage that starts"


def test_a_place_that_is_taken_by_a_directory(qwen_image_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    done = segue("generate", str(qwen_image_dir), "hi", "-o", str(tmp_path / "taken.png"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "it is a directory" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_to(qwen_image_dir: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    done = segue("generate", str(qwen_image_dir), "hi", "-o", str(tmp_path / "out.png"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no permission to write" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--size", "64"], "is not a size"),
        (["--size", "0x64"], "is not a size"),
        (["--parameter", "x"], "is not NAME=VALUE"),
    ],
)
def test_arguments_are_read(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["generate", "nowhere", "hi", *arguments])
    assert says in capsys.readouterr().err


@pytest.mark.nightly
def test_a_video_is_written(tmp_path: Path) -> None:
    model = tiny(tmp_path / "wan", "wan")
    to = tmp_path / "out.mp4"
    asked = ["--size", "64x32", "--steps", "2", "--seconds", "0.5", "--guidance", "2", "--fps", "8", "-o", str(to)]
    done = segue("generate", str(model), "a small boat", *asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(to)]
    with av.open(str(to)) as file:
        shown = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        assert file.streams.video[0].average_rate == 8
    assert np.stack(shown).shape == (5, 32, 64, 3)


@pytest.mark.nightly
def test_a_part_of_an_image_is_made_anew_with_an_adapter(qwen_image_dir: Path, tmp_path: Path) -> None:
    """A mask that is white, and one that is transparent, open the same part; the adapter changes what is made there."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "given.png")
    white = np.zeros((64, 64), dtype=np.uint8)
    white[:, 32:] = 255
    Image.fromarray(white).save(tmp_path / "white.png")
    Image.fromarray(np.dstack([noise, 255 - white])).save(tmp_path / "clear.png")
    adapter(qwen_image_dir, tmp_path / "style.safetensors")
    asked = ["generate", str(qwen_image_dir), "a wheel", "--size", "64x64", "--steps", "2", "--seed", "3"]
    asked += ["--image", str(tmp_path / "given.png"), "--step-cache", "taylorseer"]
    made = {}
    for name, more in (
        ("white", ["--mask", str(tmp_path / "white.png")]),
        ("clear", ["--mask", str(tmp_path / "clear.png")]),
        ("styled", ["--mask", str(tmp_path / "white.png"), "--lora", str(tmp_path / "style.safetensors")]),
        ("whole", []),
    ):
        done = segue(*asked, *more, "-o", str(tmp_path / f"{name}-out.png"))
        assert done.returncode == 0, done.stderr
        made[name] = read(tmp_path / f"{name}-out.png")
    assert np.abs(made["white"] - made["clear"]).max() <= 1, "rounding alone"
    assert np.abs(made["white"] - made["styled"]).mean() > 1
    assert np.abs(made["white"] - made["whole"]).mean() > 1

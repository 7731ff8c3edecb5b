"""`segue generate`: run one request, print its text and write its media to files."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.cli.model import model_settings
from segue.messages.diffusion import SIZE, STEP_CACHES
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, SegueError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from segue.orchestrator.omni.async_omni import AsyncOmni
    from segue.orchestrator.omni.outputs import RequestOutput

_IMAGES = {".png": "png", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}
"""File extension → format."""
_VIDEO = ".mp4"
_PARAMETERS = {
    "negative": "negative_prompt",
    "steps": "num_inference_steps",
    "guidance": "guidance_scale",
    "true_cfg": "true_cfg_scale",
    "scheduler": "scheduler",
    "step_cache": "step_cache",
    "number": "num_images_per_prompt",
    "frames": "num_frames",
    "seconds": "seconds",
    "fps": "fps",
}
"""Option → the pipelines' argument name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments except the model."""
    parser.add_argument(
        "prompt",
        nargs="?",
        help="the user message; for a model without chat template, the text to continue; not for a model that "
        "transcribes speech",
    )
    for kind in ("image", "audio", "video"):
        parser.add_argument(
            f"--{kind}",
            type=Path,
            action="append",
            default=[],
            metavar="FILE",
            help="file to send with the prompt; may be given repeatedly",
        )
    parser.add_argument(
        "--tensor",
        type=_file_of,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a .npy file to send as one of the named tensors that the model takes; may be given repeatedly",
    )
    parser.add_argument("--voice", help="voice of the speech; default: the model's first")
    parser.add_argument(
        "--lora",
        metavar="NAME|PATH",
        help="a LoRA adapter: one of the deployment's by name, or the directory or file of another (or NAME=PATH)",
    )
    parser.add_argument("--seed", type=int, help="seed of all random numbers; default: a new one each time")
    parser.add_argument("--max-tokens", type=int, help="length of the text; default: the model's, or up to its context")
    parser.add_argument("--temperature", type=float, help="of sampling; 0: greedy decoding; default: the model's")
    parser.add_argument(
        "--option",
        type=_parameter,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the model family, e.g. language=de for Whisper; may be given repeatedly",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="write speech (.wav, .mp3, .flac, .opus), images (.png, .webp, .jpg) or video (.mp4) to this file; "
        "several get numbers",
    )
    images = parser.add_argument_group("images and video")
    images.add_argument("--size", type=_size, metavar="WxH", help="pixels, e.g. 1024x768; default: the model's")
    images.add_argument(
        "--mask",
        type=Path,
        metavar="FILE",
        help="with --image: regenerate the area that is white in this mask, or fully transparent if the mask has "
        "transparency",
    )
    images.add_argument("--steps", type=int, help="denoising steps; default, as for the options below: the model's")
    images.add_argument("--negative", metavar="TEXT", help="negative prompt")
    images.add_argument("--guidance", type=float, help="guidance_scale of the model's pipeline")
    images.add_argument("--true-cfg", type=float, help="true_cfg_scale of the model's pipeline")
    images.add_argument("--scheduler", help="class name of one of diffusers' schedulers")
    images.add_argument(
        "--step-cache", choices=STEP_CACHES, help="approximate some network calls by earlier ones: faster, but lossy"
    )
    images.add_argument("-n", "--number", type=int, help="how many images or videos; default: 1")
    images.add_argument("--frames", type=int, help="frames of a video")
    images.add_argument("--seconds", type=float, help="length of a video, instead of --frames")
    images.add_argument("--fps", type=float, help="frames per second of the written video")
    images.add_argument(
        "--parameter",
        type=_parameter,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the model's pipeline; may be given repeatedly",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises `ConfigError` for an unusable output before any start."""
    from segue.messages.sampling import SamplingParams
    from segue.orchestrator.omni.blocking import Omni

    output: Path | None = arguments.output
    gives = _gives(arguments.model)
    modality = _modality(gives, output)
    if output is not None:
        _check_no_input(output, arguments)
    asks = {"voice": arguments.voice} if modality in (None, "audio") else {}
    sampling = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    settings = {
        "modalities": None if modality is None else _asked(modality, gives),
        "seed": arguments.seed,
        "options": dict(arguments.option) or None,
        "sampling": sampling if sampling != SamplingParams() else None,
        **asks,
        **_parameters(arguments),
    }
    prompt = _prompt(arguments)
    name, adapters = _adapter(arguments.lora)
    if name is not None:
        settings["adapter"] = name

    def check(omni: AsyncOmni) -> None:
        try:
            omni.check(omni.request(prompt, **settings))
        except (InvalidRequest, NotFound) as error:
            raise _as_written(error, arguments, omni) from error

    with Omni(**model_settings(arguments), lora=adapters, before_start=check) as omni:
        [out] = omni.generate(prompt, **settings)
    if modality is None or "text" in settings["modalities"]:
        print(out.text)
    if output is not None:
        for path in _write(output, out):
            if modality in ("image", "video"):
                print(path)
    return 0


def _prompt(arguments: argparse.Namespace) -> Any:
    parts = [
        {"type": kind, kind: path}
        for kind, paths in (("image", arguments.image), ("audio", arguments.audio), ("video", arguments.video))
        for path in paths
    ]
    parts += [{"type": "tensor", "name": name, "data": _array(path)} for name, path in arguments.tensor]
    text = [] if arguments.prompt is None else [{"type": "text", "text": arguments.prompt}]
    if not parts and not text:
        raise ConfigError("give a prompt, or a recording with --audio", field="prompt")
    return {"messages": [{"role": "user", "content": [*parts, *text]}]} if parts else arguments.prompt


def _file_of(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE")
    return name, Path(path)


def _array(path: Path) -> np.ndarray:
    """Read an array. Raises `ConfigError`."""
    import numpy

    try:
        with path.open("rb") as file:
            array: np.ndarray = numpy.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tensor {str(path)!r} is not a readable .npy file: {error}", field="tensor") from error
    return array


def _parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options for images and video under the pipelines' argument names."""
    given = vars(arguments)
    parameters = {name: given[option] for option, name in _PARAMETERS.items() if given[option] is not None}
    if arguments.size is not None:
        parameters |= {"width": arguments.size[0], "height": arguments.size[1]}
    if arguments.mask is not None:
        if not arguments.image:
            raise ConfigError("--mask selects the area of an image to regenerate; give --image, too", field="mask")
        parameters["mask_image"] = _mask(arguments.mask)
    return {**parameters, **dict(arguments.parameter)}


def _mask(path: Path) -> Image.Image | Path:
    """Return a mask that is white where the image is regenerated: the file, or its fully transparent area. Raises
    `ConfigError`."""
    from PIL import Image

    try:
        with Image.open(path) as mask:
            if not mask.has_transparency_data:
                return path
            return mask.convert("RGBA").getchannel("A").point(lambda alpha: 0 if alpha else 255)
    except OSError as error:
        raise ConfigError(f"--mask {str(path)!r} is not a readable image: {error}", field="mask") from error


def _adapter(lora: str | None) -> tuple[str | None, dict[str, str] | None]:
    """Return the adapter's name, and the adapters to load in addition to the deployment's. Raises `ConfigError`."""
    if lora is None:
        return None, None
    name, equals, path = lora.partition("=")
    if equals and name and path:
        return name, {name: path}
    if Path(lora).expanduser().exists():
        return Path(lora).stem or "lora", {Path(lora).stem or "lora": lora}
    if os.sep in lora:
        raise ConfigError(f"--lora {lora!r}: there is no such file or directory", field="lora")
    return lora, None


def _as_written(error: SegueError, arguments: argparse.Namespace, omni: AsyncOmni) -> ConfigError:
    """Turn the refusal of a request into an error that names the command's option and a valid value."""
    said = error.message
    if error.field == "adapter":
        known = ", ".join(omni.card.adapters) or "none"
        return ConfigError(
            f"--lora {arguments.lora!r} is neither an adapter of the deployment ({known}) nor a file or directory; an "
            "adapter's scale is always that of its files",
            field="lora",
        )
    if error.field in ("height", "width") and arguments.size is not None:
        width, height = arguments.size
        if omni.sizes is not None:
            fits = omni.sizes.nearest(height, width, omni.plan.limits.max_output_pixels)
            said = f"{said}; --size {fits[1]}x{fits[0]} would work"
        return ConfigError(f"--size {width}x{height}: {said}", field="size")
    options = {name: option for option, name in _PARAMETERS.items() if vars(arguments)[option] is not None}
    option = options.get(error.field or "")
    return ConfigError(f"--{option.replace('_', '-')}: {said}" if option else said, field=error.field)


def _gives(model: str) -> frozenset[str]:
    """Return the modalities that a model gives. Raises `ConfigError`."""
    from segue.models.model_graph import read_models

    return read_models(model).graph.gives


def _asked(modality: str, gives: frozenset[str]) -> list[str]:
    """Return the modalities to ask for, to get a file of one: with audio, the text that is spoken, if there is one."""
    return ["text", "audio"] if modality == "audio" and "text" in gives else [modality]


def _modality(gives: frozenset[str], output: Path | None) -> str | None:
    """Return the modality of the output file's extension; None: text. Raises `ConfigError` if the model lacks it."""
    from segue.messages.formats import AUDIO_FORMATS, check_audio_format

    endings = {
        **dict.fromkeys(_IMAGES, "image"),
        _VIDEO: "video",
        **{f".{name}": "audio" for name in AUDIO_FORMATS},
    }
    writes = ", ".join(ending for ending, modality in endings.items() if modality in gives)
    if output is None:
        if "text" in gives or gives.isdisjoint(("image", "video", "audio")):
            return None
        raise ConfigError(f"this model's output needs a file: give --output with one of {writes}", field="output")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {str(output)!r}: there is no directory {str(output.parent)!r}", field="output")
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        why = "it is a directory" if output.is_dir() else "no permission to write"
        raise ConfigError(f"--output {str(output)!r} cannot be written: {why}", field="output")
    ending = output.suffix.lower()
    if "audio" in gives and ending not in endings:
        check_audio_format(ending.removeprefix(".") or "wav", "--output")
        return "audio"
    if endings.get(ending) not in gives:
        right = f"use one of {writes}" if writes else "it gives only text, and needs no --output"
        raise ConfigError(f"--output {str(output)!r} is not a file that this model writes; {right}", field="output")
    return endings[ending]


def _check_no_input(output: Path, arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` if the output would replace a file that the request reads."""
    adapter = [] if arguments.lora is None else [Path(arguments.lora.rpartition("=")[2]).expanduser()]
    tensors = [path for _, path in arguments.tensor]
    read = [*arguments.image, *arguments.audio, *arguments.video, *tensors, *filter(None, [arguments.mask]), *adapter]
    for path in _paths(output, arguments.number or 1):
        for given in read:
            if path.exists() and given.exists() and path.samefile(given):
                raise ConfigError(
                    f"--output {str(output)!r} would replace {str(given)!r}, which the request reads; name another",
                    field="output",
                )


def _paths(path: Path, count: int) -> list[Path]:
    """Return the paths of `count` outputs: one has the name itself, several get numbers."""
    return [path.with_stem(f"{path.stem}-{index}") for index in range(count)] if count > 1 else [path]


def _write(path: Path, output: RequestOutput) -> list[Path]:
    """Write the outputs and return their paths. Raises `ConfigError`."""
    writers = _writers(path.suffix.lower(), output)
    paths = _paths(path, len(writers))
    for to, write in zip(paths, writers, strict=False):
        try:
            write(to)
        except OSError as error:
            raise ConfigError(f"--output {str(to)!r} cannot be written: {error.strerror}", field="output") from error
    return paths


def _writers(ending: str, output: RequestOutput) -> list[Callable[[Path], object]]:
    """Return one function per output, which writes it."""
    from segue.media.encode import encode_audio, encode_image

    def writer(image: Image.Image) -> Callable[[Path], object]:
        data = encode_image(image.tobytes(), image.height, image.width, _IMAGES[ending])
        return lambda path: path.write_bytes(data)

    if ending in _IMAGES:
        return [writer(image) for image in output.images]
    if ending == _VIDEO:
        return [video.save for video in output.videos]
    if output.audio is None:
        return []
    speech = encode_audio(output.audio.samples, output.audio.sample_rate, ending.removeprefix(".") or "wav")
    return [lambda path: path.write_bytes(speech)]


def _size(text: str) -> tuple[int, int]:
    match = SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 1024x768 (width, height)")
    return int(match[1]), int(match[2])


def _parameter(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; a value that is not JSON is text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

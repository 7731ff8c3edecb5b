"""`segue generate`: one request, and files of what comes out."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segue.cli_model import model_settings
from segue.messages.diffusion import STEP_CACHES
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, SegueError

if TYPE_CHECKING:
    from PIL import Image

    from segue.orchestrator.omni import AsyncOmni
    from segue.orchestrator.outputs import RequestOutput

_PICTURES = {".png": "png", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}
"""Ending → format."""
_VIDEO = ".mp4"
_SIZE = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})")
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
"""Option → what pipelines call it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything but the model."""
    parser.add_argument(
        "prompt",
        nargs="?",
        help="the user message; for a model without chat template, the text to go on with; not for one that writes "
        "down what it hears",
    )
    for kind in ("image", "audio", "video"):
        parser.add_argument(
            f"--{kind}",
            type=Path,
            action="append",
            default=[],
            metavar="FILE",
            help="goes with the prompt; may be given repeatedly",
        )
    parser.add_argument("--voice", help="of the speech; default: the model's first")
    parser.add_argument(
        "--lora",
        metavar="NAME|PATH",
        help="a LoRA adapter: one of the deployment's by name, or the directory or file of another (or NAME=PATH)",
    )
    parser.add_argument("--seed", type=int, help="of all that is drawn; default: another one each time")
    parser.add_argument("--max-tokens", type=int, help="of the text; default: the model's, or up to its context")
    parser.add_argument("--temperature", type=float, help="of the text, 0: always the likeliest; default: the model's")
    parser.add_argument(
        "--option",
        type=_parameter,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one of the model family's own, e.g. language=de for Whisper; may be given repeatedly",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="write speech (.wav, .mp3, .flac, .opus), pictures (.png, .webp, .jpg) or video (.mp4) here; several get "
        "numbers",
    )
    pictures = parser.add_argument_group("pictures and video")
    pictures.add_argument("--size", type=_size, metavar="WxH", help="pixels, e.g. 1024x768; default: the model's")
    pictures.add_argument(
        "--mask",
        type=Path,
        metavar="FILE",
        help="with --image: what is made anew of it, white in this picture, or fully transparent where it has a "
        "transparency",
    )
    pictures.add_argument("--steps", type=int, help="denoising steps; default, as of what follows: the model's")
    pictures.add_argument("--negative", metavar="TEXT", help="what should not be there")
    pictures.add_argument("--guidance", type=float, help="guidance_scale of the model's pipeline")
    pictures.add_argument("--true-cfg", type=float, help="true_cfg_scale of the model's pipeline")
    pictures.add_argument("--scheduler", help="class name of one of diffusers' schedulers")
    pictures.add_argument(
        "--step-cache", choices=STEP_CACHES, help="guess some of the network's calls from earlier ones: faster, a loss"
    )
    pictures.add_argument("-n", "--number", type=int, help="how many pictures or videos; default: 1")
    pictures.add_argument("--frames", type=int, help="of a video")
    pictures.add_argument("--seconds", type=float, help="of a video, instead of --frames")
    pictures.add_argument("--fps", type=float, help="of the video that is written")
    pictures.add_argument(
        "--parameter",
        type=_parameter,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the model's pipeline; may be given repeatedly",
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status. Raises `ConfigError` for what cannot be written before anything is started."""
    from segue.messages.sampling import SamplingParams
    from segue.orchestrator.blocking import Omni

    output: Path | None = arguments.output
    modality = _modality(arguments.model, output)
    asks = {"voice": arguments.voice} if modality in (None, "audio") else {}
    sampling = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    settings = {
        "modalities": None if modality is None else ["text", "audio"] if modality == "audio" else [modality],
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
    if modality in (None, "audio"):
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
    text = [] if arguments.prompt is None else [{"type": "text", "text": arguments.prompt}]
    if not parts and not text:
        raise ConfigError("give a prompt, or a recording with --audio", field="prompt")
    return {"messages": [{"role": "user", "content": [*parts, *text]}]} if parts else arguments.prompt


def _parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was said of pictures and video, by the pipelines' names."""
    given = vars(arguments)
    parameters = {name: given[option] for option, name in _PARAMETERS.items() if given[option] is not None}
    if arguments.size is not None:
        parameters |= {"width": arguments.size[0], "height": arguments.size[1]}
    if arguments.mask is not None:
        if not arguments.image:
            raise ConfigError("--mask says what is made anew of a picture; there is no --image", field="mask")
        parameters["mask_image"] = _mask(arguments.mask)
    return {**parameters, **dict(arguments.parameter)}


def _mask(path: Path) -> Image.Image | Path:
    """White where the picture is made anew: the file itself, or what is fully transparent in it. Raises
    `ConfigError`."""
    from PIL import Image

    try:
        with Image.open(path) as mask:
            if not mask.has_transparency_data:
                return path
            return mask.convert("RGBA").getchannel("A").point(lambda alpha: 0 if alpha else 255)
    except OSError as error:
        raise ConfigError(f"--mask {str(path)!r} is no picture that can be read: {error}", field="mask") from error


def _adapter(lora: str | None) -> tuple[str | None, dict[str, str] | None]:
    """The adapter's name in the request, and what is to be loaded besides the deployment's. Raises `ConfigError`."""
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
    """What a request is refused for, by the option that says it, with what would do."""
    said = error.message
    if error.field == "adapter":
        known = ", ".join(omni.card.adapters) or "none"
        return ConfigError(
            f"--lora {arguments.lora!r} is no adapter of the deployment ({known}), nor a file or directory; an adapter "
            "has the scale that its files say, and no other",
            field="lora",
        )
    if error.field in ("height", "width") and arguments.size is not None:
        width, height = arguments.size
        if omni.sizes is not None:
            fits = omni.sizes.nearest(height, width, omni.plan.limits.max_output_pixels)
            said = f"{said}; --size {fits[1]}x{fits[0]} would do"
        return ConfigError(f"--size {width}x{height}: {said}", field="size")
    options = {name: option for option, name in _PARAMETERS.items() if vars(arguments)[option] is not None}
    option = options.get(error.field or "")
    return ConfigError(f"--{option.replace('_', '-')}: {said}" if option else said, field=error.field)


def _modality(model: str, output: Path | None) -> str | None:
    """What the ending of the file asks for; None: text. Raises `ConfigError` for what the model does not give."""
    from segue.media.encode import AUDIO_FORMATS, check_audio_format
    from segue.models.located import located
    from segue.models.registry import family_of, read_config

    model_dir, _ = located(model)
    config = read_config(model_dir)
    gives = family_of(config, model_dir).graph(config).gives
    endings = {
        **dict.fromkeys(_PICTURES, "image"),
        _VIDEO: "video",
        **{f".{name}": "audio" for name in AUDIO_FORMATS},
    }
    writes = ", ".join(ending for ending, modality in endings.items() if modality in gives)
    if output is None:
        if "text" in gives or gives.isdisjoint(("image", "video")):
            return None
        raise ConfigError(f"say where what this model makes is to be written, with --output: {writes}", field="output")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {str(output)!r}: there is no directory {str(output.parent)!r}", field="output")
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        why = "that is a directory" if output.is_dir() else "it may not be written to"
        raise ConfigError(f"--output {str(output)!r} cannot be written: {why}", field="output")
    ending = output.suffix.lower()
    if "audio" in gives and ending not in endings:
        check_audio_format(ending.removeprefix(".") or "wav", "--output")
        return "audio"
    if endings.get(ending) not in gives:
        right = f"it writes {writes}" if writes else "it gives text alone, and needs no --output"
        raise ConfigError(f"--output {str(output)!r} is nothing that this model gives; {right}", field="output")
    return endings[ending]


def _write(path: Path, output: RequestOutput) -> list[Path]:
    """The files that were written: one of the name itself, several with numbers. Raises `ConfigError`."""
    writers = _writers(path.suffix.lower(), output)
    paths = [path.with_stem(f"{path.stem}-{index}") for index in range(len(writers))] if len(writers) > 1 else [path]
    for to, write in zip(paths, writers, strict=False):
        try:
            write(to)
        except OSError as error:
            raise ConfigError(f"--output {str(to)!r} cannot be written: {error.strerror}", field="output") from error
    return paths


def _writers(ending: str, output: RequestOutput) -> list[Callable[[Path], object]]:
    """What writes each of the outputs."""
    from segue.media.encode import encode_audio
    from segue.media.encode_image import encode_image

    def picture(image: Image.Image) -> Callable[[Path], object]:
        data = encode_image(image.tobytes(), image.height, image.width, _PICTURES[ending])
        return lambda path: path.write_bytes(data)

    if ending in _PICTURES:
        return [picture(image) for image in output.images]
    if ending == _VIDEO:
        return [video.save for video in output.videos]
    if output.audio is None:
        return []
    speech = encode_audio(output.audio.samples, output.audio.sample_rate, ending.removeprefix(".") or "wav")
    return [lambda path: path.write_bytes(speech)]


def _size(text: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 1024x768 (width, height)")
    return int(match[1]), int(match[2])


def _parameter(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value in JSON or, where it is none, as text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

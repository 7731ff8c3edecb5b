"""The output sizes of a checkpoint, from the configs of its parts alone. No torch here: also used before loading."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError, InvalidRequest, TooLarge
from segue.models.shared.checkpoint.files import read_object


@dataclass(frozen=True, slots=True)
class Sizes:
    """Output sizes in pixels and frames."""

    multiple: int
    """Height and width are multiples of this many pixels."""
    largest_side: int | None = None
    """Pixels in height and in width for which the network has positions."""
    frame_step: int = 1
    """The number of frames is a multiple of this, plus 1."""

    def check(self, height: int, width: int, most: int) -> None:
        """Raise `InvalidRequest`, or `TooLarge` for more than `most` pixels, naming `height` or `width`; 0: not known.
        The limits are checked before the multiple, whose suggested size could exceed them."""
        if height * width > most:
            fits = self.nearest(height, width, most)
            raise TooLarge(
                f"height {height} x width {width} is {height * width} pixels; at most {most} (max_output_pixels), e.g. "
                f"{fits[0]} x {fits[1]}",
                field="height" if height >= width else "width",
            )
        sides = (("height", height), ("width", width))
        for name, value in sides:
            if self.largest_side is not None and value > self.largest_side:
                raise TooLarge(f"{name} is {value}; this model makes at most {self.largest_side}", field=name)
        for name, value in sides:
            _check_multiple(name, value, self.multiple, 0)

    def check_frames(self, frames: int) -> None:
        """Raise `InvalidRequest` for an invalid `num_frames`."""
        _check_multiple("num_frames", frames, self.frame_step, 1)

    def nearest(self, height: int, width: int, most: int) -> tuple[int, int]:
        """The valid (height, width) nearest to the given one, with at most `most` pixels."""
        largest = max(height, width) if self.largest_side is None else self.largest_side
        height, width = (
            min(max(1, round(side / self.multiple)), max(1, largest // self.multiple)) * self.multiple
            for side in (height, width)
        )
        return (height, width) if height * width <= most else fitting_size(height, width, most, self.multiple)


def fitting_size(height: int, width: int, pixels: int, multiple: int) -> tuple[int, int]:
    """A size of at most `pixels` pixels with nearly the same aspect ratio; for extreme ratios, the short side is one
    multiple."""
    shrink = (pixels / (height * width)) ** 0.5
    short = max(multiple, int(min(height, width) * shrink) // multiple * multiple)
    long = max(multiple, min(int(max(height, width) * shrink), pixels // short) // multiple * multiple)
    return (long, short) if height >= width else (short, long)


def config_of(model_dir: Path, part: str, file: str = "config.json") -> dict[str, Any]:
    """The config of a part of a pipeline. Raises `ConfigError`."""
    path = model_dir / part / file
    if not path.is_file():
        raise ConfigError(f"{path}: not there, so {str(path.parent)!r} is not part of a pipeline", field="model")
    return read_object(path)


def pixels_per_latent(model_dir: Path) -> int:
    """Pixels per latent of diffusers' `AutoencoderKL`, in height and in width, from its config."""
    return int(2 ** (len(config_of(model_dir, "vae").get("block_out_channels", (0,))) - 1))


def _check_multiple(name: str, value: int, multiple: int, offset: int) -> None:
    if (value - offset) % multiple == 0:
        return
    below = (value - offset) // multiple * multiple + offset
    near = [str(size) for size in (below, below + multiple) if size > 0]
    what = f"a multiple of {multiple}" + (f" and {offset} more" if offset else "")
    raise InvalidRequest(f"{name} is {value}; this model needs {what}, the nearest: {' or '.join(near)}", field=name)

"""What a request asks of a model that makes pictures or video: the pipelines' own argument names.

Types are checked at the door; values that only the checkpoint can judge (which sizes it can make, how many steps are
absurd) are checked by the family's input stage.
"""

from __future__ import annotations

import msgspec


class DiffusionParams(msgspec.Struct, kw_only=True, frozen=True):
    """None: what the family's pipeline takes by default."""

    negative_prompt: str | None = None
    prompt_2: str | None = None
    prompt_3: str | None = None
    negative_prompt_2: str | None = None
    negative_prompt_3: str | None = None
    height: int | None = None
    """Pixels."""
    width: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    """Of the file that is written; the network knows no frame rate."""
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    """Of the second expert (Wan2.2 A14B)."""
    true_cfg_scale: float | None = None
    guidance_interval: tuple[float, float] | None = None
    """(from, to) in shares of the steps, e.g. (0.1, 0.8): outside it, the guidance branch is not computed. A loss."""
    sigmas: list[float] | None = None
    """Noise levels instead of `num_inference_steps`, where the scheduler takes them."""
    scheduler: str | None = None
    """Class name of one of diffusers' schedulers, instead of the checkpoint's."""
    strength: float | None = None
    """How much of the given picture is made anew, 0 to 1 (SDXL, Flux: image to image)."""
    num_images_per_prompt: int = 1
    """Pictures (or videos) of one request: noise of picture i is slice i of what the seed draws, as in diffusers."""
    max_sequence_length: int | None = None
    """Tokens of the prompt that the text encoder sees."""
    step_cache: str | None = None
    """A step cache of diffusers by name (`first_block`, `taylorseer`, …): faster, with a loss. None: exact."""
    step_cache_threshold: float | None = None
    progress: bool = False
    """Tell of every step."""
    partial_images: int = 0
    """Previews on the way, evenly spread over the steps."""

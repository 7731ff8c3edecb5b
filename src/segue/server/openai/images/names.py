"""Parameter names from other programs and endpoints, with this endpoint's counterpart.

An error for such a name suggests the counterpart instead of a name with similar spelling.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from segue.messages.errors import InvalidRequest, shown

_EDITS = "input images and masks go to /v1/images/edits as image and mask"
_FIRST = "the first frame is input_reference, the last one last_image"
_VIDEO = "it applies to video, which is made at /v1/videos"
_COMMON = {
    **dict.fromkeys(("steps", "num_steps", "sampling_steps", "sample_steps", "timesteps"), "num_inference_steps"),
    **dict.fromkeys(
        ("cfg", "cfg_scale", "cfg_weight", "guidance", "text_guidance_scale"),
        "guidance_scale or true_cfg_scale, as in the model's pipeline",
    ),
    **dict.fromkeys(("negative", "negative_text"), "negative_prompt"),
    **dict.fromkeys(("sampler", "sampler_name", "sampling_method", "schedule"), "scheduler"),
    **dict.fromkeys(("denoise", "denoising_strength", "prompt_strength", "image_strength"), "strength"),
    **dict.fromkeys(("aspect_ratio", "resolution", "dimensions"), "size, WIDTHxHEIGHT in pixels"),
    **dict.fromkeys(("lora", "loras", "adapter"), "the name of a LoRA adapter goes into model"),
    **dict.fromkeys(("cache", "cache_backend"), "step_cache"),
    **dict.fromkeys(("text", "input", "instructions", "messages"), "prompt, a text"),
    "clip": "clip_skip",
    "sigma": "sigmas, a list",
    "extra_body": "write its entries next to prompt (extra_body is an argument of OpenAI's client)",
}
_SEVERAL = ("num_images", "num_outputs", "batch_size", "num_videos", "num_videos_per_prompt")
_ANY_IMAGES = {
    **dict.fromkeys(_SEVERAL, "n"),
    **dict.fromkeys(("duration", "frames", "frame_rate", "num_seconds", "video"), _VIDEO),
    "format": "output_format",
    "input_reference": _VIDEO,
    "last_image": _VIDEO,
}
OF_GENERATIONS: Mapping[str, str] = {
    **_COMMON,
    **_ANY_IMAGES,
    **dict.fromkeys(
        ("image", "images", "image[]", "image_url", "input_image", "init_image", "mask", "mask_image", "mask_url"),
        _EDITS,
    ),
    "image_reference": _EDITS,
    "file": _EDITS,
}
"""Names for `/v1/images/generations`."""
OF_EDITS: Mapping[str, str] = {
    **_COMMON,
    **_ANY_IMAGES,
    **dict.fromkeys(("image_url", "input_image", "init_image", "file"), "image"),
    **dict.fromkeys(("mask_image", "mask_url"), "mask, a PNG that is fully transparent where the image is repainted"),
}
"""Names for `/v1/images/edits`."""
ONE_VIDEO = "a job makes one video: start one job per video; jobs share the model's calls"
OF_VIDEOS: Mapping[str, str] = {
    **_COMMON,
    **dict.fromkeys((*_SEVERAL[:-1],), ONE_VIDEO),
    **dict.fromkeys(("duration", "length", "num_seconds"), "seconds"),
    **dict.fromkeys(("frames", "frame_count"), "num_frames"),
    **dict.fromkeys(("image", "images", "image_url", "input_image", "init_image", "image_reference", "file"), _FIRST),
    **dict.fromkeys(("mask", "mask_image"), "masks are not supported for video"),
    **dict.fromkeys(("remix_id", "remix_video_id", "video"), "videos are made from text and images, not from videos"),
    "frame_rate": "fps",
    "stream": "watch a job at /v1/videos/{video_id}",
    "deadline": "end a job by DELETE /v1/videos/{video_id}",
    "format": "the file is an MP4",
    "quality": "num_inference_steps improves quality",
}
"""Names for `/v1/videos`."""


def check_called(values: Mapping[str, Any], known: Container[str], instead: Mapping[str, str]) -> None:
    """Raise `InvalidRequest` for a name that is not `known` but in `instead`, and name this endpoint's counterpart."""
    for name in values:
        if name not in known and name in instead:
            raise InvalidRequest(f"unknown parameter {shown(name)}; here: {instead[name]}", field=name)

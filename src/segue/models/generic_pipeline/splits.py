"""Pipelines of diffusers that its modular blocks take apart: which blocks, in which stage. No torch here.

Blocks stand here where they take all that the pipeline's own `__call__` takes; what diffusers has no blocks for, or
blocks that know less (of Helios, Ideogram 4, the inpainting and image-to-image pipelines of other families), is called
whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_STAGE = "library_text_encoder"
PICTURE_STAGE = "library_picture_encoder"
DENOISER_STAGE = "library_denoiser"
DECODER_STAGE = "library_decoder"


@dataclass(frozen=True, slots=True)
class Split:
    """Of one pipeline. Blocks by the names of `default_blocks_name`'s own, in the order they run."""

    kind: str
    """diffusers' modular pipeline."""
    texts: tuple[str, ...]
    pictures: tuple[str, ...] = ()
    """None: it takes no pictures."""
    denoise: tuple[str, ...] = ("denoise",)
    decode: tuple[str, ...] = ("decode",)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a checkpoint's `model_index.json` that the blocks take for granted. One with other settings, or with
    any that does not stand here, is called whole."""

    one_output: bool = False
    """The library's network takes one sample at a time: with two, it fails in the pipeline, too."""

    @property
    def stages(self) -> Mapping[str, tuple[str, ...]]:
        """Blocks by stage; a stage without blocks is left out."""
        found = {
            TEXT_STAGE: self.texts,
            PICTURE_STAGE: self.pictures,
            DENOISER_STAGE: self.denoise,
            DECODER_STAGE: self.decode,
        }
        return {stage: blocks for stage, blocks in found.items() if blocks}


_LTX = "LTXModularPipeline"
_HUNYUAN = "HunyuanVideo15ModularPipeline"

SPLITS: Mapping[str, Split] = {
    "LTXPipeline": Split(_LTX, ("text_encoder",)),
    "LTXImageToVideoPipeline": Split(_LTX, ("text_encoder",), ("vae_encoder",)),
    "HunyuanVideo15Pipeline": Split(_HUNYUAN, ("text_encoder",), one_output=True),
    "HunyuanVideo15ImageToVideoPipeline": Split(
        _HUNYUAN, ("text_encoder",), ("vae_encoder", "image_encoder"), one_output=True
    ),
    "ErnieImagePipeline": Split("ErnieImageModularPipeline", ("prompt_enhancer", "text_encoder")),
    "Krea2Pipeline": Split(
        "Krea2ModularPipeline",
        ("text_encoder",),
        settings={
            "is_distilled": False,  # those blocks take no scale of guidance
            "patch_size": 2,
            "text_encoder_select_layers": [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35],
        },
    ),
}
"""By the `_class_name` of the checkpoint."""


def split_of(index: Mapping[str, Any]) -> Split | None:
    """How a checkpoint's pipeline is taken apart, from its `model_index.json`; None: it is called whole."""
    split = SPLITS.get(str(index.get("_class_name")))
    if split is None:
        return None
    for name, value in index.items():
        own = name.startswith("_") or name == "architectures"
        part = isinstance(value, list) and len(value) == 2 and all(one is None or isinstance(one, str) for one in value)
        if not own and not part and split.settings.get(name, _OTHER) != value:
            return None
    return split


_OTHER = object()

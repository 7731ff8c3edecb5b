"""The pipelines of diffusers that its modular blocks can split: which blocks run in which stage. No torch here.

A pipeline is listed if its blocks accept all arguments of the pipeline's own `__call__`. Pipelines without blocks, or
whose blocks accept less (of Helios, Ideogram 4, the inpainting and image-to-image pipelines of other families), are
called as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_STAGE = "library_text_encoder"
IMAGE_STAGE = "library_picture_encoder"
DENOISER_STAGE = "library_denoiser"
DECODER_STAGE = "library_decoder"


@dataclass(frozen=True, slots=True)
class Split:
    """The split of one pipeline. Blocks have the names of `default_blocks_name` and run in this order."""

    kind: str
    """Name of diffusers' modular pipeline."""
    texts: tuple[str, ...]
    images: tuple[str, ...] = ()
    """Empty: it takes no images."""
    denoise: tuple[str, ...] = ("denoise",)
    decode: tuple[str, ...] = ("decode",)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a checkpoint's `model_index.json` that the blocks assume. A checkpoint with other values, or with
    settings that are not listed, is called as a whole."""

    one_output: bool = False
    """The library's network takes one sample at a time: with two, the library's pipeline fails as well."""

    @property
    def stages(self) -> Mapping[str, tuple[str, ...]]:
        """Blocks by stage, without stages that have no blocks."""
        found = {
            TEXT_STAGE: self.texts,
            IMAGE_STAGE: self.images,
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
            "is_distilled": False,  # these blocks take no guidance scale
            "patch_size": 2,
            "text_encoder_select_layers": [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35],
        },
    ),
}
"""By the `_class_name` of the checkpoint."""


def split_of(index: Mapping[str, Any]) -> Split | None:
    """The split of a checkpoint's pipeline, from its `model_index.json`; None: it is called as a whole."""
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

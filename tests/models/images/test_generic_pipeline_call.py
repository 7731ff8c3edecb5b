"""What the graph of a pipeline that is called whole says that it takes."""

from __future__ import annotations

import inspect

import diffusers
import pytest

from segue.models.images.generic_pipeline.call import arguments_of
from segue.models.images.generic_pipeline.graph import graph


def index(kind: str) -> dict[str, str]:
    return {"_class_name": kind, "_diffusers_version": diffusers.__version__}


@pytest.mark.parametrize(
    ("kind", "takes"),
    [
        ("StableDiffusionPipeline", {"text"}),
        ("PixArtSigmaPipeline", {"text"}),
        ("StableDiffusionImg2ImgPipeline", {"text", "image"}),
        ("StableDiffusionInpaintPipeline", {"text", "image"}),
        ("LTXConditionPipeline", {"text", "image"}),
        ("NotInTheLibraryPipeline", {"text", "image"}),
    ],
)
def test_what_it_takes(kind: str, takes: set[str]) -> None:
    assert graph(index(kind)).takes == takes


@pytest.mark.parametrize("kind", ["StableDiffusionPipeline", "LTXConditionPipeline", "StableDiffusionInpaintPipeline"])
def test_the_source_says_what_the_class_does(kind: str) -> None:
    theirs = inspect.signature(getattr(diffusers, kind).__call__).parameters
    assert arguments_of(kind) == set(theirs) - {"self", "kwargs"}

"""What the tiny checkpoint of every family gives on a GPU, against what it gives on a CPU, in float32: `pytest -m gpu`.

Nightly, one runs on the CPU twice, so that this file is known to work where there is no GPU.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from segue.models.registry import families, tiny_preset
from segue.models.speech.pocket_tts.graph import has_model
from segue.orchestrator.omni.outputs import RequestOutput
from segue.verify.questions import questions
from segue.verify.segue_side import Served, serve
from segue.verify.subject import Subject, read_subject

LARGEST = 2048
"""Tokens of a sequence."""
SHARE = 0.04
"""Of a device's memory, for each stage."""
AUDIO, PIXEL, NUMBER = 1e-3, 2 / 255, 1e-4
"""Largest differences; a sample's and a pixel's largest value is 1."""
HEARD_OTHERWISE = ("mimo-audio", "audio")
"""Preset and question: the codes of a recording are the nearest of many, of which other rounding takes others."""
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PRESETS = sorted(name for family in families().values() for name in family.tiny_names)
if not has_model(version("transformers")):
    PRESETS.remove("pocket-tts")


@pytest.mark.parametrize(
    ("preset", "device"),
    [
        pytest.param("llama", "cpu", marks=pytest.mark.nightly),
        *(pytest.param(name, "cuda:0", marks=GPU) for name in PRESETS),
    ],
)
def test_a_device_gives_what_a_cpu_gives(preset: str, device: str, tmp_path: Path) -> None:
    directory = tmp_path / preset
    tiny_preset(preset).make(directory, "tiny", 0)
    subject = read_subject(directory)
    asked = questions(subject, quick=True)
    here, there = (_served(subject, asked, one) for one in ("cpu", device))
    for question, ours, theirs in zip(asked, there, here, strict=True):
        if (preset, question.name) == HEARD_OTHERWISE:
            continue
        assert (ours.error, ours.refused) == (None, theirs.refused)
        assert ours.outputs.keys() == theirs.outputs.keys()
        for how, output in ours.outputs.items():
            _compare(output, theirs.outputs[how])


def _served(subject: Subject, asked: list[Any], device: str) -> list[Served]:
    stages = {name: {"memory_share": SHARE} for name in subject.graph.stages if name not in ("input", "output")}
    limit = LARGEST if subject.context is None else min(LARGEST, subject.context)
    for name, stage in subject.graph.stages.items():
        if stage.engine == "autoregressive":
            stages[name] |= {"max_batch": 8, "max_tokens_per_step": max(32, limit // 8)}
            if subject.context is not None:
                stages[name]["max_model_len"] = limit
    config = {"defaults": {"devices": device}, "stages": stages}
    return asyncio.run(serve(subject, asked, "float32", config, None, lambda line: None))


def _compare(ours: RequestOutput, theirs: RequestOutput) -> None:
    assert ours.token_ids == theirs.token_ids
    if theirs.audio is not None:
        assert ours.audio is not None
        _close(ours.audio.samples, theirs.audio.samples, AUDIO)
    for own, other in zip(ours.images, theirs.images, strict=True):
        _close(np.asarray(own, np.float32) / 255, np.asarray(other, np.float32) / 255, PIXEL)
    for clip, other_clip in zip(ours.videos, theirs.videos, strict=True):
        _close(np.asarray(clip.frames, np.float32) / 255, np.asarray(other_clip.frames, np.float32) / 255, PIXEL)
    for name in ("embedding", "classes", "score"):
        if (value := getattr(theirs, name)) is not None:
            _close(np.asarray(getattr(ours, name)), np.asarray(value), NUMBER)


def _close(ours: Any, theirs: Any, most: float) -> None:
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert ours.shape == theirs.shape
    assert ours.size == 0 or float(np.abs(ours - theirs).max()) <= most

"""The streaming decoder of continuous latents gives what the library's gives for a whole utterance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pocket_family import WIDTH, context, stage_request

from segue.messages.errors import StageFailed
from segue.models.speech.pocket_tts.reference import Reference
from segue.models.speech.pocket_tts.vocoder import Vocoder

WITHIN = 1e-4
SAMPLES = 1920


@pytest.fixture(scope="module")
def vocoder(pocket_dir: Path) -> Vocoder:
    return Vocoder(context(pocket_dir, "vocoder"))


@pytest.fixture(scope="module")
def library(pocket_dir: Path) -> Reference:
    return Reference(pocket_dir)


def latents_of(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(frames, WIDTH, generator=torch.Generator().manual_seed(seed))


def streamed(vocoder: Vocoder, latents: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The samples of chunks of these sizes, and then the rest."""
    utterance, _ = vocoder.begin(stage_request("vocoder", "r"))
    parts, at = [], 0
    for size in (*sizes, len(latents) - sum(sizes)):
        payload = {"codes": latents[at : at + size], "start": at}
        at += size
        for work in vocoder.feed(utterance, "backbone", payload, final=at == len(latents)):
            [result] = vocoder.run([work])
            assert result.payload["start"] == sum(map(len, parts))
            parts.append(result.payload["samples"])
    return torch.cat(parts)


def whole(library: Reference, latents: torch.Tensor) -> torch.Tensor:
    samples: torch.Tensor = library.processor.decode(library.model.denormalize_latents(latents))
    return samples


@pytest.mark.parametrize("frames", [1, 3, 7, 60])
def test_streamed_is_whole(vocoder, library, frames):
    """60 frames are 960 positions of attention, of which each sees 250."""
    latents = latents_of(frames)
    samples = streamed(vocoder, latents, *([1] * (frames // 2)))
    assert len(samples) == SAMPLES * frames
    torch.testing.assert_close(samples, whole(library, latents), atol=WITHIN, rtol=0)
    assert 0.02 < float(samples.square().mean().sqrt()) < 0.5
    assert torch.equal(samples, streamed(vocoder, latents))


def test_in_a_batch(vocoder, library):
    utterances = [vocoder.begin(stage_request("vocoder", name))[0] for name in "ab"]
    works = [
        vocoder.feed(utterance, "backbone", {"codes": latents_of(8, seed), "start": 0}, final=True)
        for seed, utterance in enumerate(utterances)
    ]
    parts = [vocoder.run(list(pair)) for pair in zip(*works, strict=True)]
    for seed in range(2):
        samples = torch.cat([results[seed].payload["samples"] for results in parts])
        torch.testing.assert_close(samples, whole(library, latents_of(8, seed)), atol=WITHIN, rtol=0)


def test_a_latent_of_another_width_fails_its_request(vocoder):
    utterance, _ = vocoder.begin(stage_request("vocoder", "r"))
    with pytest.raises(StageFailed, match=f"rows of \\[3\\] codes came; the vocoder takes {WIDTH}"):
        vocoder.feed(utterance, "backbone", {"codes": torch.zeros(2, 3), "start": 0}, final=True)

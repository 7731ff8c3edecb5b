"""The streaming vocoder: in any split, alone or batched, what one call of the package's decoder gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen3_tts_family import EVERY, Case, cases, context, spoken_by, stage_request, wave_of

from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.messages.errors import ConfigError, StageFailed
from segue.models.shared.speech.pieces import CodePiece
from segue.models.speech.qwen3_tts.config import read_vocoder
from segue.models.speech.qwen3_tts.loading import load_vocoder
from segue.models.speech.qwen3_tts.vocoder import CodeDecoder, Vocoder

WITHIN = 1e-4
SAMPLES = 1920
"""Per frame."""


@pytest.fixture(scope="module")
def vocoder(tiny_dir: Path) -> Vocoder:
    return Vocoder(context(tiny_dir, "vocoder"))


def codes_of(frames: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, 64, (frames, 4), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("case", cases().values(), ids=lambda case: case.name)
def test_every_sample_is_there_and_is_the_packages(
    tiny_dir: Path, design_dir: Path, vocoder: Vocoder, case: Case
) -> None:
    made = vocoder if case.kind == "custom_voice" else Vocoder(context(design_dir, "vocoder"))
    wave = wave_of(made, case.codes)
    assert len(wave) == SAMPLES * len(case.codes)
    torch.testing.assert_close(wave[::EVERY], case.samples, atol=WITHIN, rtol=0)
    assert 0.02 < float(case.samples.square().mean().sqrt()) < 0.5


@pytest.mark.parametrize(
    "part",
    [
        "rvq_rest.layers.2",
        "pre_conv.conv",
        "pre_transformer.layers.1.self_attn",
        "pre_transformer.output_proj",
        "upsample.1.1.pwconv2",
        "decoder.2.1.conv",
    ],
)
def test_every_part_is_heard(tiny_dir: Path, part: str) -> None:
    """One part of the network gives more than it should: the samples are others."""
    spoilt, case = Vocoder(context(tiny_dir, "vocoder")), cases()["cut"]
    assert isinstance(spoilt.decoder, CodeDecoder)
    spoilt.decoder.net.get_submodule(part).register_forward_hook(lambda module, given, out: _louder(out))
    assert float((wave_of(spoilt, case.codes)[::EVERY] - case.samples).abs().max()) > 10 * WITHIN


def _louder(out: Any) -> Any:
    return (1.5 * out[0], *out[1:]) if isinstance(out, tuple) else 1.5 * out


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 40))
def test_the_split_changes_no_sample(vocoder: Vocoder, sizes: list[int], frames: int) -> None:
    codes = codes_of(frames)
    assert torch.equal(wave_of(vocoder, codes, sizes), wave_of(vocoder, codes))


def test_longer_than_the_attention_window(tiny_dir: Path, vocoder: Vocoder) -> None:
    """Two layers that look back 71 frames each: one call over all frames gives the same."""
    codes = codes_of(110)
    config = read_vocoder(tiny_dir)
    decoder = CodeDecoder(load_vocoder(context(tiny_dir, "vocoder"), config), config.decoder_config)
    [(whole, _)] = decoder.decode([CodePiece(torch.tensor(codes).T.contiguous(), 0, None)])
    torch.testing.assert_close(wave_of(vocoder, codes), whole, atol=WITHIN, rtol=0)
    changed = [list(row) for row in codes]
    changed[5][2] = (changed[5][2] + 1) % 64
    off = (wave_of(vocoder, changed) - whole).abs()
    assert float(off[: SAMPLES * 5].max()) <= WITHIN
    assert float(off[SAMPLES * 5 : SAMPLES * 6].max()) > 0.1
    assert float(off[SAMPLES * 90 : SAMPLES * 110].max()) > WITHIN, "through both layers"


def test_in_a_batch_of_utterances_at_different_places(vocoder: Vocoder) -> None:
    """Each joins when the one before it is some frames ahead."""
    asked = {case.name: case for case in spoken_by("custom_voice")}
    engine = ModuleEngine(vocoder, ModuleConfig(max_batch=4))
    samples: dict[str, list[torch.Tensor]] = {}
    at = dict.fromkeys(asked, 0)
    turn = 0
    while any(at[name] < len(case.codes) for name, case in asked.items()) or engine.has_work():
        for index, (name, case) in enumerate(asked.items()):
            if turn < 2 * index or at[name] == len(case.codes):
                continue
            if name not in samples:
                samples[name] = []
                engine.add(stage_request("vocoder", request_id=name))
            stop = min(at[name] + 5, len(case.codes))
            payload = {"codes": torch.tensor(case.codes[at[name] : stop]), "start": at[name]}
            engine.feed(name, "talker", payload, final=stop == len(case.codes))
            at[name] = stop
        for output in engine.step():
            assert output.error is None
            assert output.payload is not None
            assert output.payload["start"] == sum(map(len, samples[output.request_id]))
            samples[output.request_id].append(output.payload["samples"])
        turn += 1
    assert engine.stats()["calls_total"] < sum(map(len, samples.values()))
    for name, case in asked.items():
        torch.testing.assert_close(torch.cat(samples[name])[::EVERY], case.samples, atol=WITHIN, rtol=0)


def test_an_utterance_without_a_frame_has_no_samples(vocoder: Vocoder) -> None:
    assert len(wave_of(vocoder, [])) == 0


def test_wrong_codes_and_options_are_named(tiny_dir: Path, vocoder: Vocoder) -> None:
    with pytest.raises(StageFailed, match="code 64 is outside the codebook, which has codes 0 to 63"):
        wave_of(vocoder, [[0, 0, 64, 0]])
    with pytest.raises(ConfigError, match="the vocoder has no option 'look_ahead'"):
        Vocoder(context(tiny_dir, "vocoder", options={"look_ahead": 1}))

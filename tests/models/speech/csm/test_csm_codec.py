"""The streaming vocoder: in any split, alone or batched, what one call of the library's Mimi gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from csm_family import context, library_model, stage_request
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.contract import StageOutput
from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.messages.errors import ConfigError, StageFailed
from segue.models.shared.speech.pieces import GROUPS
from segue.models.speech.csm.codec import Vocoder

WITHIN = 1e-4
FRAMES = (1, 2, 3, 7, 21, 80, 190)
"""Lengths of utterances: the attention looks back 125 frames in each of two layers."""


@pytest.fixture(scope="module")
def vocoder(tiny_dir: Path) -> Vocoder:
    return Vocoder(context(tiny_dir, "vocoder"))


def codes_of(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (frames, 8), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def whole(tiny_dir: Path, codes: torch.Tensor) -> torch.Tensor:
    """One call over all codes."""
    wave: torch.Tensor = library_model(tiny_dir).codec_model.decode(codes.T[None]).audio_values[0, 0]
    return wave


class Requests:
    """Utterances through the vocoder in its engine."""

    def __init__(self, vocoder: Vocoder, **config: int) -> None:
        self.engine = ModuleEngine(vocoder, ModuleConfig(**config))
        self.samples: dict[str, list[torch.Tensor]] = {}
        self.done: set[str] = set()

    def add(self, name: str) -> None:
        self.samples[name] = []
        self.engine.add(stage_request("vocoder", request_id=name, upstreams={"backbone"}))

    def feed(self, name: str, codes: torch.Tensor, start: int, *, final: bool = False) -> None:
        self.engine.feed(name, "backbone", {"codes": codes, "start": start}, final=final)

    def run(self) -> None:
        while self.engine.has_work():
            for output in self.engine.step():
                self._take(output)

    def wave(self, name: str) -> torch.Tensor:
        assert name in self.done
        return torch.cat(self.samples[name])

    def _take(self, output: StageOutput) -> None:
        if output.error is not None:
            raise output.error
        assert output.payload is not None
        assert output.payload["start"] == sum(len(part) for part in self.samples[output.request_id])
        assert output.payload["sample_rate"] == 24000
        self.samples[output.request_id].append(output.payload["samples"])
        if output.finished:
            self.done.add(output.request_id)


@pytest.mark.parametrize("frames", FRAMES)
def test_every_sample_is_there_and_is_the_librarys(tiny_dir: Path, vocoder: Vocoder, frames: int) -> None:
    codes = codes_of(frames)
    requests = Requests(vocoder)
    requests.add("r")
    for index, row in enumerate(codes):
        requests.feed("r", row[None], index, final=index == frames - 1)
        requests.run()
    wave, expected = requests.wave("r"), whole(tiny_dir, codes)
    assert len(wave) == 1920 * frames
    torch.testing.assert_close(wave, expected, atol=WITHIN, rtol=0)
    if frames > 2:
        assert 0.02 < float(expected.square().mean().sqrt()) < 0.5


@settings(max_examples=8)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 3))
def test_the_split_changes_no_sample(vocoder: Vocoder, sizes: list[int], seed: int) -> None:
    codes = codes_of(sum(sizes), seed)
    waves = []
    for split in (sizes, [sum(sizes)]):
        requests = Requests(vocoder)
        requests.add("r")
        at = 0
        for index, size in enumerate(split):
            requests.feed("r", codes[at : at + size], at, final=index == len(split) - 1)
            requests.run()
            at += size
        waves.append(requests.wave("r"))
    assert torch.equal(*waves)


def test_in_a_batch_of_utterances_at_different_places(tiny_dir: Path, vocoder: Vocoder) -> None:
    """Each joins when the one before it is some frames ahead."""
    asked = {f"r{seed}": codes_of(20 + 31 * seed, seed) for seed in range(4)}
    requests = Requests(vocoder, max_batch=4)
    at = dict.fromkeys(asked, 0)
    for turn in range(200):
        for index, (name, codes) in enumerate(asked.items()):
            if turn < 3 * index or at[name] == len(codes):
                continue
            if name not in requests.samples:
                requests.add(name)
            stop = min(at[name] + 5, len(codes))
            requests.feed(name, codes[at[name] : stop], at[name], final=stop == len(codes))
            at[name] = stop
        requests.run()
    assert requests.engine.stats()["calls_total"] < sum(len(parts) for parts in requests.samples.values())
    for name, codes in asked.items():
        torch.testing.assert_close(requests.wave(name), whole(tiny_dir, codes), atol=WITHIN, rtol=0)


def test_a_code_reaches_all_frames_of_the_windows_and_none_before(vocoder: Vocoder) -> None:
    """What is kept reaches as far as the network does: 249 positions, two per frame, in each of two layers."""
    codes = codes_of(190)
    changed = codes.clone()
    changed[5, 2] = (changed[5, 2] + 1) % 64
    waves = []
    for asked in (codes, changed):
        requests = Requests(vocoder)
        requests.add("r")
        requests.feed("r", asked, 0, final=True)
        requests.run()
        waves.append(requests.wave("r"))
    off = (waves[0] - waves[1]).abs()
    assert float(off[: 1920 * 5].max()) == 0
    assert float(off[1920 * 5 : 1920 * 6].max()) > 0.01
    assert float(off[1920 * 140 : 1920 * 180].max()) > WITHIN / 10, "through both layers"


def test_a_changed_weight_changes_the_samples(tiny_dir: Path) -> None:
    spoilt = Vocoder(context(tiny_dir, "vocoder"))
    modules = spoilt.decoder.library_codec.named_modules()
    [attention] = [module for name, module in modules if name.endswith("decoder_transformer.layers.1.self_attn")]
    attention.register_forward_hook(lambda module, given, out: (1.5 * out[0], *out[1:]))
    codes = codes_of(21)
    requests = Requests(spoilt)
    requests.add("r")
    requests.feed("r", codes, 0, final=True)
    requests.run()
    assert float((requests.wave("r") - whole(tiny_dir, codes)).abs().max()) > 10 * WITHIN


def test_what_a_request_holds_does_not_grow(vocoder: Vocoder) -> None:
    held = []
    for frames in (sum(GROUPS), sum(GROUPS) + 20 * GROUPS[-1]):
        state, _ = vocoder.begin(stage_request("vocoder", upstreams={"backbone"}))
        for work in vocoder.feed(state, "backbone", {"codes": codes_of(frames), "start": 0}, final=False):
            vocoder.run([work])
        assert state.past is not None
        held.append(sum(kept.untyped_storage().nbytes() for kept in state.past) + state.frames.nbytes)
    assert held[0] == held[1]


def test_codes_outside_the_codebook_are_named(vocoder: Vocoder) -> None:
    state, _ = vocoder.begin(stage_request("vocoder", upstreams={"backbone"}))
    codes = torch.full((1, 8), 64)
    with pytest.raises(StageFailed, match="code 64 is outside the codebook, which has codes 0 to 63"):
        vocoder.feed(state, "backbone", {"codes": codes, "start": 0}, final=False)


def test_an_unknown_option_is_named(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="the vocoder has no option 'look_ahead'"):
        Vocoder(context(tiny_dir, "vocoder", options={"look_ahead": 1}))

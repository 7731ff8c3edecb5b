"""The vocoder's two networks against the library's own forward: the flow over windows, BigVGAN over pieces of mel."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.omni.qwen2_5_omni.loading import Speaker, load_config, load_speakers, load_token2wav
from segue.models.omni.qwen2_5_omni.tiny import presets as tiny
from segue.models.omni.qwen2_5_omni.vocoder.bigvgan import BigVGAN
from segue.models.omni.qwen2_5_omni.vocoder.dit import Decoded, FlowDecoder, FlowSettings, Voice, Window
from segue.models.omni.qwen2_5_omni.vocoder.vocoder import BlockNoise

SEED = 5


class Parts:
    """The library's model, and ours made from it."""

    def __init__(self, directory: Path) -> None:
        tiny.make(directory, "tiny", 0)
        ctx = LoadContext(directory, "vocoder", torch.device("cpu"), torch.float32)
        self.model = load_token2wav(ctx).eval()
        self.speakers = load_speakers(ctx, load_config(ctx))
        self.dit = self.model.code2wav_dit_model
        self.flow = FlowDecoder(self.dit)
        self.bigvgan = BigVGAN(self.model.code2wav_bigvgan_model)

    def codes(self, count: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.dit.config.num_embeds, (count,), generator=generator)

    def whole(self, codes: Tensor, voice: str = "Chelsie", guidance: float = 0.5) -> Tensor:
        """[frames, 80] as the library samples it, from the noise of `SEED`."""
        speaker: Speaker = self.speakers[voice]
        torch.manual_seed(SEED)
        mel = self.dit.sample(speaker.cond, speaker.ref_mel, codes[None], guidance_scale=guidance)
        return mel[0].T

    def voice(self, name: str = "Chelsie") -> Voice:
        return self.flow.voice(self.speakers[name].cond, self.speakers[name].ref_mel)

    def window(self, codes: Tensor, voice: str = "Chelsie", first: int = 0, **rest: object) -> Window:
        noise = torch.randn(1, 2 * len(codes), 80, generator=torch.Generator().manual_seed(SEED))[0]
        blocks = -(-len(codes) // 12)
        return Window(self.voice(voice), codes, noise, first, **{"emit": blocks, "past": None, **rest})

    def streamed(self, codes: Tensor, emit: int, ahead: int) -> Tensor:
        """[frames, 80] decoded in windows that emit `emit` blocks and look ahead at `ahead`."""
        whole = self.window(codes)
        mels, past = [], None
        for first in range(0, -(-len(codes) // 12), emit):
            stop = (first + emit + ahead) * 12
            piece = slice(first * 12, stop), slice(first * 24, stop * 2)
            window = Window(whole.voice, codes[piece[0]], whole.noise[piece[1]], first, emit, past)
            [decoded] = self.flow.integrate([window])
            mels.append(decoded.mel)
            past = decoded.past
        return torch.cat(mels)


@pytest.fixture(scope="module")
def parts(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return Parts(tmp_path_factory.mktemp("tiny") / "model")


def apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return (one - other).abs().max().item()


@pytest.mark.parametrize("count", [1, 12, 30, 61])
def test_whole_decoding_is_the_librarys(parts: Parts, count: int) -> None:
    codes = parts.codes(count)
    [decoded] = parts.flow.integrate([parts.window(codes)])
    assert decoded.past is None
    assert apart(decoded.mel, parts.whole(codes)) < 2e-5


def test_without_guidance_there_is_one_branch_and_the_same_answer(parts: Parts) -> None:
    flow = FlowDecoder(parts.dit, FlowSettings(guidance=0.0))
    speaker, codes = parts.speakers["Ethan"], parts.codes(20)
    window = parts.window(codes)
    [decoded] = flow.integrate(
        [Window(flow.voice(speaker.cond, speaker.ref_mel), codes, window.noise, 0, window.emit, None)]
    )
    assert apart(decoded.mel, parts.whole(codes, "Ethan", guidance=0.0)) < 2e-5


@pytest.mark.parametrize("change", ["code", "noise", "voice", "weight"])
def test_parity_fails_when_one_thing_is_changed(parts: Parts, change: str) -> None:
    codes = parts.codes(30)
    flow, window = parts.flow, parts.window(codes)
    if change == "code":
        window = parts.window(codes.index_fill(0, torch.tensor(13), 7))
    elif change == "noise":
        noise = window.noise.clone()
        noise[17, 3] += 0.1
        window = Window(window.voice, codes, noise, 0, window.emit, None)
    elif change == "voice":
        window = parts.window(codes, "Ethan")
    else:
        dit = copy.deepcopy(parts.dit)
        with torch.no_grad():
            dit.transformer_blocks[1].attn.to_v.weight[0] *= 1.1
        flow = FlowDecoder(dit)
    [decoded] = flow.integrate([window])
    assert apart(decoded.mel, parts.whole(codes)) > 1e-3


@pytest.mark.parametrize(("ahead", "within"), [(0, 3.0), (1, 5e-3), (2, 3e-5), (3, 3e-5)])
def test_error_of_windows_by_look_ahead(parts: Parts, ahead: int, within: float) -> None:
    """Log-mel units, of std 3. With look-ahead the error falls a hundredfold and more per block, down to rounding."""
    codes = parts.codes(90)
    error = apart(parts.streamed(codes, 1, ahead), parts.whole(codes))
    assert error < within
    if ahead == 0:
        assert error > 0.01  # the blocks of this checkpoint do influence each other


def test_looking_back_is_exact(parts: Parts) -> None:
    """Where nothing beyond the window exists, windows of any size give what whole decoding gives, to rounding; without
    what they look back on, they do not."""
    codes = parts.codes(48)
    whole = parts.whole(codes)
    assert apart(parts.streamed(codes, 1, 3), whole) < 3e-5
    noise = parts.window(codes).noise
    [forgetful] = parts.flow.integrate([Window(parts.voice(), codes[24:], noise[48:], 2, 2, None)])
    assert apart(forgetful.mel, whole[48:]) > 1e-3


def test_windows_of_many_requests_share_a_batch(parts: Parts) -> None:
    """First, middle and last windows, partial blocks, two voices: together as alone."""
    first = parts.window(parts.codes(36, 1), "Ethan", emit=2)
    [begun] = parts.flow.integrate([first])
    windows = [
        parts.window(parts.codes(24, 2)),
        parts.window(parts.codes(36, 3), "Ethan", first=2, emit=2, past=begun.past),
        parts.window(parts.codes(5, 4), first=40),
        parts.window(parts.codes(17, 5), first=2, past=begun.past),
        first,
    ]
    together = parts.flow.integrate(windows)
    pasts: list[tuple[Tensor, Tensor | None]] = []
    for window, decoded in zip(windows, together, strict=True):
        [alone] = parts.flow.integrate([window])
        assert apart(decoded.mel, alone.mel) < 2e-5
        assert (decoded.past is None) == (alone.past is None)
        pasts += [(decoded.past, alone.past)] if decoded.past is not None else []
    assert pasts
    assert all(apart(*two) < 1e-4 for two in pasts)


def test_spare_memory_is_filled_and_the_past_only_read(parts: Parts) -> None:
    [begun] = parts.flow.integrate([parts.window(parts.codes(36), emit=2)])
    past: Tensor = begun.past
    before, spare = past.clone(), torch.full(parts.flow.past_shape, torch.nan)
    again: Decoded = parts.flow.integrate([parts.window(parts.codes(36), first=2, emit=2, past=past, spare=spare)])[0]
    assert again.past is spare
    assert spare.isfinite().all()
    assert torch.equal(past, before)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
@settings(max_examples=12, deadline=None)
def test_bigvgan_streamed_is_bigvgan_whole(parts: Parts, lengths: list[int]) -> None:
    mel = 3 * torch.randn(sum(lengths) + 1, 80, generator=torch.Generator().manual_seed(2)) - 4
    with torch.inference_mode():
        whole = parts.model.code2wav_bigvgan_model(mel.T[None])
    assert 0.02 < whole.pow(2).mean().sqrt() < 0.5
    stream = parts.bigvgan.open()
    pieces = [stream.push(piece) for piece in mel.split([*lengths, 1])]
    pieces.append(stream.push(mel[:0], final=True))
    samples = torch.cat(pieces)
    assert len(samples) == 240 * len(mel) == parts.bigvgan.samples_per_frame * len(mel)
    assert apart(samples, whole) < 1e-5


def test_bigvgan_keeps_to_its_range_and_differs_when_a_weight_does(parts: Parts) -> None:
    mel = 3 * torch.randn(60, 80, generator=torch.Generator().manual_seed(2)) - 4
    loud = copy.deepcopy(parts.model.code2wav_bigvgan_model)
    changed = copy.deepcopy(loud)
    with torch.no_grad():
        loud.conv_post.weight *= 20
        changed.resblocks[2].convs1[0].weight[0, 0, 0] += 0.1
    samples = BigVGAN(loud).open().push(mel, final=True)
    assert samples.abs().max() == 1.0
    assert apart(samples, loud(mel.T[None]).detach()) < 1e-4
    usual = parts.bigvgan.open().push(mel, final=True)
    assert apart(BigVGAN(changed).open().push(mel, final=True), usual) > 1e-3


def test_an_empty_utterance_has_no_samples(parts: Parts) -> None:
    assert parts.bigvgan.open().push(torch.empty(0, 80), final=True).shape == (0,)


@given(st.integers(1, 20), st.integers(0, 2**63 - 1))
@settings(max_examples=30, deadline=None)
def test_noise_in_blocks_is_the_noise_of_the_whole(blocks: int, seed: int) -> None:
    noise = BlockNoise(seed, 24, 80)
    drawn = torch.cat([noise.draw() for _ in range(blocks)])
    for frames in (24 * blocks, 24 * blocks - 22, 1):  # a prefix is the prefix of the whole, also within a block
        whole = torch.randn(1, frames, 80, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(drawn[:frames], whole[0])

"""Token2Wav as a stage: streamed audio against the library's whole decoding, for any arrival, batch and length.

Reported error (largest difference between samples; rms of the sound 0.16) against whole decoding, tiny checkpoint:
look-ahead 1: 1.0e-4 · 2: 1.9e-6 · 3: 1.7e-6, the last two being float32 rounding.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from segue.engines.contract import LoadContext, StageOutput, StageRequest
from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.messages.errors import ConfigError, NotFound, SegueError, StageFailed
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen2_5_omni.loading import load_config, load_speakers, load_token2wav
from segue.models.omni.qwen2_5_omni.tiny import presets as tiny
from segue.models.omni.qwen2_5_omni.vocoder.vocoder import Token2Wav
from selection import daily

WITHIN = {1: 2e-4, 2: 1e-5, 3: 1e-5, "all": 1e-5}
"""Largest difference between samples by look-ahead."""
SEED = 11
VOICES = ("Chelsie", "Ethan")


class Stage:
    """A checkpoint, the library's model of it, and adapters by look-ahead."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        tiny.make(directory, "tiny", 0)
        self.model = load_token2wav(self.context()).eval()
        self.speakers = load_speakers(self.context(), load_config(self.context()))
        self._adapters: dict[object, Token2Wav] = {}
        self._alone: dict[tuple[object, ...], list[Tensor]] = {}

    def context(self, **options: object) -> LoadContext:
        return LoadContext(self.directory, "vocoder", torch.device("cpu"), torch.float32, options=options)

    def adapter(self, look_ahead: object = 1) -> Token2Wav:
        if look_ahead not in self._adapters:
            self._adapters[look_ahead] = Token2Wav(self.context(look_ahead=look_ahead))
        return self._adapters[look_ahead]

    def alone(self, count: int, index: int, look_ahead: object = 1) -> list[Tensor]:
        """What the `index`-th request says when it has the stage to itself and all its codes at once."""
        key = (count, index, look_ahead)
        if key not in self._alone:
            self._alone[key] = spoken(self.adapter(look_ahead), some_codes(count, index), VOICES[index % 2], index)
        return self._alone[key]

    def whole(self, codes: Tensor, voice: str = "Chelsie", seed: int = SEED) -> Tensor:
        """[samples] by the library."""
        speaker = self.speakers[voice]
        torch.manual_seed(seed)
        with torch.inference_mode():
            return self.model(codes[None], speaker.cond, speaker.ref_mel)


@pytest.fixture(scope="module")
def stage(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("tiny") / "model")


def some_codes(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 289, (count,), generator=torch.Generator().manual_seed(seed))


def request(name: str = "a", voice: str | None = None, seed: int = SEED) -> StageRequest:
    return StageRequest(
        name,
        "vocoder",
        Request(request_id=name, voice=voice),
        SamplingParams(),
        seed,
        frozenset({"talker"}),
        frozenset(),
        frozenset({"audio"}),
    )


def say(engine: ModuleEngine, codes: Tensor, start: int = 0, *, final: bool, name: str = "a", **rest: Any) -> None:
    engine.feed(name, "talker", {"codes": codes, "start": start, **rest}, final=final)


def drain(engine: ModuleEngine) -> list[StageOutput]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def pieces_of(outputs: list[StageOutput], name: str = "a") -> list[Tensor]:
    """The samples of one request, checked to be whole and in order."""
    own = [output for output in outputs if output.request_id == name]
    assert [output.error for output in own] == [None] * len(own)
    assert [output.finished for output in own] == [False] * (len(own) - 1) + [True]
    position, pieces = 0, []
    for output in own:
        payload = output.payload
        assert payload["start"] == position
        assert payload["sample_rate"] == 24000
        assert payload["samples"].dtype == torch.float32
        position += len(payload["samples"])
        pieces.append(payload["samples"])
    return pieces


def spoken(adapter: Token2Wav, codes: Tensor, voice: str | None = None, seed: int = SEED) -> list[Tensor]:
    engine = ModuleEngine(adapter)
    engine.add(request(voice=voice, seed=seed))
    say(engine, codes, final=True)
    return pieces_of(drain(engine))


def apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return (one - other).abs().max().item()


@pytest.mark.parametrize("look_ahead", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 3)), "all"])
def test_streamed_audio_is_the_librarys_within_the_stated_error(stage: Stage, look_ahead: int | str) -> None:
    codes = some_codes(180)
    whole = stage.whole(codes)
    assert 0.02 < whole.pow(2).mean().sqrt() < 0.5
    pieces = spoken(stage.adapter(look_ahead), codes)
    assert (len(pieces) > 4) == (look_ahead != "all")
    assert apart(torch.cat(pieces), whole) < WITHIN[look_ahead]


@pytest.mark.parametrize("count", daily((1, 2, 11, 12, 13, 35, 36, 37, 47, 48, 60, 84), (1, 12, 13, 36, 37, 48)))
def test_every_length_gives_its_480_samples_a_code(stage: Stage, count: int) -> None:
    codes = some_codes(count, seed=count)
    samples = torch.cat(spoken(stage.adapter(), codes))
    assert len(samples) == 480 * count
    assert apart(samples, stage.whole(codes)) < WITHIN[1]


@pytest.mark.parametrize("change", ["code", "seed", "voice"])
def test_parity_fails_when_one_thing_is_changed(stage: Stage, change: str) -> None:
    codes = some_codes(60)
    whole = stage.whole(codes)
    if change == "code":
        codes = codes.index_fill(0, torch.tensor(30), 3)
    voice, seed = "Ethan" if change == "voice" else None, SEED + (change == "seed")
    assert apart(torch.cat(spoken(stage.adapter(), codes, voice, seed)), whole) > 10 * WITHIN[1]


@pytest.mark.parametrize(
    "name", ["code2wav_dit_model.transformer_blocks.1.attn.to_k.weight", "code2wav_bigvgan_model.conv_pre.weight"]
)
def test_parity_fails_when_one_weight_is_changed(stage: Stage, tmp_path: Path, name: str) -> None:
    shutil.copytree(stage.directory, tmp_path / "other")
    index = json.loads((stage.directory / "model.safetensors.index.json").read_text())["weight_map"]
    shard = tmp_path / "other" / index[f"token2wav.{name}"]
    tensors = load_file(shard)
    tensors[f"token2wav.{name}"][0, 0] += 0.2
    save_file(tensors, shard, metadata={"format": "pt"})
    options = {"look_ahead": 2}
    ctx = LoadContext(tmp_path / "other", "vocoder", torch.device("cpu"), torch.float32, options=options)
    codes = some_codes(60)
    assert apart(torch.cat(spoken(Token2Wav(ctx), codes)), stage.whole(codes)) > 10 * WITHIN[2]


@given(
    cuts=st.lists(st.integers(0, 40), max_size=8),
    repeat=st.booleans(),
    steps=st.booleans(),
    look_ahead=st.sampled_from([1, 2]),
)
@settings(max_examples=8, deadline=None)
def test_arrival_changes_nothing(stage: Stage, cuts: list[int], repeat: bool, steps: bool, look_ahead: int) -> None:
    """Codes one by one or all at once, sent again from the start by a talker that was restarted, stepped between or
    not: the very same pieces."""
    codes = some_codes(90)
    engine = ModuleEngine(stage.adapter(look_ahead))
    engine.add(request(seed=0))
    outputs, position = [], 0
    for length in cuts:
        say(engine, codes[position : position + length], min(position, 90), final=False)
        position = min(90, position + length)
        if repeat:
            say(engine, codes[:position], 0, final=False)
        if steps:
            outputs += engine.step()
    say(engine, codes[position:], position, final=True)
    pieces = pieces_of(outputs + drain(engine))
    expected = stage.alone(90, 0, look_ahead)
    assert len(pieces) == len(expected)
    assert all(torch.equal(piece, other) for piece, other in zip(pieces, expected, strict=True))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=12), st.integers(1, 4))
@settings(max_examples=4, deadline=None)
def test_company_changes_nothing(stage: Stage, feeds: list[tuple[int, int]], max_batch: int) -> None:
    lengths = [61, 37, 12, 48]
    engine = ModuleEngine(stage.adapter(), ModuleConfig(max_batch, max_cost=12))
    sent, outputs = [0] * 4, []
    for index in range(4):
        engine.add(request(str(index), voice=VOICES[index % 2], seed=index))
    for index, count in [*feeds, *((index, 90) for index in range(4))]:
        codes = some_codes(lengths[index], index)[sent[index] : sent[index] + count]
        if sent[index] < lengths[index]:
            final = sent[index] + len(codes) == lengths[index]
            say(engine, codes, sent[index], final=final, name=str(index))
            sent[index] += len(codes)
        outputs += engine.step()
    outputs += drain(engine)
    for index in range(4):
        alone = stage.alone(lengths[index], index)
        together = pieces_of(outputs, str(index))
        assert [len(piece) for piece in together] == [len(piece) for piece in alone]
        assert apart(torch.cat(together), torch.cat(alone)) < 2e-5


def test_audio_begins_with_36_codes_and_does_not_wait_for_the_rest(stage: Stage) -> None:
    engine = ModuleEngine(stage.adapter())
    engine.add(request())
    codes = some_codes(90)
    say(engine, codes[:35], final=False)
    assert not engine.has_work()
    say(engine, codes[35:36], 35, final=False)
    [output] = engine.step()
    first = output.payload["samples"]
    assert 12 * 240 <= len(first) < 13 * 240  # 0.12 s
    assert apart(first, stage.whole(codes)[: len(first)]) < WITHIN[1]


def seam_of(samples: Tensor, borders: list[int]) -> float:
    """How much a border sticks out: largest second difference within 1 ms of one, over the largest elsewhere."""
    bend = samples.diff(n=2).abs()
    near = torch.zeros(len(bend), dtype=torch.bool)
    for border in borders:
        near[max(0, border - 24) : border + 24] = True
    return (bend[near].max() / bend[~near].max()).item()


def test_seams_are_inaudible(stage: Stage) -> None:
    """At the borders of pieces and of windows the waveform bends no more than elsewhere, and the error against whole
    decoding has there less than -70 dB of the sound's energy. Pieces decoded apart fail both, by far."""
    codes = some_codes(180)
    whole = stage.whole(codes)
    pieces = spoken(stage.adapter(), codes)
    samples = torch.cat(pieces)
    joints = torch.tensor([len(piece) for piece in pieces]).cumsum(0)[:-1].tolist()
    windows = [block * 24 * 240 for block in (2, 4, 8, 12)]
    apart_pieces = [torch.cat(spoken(stage.adapter(), part)) for part in codes.split([24, 24, 48, 48, 36])]
    naive = torch.cat(apart_pieces)
    assert naive.shape == whole.shape

    def error_at(audio: Tensor, borders: list[int]) -> float:
        near = torch.cat([(audio - whole)[border - 240 : border + 240] for border in borders])
        return 10 * torch.log10(near.pow(2).mean() / whole.pow(2).mean()).item()

    assert seam_of(samples, joints) <= 1.0
    assert seam_of(samples, windows) <= 1.0
    assert error_at(samples, joints) < -70
    assert error_at(samples, windows) < -70
    assert error_at(naive, windows) > -30


def test_a_talker_without_codes_gives_an_empty_audio(stage: Stage) -> None:
    for look_ahead in (1, "all"):
        engine = ModuleEngine(stage.adapter(look_ahead))
        engine.add(request())
        say(engine, torch.empty(0, dtype=torch.long), final=True)
        [piece] = pieces_of(drain(engine))
        assert piece.shape == (0,)


def test_a_final_chunk_without_codes_flushes_what_is_left(stage: Stage) -> None:
    engine = ModuleEngine(stage.adapter())
    engine.add(request())
    say(engine, some_codes(36), final=False)
    outputs = drain(engine)
    say(engine, torch.empty(0, dtype=torch.long), 36, final=True)
    assert apart(torch.cat(pieces_of(outputs + drain(engine))), stage.whole(some_codes(36))) < WITHIN[1]


@pytest.mark.parametrize(
    ("codes", "start", "says"),
    [
        ([5, 290], 0, "code 290 is outside the codebook, which has codes 0 to 289"),
        ([-1], 0, "code -1"),
        ([1], 3, "never"),
    ],
)
def test_bad_codes_fail_their_request_alone(stage: Stage, codes: list[int], start: int, says: str) -> None:
    engine = ModuleEngine(stage.adapter())
    engine.add(request("good"))
    engine.add(request("bad"))
    say(engine, torch.tensor(codes), start, final=True, name="bad")
    say(engine, some_codes(40), final=True, name="good")
    outputs = drain(engine)
    [failed] = [output for output in outputs if output.request_id == "bad"]
    assert isinstance(failed.error, StageFailed)
    assert says in failed.error.message
    assert len(torch.cat(pieces_of(outputs, "good"))) == 40 * 480


def test_voices(stage: Stage) -> None:
    """The request's voice, or the one that comes with the first codes, or the checkpoint's default."""
    codes = some_codes(20)
    ethan = stage.whole(codes, "Ethan")
    assert apart(torch.cat(spoken(stage.adapter(), codes, voice="Ethan")), ethan) < WITHIN[1]
    engine = ModuleEngine(stage.adapter())
    engine.add(request())
    say(engine, codes, final=True, voice="Ethan")
    assert apart(torch.cat(pieces_of(drain(engine))), ethan) < WITHIN[1]
    with pytest.raises(NotFound, match="did you mean 'Chelsie'"):
        engine.add(request("b", voice="Chelsea"))
    engine.add(request("c"))
    say(engine, codes, final=True, voice="Nobody", name="c")
    [output] = drain(engine)
    assert isinstance(output.error, SegueError)
    assert output.error.field == "voice"


def test_a_repeated_call_does_not_advance_the_stream(stage: Stage) -> None:
    """The engine repeats a call item by item when another item made it fail: what was done is not done twice."""
    adapter, codes = stage.adapter(), some_codes(60)
    state, works = adapter.begin(request())
    works += adapter.feed(state, "talker", {"codes": codes, "start": 0}, final=True)
    samples = []
    for work in works:
        adapter.run([work])
        samples += [result.payload["samples"] for result in adapter.run([work])]
    assert torch.equal(torch.cat(samples), torch.cat(spoken(adapter, codes)))


def test_utterances_longer_than_the_librarys_limit(stage: Stage, tmp_path: Path) -> None:
    shutil.copytree(stage.directory, tmp_path / "short")
    path = tmp_path / "short" / "config.json"
    config = json.loads(path.read_text())
    config["token2wav_config"]["dit_config"]["max_position_embeddings"] = 64
    path.write_text(json.dumps(config))
    ctx = LoadContext(tmp_path / "short", "vocoder", torch.device("cpu"), torch.float32)
    codes, speaker = some_codes(90), stage.speakers["Chelsie"]
    with pytest.raises(ValueError, match="max_position_embeddings"):
        load_token2wav(ctx)(codes[None], speaker.cond, speaker.ref_mel)
    assert apart(torch.cat(spoken(Token2Wav(ctx), codes)), stage.whole(codes)) < WITHIN[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"look_ahed": 1}, "did you mean 'look_ahead'"),
        ({"look_ahead": -1}, "number of blocks or 'all'"),
        ({"look_ahead": "some"}, "number of blocks or 'all'"),
        ({"look_ahead": True}, "number of blocks or 'all'"),
    ],
)
def test_bad_options_are_refused(stage: Stage, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Token2Wav(stage.context(**options))

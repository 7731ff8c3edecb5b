"""The workload: frozen, the same for everybody, never twice the same content."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from segue.bench.omni.families import FAMILIES
from segue.bench.omni.paper import PaperWorkload, audio_seconds, video_seconds
from segue.bench.omni.workload import AUDIO_RATE, KINDS, REPLY_TOKENS, VIDEO_FPS, BenchRequest, Material, Workload
from segue.messages.errors import ConfigError
from segue.messages.request import MediaPart, TextPart

ASSETS = Path(__file__).parents[2] / "assets"


@pytest.fixture(scope="module")
def material() -> Material:
    return Material.read(ASSETS)


def media(request: BenchRequest) -> list[MediaPart]:
    return [part for message in request.messages for part in message.content if isinstance(part, MediaPart)]


def test_the_table_is_frozen() -> None:
    table = hashlib.sha256(repr((REPLY_TOKENS, FAMILIES["qwen2_5_omni"].codes_per_token, KINDS)).encode()).hexdigest()
    assert table[:16] == "dfa4891f7b729d01", "figures of earlier runs can no longer be compared"


def test_the_table_is_what_the_benchmark_promises() -> None:
    assert min(REPLY_TOKENS) == 32
    assert max(REPLY_TOKENS) == 96
    assert FAMILIES["qwen3_omni"].codes_per_token * 64 * 0.08 == pytest.approx(10.24), "seconds of an average reply"
    for place in range(len(KINDS)):
        lengths = REPLY_TOKENS[place :: len(KINDS)]
        assert sum(lengths) / len(lengths) == 64, f"{KINDS[place]} requests would be longer or shorter than others"


def test_the_same_seed_gives_the_same_requests(material: Material) -> None:
    first, again = Workload(material, 3), Workload(Material.read(ASSETS), 3)
    encode = msgspec.msgpack.encode
    assert [encode(first.request(i)) for i in range(12)] == [encode(again.request(i)) for i in (range(12))]
    assert encode(first.request(5)) != encode(Workload(material, 4).request(5))


def test_kinds_take_turns_and_carry_their_medium(material: Material) -> None:
    requests = Workload(material).requests(40, 8)
    assert [request.index for request in requests] == list(range(40, 48))
    assert [request.kind for request in requests] == ["text", "image", "audio", "video"] * 2
    for request in requests:
        assert [part.kind for part in media(request)] == ([] if request.kind == "text" else [request.kind])
        assert request.codes == 4 * request.reply_tokens
        assert request.reply_tokens == REPLY_TOKENS[request.index % 32]


def test_no_content_comes_twice(material: Material) -> None:
    requests = Workload(material).requests(0, 64)
    prompts = {part.text for request in requests for part in request.messages[0].content if isinstance(part, TextPart)}
    assert len(prompts) == 64
    for kind in ("image", "audio", "video"):
        cuts = [part.data for request in requests if request.kind == kind for part in media(request)]
        assert len(set(cuts)) == len(cuts) == 16


def test_arrays_are_what_their_description_says(material: Material) -> None:
    for request in Workload(material).requests(0, 16):
        for part in media(request):
            assert part.array is not None
            array = np.frombuffer(part.data, part.array.dtype).reshape(part.array.shape)
            if part.kind == "audio":
                assert np.abs(array).max() <= 1.0
                assert float(np.sqrt(np.mean(array**2))) > 0.01, "the words must be heard"
            else:
                assert array.shape[-1] == 3
                assert array.std() > 5, "the image must show something"


def test_the_papers_workload_has_the_sizes_of_its_data_sets(material: Material) -> None:
    count = PaperWorkload.count
    requests = PaperWorkload(material, codes_per_token=2).requests(0, count)
    found = {kind: [part.array for r in requests if r.kind == kind for part in media(r)] for kind in KINDS}
    assert [len(found[kind]) for kind in ("text", "audio", "image", "video")] == [0, 100, 100, 100]
    seconds = [info.shape[0] / AUDIO_RATE for info in found["audio"] if info is not None]
    assert 1 <= min(seconds) < 8 < 18 < max(seconds) <= 35
    assert sum(seconds) / 100 == pytest.approx(12.3, abs=1)
    for info in found["image"]:
        assert info is not None
        assert max(info.shape[:2]) == 512
        assert min(info.shape[:2]) in (341, 384, 512)
    frames = [info.shape[0] for info in found["video"] if info is not None]
    assert {info.shape[1:] for info in found["video"] if info is not None} == {(240, 320, 3)}
    assert {count % 2 for count in frames} == {0}
    assert 4 <= min(frames) < 8 < 24 < max(frames) <= 142
    assert sum(frames) / 100 / VIDEO_FPS == pytest.approx(7.2, abs=1)
    assert len({part.data for request in requests for part in media(request)}) == count
    encode = msgspec.msgpack.encode
    again = PaperWorkload(Material.read(ASSETS), codes_per_token=2)
    assert [encode(one) for one in again.requests(0, 6)] == [encode(one) for one in requests[:6]]


def test_the_papers_lengths_have_the_means_of_its_data_sets() -> None:
    draw = random.Random(0)
    audio, video = ([of(draw) for _ in range(20_000)] for of in (audio_seconds, video_seconds))
    assert sum(audio) / len(audio) == pytest.approx(12.3, abs=0.1)
    assert sum(video) / len(video) == pytest.approx(7.2, abs=0.1)


def test_material_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"photo\.jpg"):
        Material.read(tmp_path)


def test_ends_placeholders_and_unheard_codes_are_suppressed() -> None:
    config = {
        "thinker_config": {
            "image_token_index": 5,
            "audio_token_index": 6,
            "video_token_index": 7,
            "vision_start_token_id": 8,
            "audio_start_token_id": 9,
            "text_config": {"eos_token_id": [2, 3]},
        },
        "talker_config": {"vocab_size": 20, "tts_codec_pad_token_id": 12, "tts_codec_end_token_id": 14},
        "token2wav_config": {"dit_config": {"num_embeds": 17}},
    }
    found = FAMILIES["qwen2_5_omni"].suppressed(config)
    assert found.thinker == (2, 3, 5, 6, 7, 8, 9)
    assert found.talker == (12, 14, 17, 18, 19)
    assert found.talker_ends == (12, 14)

"""The workload: frozen, the same for everybody, never twice the same content."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from segue.bench.omni.workload import CODES_PER_TOKEN, KINDS, REPLY_TOKENS, BenchRequest, Material, Suppressed, Workload
from segue.messages.errors import ConfigError
from segue.messages.request import MediaPart, TextPart

ASSETS = Path(__file__).parents[2] / "assets"


@pytest.fixture(scope="module")
def material() -> Material:
    return Material.read(ASSETS)


def media(request: BenchRequest) -> list[MediaPart]:
    return [part for message in request.messages for part in message.content if isinstance(part, MediaPart)]


def test_the_table_is_frozen() -> None:
    table = hashlib.sha256(repr((REPLY_TOKENS, CODES_PER_TOKEN, KINDS)).encode()).hexdigest()
    assert table[:16] == "dfa4891f7b729d01", "figures of earlier runs can no longer be compared"


def test_the_table_is_what_the_benchmark_promises() -> None:
    assert min(REPLY_TOKENS) == 32
    assert max(REPLY_TOKENS) == 96
    assert CODES_PER_TOKEN == 4
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
    found = Suppressed.of(config)
    assert found.thinker == (2, 3, 5, 6, 7, 8, 9)
    assert found.talker == (12, 14, 17, 18, 19)
    assert found.talker_ends == (12, 14)

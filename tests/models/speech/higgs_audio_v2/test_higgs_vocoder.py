"""The vocoder: streamed pieces are what the library's codec gives in one call over the whole utterance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from higgs_family import CASES, context, decoded, expected, stage_request

from segue.messages.errors import ConfigError, StageFailed
from segue.models.shared.speech.vocoder import Utterance
from segue.models.speech.higgs_audio_v2.loading import CODEC
from segue.models.speech.higgs_audio_v2.tiny import presets as tiny
from segue.models.speech.higgs_audio_v2.vocoder import Vocoder, reach

HOP = 960


@pytest.fixture(scope="module")
def vocoder(tiny_dir: Path) -> Vocoder:
    return Vocoder(context(tiny_dir, "vocoder"))


def begun(vocoder: Vocoder) -> Utterance:
    return vocoder.begin(stage_request("vocoder"))[0]


def streamed(vocoder: Vocoder, rows: list[list[int]], size: int) -> list[torch.Tensor]:
    """The samples of each piece, for rows that come `size` at a time."""
    state, pieces, end = begun(vocoder), [], 0
    for start in range(0, len(rows), size):
        chunk = {"codes": torch.tensor(rows[start : start + size]), "start": start}
        for work in vocoder.feed(state, "llm", chunk, final=start + size >= len(rows)):
            payload = vocoder.run([work])[0].payload
            assert payload is not None
            assert (payload["start"], payload["sample_rate"]) == (end, 24000)
            pieces.append(payload["samples"])
            end += len(payload["samples"])
    return pieces


def drawn(count: int) -> list[list[int]]:
    """Rows of an utterance that is cut: its beginning, then random codes."""
    codes = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(count))
    return [[64] * 8, *codes.tolist()]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_streamed_is_whole(tiny_dir: Path, vocoder: Vocoder, size: int) -> None:
    rows = drawn(107)
    pieces = streamed(vocoder, rows, size)
    wave = torch.cat(pieces)
    assert len(wave) == 100 * HOP
    torch.testing.assert_close(wave, decoded(tiny_dir, rows), atol=1e-4, rtol=0)
    assert 0.02 < float(wave.square().mean().sqrt()) < 0.5
    assert [len(piece) // HOP for piece in pieces[:5]] == [2, 4, 8, 16, 32]


def test_of_utterances_that_ended(tiny_dir: Path, vocoder: Vocoder) -> None:
    for case in CASES:
        rows = expected(tiny_dir, case)
        wave = torch.cat(streamed(vocoder, rows[:-1], 5))
        assert len(wave) == (len(rows) - 9) * HOP
        torch.testing.assert_close(wave, decoded(tiny_dir, rows), atol=1e-4, rtol=0)


def test_samples_depend_on_no_frame_out_of_reach(vocoder: Vocoder) -> None:
    """On every frame within it but the outermost, which rounding up may add."""
    codec = vocoder.decoder.library_codec
    behind, ahead = reach(codec.acoustic_decoder)
    codes = torch.randint(0, 64, (1, 8, 60), generator=torch.Generator().manual_seed(1))
    other = codes.clone()
    other[:, :, 30] = (other[:, :, 30] + 7) % 64
    with torch.inference_mode():
        apart = (codec(codes) - codec(other))[0].view(60, HOP).abs().amax(dim=1)
    changed = apart.nonzero()[:, 0].tolist()
    assert 30 - ahead <= changed[0] <= 30 - ahead + 2
    assert 30 + behind - 2 <= changed[-1] <= 30 + behind


def test_pieces_of_several_utterances_are_one_batch(vocoder: Vocoder) -> None:
    states = [begun(vocoder) for _ in range(2)]
    works = []
    for index, state in enumerate(states):
        works.append(vocoder.feed(state, "llm", {"codes": torch.tensor(drawn(30 + index)), "start": 0}, final=False))
    assert works[0][0].bucket == works[1][0].bucket
    together = [result.payload for result in vocoder.run([works[0][0], works[1][0]])]
    for index, payload in enumerate(together):
        alone = streamed(vocoder, drawn(30 + index), 1000)[0]
        assert payload is not None
        torch.testing.assert_close(payload["samples"], alone, atol=1e-4, rtol=0)


def test_rows_that_come_again_are_taken_once(vocoder: Vocoder) -> None:
    """The language model was started again."""
    state, rows = begun(vocoder), torch.tensor(drawn(20))
    vocoder.feed(state, "llm", {"codes": rows[:9], "start": 0}, final=False)
    vocoder.feed(state, "llm", {"codes": rows[4:15], "start": 4}, final=False)
    assert state.received == 15
    with pytest.raises(StageFailed, match="rows 15 to 15 of request 'r' never came"):
        vocoder.feed(state, "llm", {"codes": rows[16:], "start": 16}, final=False)
    with pytest.raises(StageFailed, match="code 66 is outside the codebook, which has codes 0 to 63"):
        vocoder.feed(state, "llm", {"codes": rows[15:16] * 0 + 66, "start": 15}, final=False)


@pytest.mark.parametrize("rows", [1, 8])
def test_an_utterance_without_a_frame(vocoder: Vocoder, rows: int) -> None:
    assert [len(piece) for piece in streamed(vocoder, drawn(7)[:rows], 100)] == [0]


def test_a_checkpoint_without_its_codec_is_named(tmp_path: Path) -> None:
    tiny.make(tmp_path)
    (tmp_path / CODEC).rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="put the codec's checkpoint, which"):
        Vocoder(context(tmp_path, "vocoder"))


def test_every_part_is_heard(tiny_dir: Path, vocoder: Vocoder) -> None:
    spoilt = Vocoder(context(tiny_dir, "vocoder"))
    codec, rows = spoilt.decoder.library_codec, drawn(40)
    parts = (codec.quantizer.quantizers[7].project_out, codec.fc2, codec.acoustic_decoder.block[4].res_unit3)
    for part in parts:
        hook = part.register_forward_hook(lambda module, given, out: 1.5 * out)
        assert float((torch.cat(streamed(spoilt, rows, 9)) - decoded(tiny_dir, rows)).abs().max()) > 1e-3
        hook.remove()

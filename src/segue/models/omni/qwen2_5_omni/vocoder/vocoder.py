"""Token2Wav as a streaming stage: chunks of codes in, chunks of waveform out.

An utterance is decoded in *windows* on absolute block boundaries. A window emits some blocks and looks ahead at the
next `look_ahead` blocks, which the following window decodes again with more look-ahead. Each window's past is kept
(`dit`), and so is the waveform network's (`bigvgan`): nothing before the last emitted block is computed twice. How many
blocks a window emits depends only on its index (`GROUPS`), and where it ends, only on the utterance's length: the
samples do not depend on how codes arrived, on load, or on the rest of the batch.

Compared with decoding the whole utterance, emitted frames miss the context beyond the look-ahead.
tests/models/omni/qwen2_5_omni/test_qwen2_5_omni_vocoder.py states and checks the difference for a look-ahead of 1, 2
and 3. `look_ahead: all` decodes the utterance at once when it is complete.

A request holds, whatever the length of its utterance: keys and values of one block for every evaluation and look-back
layer (twice: read and written in turn), the waveform network's past, and the codes and noise of blocks not yet emitted.
Positions may exceed `max_position_embeddings`, which limits only the reference's whole decoding: positions are used
for rotary embeddings alone, and attention never reaches farther than two blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import ConfigError, NotFound, nearest
from segue.models.omni.qwen2_5_omni.loading import Speaker, load_config, load_speakers, load_token2wav
from segue.models.omni.qwen2_5_omni.vocoder.bigvgan import BigVGAN, WaveStream
from segue.models.omni.qwen2_5_omni.vocoder.dit import FlowDecoder, Voice, Window
from segue.models.shared.speech.rows import check_codes, new_rows
from segue.models.shared.speech.vocoder import check_options

SAMPLE_RATE = 24000

GROUPS = (2, 2, 4, 4, 8)
"""Blocks emitted by an utterance's first, second, … window; the last entry repeats. The waveform network needs 36
frames beyond a sample, so one block yields no audio yet and two yield 0.12 s. Later windows grow, as each costs
`look_ahead` blocks more than it emits."""

OPTIONS = ("look_ahead",)
WHOLE = "all"


class BlockNoise:
    """The noise of one utterance, drawn on the CPU block by block.

    Concatenated, the blocks equal `torch.randn(1, frames, mel_dim, generator=…)` of the same seed, bit for bit, if a
    frame has a multiple of 16 numbers (the published one: 80): torch makes normal numbers from uniform ones in groups
    of 16, and redraws an incomplete group.
    """

    def __init__(self, seed: int, block: int, mel_dim: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._shape = (block, mel_dim)

    def draw(self) -> Tensor:
        """The next block: [block, mel_dim] float32."""
        return torch.randn(self._shape, generator=self._generator)


@dataclass(slots=True)
class Utterance:
    """The state of a request in this stage, until its last samples are emitted."""

    request_id: str
    voice: str
    noise: BlockNoise
    wave: WaveStream
    codes: Tensor
    """[n] long: codes from the first block that no window has emitted."""
    drawn: Tensor
    """[blocks · block, mel_dim]: noise from the same block on."""
    received: int = 0
    """Number of codes received."""
    windows: int = 0
    first_block: int = 0
    """The block at which the next window begins."""
    complete: bool = False
    """The last window is planned."""
    past: Tensor | None = None
    spare: Tensor | None = None
    samples: int = 0
    """Number of samples emitted."""


@dataclass(slots=True)
class SoundPiece:
    """One window of an utterance, as a work item. Keeps its results, so that a repeated call computes nothing twice."""

    utterance: Utterance
    codes: Tensor
    noise: Tensor
    first_block: int
    emit: int
    last: bool
    mel: Tensor | None = None
    """[frames, mel_dim]: the frames that the window emits."""
    payload: Payload | None = field(default=None)


class Token2Wav:
    """The vocoder stage's `ModuleModel`.

    In, from the talker: `{"codes": LongTensor [n], "start": int, ["voice": str]}`. Out, per window: `{"samples":
    FloatTensor [n] on the CPU, in [-1, 1], "start": index of the first one, "sample_rate": 24000}`. Always float32.
    """

    def __init__(self, ctx: LoadContext) -> None:
        self._look_ahead = _look_ahead(ctx)
        config = load_config(ctx)
        model = load_token2wav(ctx, config).eval()
        self._speakers: dict[str, Speaker] = load_speakers(ctx, config)
        dit = model.code2wav_dit_model
        if dit.block_size % dit.repeats:
            raise ConfigError(
                f"block_size {dit.block_size} is no multiple of repeats {dit.repeats}", field="dit_config"
            )
        self.voices = list(self._speakers)
        self._flow = FlowDecoder(dit)
        self._bigvgan = BigVGAN(model.code2wav_bigvgan_model)
        self._codes_per_block = dit.block_size // dit.repeats
        self._seconds_per_block = dit.block_size * self._bigvgan.samples_per_frame / SAMPLE_RATE
        self._conditions: dict[str, Voice] = {}

    def warm_up(self) -> None:
        """Decode the first windows of an utterance in the default voice, whose conditioning is kept."""
        utterance = self._open("warm-up", next(iter(self._speakers)), seed=0)
        codes = torch.zeros(GROUPS[0] * self._codes_per_block, dtype=torch.long)
        self.run(self.feed(utterance, "", {"codes": codes, "start": 0}, final=True))

    def begin(self, request: StageRequest) -> tuple[Utterance, list[Work]]:
        voice = self._known(request.request.voice or next(iter(self._speakers)))
        return self._open(request.request_id, voice, request.seed), []

    def _open(self, request_id: str, voice: str, seed: int) -> Utterance:
        return Utterance(
            request_id=request_id,
            voice=voice,
            noise=BlockNoise(seed, self._flow.block, self._flow.mel_dim),
            wave=self._bigvgan.open(),
            codes=torch.empty(0, dtype=torch.long),
            drawn=torch.empty(0, self._flow.mel_dim),
        )

    def feed(self, state: Utterance, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Append codes and plan windows; repeated codes (the talker restarted) are dropped by their index.

        Raises `NotFound` for an unknown voice, `StageFailed` for codes that are missing or out of range.
        """
        if state.complete:
            return []
        if "voice" in payload:
            state.voice = self._known(payload["voice"])
        self._append(state, payload["codes"], payload["start"])
        works = []
        while not state.complete and (piece := self._plan(state, final)) is not None:
            cost = max(1, -(-len(piece.codes) // self._codes_per_block))
            played_at = piece.first_block * self._seconds_per_block
            works.append(Work(state.request_id, piece, cost=cost, last=piece.last, played_at=played_at))
        return works

    def run(self, works: list[Work]) -> list[Result]:
        """Integrate all windows of the call as one batch, then run each through its utterance's waveform network."""
        pieces: list[SoundPiece] = [work.item for work in works]
        self._integrate([piece for piece in pieces if piece.mel is None])
        return [Result(self._audio(piece)) for piece in pieces]

    def end(self, state: Utterance) -> None:
        state.complete = True
        state.past = state.spare = None

    def _known(self, voice: str) -> str:
        if voice not in self._speakers:
            raise NotFound(f"voice {voice!r} is unknown{nearest(voice, self._speakers)}", field="voice")
        return voice

    def _append(self, state: Utterance, codes: Tensor, start: int) -> None:
        new = new_rows(codes, start, state.received, state.request_id).to("cpu", torch.long)
        check_codes(new, self._flow.num_codes)
        state.codes = torch.cat([state.codes, new])
        state.received += len(new)

    def _plan(self, state: Utterance, final: bool) -> SoundPiece | None:
        """The next window, if its codes have arrived; the last takes all remaining ones. Its end depends only on the
        utterance's length: a window is the last one if and only if the codes end inside it."""
        emit = GROUPS[min(state.windows, len(GROUPS) - 1)]
        needed = None if self._look_ahead is None else (emit + self._look_ahead) * self._codes_per_block
        last = needed is None or len(state.codes) < needed
        if last and not final:
            return None
        codes = state.codes if last else state.codes[:needed]
        if last:
            emit = -(-len(codes) // self._codes_per_block)
        frames = len(codes) * self._flow.repeats
        missing = -(-(frames - len(state.drawn)) // self._flow.block)
        state.drawn = torch.cat([state.drawn, *(state.noise.draw() for _ in range(missing))])
        piece = SoundPiece(state, codes, state.drawn[:frames], state.first_block, emit, last)
        state.codes = state.codes[emit * self._codes_per_block :]
        state.drawn = state.drawn[emit * self._flow.block :]
        state.first_block += emit
        state.windows += 1
        state.complete = last
        return piece

    def _integrate(self, pieces: list[SoundPiece]) -> None:
        for piece in pieces:
            if not len(piece.codes):
                piece.mel = torch.empty(0, self._flow.mel_dim)
        windowed = [piece for piece in pieces if len(piece.codes)]
        if not windowed:
            return
        decoded = self._flow.integrate([self._window(piece) for piece in windowed])
        for piece, result in zip(windowed, decoded, strict=True):
            piece.mel = result.mel
            piece.utterance.past, piece.utterance.spare = result.past, piece.utterance.past

    def _window(self, piece: SoundPiece) -> Window:
        past, spare = piece.utterance.past, piece.utterance.spare
        voice = self._voice(piece.utterance.voice)
        return Window(voice, piece.codes, piece.noise, piece.first_block, piece.emit, past, spare)

    def _voice(self, name: str) -> Voice:
        if name not in self._conditions:
            speaker = self._speakers[name]
            self._conditions[name] = self._flow.voice(speaker.cond, speaker.ref_mel)
        return self._conditions[name]

    def _audio(self, piece: SoundPiece) -> Payload:
        if piece.payload is None:
            assert piece.mel is not None, "the flow runs before the waveform network"
            utterance = piece.utterance
            samples = utterance.wave.push(piece.mel, final=piece.last)
            piece.payload = {"samples": samples, "start": utterance.samples, "sample_rate": SAMPLE_RATE}
            utterance.samples += len(samples)
        return piece.payload


def _look_ahead(ctx: LoadContext) -> int | None:
    """The stage's options → blocks to look ahead, None for the whole utterance."""
    check_options(ctx, OPTIONS)
    value = ctx.options.get("look_ahead", 1)
    if value == WHOLE:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"look_ahead is {value!r}; it must be a number of blocks or {WHOLE!r}", field="look_ahead")
    return value

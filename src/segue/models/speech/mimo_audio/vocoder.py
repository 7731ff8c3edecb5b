"""The vocoder stage: rows of patches → frames → samples, by the decoder of the audio tokenizer over windows of frames.

The decoder norms over all frames of a call, and looks ahead, so pieces cannot give what one call over the whole gives.
What they give is defined by the published chunked decoding: every call has up to 250 frames that calls before it have
had, and its new ones; the last 40 wait for the next call, which has them again with what follows. The borders of pieces
depend on nothing but their index (`PIECES`), and only pieces of equal windows are batched, each with its own norm: how
codes arrive, and what else is decoded, changes no sample.

K codes per frame, n frames of 40 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError, StageFailed
from segue.models.shared.speech.vocoder import StreamingVocoder, check_options
from segue.models.shared.speech.windows import WindowDecoder
from segue.models.speech.mimo_audio.codec import Decoder
from segue.models.speech.mimo_audio.config import Config, read_codec, read_config
from segue.models.speech.mimo_audio.loading import load_decoder

PIECES = (8, 16, 32, 64)
"""Frames of an utterance's first, second, … piece; the last entry repeats. Later pieces grow, because each is decoded
with the frames around it."""
BEFORE = 250
"""Frames of earlier calls that a call has again, those that the one before it looked ahead at included."""
AHEAD = 40
"""Frames that a call has, but leaves to the next: as far as the layers of the published vocoder look ahead."""
_OPTION = "right_frames"


class CodeDecoder(WindowDecoder):
    """The audio tokenizer's decoder. A row is a patch of frames."""

    def __init__(self, net: Decoder, config: Config, hop: int, ahead: int, device: torch.device) -> None:
        channels = config.audio_channels
        super().__init__(config.group_size * channels, channels, PIECES, (BEFORE - ahead, ahead), hop)
        self.net = net
        self._device = device
        self._empty = torch.tensor(config.empty_codes)

    def waves(self, codes_BKn: Tensor) -> Tensor:
        waves: Tensor = self.net(codes_BKn.transpose(1, 2).to(self._device))
        return waves

    def frames(self, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Empty codes are no frames."""
        frames = rows.reshape(-1, self.groups)
        frames = frames[frames[:, 0] != self._empty[0]]
        if (broken := (frames < 0) | (frames >= self._empty)).any():
            place, channel = broken.nonzero()[0].tolist()
            raise StageFailed(
                f"code {int(frames[place, channel])} of channel {channel} is outside its codebook, which has codes 0 "
                f"to {int(self._empty[channel]) - 1}"
            )
        return frames, rows[:0]


class Vocoder(StreamingVocoder):
    """The decoder as a stage; always float32.

    Options: `right_frames`, from 0 to 40, by which a piece waits for what follows it; with fewer than 40 the first
    samples come earlier, and differ from the published decoding.
    """

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an option, and for an unreadable checkpoint."""
        ahead = _ahead(ctx)
        config = read_config(ctx.model_dir)
        codec = read_codec(ctx.model_dir, config)
        decoder = CodeDecoder(load_decoder(ctx, codec, config), config, codec.hop, ahead, ctx.device)
        super().__init__(ctx, decoder, codec.sampling_rate, codec.sampling_rate / codec.hop, (_OPTION,))


def _ahead(ctx: LoadContext) -> int:
    """The stage's option, 40 by default."""
    check_options(ctx, (_OPTION,))
    ahead = ctx.options.get(_OPTION, AHEAD)
    if not isinstance(ahead, int) or isinstance(ahead, bool) or not 0 <= ahead <= AHEAD:
        raise ConfigError(f"{_OPTION} is {ahead!r}; it must be from 0 to {AHEAD}", field=_OPTION)
    return ahead

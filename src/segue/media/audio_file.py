"""Encode the samples of one output into a file, in the format that the client asked for."""

from __future__ import annotations

import numpy as np

from segue.media.encode import AudioEncoder, Samples, audio_encoder, encode_audio
from segue.media.speed import Reshaper
from segue.messages.formats import Format


class AudioFile:
    """A file that is made while its samples come; the bytes of `feed` and `finish`, concatenated, are the file. They do
    not depend on how the samples are split, so that another process can make the same file again."""

    def __init__(self, form: Format, sample_rate: int) -> None:
        """`sample_rate`: of the samples."""
        self._name = form.name
        self._reshaper = Reshaper(sample_rate, speed=form.speed, rate=form.rate)
        self._encoder: AudioEncoder | None = None
        if not form.whole:
            self._encoder = audio_encoder(form.name, self._reshaper.rate, part=form.part)
        self._kept: list[Samples] = []
        """The samples of a file that is made at the end."""

    def feed(self, samples: Samples) -> bytes:
        """Return the bytes that are ready."""
        return self._take(self._reshaper.feed(samples))

    def finish(self) -> bytes:
        """Return the rest of the file."""
        data = self._take(self._reshaper.finish())
        if self._encoder is not None:
            return data + self._encoder.finish()
        samples = np.concatenate(self._kept) if self._kept else np.zeros(0, np.float32)
        return encode_audio(samples, self._reshaper.rate, self._name)

    def _take(self, samples: Samples) -> bytes:
        if self._encoder is not None:
            return self._encoder.feed(samples)
        self._kept.append(np.array(samples))  # the caller's memory may be another's soon
        return b""

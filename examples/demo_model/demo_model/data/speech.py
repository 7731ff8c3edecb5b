"""Speech to train on, said by espeak-ng in this process (package `espeakng-loader`)."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import numpy as np

RATE = 22050
"""Samples a second of what espeak-ng says."""
VOICES = ("en-us", "en", "en-gb-scotland", "en-gb-x-rp", "en-us+f2", "en-us+f4", "en+m3", "en-us+m7", "en+f3")
"""Voices that ask; the model hears them all."""
_SYNCHRONOUS = 2
_WORDS_PER_MINUTE, _PITCH, _WORD_GAP = 1, 3, 7
_UTF8 = 1
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Manner:
    """How a sentence is said. `speed`: words a minute; `pitch`: 0 to 99; `gap`: pause between words, 10 ms."""

    voice: str = "en-us"
    speed: int = 160
    pitch: int = 50
    gap: int = 0


def say(text: str, manner: Manner) -> np.ndarray:
    """float32 [samples] at `RATE`. Raises `RuntimeError` for an unknown voice."""
    library, heard, _keep = _library()
    if library.espeak_SetVoiceByName(manner.voice.encode()):
        raise RuntimeError(f"espeak-ng has no voice {manner.voice!r}")
    for parameter, value in ((_WORDS_PER_MINUTE, manner.speed), (_PITCH, manner.pitch), (_WORD_GAP, manner.gap)):
        library.espeak_SetParameter(parameter, value, 0)
    library.espeak_ng_SetRandSeed(ctypes.c_long(1))  # by itself it takes the time
    heard.clear()
    spoken = text.encode()
    if library.espeak_Synth(spoken, len(spoken) + 1, 0, 0, 0, _UTF8, None, None):
        raise RuntimeError(f"espeak-ng cannot say {text!r}")
    return np.concatenate(heard).astype(np.float32) / 32768 if heard else np.zeros(0, np.float32)


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """float32 [samples] at `RATE` → at `rate`, through their spectrum."""
    common = math.gcd(RATE, rate)
    blocks = -(-len(samples) // (RATE // common) // 16) * 16  # a length whose transform is quick
    spectrum = np.fft.rfft(samples, blocks * (RATE // common))
    length = blocks * (rate // common)
    kept: np.ndarray = np.fft.irfft(spectrum[: length // 2 + 1], length) * (rate / RATE)
    return kept[: len(samples) * rate // RATE].astype(np.float32)


@cache
def _library() -> tuple[ctypes.CDLL, list[np.ndarray], object]:
    """The library, the list that it writes sound to, and the function by which it does."""
    import espeakng_loader  # here, so that written questions can be asked without it

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    heard: list[np.ndarray] = []

    def take(samples: ctypes._Pointer[ctypes.c_short], count: int, events: int | None) -> int:
        if samples and count:
            heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    take_samples = _Callback(take)
    if library.espeak_Initialize(_SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0) != RATE:
        raise RuntimeError("espeak-ng does not start, or not at 22050 Hz")
    library.espeak_SetSynthCallback(take_samples)
    return library, heard, take_samples

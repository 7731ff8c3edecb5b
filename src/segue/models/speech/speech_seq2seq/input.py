"""The input stage: a recording → the requested window of its spectrogram, and the decoder's prompt tokens. `stages`
documents the payload."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.messages.errors import ConfigError, InvalidRequest, wrong
from segue.messages.request import MediaPart, Request
from segue.models.shared.checkpoint.files import read_object
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.generation import generation_of
from segue.models.shared.encoder_cache import add_content
from segue.models.shared.input_stage import InputStage
from segue.models.shared.library import AutoFeatureExtractor
from segue.models.shared.text.prompt import client_tokens
from segue.models.shared.text.tokenizer import load_tokenizer
from segue.models.speech.speech_seq2seq.facts import speech_facts

KEPT_BYTES = 128 * 2**20
"""Maximum bytes of kept spectrograms: clients request a long recording window by window."""


@dataclass(frozen=True, slots=True)
class _Spectrogram:
    """The spectrogram of a recording."""

    frames: torch.Tensor
    """[bins, n] float32"""
    seconds: float
    whole: bool
    """It covers the whole recording, unpadded."""
    longer: bool
    """The recording is longer than a window."""


class InputProcessor(InputStage):
    """Accepts one recording. Options: `limits`, a dict of `MediaLimits` fields."""

    alone = True

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        self._facts = speech_facts(read_object(ctx.model_dir / "config.json"), ctx.model_dir)
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget = self._limits.budget
        tokenizer = load_tokenizer(ctx.model_dir)
        if tokenizer is None:
            raise ConfigError(f"{ctx.model_dir}: the checkpoint has no tokenizer", field="model")
        self._tokenizer: Any = tokenizer
        self._extractor: Any = _extractor(ctx)
        generation = generation_of(ctx.model_dir, config).to_dict()
        self._begin: int = generation["decoder_start_token_id"]
        self._tasks: dict[str, int] = generation["task_to_id"] if self._facts.languages else {}
        # a preceding text is truncated to this many tokens, as in Whisper's own program
        self._most_before = config.max_target_positions // 2 - 1
        self._kept: OrderedDict[bytes, _Spectrogram] = OrderedDict()

    def warm_up(self) -> None:
        """Process one second of silence."""
        self._extracted(torch.zeros(self._extractor.sampling_rate).numpy(), long=False)

    @torch.inference_mode()
    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""
        part = _recording(request)
        options = request.options
        seek = int(options.get("seek", 0))
        times = bool(options.get("timestamps"))
        spectrogram = self._spectrogram(part, long=times)
        window = spectrogram.frames[:, seek : seek + self._facts.window]
        window = pad(window, (0, self._facts.window - window.shape[1]))
        digest = hashlib.blake2b(digest_size=16)
        add_content(digest, window)
        ids = [self._begin] if options.get("detect") else self._prompt(options, times=times)
        tokens: Payload = {}
        if TOKENS in request.modalities:
            tokens = client_tokens(ids, self._tokenizer)
            tokens[TOKENS] |= {"frames": spectrogram.frames.shape[1], "seconds": spectrogram.seconds}
        return {
            "token_ids": torch.tensor(ids, dtype=torch.long),
            "times": times,
            "detect": bool(options.get("detect")),
            "window": {"hash": digest.digest(), "frames": window},
            **tokens,
        }

    def _prompt(self, options: dict[str, Any], *, times: bool) -> list[int]:
        """The library's forced tokens: the preceding text, the start, language, task, and whether to write
        timestamps."""
        ids = [*self._before(options["prompt"])] if options.get("prompt") else []
        ids.append(self._begin)
        if self._facts.languages:
            language = options.get("language")
            if language not in self._facts.languages:
                raise wrong("language", language, f"one of {', '.join(self._facts.languages)}")
            ids += [self._facts.languages[language], self._tasks[options.get("task") or "transcribe"]]
        return ids if times else [*ids, self._facts.first_time - 1]

    def _before(self, text: str) -> list[int]:
        try:
            ids = [int(token) for token in self._tokenizer.get_prompt_ids(text)]
        except ValueError as error:
            raise InvalidRequest(f"prompt cannot be tokenized: {error}", field="prompt") from error
        return [ids[0], *ids[1:][-self._most_before :]]

    def _spectrogram(self, part: MediaPart, *, long: bool) -> _Spectrogram:
        content = hashlib.blake2b(part.data, digest_size=16)
        content.update(repr(part.array).encode())
        key = content.digest()
        known = self._kept.get(key)
        if known is None or known.whole != (long or known.longer):
            known = self._kept[key] = self._spectrogram_of(part, long=long)
            while len(self._kept) > 1 and sum(one.frames.nbytes for one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return known

    def _spectrogram_of(self, part: MediaPart, *, long: bool) -> _Spectrogram:
        rate = self._extractor.sampling_rate
        samples = decode_audio(part, rate, self._limits)
        if len(samples) < self._extractor.hop_length or len(samples) <= self._extractor.n_fft // 2:
            raise InvalidRequest(
                f"{part.field or 'audio'} is {len(samples) / rate:g} seconds long; that is too short",
                field=part.field or None,
            )
        # a recording longer than a window is extracted as a whole, as `generate` requires
        longer = len(samples) > self._extractor.n_samples
        return _Spectrogram(self._extracted(samples, long=long or longer), len(samples) / rate, long or longer, longer)

    def _extracted(self, samples: Any, *, long: bool) -> torch.Tensor:
        """[bins, n] of all samples; unless `long`, of one window, padded with silence."""
        cut = {"truncation": False, "padding": "longest"} if long else {}
        made = self._extractor(samples, sampling_rate=self._extractor.sampling_rate, return_tensors="pt", **cut)
        frames: torch.Tensor = made["input_features"][0]
        return frames


def _extractor(ctx: LoadContext) -> Any:
    try:
        return AutoFeatureExtractor.from_pretrained(ctx.model_dir)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{ctx.model_dir}: the feature extractor cannot be read: {error}", field="model") from error


def _recording(request: Request) -> MediaPart:
    """The request's only recording. Raises `InvalidRequest`."""
    content = [part for message in request.messages for part in message.content]
    if len(request.messages) != 1 or len(content) != 1 or not isinstance(content[0], MediaPart):
        raise InvalidRequest(
            "this model transcribes audio: send one user message with one recording (audio) and nothing else; "
            "pass preceding text as the option prompt",
            field="messages",
        )
    return content[0]

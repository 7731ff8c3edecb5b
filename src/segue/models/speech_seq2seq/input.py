"""The input stage: a recording → the window of its spectrogram that is asked for, and the tokens the decoder begins
with. What the payload holds is written in `stages`."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Work
from segue.graph.parts import TOKENS
from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.messages.errors import ConfigError, InvalidRequest, wrong
from segue.messages.request import MediaPart, Request
from segue.models.encoder_cache import add_content
from segue.models.generation import generation_of
from segue.models.input_stage import InputStage
from segue.models.json_files import read_object
from segue.models.library import AutoFeatureExtractor
from segue.models.pretrained import load_config
from segue.models.prompt import client_tokens
from segue.models.speech_seq2seq.facts import speech_facts
from segue.models.tokenizer import load_tokenizer

KEPT_BYTES = 128 * 2**20
"""Of spectrograms: a long recording is asked for window after window."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """A recording."""

    frames: torch.Tensor
    """[bins, n] float32"""
    seconds: float
    whole: bool
    """It was extracted as long as it is."""
    longer: bool
    """Than a window."""


class InputProcessor(InputStage):
    """One recording. Options: `limits`, a dict of `MediaLimits` fields."""

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        self._facts = speech_facts(read_object(ctx.model_dir / "config.json"), ctx.model_dir)
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        tokenizer = load_tokenizer(ctx.model_dir)
        if tokenizer is None:
            raise ConfigError(f"{ctx.model_dir}: the checkpoint has no tokenizer", field="model")
        self._tokenizer: Any = tokenizer
        self._extractor: Any = _extractor(ctx)
        generation = generation_of(ctx.model_dir, config).to_dict()
        self._begin: int = generation["decoder_start_token_id"]
        self._tasks: dict[str, int] = generation["task_to_id"] if self._facts.languages else {}
        # what comes before a text is cut to so many tokens, as by Whisper's own program
        self._most_before = config.max_target_positions // 2 - 1
        self._kept: OrderedDict[bytes, _Heard] = OrderedDict()

    def warm_up(self) -> None:
        """A second of silence."""
        self._extracted(torch.zeros(self._extractor.sampling_rate).numpy(), long=False)

    def begin(self, request: StageRequest) -> tuple[None, list[Work]]:
        # a bucket of its own: no request waits for the recording of another to be decoded
        return None, [Work(request.request_id, request.request, bucket=request.request_id, last=True)]

    @torch.inference_mode()
    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` naming the field, the value and what would be right."""
        part = _recording(request)
        options = request.options
        seek = int(options.get("seek", 0))
        times = bool(options.get("timestamps"))
        heard = self._heard(part, long=times)
        window = heard.frames[:, seek : seek + self._facts.window]
        window = pad(window, (0, self._facts.window - window.shape[1]))
        digest = hashlib.blake2b(digest_size=16)
        add_content(digest, window)
        ids = [self._begin] if options.get("detect") else self._prompt(options, times=times)
        tokens: Payload = {}
        if TOKENS in request.modalities:
            tokens = client_tokens(ids, self._tokenizer)
            tokens[TOKENS] |= {"frames": heard.frames.shape[1], "seconds": heard.seconds}
        return {
            "token_ids": torch.tensor(ids, dtype=torch.long),
            "times": times,
            "detect": bool(options.get("detect")),
            "window": {"hash": digest.digest(), "frames": window},
            **tokens,
        }

    def _prompt(self, options: dict[str, Any], *, times: bool) -> list[int]:
        """What the library forces: the text before, the beginning, language, task, and whether there are times."""
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
            raise InvalidRequest(f"prompt cannot be taken: {error}", field="prompt") from error
        return [ids[0], *ids[1:][-self._most_before :]]

    def _heard(self, part: MediaPart, *, long: bool) -> _Heard:
        content = hashlib.blake2b(part.data, digest_size=16)
        content.update(repr(part.array).encode())
        key = content.digest()
        known = self._kept.get(key)
        if known is None or known.whole != (long or known.longer):
            known = self._kept[key] = self._listened(part, long=long)
            while len(self._kept) > 1 and sum(one.frames.nbytes for one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return known

    def _listened(self, part: MediaPart, *, long: bool) -> _Heard:
        rate = self._extractor.sampling_rate
        samples = decode_audio(part, rate, self._limits)
        if len(samples) < self._extractor.hop_length or len(samples) <= self._extractor.n_fft // 2:
            raise InvalidRequest(
                f"{part.field or 'audio'} is {len(samples) / rate:g} seconds long; that is too short to hear anything",
                field=part.field or None,
            )
        # what is longer than a window is extracted whole, as `generate` wants it
        longer = len(samples) > self._extractor.n_samples
        return _Heard(self._extracted(samples, long=long or longer), len(samples) / rate, long or longer, longer)

    def _extracted(self, samples: Any, *, long: bool) -> torch.Tensor:
        """[bins, n] of all samples; where not `long`, of as many as a window has, silence behind them."""
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
    """The one that a request has. Raises `InvalidRequest`."""
    content = [part for message in request.messages for part in message.content]
    if len(request.messages) != 1 or len(content) != 1 or not isinstance(content[0], MediaPart):
        raise InvalidRequest(
            "this model writes down what it hears: send one user message with one recording (audio) and nothing else; "
            "a text that comes before is the option prompt",
            field="messages",
        )
    return content[0]

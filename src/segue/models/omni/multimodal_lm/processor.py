"""Run the checkpoint's own processor on prompts with media, and find out what it accepts and returns.

All media of a prompt go through one call, as in the library: a processor may treat a single image differently from one
of several (LLaVA-OneVision cuts only a single one into tiles).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from segue.media.audio import Samples
from segue.media.video import Video
from segue.messages.errors import ConfigError
from segue.models.shared.library import (
    VERSION,
    AutoProcessor,
    BaseVideoProcessor,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    WhisperFeatureExtractor,
)

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments by which a forward learns which tokens are a medium's."""
VIDEO_FPS = 2.0
"""Frames per second of a video, for processors that state none."""
_TEXT_KEYS = frozenset(
    (
        *("input_ids", "attention_mask", *TYPES),
        *("text_replacement_offsets", "video_metadata", "labels"),
    )
)
_OLDER = MappingProxyType({"pixel_values_images": "pixel_values"})
"""Older names that a processor still returns → the model's current names (Video-LLaVA)."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError, RuntimeError, IndexError)

Medium = np.ndarray[Any, np.dtype[np.uint8]] | Samples | Video
"""A decoded image [height, width, 3], recording [samples] or clip."""


@dataclass(frozen=True)
class Processed:
    """One prompt and its media, processed."""

    ids: list[int]
    token_ids: dict[str, int]
    """By kind, the placeholder id whose rows the model replaces."""
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By kind, arguments of the model's forward, under the library's names."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """By kind, the number of placeholder tokens of each medium; kinds are missing if the processor does not return
    it."""

    token_types: list[int] | None = None
    """For each id the library's number of its kind (`mm_token_type_ids`, `token_type_ids`), if the processor returns
    it."""
    named_types: dict[str, list[int]] = field(default_factory=dict)
    """The same numbers under the processor's own names: PaliGemma's `token_type_ids` tell a prompt from a reply."""

    def places(self, kind: str) -> list[int]:
        """The positions of a kind's rows."""
        return [place for place, token in enumerate(self.ids) if token == self.token_ids[kind]]


class Processor:
    """`AutoProcessor` of one checkpoint."""

    def __init__(self, model_dir: Path, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: kind → placeholder id, for the kinds that the model has encoders for.

        Raises `ConfigError` for a processor that takes none of them, or has an unusual interface.
        """
        self._token_ids = dict(token_ids)
        self._library = _load(model_dir)
        self.tokenizer: PreTrainedTokenizerBase = self._library.tokenizer
        self.template: str | None = self._library.chat_template
        self._parts = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
        self.placeholders: dict[str, str] = {}
        for kind in token_ids:
            if self._parts[kind] not in self._library.get_attributes():
                continue
            token = vars(self._library).get(f"{kind}_token")
            if not isinstance(token, str):
                raise self._unusable(f"it names no placeholder for {kind}")
            self.placeholders[kind] = token
        if not self.placeholders:
            raise self._unusable(f"it takes none of {', '.join(token_ids)}")
        self._says_more = True
        """It returns the number of tokens of each medium, and the kind of each token."""
        self._samples = {kind: self._sample_text(kind) for kind in self.placeholders}
        if type(self._library).__call__ is not ProcessorMixin.__call__:
            self._says_more = self._tries_to_say_more()
        self._keys = self._learn_keys()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that it accepts."""
        return tuple(self.placeholders)

    @cached_property
    def placeholder_ids(self) -> dict[str, int]:
        """By kind, the id of the placeholder in a text."""
        return {kind: int(self.tokenizer.convert_tokens_to_ids(text)) for kind, text in self.placeholders.items()}

    @property
    def rows(self) -> dict[str, int]:
        """By kind, the id whose rows the model replaces."""
        return {kind: self._token_ids[kind] for kind in self.placeholders}

    def tokens(self) -> dict[str, frozenset[int]]:
        """By kind, the ids that stand for media."""
        return {kind: frozenset({own, self.rows[kind]}) for kind, own in self.placeholder_ids.items()}

    def sample(self, kind: str) -> str:
        """The text for one medium, without other text around it."""
        return self._samples[kind]

    def around(self, kind: str) -> tuple[int, int] | tuple[None, None]:
        """The ids of the tokens around the placeholder in `sample`, if there are any."""
        names = [vars(self._library).get(f"{kind}_{side}_token") for side in ("start", "end")]
        if self._samples[kind] == self.placeholders[kind]:
            return None, None
        before, after = self.tokenizer.convert_tokens_to_ids(names)
        return before, after

    def border(self, texts: Sequence[str]) -> tuple[str, int]:
        """A special token that is in none of the texts and stands for no medium: its text and its id."""
        media = frozenset().union(*self.tokens().values())
        for token, entry in self.tokenizer.added_tokens_decoder.items():
            strips = entry.lstrip or entry.rstrip
            if entry.special and not strips and token not in media and not any(entry.content in text for text in texts):
                return entry.content, token
        raise ValueError("the tokenizer has no special token to mark the ids of a prompt")

    @cached_property
    def sampling_rate(self) -> int:
        """Samples per second of its audio inputs."""
        return int(self._library.feature_extractor.sampling_rate)

    @cached_property
    def longest_audio(self) -> int | None:
        """Maximum samples of a recording, if the library silently truncates longer ones."""
        extractor = self._library.feature_extractor
        if isinstance(extractor, WhisperFeatureExtractor):
            pieces = max(shape[0] for shape in self._shapes(2 * extractor.n_samples))
            return extractor.n_samples if pieces == 1 else None
        # the call's default limit (Gemma 3n)
        named = inspect.signature(extractor.__call__).parameters.get("max_length")
        if named is None or not isinstance(named.default, int):
            return None
        return named.default if self._shapes(named.default) == self._shapes(2 * named.default) else None

    def _shapes(self, samples: int) -> list[tuple[int, ...]]:
        """Shapes of the processor's tensors for a silent recording."""
        made = self(self.placeholders["audio"], {"audio": [np.zeros(samples, np.float32)]})
        return [tuple(value.shape) for value in made.tensors["audio"].values()]

    @cached_property
    def fps(self) -> float:
        """Frames per second of its video inputs."""
        return float(self._library.video_processor.fps or VIDEO_FPS)

    @cached_property
    def clip_frames(self) -> int | None:
        """Number of frames, evenly spaced, of every clip, if the library's processor takes a fixed number (Gemma 4)."""
        part = self._library.video_processor
        even = type(part).sample_frames is BaseVideoProcessor.sample_frames
        return part.num_frames if even and part.do_sample_frames and part.fps is None else None

    def settings(self, kind: str) -> dict[str, Any]:
        """The settings of the part for a kind, from its file."""
        part: Any = vars(self._library)[self._parts[kind]]
        return part.to_dict()

    def __call__(
        self, text: str, media: dict[str, list[Medium]], *, add_special_tokens: bool | None = None
    ) -> Processed:
        """Process a prompt with one placeholder per medium, and the media of each kind in order.

        `add_special_tokens`: None for the library's default with chat templates. Raises the library's exceptions.
        """
        made = dict(
            self._library(
                text=[text],
                return_tensors="pt",
                add_special_tokens=self.adds(text) if add_special_tokens is None else add_special_tokens,
                **self._arguments(media),
            )
        )
        ids = made["input_ids"][0].tolist()
        tensors = {
            kind: {_OLDER.get(key, key): made[key] for key in keys if key in made}
            for kind, keys in self._keys_of(made, media).items()
        }
        named = {name: made[name][0].tolist() for name in TYPES if name in made}
        return Processed(
            ids,
            self._token_ids,
            tensors,
            self._counts(made, media),
            next(iter(named.values()), None),
            named,
        )

    def plain(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """The ids of a chat without media."""
        adds = self.adds(text) if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(text, add_special_tokens=adds)["input_ids"])

    def example(self, kind: str, seed: int = 0) -> Medium:
        """A small medium of random noise."""
        noise = np.random.default_rng(seed)
        if kind == "audio":
            return (0.1 * noise.standard_normal(self.sampling_rate)).astype(np.float32)
        if kind == "image":
            return noise.integers(0, 255, (56, 84, 3), dtype=np.uint8)
        return Video(noise.integers(0, 255, (self.clip_frames or 8, 56, 84, 3), dtype=np.uint8), self.fps)

    def examples(self, kind: str) -> tuple[str, list[Medium]]:
        """A text with placeholders for small media of a kind, and the media: two, or one if a prompt allows only
        one."""
        media = [self.example(kind, seed) for seed in range(2)]
        sample = self._samples[kind]
        text = f"a {sample} b {sample} c"
        try:
            self(text, {kind: media})
        except _UNREADABLE:
            return f"a {sample} b", media[:1]
        return text, media

    def adds(self, text: str) -> bool:
        """Whether to add special tokens to a chat: as in the library's `apply_chat_template`, unless the template has
        written the first of them."""
        begin = self.tokenizer.bos_token
        return begin is None or not text.startswith(begin)

    def _arguments(self, media: dict[str, list[Medium]]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if "image" in media:  # a nested list marks images of one prompt
            arguments["images"] = [[Image.fromarray(np.asarray(pixels)) for pixels in media["image"]]]
        if "video" in media:
            clips: list[Any] = media["video"]
            arguments["videos"] = [[clip.frames for clip in clips]]
            arguments["video_metadata"] = [[_metadata(clip) for clip in clips]]
            # the text for a clip may contain timestamps (Cosmos 3 Edge)
            arguments["videos_kwargs"] = {"input_data_format": "channels_last", "return_metadata": True}
        if "audio" in media:
            arguments["audio"] = media["audio"]
            arguments["audio_kwargs"] = {"sampling_rate": self.sampling_rate}
        if self._says_more:
            arguments |= {"return_text_replacement_offsets": True, "return_mm_token_type_ids": True}
        return arguments

    def _counts(self, made: dict[str, Any], media: dict[str, list[Medium]]) -> dict[str, list[int]]:
        offsets = made.get("text_replacement_offsets")
        if not offsets:
            return {}
        names = {kind: self.tokenizer.convert_ids_to_tokens(self._token_ids[kind]) for kind in media}
        return {
            kind: [entry["replacement"].count(name) for entry in offsets[0] if entry["type"] == kind]
            for kind, name in names.items()
        }

    def _sample_text(self, kind: str) -> str:
        """The text for one medium: the placeholder, between its start and end tokens if the processor names them
        (HunYuan-VL's requires them)."""
        names = vars(self._library)
        around = [names.get(f"{kind}_{side}_token") for side in ("start", "end")]
        token = self.placeholders[kind]
        return f"{around[0]}{token}{around[1]}" if all(isinstance(side, str) for side in around) else token

    def _made(self, kind: str, media: list[Medium]) -> dict[str, Any]:
        """The library's result for media of one kind."""
        text = " ".join(self._samples[kind] for _ in media)
        return dict(self._library(text=[text], return_tensors="pt", **self._arguments({kind: media})))

    def _keys_of(self, made: dict[str, Any], media: dict[str, list[Medium]]) -> dict[str, list[str]]:
        """For each kind among a prompt's media, the names of its tensors; some occur only for media of certain sizes
        (pieces of large images, in DeepSeek-OCR 2)."""
        known = _TEXT_KEYS.union(*self._keys.values())
        if more := [key for key in made if key not in known]:
            for kind in media:
                alone = made if len(media) == 1 else self._made(kind, media[kind])
                self._keys[kind] += [key for key in more if key in alone]
        return {kind: self._keys[kind] for kind in media}

    def _tries_to_say_more(self) -> bool:
        """Whether a processor that overrides `__call__` returns the additional entries on request."""
        try:
            kind = next(iter(self.placeholders))
            made = self._made(kind, [self.example(kind)])
        except _UNREADABLE:
            return False
        return "text_replacement_offsets" in made

    def _learn_keys(self) -> dict[str, list[str]]:
        """By kind, the names of its tensors. A kind whose media become tokens of another kind (GLM-4V's clips become
        images) is dropped."""
        keys: dict[str, list[str]] = {}
        for kind in list(self.placeholders):
            try:
                made = self._made(kind, [self.example(kind)])
            except _UNREADABLE as error:
                raise self._unusable(f"it does not accept {kind} as other processors do ({error!r})") from error
            if self._token_ids[kind] in made["input_ids"][0].tolist():
                keys[kind] = [key for key in made if key not in _TEXT_KEYS]
            else:
                del self.placeholders[kind]
        if not keys:
            raise self._unusable("its results for media have none of the config's media tokens")
        for kind, own in keys.items():
            for other, others in keys.items():
                if kind < other and (shared := set(own) & set(others)):
                    raise self._unusable(f"{kind} and {other} share a tensor name ({min(shared)})")
        return keys

    def _unusable(self, reason: str) -> ConfigError:
        kind = type(self._library).__name__
        return ConfigError(f"{kind} of transformers {VERSION} cannot be used: {reason}", field="architectures")


def _load(model_dir: Path) -> Any:
    try:
        processor = AutoProcessor.from_pretrained(model_dir, trust_remote_code=False)
    except _UNREADABLE as error:
        raise ConfigError(f"{model_dir}: the processor cannot be read: {error}", field="model") from error
    if not isinstance(processor, ProcessorMixin) or "tokenizer" not in processor.get_attributes():
        raise ConfigError(
            f"{model_dir}: {type(processor).__name__} is not a processor of text and media", field="architectures"
        )
    return processor


def _metadata(clip: Video) -> dict[str, Any]:
    count, height, width = clip.frames.shape[:3]
    return {
        "total_num_frames": count,
        "fps": clip.fps,
        "width": width,
        "height": height,
        "duration": count / clip.fps,
        "frames_indices": list(range(count)),
    }

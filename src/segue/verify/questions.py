"""The fixed requests of `segue verify`, one per kind of input; they are generated, so that everybody uses the same."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from segue.graph.kinds.registry import kind_of
from segue.graph.parts import Stage
from segue.messages.errors import SegueError
from segue.verify.subject import Subject

SEED = 7
RATE = 16_000
FPS = 2.0
_SHORT = "Name three rivers."
_SENTENCES = (
    "The harbour lay still in the early morning, and a small boat left it for the open sea.",
    "Nobody on the pier had seen the weather change so quickly in all the years before.",
    "By noon the wind had turned to the north, and the gulls came in from the islands.",
    "An old man counted the masts, wrote the number 47 into his book, and went home.",
)
_QUESTION = "What is this? Describe it in one sentence."
_PAINT = "a red lighthouse on a cliff above a stormy sea, oil painting"


@dataclass(frozen=True)
class Question:
    """One request."""

    name: str
    prompt: dict[str, Any]
    """A prompt of `AsyncOmni`."""
    optional: bool = False
    """A model need not accept it: if one side refuses it, that is not a failure."""


def questions(subject: Subject, *, quick: bool) -> list[Question]:
    """Return the requests for a model, by its graph's inputs and outputs. Empty: nothing can be compared."""
    gives = subject.graph.gives
    if gives & {"image", "video"}:
        return _pixels(subject, quick)
    if subject.family.speech is not None:
        return _recordings(subject, quick)
    if "score" in gives:
        return [
            Question(f"pair {place}", {"prompt": _SHORT, "options": {"text_pair": text}})
            for place, text in enumerate(_texts(subject, quick), 1)
        ]
    if gives & {"embedding", "classes"}:
        return [Question(f"text {place}", {"prompt": text}) for place, text in enumerate(_texts(subject, quick), 1)]
    if "text" in gives:
        return _chats(subject, quick)
    return _spoken(subject, quick) if "audio" in gives else []


def sampling_stages(subject: Subject) -> list[Stage]:
    return [stage for stage in subject.graph.stages.values() if kind_of(stage.engine).samples]


def long_text(subject: Subject, words: int = 400) -> str:
    """Return a text of this many words, or of as many as surely fit into the model's context."""
    most = words if subject.context is None else min(words, subject.context // 8)
    sentences = " ".join(f"{place}. {_SENTENCES[place % len(_SENTENCES)]}" for place in range(1, words // 8)).split()
    return " ".join(sentences[:most])


def _texts(subject: Subject, quick: bool) -> list[str]:
    texts = [_SHORT, _SENTENCES[0], long_text(subject, 120)]
    return texts[:2] if quick else texts


def _chats(subject: Subject, quick: bool) -> list[Question]:
    """Return requests for a model that writes text, and may take media and speak."""
    chats = subject.family.chats(subject.model_dir)
    tokens, codes = (16, 50) if quick else (48, 120)
    stages = sampling_stages(subject)
    sampling: dict[str, dict[str, Any]] = {
        stage.name: {"temperature": 0.0, "max_tokens": tokens if stage.gives else codes} for stage in stages
    }
    sampling[subject.graph.main]["logprobs"] = 0  # only those of the generated tokens
    shared: dict[str, Any] = {
        "modalities": sorted(subject.graph.gives & {"text", "audio"}),
        "sampling": sampling,
        "seed": SEED,
        "return_prompt_ids": True,
    }

    def asked(name: str, text: str, *parts: dict[str, Any], **more: Any) -> Question:
        content = [*parts, {"type": "text", "text": text}]
        written = {"messages": [{"role": "user", "content": content}]} if chats or parts else {"prompt": text}
        return Question(name, {**written, **shared, **more})

    found = [asked("short text", _SHORT), asked("long text", f"{long_text(subject)} What is this about?")]
    kinds = [kind for kind in ("image", "audio", "video") if kind in subject.graph.takes]
    found += [asked(kind, _QUESTION, _part(kind)) for kind in kinds]
    if len(kinds) > 1 and not quick:
        mixed = asked(" + ".join(kinds), _QUESTION, *(_part(kind) for kind in kinds))
        found.append(Question(mixed.name, mixed.prompt, optional=True))
    if "use_audio_in_video" in subject.family.options and not quick and (file := talking_clip()) is not None:
        part = {"type": "video", "video": file}
        found.append(asked("video with audio", _QUESTION, part, options={"use_audio_in_video": True}))
    return found


def _spoken(subject: Subject, quick: bool) -> list[Question]:
    """Return requests for a model that says a given text."""
    greedy = {
        stage.name: {"temperature": 0.0, "max_tokens": 50 if quick else 120} for stage in sampling_stages(subject)
    }
    texts = {"short text": _SHORT, "sentence": _SENTENCES[0], "long text": long_text(subject, 120)}
    return [
        Question(
            name,
            {
                "messages": [{"role": "user", "content": text}],
                "modalities": ["audio"],
                "sampling": greedy,
                "seed": SEED,
            },
        )
        for name, text in list(texts.items())[: 2 if quick else 3]
    ]


def _recordings(subject: Subject, quick: bool) -> list[Question]:
    """Return requests for a model that transcribes speech."""
    assert subject.family.speech is not None
    facts = subject.family.speech(subject.config, subject.model_dir)
    options = {"task": "transcribe"} if facts.languages else {}
    greedy = {stage.name: {"temperature": 0.0, "max_tokens": 16 if quick else 48} for stage in sampling_stages(subject)}
    return [
        Question(
            f"recording of {seconds} s",
            {"audio": (sweep(seconds), RATE), "options": options, "sampling": greedy, "seed": SEED},
        )
        for seconds in ((2,) if quick else (2, 9))
    ]


def _pixels(subject: Subject, quick: bool) -> list[Question]:
    """Return requests for a model that makes images or video."""
    sizes = subject.family.sizes(subject.config, subject.model_dir)
    side = 128 if quick else 256
    height, width = (side, side) if sizes is None else sizes.nearest(side, side, side * side)
    shared: dict[str, Any] = {
        "prompt": _PAINT,
        "height": height,
        "width": width,
        "num_inference_steps": 2 if quick else 4,
        "seed": SEED,
    }
    if "video" in subject.graph.gives:
        shared["num_frames"] = 1 + 8 // step * step if (step := sizes.frame_step if sizes else 1) <= 8 else 1 + step
    takes_image = "image" in subject.graph.takes  # some of these models need one
    found = [
        Question("prompt", shared, optional=takes_image),
        Question("prompt, negative prompt", {**shared, "negative_prompt": "grey, blurred"}, optional=True),
    ]
    if takes_image:
        found.append(Question("prompt, image", {**shared, "image": shapes()}, optional=True))
    return found


# --- media -----------------------------------------------------------------------------------------------------------


def _part(kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {"image": shapes(), "audio": (sweep(2), RATE), "video": (clip(), FPS)}
    return {"type": kind, kind: made[kind]}


@cache
def shapes(height: int = 224, width: int = 336) -> np.ndarray:
    """Return [height, width, 3] uint8: a gradient with a disc and a square on it."""
    y, x = np.mgrid[0:height, 0:width]
    image = np.stack([255 * x / width, 255 * y / height, 128 + 0 * x], axis=-1)
    image[(y - height / 2) ** 2 + (x - width / 3) ** 2 < (height / 4) ** 2] = (230, 40, 30)
    image[height // 4 : height // 2, 2 * width // 3 : 5 * width // 6] = (250, 240, 60)
    return image.astype(np.uint8)


def sweep(seconds: int) -> np.ndarray:
    """Return [samples] float32 mono, 16 kHz: a tone rising from 150 to 2,000 Hz in pulses, four per second."""
    t = np.arange(seconds * RATE) / RATE
    phase = 2 * np.pi * (150 * t + (2000 - 150) * t**2 / (2 * seconds))
    return (0.3 * np.sin(phase) * np.sin(4 * np.pi * t) ** 2).astype(np.float32)


@cache
def clip(frames: int = 8, height: int = 168, width: int = 224) -> np.ndarray:
    """Return [frames, height, width, 3] uint8: a square that crosses a gradient."""
    made = np.repeat(shapes(height, width)[None], frames, axis=0)
    for place, frame in enumerate(made):
        left = place * (width - 40) // frames
        frame[60:100, left : left + 40] = (20, 20, 240)
    return made


@cache
def talking_clip() -> bytes | None:
    """Return an MP4 file of the clip with the sweep as its audio; None if no H.264 encoder is installed."""
    from segue.media.write_video import VideoWriter, check_video_encoder

    try:
        check_video_encoder()
    except SegueError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        with VideoWriter(path, fps=FPS, sample_rate=RATE) as video:
            video.add(clip())
            video.add_audio(sweep(4))
        return path.read_bytes()

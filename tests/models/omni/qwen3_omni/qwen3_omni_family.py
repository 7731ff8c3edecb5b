"""What the tests of this family share: prompts of every kind, the library's answers, and the stages driven as a worker
drives them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.media.limits import MediaLimits
from segue.media.video import Video, decode_video
from segue.messages.request import ArrayInfo, MediaPart, Message, Request, TextPart
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.omni.qwen3_omni.encoder import Encoder
from segue.models.omni.qwen3_omni.input import InputProcessor
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor
from segue.models.omni.qwen3_omni.reference import speaking
from segue.models.omni.qwen3_omni.stages import TRANSFERS
from segue.models.omni.qwen3_omni.talker import Talker
from segue.models.omni.qwen3_omni.thinker import Thinker
from segue.models.shared.omni.chat import audio_of_videos

# after the family, which mends torchvision
from segue.engines.autoregressive.config import AutoregressiveConfig  # isort: skip
from made_engine import engine_over  # isort: skip
from segue.engines.autoregressive.speculation.speculation import Speculation  # isort: skip

TOKENS = 24
CODES = 60
RATE = 16_000
FPS = 2.0
ASSETS = Path(__file__).parents[4] / "assets"


def context(model_dir: Path, stage: str, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(model_dir, stage, torch.device("cpu"), torch.float32, **more)


def stage_request(stage: str, *, upstreams: set[str], **more: Any) -> StageRequest:
    return StageRequest(
        request_id=more.pop("request_id", "r"),
        stage=stage,
        request=more.pop("request", None) or Request(request_id="r"),
        sampling=more.pop("sampling", SamplingParams(temperature=0.0)),
        seed=0,
        upstreams=frozenset(upstreams),
        downstreams=frozenset(),
        to_client=frozenset(),
        **more,
    )


# --- prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One prompt: its parts in order, (kind, seed) or a text."""

    name: str
    parts: tuple[tuple[str, int] | str, ...]
    use_audio_in_video: bool = False

    def of(self, kind: str) -> list[int]:
        return [part[1] for part in self.parts if not isinstance(part, str) and part[0] == kind]


CASES = (
    Case("text", ("write a few words about the sea and the hills behind it",)),
    Case("image", (("image", 1), "what is this")),
    Case("audio", (("audio", 2), "what was said")),
    Case("video", (("video", 3), "what happens here")),
    Case("video with sound", (("clip", 0), "and what is heard"), use_audio_in_video=True),
    Case(
        "mixed",
        (("image", 6), ("audio", 8), " between ", ("video", 10), ("image", 7), " and ", ("audio", 0), " all"),
    ),
)
BY_NAME = {case.name: case for case in CASES}


def image(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (4 + seed % 3, 5, 3), dtype=np.uint8)
    return np.kron(coarse, np.ones((32, 32, 1), dtype=np.uint8))


def audio(seed: int) -> np.ndarray:
    """Seed 0: shorter than a second."""
    rng = np.random.default_rng(seed)
    t = np.arange(7_000 + 4_700 * seed) / RATE
    tones = sum(np.sin(2 * np.pi * f * t + p) for f, p in rng.uniform((100, 0), (3000, 6), (5, 2)))
    return (0.1 * tones + 0.01 * rng.standard_normal(len(t))).astype(np.float32)


def video(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 255, (6, 3, 4, 3), dtype=np.uint8)
    return np.kron(frames, np.ones((1, 32, 32, 1), dtype=np.uint8))


def clip() -> Video:
    """A real clip with its audio track."""
    return decode_video(_part("clip", 0), FPS, MediaLimits(), audio_rate=RATE)


def _part(kind: str, seed: int) -> MediaPart:
    if kind == "clip":
        return MediaPart("video", (ASSETS / "video.mp4").read_bytes())
    array = {"image": image, "audio": audio, "video": video}[kind](seed)
    rate = {"image": None, "audio": RATE, "video": FPS}[kind]
    return MediaPart(kind, array.tobytes(), ArrayInfo(str(array.dtype), array.shape, rate))  # type: ignore[arg-type]


def request_of(case: Case) -> Request:
    parts = [TextPart(part) if isinstance(part, str) else _part(*part) for part in case.parts]
    options = {"use_audio_in_video": True} if case.use_audio_in_video else {}
    return Request(request_id=case.name, messages=[Message("user", list(parts))], options=options)


# --- the library -----------------------------------------------------------------------------------------------------


@cache
def processor(model_dir: Path) -> Any:
    return Qwen3OmniMoeProcessor.from_pretrained(model_dir)


@cache
def library_model(model_dir: Path) -> Any:
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    return speaking(model)


@cache
def processed(model_dir: Path, case: Case) -> dict[str, Any]:
    """What one call of the library's processor makes of a prompt. Not to be changed."""
    kinds = {"clip": "video"}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kinds.get(part[0], part[0])}
        for part in case.parts
    ]
    text = processor(model_dir).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    sounds: list[Any] = [audio(seed) for seed in case.of("audio")]
    more: dict[str, Any] = {}
    clips = [video(seed) for seed in case.of("video")]
    if case.of("clip"):
        assert case.use_audio_in_video
        clips, sounds = [clip().frames], [clip().audio]
        more = audio_of_videos([0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)  # the library's, numpy 2
        made = processor(model_dir)(
            text=[text],
            images=[image(seed) for seed in case.of("image")] or None,
            audio=sounds or None,
            videos=clips or None,
            videos_kwargs={"fps": FPS, "cap_pixels_per_frame": False},
            return_tensors="pt",
            **more,
        )
    return dict(made)


@cache
def expected(model_dir: Path, case: Case, tokens: int = TOKENS) -> list[int]:
    """The reply of `generate`, greedy."""
    model = library_model(model_dir)
    inputs = processed(model_dir, case)
    out = model.generate(
        **inputs,
        return_audio=False,
        use_audio_in_video=case.use_audio_in_video,
        thinker_max_new_tokens=tokens,
        thinker_eos_token_id=model.config.im_end_token_id,
        thinker_do_sample=False,
    )
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@cache
def expected_speech(
    model_dir: Path, case: Case, voice: str = "Ethan", tokens: int = TOKENS
) -> tuple[list[int], list[list[int]], torch.Tensor]:
    """(reply, rows of codes, waveform by one call over them) of `generate`, greedy."""
    model = library_model(model_dir)
    inputs = processed(model_dir, case)
    seen: list[torch.Tensor] = []
    hook = model.code2wav.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        with warnings.catch_warnings():  # of the penalty, which it applies to codes alone
            warnings.filterwarnings("ignore", "Passing `repetition_penalty`")
            sequences, _ = model.generate(
                **inputs,
                speaker=voice,
                use_audio_in_video=case.use_audio_in_video,
                thinker_max_new_tokens=tokens,
                thinker_eos_token_id=model.config.im_end_token_id,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=CODES,
            )
    finally:
        hook.remove()
    [codes] = seen
    with torch.no_grad():
        wave = model.code2wav(codes)[0, 0]
    return sequences[0, inputs["input_ids"].shape[1] :].tolist(), codes[0].T.tolist(), wave


# --- the stages, driven as a worker drives them ----------------------------------------------------------------------


def sent(source: str, target: str, output: StageOutput) -> Payload:
    payload = TRANSFERS[source, target](stage_request(source, upstreams=set()), output)
    assert payload is not None
    return payload


def encoded(encoder: Encoder, payload: Payload) -> list[tuple[Payload, bool]]:
    """The encoder's chunks for the thinker, one medium per call."""
    media = sent("input", "encoder", StageOutput("r", payload=payload, finished=True))
    chunks = []
    for work in encoder.feed("r", "input", media, final=True):
        [result] = encoder.run([work])
        made = StageOutput("r", payload=result.payload, finished=work.last)
        chunks.append((sent("encoder", "thinker", made), work.last))
    return chunks


@dataclass
class Stages:
    """The stages of one checkpoint."""

    input: InputProcessor
    encoder: Encoder
    thinker: Thinker

    @classmethod
    def of(cls, model_dir: Path) -> Stages:
        return cls(*(kind(context(model_dir, name)) for kind, name in _KINDS))


_KINDS: tuple[tuple[Any, str], ...] = ((InputProcessor, "input"), (Encoder, "encoder"), (Thinker, "thinker"))


class Run:
    """Requests through the stages, the thinker in its engine."""

    def __init__(self, stages: Stages, **config: Any) -> None:
        self.stages = stages
        self.engine = engine_over(stages.thinker, AutoregressiveConfig(**{"num_blocks": 400, **config}))
        self.cached: dict[str, int] = {}

    def __call__(self, cases: list[Case]) -> dict[str, list[int]]:
        for case in cases:
            self._add(case)
        replies: dict[str, list[int]] = {case.name: [] for case in cases}
        self.cached = dict.fromkeys(replies, 0)
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                replies[output.request_id] += output.token_ids
                self.cached[output.request_id] += output.cached_tokens
        return replies

    def _add(self, case: Case) -> None:
        payload = self.stages.input.process(request_of(case))
        sampling = SamplingParams(max_tokens=TOKENS).over(self.stages.thinker.default_sampling).over(FALLBACK)
        upstreams = {"input", "encoder"} if payload["media"] else {"input"}
        self.engine.add(stage_request("thinker", request_id=case.name, upstreams=upstreams, sampling=sampling))
        facts = sent("input", "thinker", StageOutput(case.name, payload=payload, finished=True))
        self.engine.feed(case.name, "input", facts, final=True)
        for chunk, final in encoded(self.stages.encoder, payload) if payload["media"] else ():
            self.engine.feed(case.name, "encoder", chunk, final=final)


@dataclass
class Spoken:
    """What came of one request."""

    reply: list[int] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    """The rows that left for the vocoder."""
    talked: list[list[int]] = field(default_factory=list)
    """All rows of the talker."""
    finish: str = ""


class Speech:
    """Thinker and talker in their engines, the other stages beside them; every output goes on at once."""

    def __init__(self, stages: Stages, talker: Talker, speculation: Speculation | None = None, **config: Any) -> None:
        self.stages = stages
        settings = AutoregressiveConfig(**{"num_blocks": 400, **config})
        self.thinker = engine_over(stages.thinker, settings, speculation=speculation)
        self.talker = engine_over(talker, settings)
        self._model = talker
        self._requests: dict[tuple[str, str], StageRequest] = {}

    def __call__(
        self,
        cases: list[Case],
        voice: str | None = None,
        resume: dict[str, list[list[int]]] | None = None,
        adapter: str | None = None,
    ) -> dict[str, Spoken]:
        """`resume`: rows of each request that the talker had made before. `adapter`: of the thinker."""
        spoken = {case.name: Spoken() for case in cases}
        for case in cases:
            self._add(case, voice, (resume or {}).get(case.name, []), adapter)
        engines = {"thinker": self.thinker, "talker": self.talker}
        while any(engine.has_work() for engine in engines.values()):
            for stage, engine in engines.items():
                for output in engine.step():
                    if output.error is not None:
                        raise output.error
                    self._take(stage, output, spoken[output.request_id])
        return spoken

    def _add(self, case: Case, voice: str | None, resume: list[list[int]], adapter: str | None) -> None:
        payload = self.stages.input.process(request_of(case))
        name, media = case.name, bool(payload["media"])
        greedy = SamplingParams(temperature=0.0)
        limits = {"thinker": TOKENS, "talker": CODES}
        for stage, model in (("thinker", self.stages.thinker), ("talker", self._model)):
            upstreams = {"thinker"} if stage == "talker" else {"input", "encoder"} if media else {"input"}
            sampling = SamplingParams(max_tokens=limits[stage]).over(greedy).over(model.default_sampling).over(FALLBACK)
            self._requests[name, stage] = StageRequest(
                request_id=name,
                stage=stage,
                request=Request(request_id=name, voice=voice, adapter=adapter),
                sampling=sampling,
                seed=0,
                upstreams=frozenset(upstreams),
                downstreams=frozenset({"talker" if stage == "thinker" else "vocoder"}),
                to_client=frozenset(),
                resume=resume if stage == "talker" else [],  # type: ignore[arg-type]
            )
        self.talker.add(self._requests[name, "talker"])
        self.thinker.add(self._requests[name, "thinker"])
        facts = sent("input", "thinker", StageOutput(name, payload=payload, finished=True))
        self.thinker.feed(name, "input", facts, final=True)
        for chunk, final in encoded(self.stages.encoder, payload) if media else ():
            self.thinker.feed(name, "encoder", chunk, final=final)

    def _take(self, stage: str, output: StageOutput, spoken: Spoken) -> None:
        request = self._requests[output.request_id, stage]
        if stage == "talker":
            spoken.talked += output.codes
            if (codes := TRANSFERS["talker", "vocoder"](request, output)) is not None:
                spoken.codes += codes["codes"].tolist()
            if output.finished:
                spoken.finish = output.finish_reason
            return
        spoken.reply += output.token_ids
        if (rows := TRANSFERS["thinker", "talker"](request, output)) is not None:
            self.talker.feed(output.request_id, "thinker", rows, final=output.finished)

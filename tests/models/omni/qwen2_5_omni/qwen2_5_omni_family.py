"""What the tests of this family share: prompts of every kind, the reference's answer to them, and the stages
driven as a worker would drive them."""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.omni.qwen2_5_omni.encoder import Encoder
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniForConditionalGeneration
from segue.models.omni.qwen2_5_omni.stages import TRANSFERS
from segue.models.shared.omni.chat import audio_of_videos

# after the family, which mends torchvision
from segue.engines.autoregressive.config import AutoregressiveConfig  # isort: skip
from made_engine import engine_over  # isort: skip
from segue.engines.autoregressive.speculation.speculation import Speculation  # isort: skip

THINKER_TOKENS = 24
TALKER_TOKENS = 60
CPU = torch.device("cpu")
IMAGE, VIDEO, AUDIO = (
    "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "<|vision_bos|><|VIDEO|><|vision_eos|>",
    ("<|audio_bos|><|AUDIO|><|audio_eos|>"),
)


def context(model_dir: Path, stage: str, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(model_dir, stage, CPU, torch.float32, **more)


def stage_request(
    stage: str, *, upstreams: set[str], voice: str | None = None, adapter: str | None = None, **more: Any
) -> StageRequest:
    return StageRequest(
        request_id=more.pop("request_id", "r"),
        stage=stage,
        request=Request(request_id="r", voice=voice, adapter=adapter),
        sampling=more.pop("sampling", SamplingParams(temperature=0.0)),
        seed=0,
        upstreams=frozenset(upstreams),
        downstreams=more.pop("downstreams", frozenset()),
        to_client=frozenset(),
        **more,
    )


def published_name(name: str) -> str:
    """The name in a published checkpoint of a tensor of today's whole model."""
    name = name.replace("thinker.model.language_model.", "thinker.model.")
    return re.sub(r"^thinker\.model\.(visual|audio_tower)\.", r"thinker.\1.", name)


def decoder_in(thinker: Any) -> Any:
    """The decoder of the library's thinker: in older versions it is `model` itself."""
    return getattr(thinker.model, "language_model", thinker.model)


PREFIXES = {"encoder": "thinker.", "thinker": "thinker.", "talker": "talker.", "vocoder": "token2wav."}


def published_of(stage: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a stage's part by their published names."""
    return {published_name(f"{PREFIXES[stage]}{name}"): tensor for name, tensor in module.state_dict().items()}


# --- prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One prompt: a name, its text with placeholders, and seeds of its media."""

    name: str
    text: str
    images: tuple[int, ...] = ()
    audio: tuple[int, ...] = ()
    videos: tuple[int, ...] = ()
    use_audio_in_video: bool = False


CASES = (
    Case("text", "write a few words about the sea and the hills behind it"),
    Case("image", f"{IMAGE}what is this", images=(1,)),
    Case("audio", f"{AUDIO}what was said", audio=(2,)),
    Case("video", f"{VIDEO}what happens here", videos=(3,)),
    Case("video with sound", f"{VIDEO}and what is heard", videos=(4,), audio=(5,), use_audio_in_video=True),
    Case("mixed", f"{IMAGE}{AUDIO} between {VIDEO}{IMAGE} and {AUDIO} all", images=(6, 7), audio=(8, 9), videos=(10,)),
)


def _image(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (4 + seed % 3, 5, 3), dtype=np.uint8)
    return np.kron(coarse, np.ones((28, 28, 1), dtype=np.uint8))


def _audio(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    t = np.arange(12_000 + 1_700 * seed) / 16_000
    tones = sum(np.sin(2 * np.pi * f * t + p) for f, p in rng.uniform((100, 0), (3000, 6), (5, 2)))
    return (0.1 * tones + 0.01 * rng.standard_normal(len(t))).astype(np.float32)


def _video(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 255, (6, 3, 4, 3), dtype=np.uint8)
    return np.kron(frames, np.ones((1, 28, 28, 1), dtype=np.uint8))


@cache
def processor(model_dir: Path) -> Any:
    from transformers import Qwen2_5OmniProcessor

    return Qwen2_5OmniProcessor.from_pretrained(model_dir)


@cache
def processed(model_dir: Path, case: Case) -> dict[str, Any]:
    """What the library's processor makes of a case: the reference's input. Not to be changed."""
    with_audio: dict[str, Any] = {}
    if case.use_audio_in_video:
        with_audio = audio_of_videos(range(len(case.audio)))
    text = f"<|im_start|>user\n{case.text}<|im_end|>\n<|im_start|>assistant\n"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)  # the library's, numpy 2
        return dict(
            processor(model_dir)(
                text=text,
                images=[_image(seed) for seed in case.images] or None,
                audio=[_audio(seed) for seed in case.audio] or None,
                videos=[_video(seed) for seed in case.videos] or None,
                return_tensors="pt",
                cap_pixels_per_frame=False,
                **with_audio,
            )
        )


def input_payload(inputs: dict[str, Any], case: Case) -> Payload:
    """The same as the input stage would send it."""
    media: list[Payload] = []
    for kind, pixels, grids in (
        ("image", inputs.get("pixel_values"), inputs.get("image_grid_thw")),
        ("video", inputs.get("pixel_values_videos"), inputs.get("video_grid_thw")),
    ):
        if pixels is None or grids is None:
            continue
        for index, part in enumerate(pixels.split(grids.prod(-1).tolist())):
            media.append({"kind": kind, "hash": _hash(part), "pixel_values": part, "grid_thw": grids[index].tolist()})
            if kind == "video":
                media[-1]["second_per_grid"] = float(inputs["video_second_per_grid"][index])
    if "input_features" in inputs:
        for features, mask in zip(inputs["input_features"], inputs["feature_attention_mask"], strict=True):
            own = features[:, mask.bool()]
            media.append({"kind": "audio", "hash": _hash(own), "input_features": own})
    return {"token_ids": inputs["input_ids"][0], "media": media, "use_audio_in_video": case.use_audio_in_video}


def _hash(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=16).digest()


# --- the reference ---------------------------------------------------------------------------------------------------


class _CodesOnly(torch.nn.Module):
    """Stands in for the vocoder: keeps the codes it is given."""

    dtype = torch.float

    def __init__(self) -> None:
        super().__init__()
        self.codes: list[int] = []

    def forward(self, codes: torch.Tensor, **_: Any) -> torch.Tensor:
        self.codes = codes[0].tolist()
        return torch.zeros(1)


@cache
def library_model(model_dir: Path) -> Qwen2_5OmniForConditionalGeneration:
    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.token2wav = _CodesOnly()
    return model


def reference_kwargs(inputs: dict[str, Any]) -> dict[str, Any]:
    """`generate` hands the pixels on to the talker, which refuses them, unless they are named as the thinker's."""
    renamed = {"pixel_values": "thinker_pixel_values", "pixel_values_videos": "thinker_pixel_values_videos"}
    return {renamed.get(name, name): value for name, value in inputs.items()}


def reference_answer(
    model_dir: Path, inputs: dict[str, Any], case: Case, *, voice: str = "Chelsie", thinker_tokens: int = THINKER_TOKENS
) -> tuple[list[int], list[int]]:
    """(thinker's reply ids, talker's codes without the end token), greedy."""
    model = library_model(model_dir)
    talker = model.config.talker_config
    sequences, _ = model.generate(
        **reference_kwargs(inputs),
        speaker=voice,
        use_audio_in_video=case.use_audio_in_video,
        thinker_max_new_tokens=thinker_tokens,
        talker_max_new_tokens=TALKER_TOKENS,
        talker_do_sample=False,
        talker_eos_token_id=[talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id],
    )
    length = inputs["input_ids"].shape[1]
    codes = model.token2wav.codes
    assert isinstance(codes, list)
    return sequences[0, length:].tolist(), list(codes)


def sent(source: str, target: str, request: StageRequest, output: StageOutput) -> Payload:
    """What leaves over an edge, where something must."""
    payload = TRANSFERS[source, target](request, output)
    assert payload is not None
    return payload


# --- the stages, driven as a worker drives them -----------------------------------------------------------------------


@dataclass
class Answer:
    """What came of one request."""

    reply: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    """The talker's ids, end token included."""
    finish: dict[str, str] = field(default_factory=dict)
    cached_tokens: int = 0
    modality_tokens: dict[str, int] = field(default_factory=dict)
    thought: list[StageOutput] = field(default_factory=list)
    spoken: list[Payload] = field(default_factory=list)
    """What left for the vocoder."""


@dataclass
class Ask:
    """One request to the pipeline."""

    payload: Payload
    voice: str | None = None
    tokens: int = THINKER_TOKENS
    adapter: str | None = None


def encoded(encoder: Encoder, payload: Payload) -> list[tuple[Payload, bool]]:
    """The encoder's chunks for the thinker, one medium per call."""
    request = stage_request("input", upstreams=set())
    media = sent("input", "encoder", request, StageOutput("r", payload=payload, finished=True))
    chunks = []
    for work in encoder.feed("r", "input", media, final=True):
        [result] = encoder.run([work])
        made = StageOutput("r", payload=result.payload, finished=work.last)
        chunks.append((sent("encoder", "thinker", stage_request("encoder", upstreams={"input"}), made), work.last))
    return chunks


def tight(model_dir: Path, cases: list[Case]) -> dict[str, int]:
    """Engine sizes in which the prompts of these cases fit, what they begin with counted once, and little of what they
    generate."""
    size = 4
    lengths = [processed(model_dir, case)["input_ids"].shape[1] + 2 for case in cases]
    blocks = [-(-length // size) for length in lengths]
    prompts = [processed(model_dir, case)["input_ids"][0].tolist() for case in cases]
    alike = sum(len(set(column)) == 1 for column in zip(*prompts, strict=False)) // size
    return {"block_size": size, "num_blocks": sum(blocks) - alike * (len(cases) - 1)}


class Pipeline:
    """Thinker and talker in their engines, the encoder beside them; every output goes on at once."""

    def __init__(
        self,
        encoder: Encoder,
        thinker: Any,
        talker: Any,
        *,
        num_blocks: int = 400,
        speculation: Speculation | None = None,
        **sizes: Any,
    ) -> None:
        config = AutoregressiveConfig(num_blocks=num_blocks, **sizes)
        self.encoder = encoder
        self.thinker = engine_over(thinker, config, speculation=speculation)
        self.talker = engine_over(talker, config)
        self._defaults = {"thinker": thinker.default_sampling, "talker": talker.default_sampling}
        self._requests: dict[tuple[str, str], StageRequest] = {}

    def run(self, asks: list[Ask]) -> list[Answer]:
        answers = {str(index): Answer() for index in range(len(asks))}
        for key, ask in zip(answers, asks, strict=True):
            self._begin(key, ask)
        engines = {"thinker": self.thinker, "talker": self.talker}
        while any(engine.has_work() for engine in engines.values()):
            for stage, engine in engines.items():
                for output in engine.step():
                    if output.error is not None:
                        raise output.error
                    self._take(stage, output, answers[output.request_id])
        return list(answers.values())

    def _begin(self, key: str, ask: Ask) -> None:
        media = bool(ask.payload["media"])
        greedy = SamplingParams(temperature=0.0)
        thinker = stage_request(
            "thinker",
            request_id=key,
            upstreams={"input", "encoder"} if media else {"input"},
            downstreams=frozenset({"talker"}),
            adapter=ask.adapter,
            sampling=SamplingParams(temperature=0.0, max_tokens=ask.tokens).over(self.defaults("thinker")),
        )
        talker = stage_request(
            "talker",
            request_id=key,
            upstreams={"thinker"},
            downstreams=frozenset({"vocoder"}),
            voice=ask.voice,
            sampling=SamplingParams(max_tokens=TALKER_TOKENS).over(greedy).over(self.defaults("talker")),
        )
        self._requests[key, "thinker"], self._requests[key, "talker"] = thinker, talker
        self.talker.add(talker)
        self.thinker.add(thinker)
        request = stage_request("input", upstreams=set())
        facts = sent("input", "thinker", request, StageOutput(key, payload=ask.payload, finished=True))
        self.thinker.feed(key, "input", facts, final=True)
        for chunk, final in encoded(self.encoder, ask.payload) if media else ():
            self.thinker.feed(key, "encoder", chunk, final=final)

    def defaults(self, stage: str) -> SamplingParams:
        return self._defaults[stage].over(FALLBACK)

    def _take(self, stage: str, output: StageOutput, answer: Answer) -> None:
        request = self._requests[output.request_id, stage]
        if output.finished:
            answer.finish[stage] = output.finish_reason
        if stage == "talker":
            answer.codes += output.token_ids
            if (codes := TRANSFERS["talker", "vocoder"](request, output)) is not None:
                answer.spoken.append(codes)
            return
        answer.reply += output.token_ids
        answer.cached_tokens += output.cached_tokens
        answer.modality_tokens |= output.modality_tokens
        answer.thought.append(output)
        rows = TRANSFERS["thinker", "talker"](request, output)
        if rows is not None:
            self.talker.feed(output.request_id, "thinker", rows, final=output.finished)

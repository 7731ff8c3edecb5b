"""What the tests of this family share: prompts of every kind, the reference's answer to them, and a plain way to run the
stages without an engine (whole sequences again at every step, under the library's own masks)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.contract import FlatBatch, Prompt
from segue.engines.contract import LoadContext, Payload, Rows, StageOutput, StageRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.qwen2_5_omni.encoder import Encoder
from segue.models.qwen2_5_omni.library import Qwen2_5OmniForConditionalGeneration
from segue.models.qwen2_5_omni.stages import TRANSFERS

from segue.kernels.paged_attention import library_attention  # isort: skip (torchvision is mended by the family)

THINKER_TOKENS = 24
TALKER_TOKENS = 60
CPU = torch.device("cpu")
IMAGE, VIDEO, AUDIO = (
    "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "<|vision_bos|><|VIDEO|><|vision_eos|>",
    ("<|audio_bos|><|AUDIO|><|audio_eos|>"),
)


def context(model_dir: Path, stage: str, **more: Any) -> LoadContext:
    return LoadContext(model_dir, stage, CPU, torch.float32, **more)


def stage_request(stage: str, *, upstreams: set[str], voice: str | None = None, **more: Any) -> StageRequest:
    return StageRequest(
        request_id=more.pop("request_id", "r"),
        stage=stage,
        request=Request(request_id="r", voice=voice),
        sampling=more.pop("sampling", SamplingParams(temperature=0.0)),
        seed=0,
        upstreams=frozenset(upstreams),
        downstreams=more.pop("downstreams", frozenset()),
        to_client=frozenset(),
        **more,
    )


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
    tones = sum(np.sin(2 * np.pi * f * t + p) for f, p in zip(rng.uniform(100, 3000, 5), rng.uniform(0, 6, 5)))
    return (0.1 * tones + 0.01 * rng.standard_normal(len(t))).astype(np.float32)


def _video(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 255, (6, 3, 4, 3), dtype=np.uint8)
    return np.kron(frames, np.ones((1, 28, 28, 1), dtype=np.uint8))


@cache
def processor(model_dir: Path) -> Any:
    from transformers import Qwen2_5OmniProcessor

    return Qwen2_5OmniProcessor.from_pretrained(model_dir)


def processed(model_dir: Path, case: Case) -> dict[str, Any]:
    """What the library's processor makes of a case: the reference's input."""
    text = f"<|im_start|>user\n{case.text}<|im_end|>\n<|im_start|>assistant\n"
    return dict(
        processor(model_dir)(
            text=text,
            images=[_image(seed) for seed in case.images] or None,
            audio=[_audio(seed) for seed in case.audio] or None,
            videos=[_video(seed) for seed in case.videos] or None,
            use_audio_in_video=case.use_audio_in_video,
            return_tensors="pt",
        )
    )


def input_payload(inputs: dict[str, Any], case: Case) -> Payload:
    """The same as the input stage would send it."""
    media: list[Payload] = []
    for kind, pixels, grids in (
        ("image", inputs.get("pixel_values"), inputs.get("image_grid_thw")),
        ("video", inputs.get("pixel_values_videos"), inputs.get("video_grid_thw")),
    ):
        if pixels is None:
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
def reference(model_dir: Path) -> Qwen2_5OmniForConditionalGeneration:
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
    model = reference(model_dir)
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


# --- the stages without an engine ------------------------------------------------------------------------------------


@dataclass
class Sequence:
    """One request in one autoregressive stage."""

    prompt: Prompt
    generated: list[int] = field(default_factory=list)
    conditioning: list[torch.Tensor] = field(default_factory=list)
    tail: torch.Tensor | None = None

    def row(self, index: int) -> torch.Tensor | None:
        return self.conditioning[index] if index < len(self.conditioning) else self.tail


def forward_whole(adapter: Any, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits of the last token [vocab], captured rows of all) of a whole sequence, again from its start."""
    prompt, new = sequence.prompt, torch.tensor(sequence.generated, dtype=torch.long)
    ids = torch.cat([torch.tensor(prompt.token_ids), new])
    embeds = prompt.embeds if prompt.embeds is not None else adapter.embed(torch.tensor(prompt.token_ids), None)
    length = len(prompt.token_ids)
    positions = prompt.positions
    assert positions is not None
    if len(new):
        rows = torch.stack([sequence.row(index) for index in range(len(new))]) if adapter.conditioned else None
        embeds = torch.cat([embeds, adapter.embed(new, rows)])
        after = torch.arange(length, length + len(new)) + prompt.position_delta
        positions = torch.cat([positions, after.expand(3, -1)], dim=1)
    batch = FlatBatch(ids, embeds, positions, None, [(prompt, 0, len(ids))])
    with torch.inference_mode(), library_attention():
        hidden, captured = adapter.forward(embeds, batch)
        return adapter.logits(hidden[-1:])[0], captured


def next_token(logits: torch.Tensor, seen: list[int], penalty: float) -> int:
    """Greedy, under a repetition penalty."""
    logits = logits.clone()
    ids = torch.tensor(sorted(set(seen)))
    scores = logits[ids]
    logits[ids] = torch.where(scores < 0, scores * penalty, scores / penalty)
    return int(logits.argmax())


def thinker_prompt(thinker: Any, encoder: Encoder, payload: Payload) -> Prompt:
    """Through the encoder and the thinker's door, as the worker would."""
    upstreams = {"input", "encoder"} if payload["media"] else {"input"}
    state = thinker.begin(stage_request("thinker", upstreams=upstreams))
    output = StageOutput("r", payload=payload, finished=True)
    request = stage_request("input", upstreams=set())
    fed = thinker.feed(state, "input", TRANSFERS["input", "thinker"](request, output), final=True)
    if payload["media"]:
        assert fed.prompt is None
        works = encoder.feed("r", "input", TRANSFERS["input", "encoder"](request, output), final=True)
        for work in works:
            [result] = encoder.run([work])
            made = StageOutput("r", payload=result.payload, finished=work.last)
            chunk = TRANSFERS["encoder", "thinker"](stage_request("encoder", upstreams={"input"}), made)
            fed = thinker.feed(state, "encoder", chunk, final=work.last)
    assert fed.prompt is not None
    return fed.prompt


def think(thinker: Any, prompt: Prompt, *, max_tokens: int = THINKER_TOKENS) -> list[StageOutput]:
    """The thinker's outputs, one per step, each with the rows of the tokens that step computed."""
    sequence = Sequence(prompt)
    outputs: list[StageOutput] = []
    taken = 0
    while True:
        logits, captured = forward_whole(thinker, sequence)
        token = next_token(logits, [0], 1.0)
        sequence.generated.append(token)
        stop = token in thinker.end_token_ids
        outputs.append(
            StageOutput(
                "r",
                token_ids=[token],
                first_index=len(sequence.generated) - 1,
                captured=None if captured is None else Rows(taken, captured[taken:]),
                prompt=prompt if not outputs else None,
                finished=stop or len(sequence.generated) == max_tokens,
                finish_reason="stop" if stop else "length",
            )
        )
        taken = len(prompt.token_ids) + len(sequence.generated) - 1
        if outputs[-1].finished:
            return outputs


def feed_all(talker: Any, chunks: list[tuple[Payload, bool]], voice: str | None = None) -> tuple[Sequence | None, bool]:
    """(the talker's sequence after all chunks or None without a prompt, whether it was told there is nothing to say)."""
    state = talker.begin(stage_request("talker", upstreams={"thinker"}, voice=voice))
    sequence: Sequence | None = None
    for payload, final in chunks:
        fed = talker.feed(state, "thinker", payload, final=final)
        if fed.nothing:
            return sequence, True
        if fed.prompt is not None:
            sequence = Sequence(fed.prompt)
        if sequence is not None:
            if fed.conditioning is not None:
                sequence.conditioning.extend(fed.conditioning)
            sequence.tail = fed.tail
    return sequence, False


def chunks_of(outputs: list[StageOutput]) -> list[tuple[Payload, bool]]:
    """What leaves over thinker → talker."""
    request = stage_request("thinker", upstreams={"input"}, downstreams=frozenset({"talker"}))
    payloads = [(TRANSFERS["thinker", "talker"](request, output), output.finished) for output in outputs]
    return [(payload, final) for payload, final in payloads if payload is not None]


def speak(talker: Any, sequence: Sequence, *, max_tokens: int = TALKER_TOKENS) -> list[int]:
    """The talker's codes, greedy, with the family's repetition penalty; end token included."""
    penalty = talker.default_sampling.repetition_penalty
    while len(sequence.generated) < max_tokens:
        logits, _ = forward_whole(talker, sequence)
        token = next_token(logits, [*sequence.prompt.token_ids, *sequence.generated], penalty)
        sequence.generated.append(token)
        if token in talker.end_token_ids:
            break
    return sequence.generated

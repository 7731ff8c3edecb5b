"""Record what the published code of MiMo-Audio makes of the tiny checkpoint: `golden.safetensors` beside this file.

Run it in an environment of its own, because the code pins its own transformers (CHECKOUT: that of
github.com/XiaomiMiMo/MiMo-Audio, 691ce54; it needs neither flash-attn nor soundfile here):

    python -m venv ENV && ENV/bin/pip install transformers==4.49.0 accelerate torch torchaudio einops
    segue tiny mimo-audio TINY
    ENV/bin/python tests/models/speech/mimo_audio/golden/make_golden.py CHECKOUT TINY

The code runs as it is, but in float32, with attention of torch in place of flash-attn, the first of each list of prompt
templates in place of a random one, and greedily, the codes included. For each case of `cases.json`: `NAME.prompt` and
`NAME.rows` [rows, 1 + G · K] int16, text id and codes of each row, the latter without those of the prompt, and
`NAME.samples` float32, every `EVERY`th sample, if the case has audio. For each recording of `recordings`
`encoded.SAMPLES` [K, frames], its codes (the last `LAST` frames of it); for each count of frames of `decoded`
`decoded.FRAMES`, every `EVERY`th sample of drawn codes, whole, and for those of `streamed` `streamed.FRAMES`, the same
of chunks. Metadata `checkpoint`: SHA-256 of the weights that they were made of.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
EVERY = 61
"""Prime to the samples of a frame."""
LAST = 40
RATE = 24000
WEIGHTS = ("model.safetensors", "audio_tokenizer/model.safetensors")


def recording(samples: int) -> torch.Tensor:
    """Three other tones every tenth of a second."""
    rng, t = np.random.default_rng(samples), np.arange(samples) / RATE
    tones = rng.uniform((100, 0), (6000, 6), (3, -(-samples // 2400), 2)).repeat(2400, axis=1)[:, :samples]
    wave = np.sin(2 * np.pi * tones[..., 0] * t + tones[..., 1]).sum(axis=0)
    return torch.from_numpy((0.1 * wave + 0.01 * rng.standard_normal(samples)).astype(np.float32))


def drawn_codes(frames: int, counts: list[int]) -> torch.Tensor:
    """[K, frames]."""
    rng = np.random.default_rng(frames)
    return torch.from_numpy(np.stack([rng.integers(0, count, frames) for count in counts]))


def attention(q: Any, k: Any, v: Any, cu: Any, _: Any, *more: Any, causal: bool, window_size: Any) -> torch.Tensor:
    """`flash_attn_varlen_func`, sequence by sequence."""
    out = []
    before, after = window_size[0], 0 if causal else window_size[1]
    for start, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        ahead = torch.arange(stop - start)[None] - torch.arange(stop - start)[:, None]
        mask = (ahead >= -before if before >= 0 else True) & (ahead <= after if after >= 0 else ahead < 1 << 30)
        one = (tensor[start:stop].transpose(0, 1)[None] for tensor in (q, k, v))
        out.append(torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=mask)[0].transpose(0, 1))
    return torch.cat(out)


def published(checkout: Path) -> Any:
    """The published package, for float32."""
    for name in ("flash_attn", "soundfile"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["flash_attn"].flash_attn_varlen_func = attention  # type: ignore[attr-defined]
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(checkout / "src", folder / "src")
    for path in (folder / "src").rglob("*.py"):
        code = path.read_text()
        path.write_text(code.replace("torch.bfloat16", "torch.float32").replace(".bfloat16()", ".float()"))
    sys.path.insert(0, str(folder))
    from src.mimo_audio import mimo_audio

    return mimo_audio


def digest(directory: Path) -> str:
    made = hashlib.sha256()
    for name in WEIGHTS:
        made.update((directory / name).read_bytes())
    return made.hexdigest()


def main(checkout: Path, tiny: Path) -> None:
    torch.set_num_threads(1)
    wanted = json.loads((HERE / "cases.json").read_text())
    package = published(checkout)
    random.choice = lambda values: values[0]

    class Model(package.MimoAudio):  # type: ignore[misc, name-defined]
        def preprocess_input(self, given: Any = None) -> Any:
            return super().preprocess_input(recording(given) if isinstance(given, int) else given)

        def forward(self, input_ids: Any, *more: Any, **others: Any) -> Any:
            self.prompt = input_ids
            return super().forward(input_ids, *more, **others | {"max_new_tokens": wanted["most"]})

        def save_wav(self, path: Any, wav: Any) -> None:
            self.wav = wav.reshape(-1)

    model = Model(str(tiny), str(tiny / "audio_tokenizer"), "cpu")
    greedy = {"global": package.MiMoSampler(do_sample=False), "local": package.MiMoSampler(do_sample=False)}
    model.task_sampler_configs = dict.fromkeys(model.task_sampler_configs, greedy)
    width, group = model.audio_channels + 1, model.group_size
    tensors: dict[str, torch.Tensor] = {}

    def rows(ids: torch.Tensor) -> torch.Tensor:
        """[1 + K, frames] → [rows, 1 + G · K]."""
        count = ids.shape[1] // group
        codes = ids[1:].T.reshape(count, -1)
        return torch.cat([ids[:1, ::group].T, codes], dim=1).to(torch.int16).contiguous()

    for case in wanted["cases"]:
        model.wav = None
        getattr(model, case["call"])(**case["given"])
        made = rows(model.history.reshape(-1, width).T)
        prompt = rows(model.prompt)
        tensors[f"{case['name']}.prompt"] = prompt
        tensors[f"{case['name']}.rows"] = made[len(prompt) :].contiguous()
        if model.wav is not None:
            tensors[f"{case['name']}.samples"] = model.wav[::EVERY].contiguous()
        spoken = int((made[len(prompt) :, 0] == model.empty_token).sum())
        sys.stdout.write(f"{case['name']}: {len(prompt)} + {len(made) - len(prompt)} rows, {spoken} spoken\n")

    codec = model.mimo_audio_tokenizer
    counts = [size - 1 for size in model.model.speech_vocab_sizes]
    for samples in wanted["recordings"]:
        codes = model.preprocess_input(samples).reshape(-1, model.audio_channels).T
        tensors[f"encoded.{samples}"] = codes[:, -LAST:].to(torch.int16).contiguous()
    for frames in wanted["decoded"]:
        tensors[f"decoded.{frames}"] = codec.decode(drawn_codes(frames, counts))[0, 0, ::EVERY].contiguous()
    package_codec = sys.modules[type(codec).__module__]
    for frames, chunks in wanted["streamed"].items():
        codes, at, waves = drawn_codes(int(frames), counts), 0, []
        cache = package_codec.StreamingCache()
        for number, chunk in enumerate(chunks):
            out, cache = codec.streaming_decode(
                codes[:, at : at + chunk], [chunk], cache, last_chunk=number == len(chunks) - 1
            )
            waves += [out[0]] if out[0] is not None else []
            at += chunk
        assert at == int(frames)
        wave = torch.cat(waves, dim=-1).reshape(-1)
        sys.stdout.write(f"{frames} frames: {len(wave)} samples, rms {float(wave.std()):.3f}\n")
        tensors[f"streamed.{frames}"] = wave[::EVERY].contiguous()
    save_file(tensors, HERE / "golden.safetensors", metadata={"checkpoint": digest(tiny)})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

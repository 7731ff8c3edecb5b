"""Record what the public package `qwen-tts` makes of the tiny checkpoints: `golden.safetensors` beside this file.

Run it in an environment of its own, because the package pins its own transformers:

    python -m venv ENV && ENV/bin/pip install qwen-tts==0.1.1 torch torchaudio
    segue tiny qwen3-tts CUSTOM && segue tiny qwen3-tts-voice-design DESIGN
    ENV/bin/python tests/models/speech/qwen3_tts/golden/make_golden.py CUSTOM DESIGN

For each case of `cases.json`, greedily (an `arriving` text without `non_streaming_mode`): `NAME.codes` [frames, groups]
int16, and `NAME.samples` float32: every `EVERY`th sample of the waveform. Metadata `checkpoint.KIND`: SHA-256 of the
weights that they were made of.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from qwen_tts import Qwen3TTSModel
from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).parent
EVERY = 7
"""Prime to the samples of a frame."""
WEIGHTS = ("model.safetensors", "speech_tokenizer/model.safetensors")


def digest(directory: Path) -> str:
    made = hashlib.sha256()
    for name in WEIGHTS:
        made.update((directory / name).read_bytes())
    return made.hexdigest()


def check_names(module: torch.nn.Module, path: Path) -> None:
    """The checkpoint has every parameter of the package's module, and no tensor that it lacks."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
    parameters = {name for name, _ in module.named_parameters()}
    assert parameters <= names <= set(module.state_dict()), parameters ^ names


def main(custom: Path, design: Path) -> None:
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = json.loads((HERE / "cases.json").read_text())
    models = {"custom_voice": custom, "voice_design": design}
    loaded = {kind: Qwen3TTSModel.from_pretrained(str(path), dtype=torch.float32) for kind, path in models.items()}
    for kind, path in models.items():
        model = loaded[kind].model
        check_names(model, path / WEIGHTS[0])
        check_names(model.speech_tokenizer.model, path / WEIGHTS[1])
    tensors: dict[str, torch.Tensor] = {}
    for case in cases:
        model = loaded[case["kind"]]
        call = model.generate_custom_voice if case["kind"] == "custom_voice" else model.generate_voice_design
        rows: list[torch.Tensor] = []
        decode = model.model.speech_tokenizer.decode

        def seen(codes: Any, rows: list[torch.Tensor] = rows, decode: Any = decode) -> Any:
            rows.append(codes[0]["audio_codes"])
            return decode(codes)

        model.model.speech_tokenizer.decode = seen
        try:
            [wave], rate = call(
                **case["given"],
                non_streaming_mode=not case.get("arriving", False),
                do_sample=False,
                subtalker_dosample=False,
                max_new_tokens=case["max_tokens"],
            )
        finally:
            model.model.speech_tokenizer.decode = decode
        assert rate == 24000
        tensors[f"{case['name']}.codes"] = rows[0].to(torch.int16)
        tensors[f"{case['name']}.samples"] = torch.from_numpy(wave)[::EVERY].contiguous()
        sys.stdout.write(
            f"{case['name']}: {tuple(rows[0].shape)}, rms {float(wave.std()):.3f}, {rows[0][0].tolist()}\n"
        )
    digests = {f"checkpoint.{kind}": digest(path) for kind, path in models.items()}
    save_file(tensors, HERE / "golden.safetensors", metadata=digests)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

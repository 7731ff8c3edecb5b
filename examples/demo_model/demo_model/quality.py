"""What fewer bits, drafts and pieces of sound cost the model: `python -m demo_model.quality DIR`.

Writes the figures into `DIR/quality.json`; `demo_model.tables` makes tables of them. Questions are those of `evaluate`,
answered greedily.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo_model import evaluate
from demo_model.data.questions import STYLES
from demo_model.data.sayings import FRAME
from demo_model.ways import WAYS, after_kills, batched, encoded, in_pieces, library_of
from segue import AsyncOmni, Omni
from segue.bench.harness.hardware import machine
from segue.messages.deltas import AudioDelta
from segue.messages.stats import Histogram
from segue.models.omni.qwen3_omni.reference import spoken_codes

WEIGHTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "bfloat16": {"quantization": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
}
"""Weights of thinker and talker, and how they are computed with; as published: bfloat16 weights, float32 products."""
DRAFTS = {"method": "ngram", "tokens": 4, "adaptive": False}
_HOP, _WINDOW = 240, 960
"""Samples from one spectrum to the next, and of each."""


def of_questions(directory: Path, count: int) -> Iterator[dict[str, Any]]:
    """Right answers, those in JSON without a grammar and with it, and of what the model finds hardest."""
    for grammar in (False, True):
        asked = [*evaluate.held_out(count, grammar=grammar), *evaluate.alike(count)]
        texts = batched(directory, [one.prompt for one in asked])
        yield {"grammar": grammar, "asked": len(asked), "right": evaluate.shares(asked, texts)}


def of_ways(directory: Path, count: int) -> Iterator[dict[str, Any]]:
    """Right answers by each way to ask, and how many answers are those of the library."""
    asked = list(evaluate.held_out(count))
    prompts = [one.prompt for one in asked]
    exact = WAYS["library"](directory, prompts)
    for name, ask in WAYS.items():
        texts = exact if name == "library" else ask(directory, prompts)
        right = evaluate.shares(asked, texts)
        yield {"way": name, "asked": len(asked), "same": _share(texts, exact), "right": right}


def _share(texts: Sequence[str], others: Sequence[str]) -> float:
    return round(sum(map(str.__eq__, texts, others)) / len(others), 4)


def of_weights(directory: Path, count: int, spoken: int) -> Iterator[dict[str, Any]]:
    """Right answers, and words mistaken, with fewer bits."""
    asked = list(evaluate.held_out(count))
    exact: list[str] = []
    for name, settings in WEIGHTS.items():
        with Omni(directory, **settings) as omni:
            texts = [out.text for out in omni.generate([one.prompt for one in asked], modalities=["text"])]
            said = evaluate.speech(omni, spoken)
        exact = exact or texts
        right = evaluate.shares(asked, texts)
        yield {"weights": name, "asked": len(asked), "same": _share(texts, exact), "right": right, "speech": said}


def of_drafts(directory: Path, count: int) -> Iterator[dict[str, Any]]:
    """The share of drafted tokens that the model accepts, of each style of answers, and whether any answer changes."""
    asked = list(evaluate.held_out(count))
    exact = batched(directory, [one.prompt for one in asked])
    for style in ("", *STYLES):
        prompts = [one.prompt for one in asked if one.style == style]
        texts, drafted, accepted = asyncio.run(_drafted(directory, prompts))
        same = texts == [text for one, text in zip(asked, exact, strict=True) if one.style == style]
        share = round(accepted / drafted, 4) if drafted else None
        yield {"drafts": style or "none", "asked": len(prompts), "drafted": drafted, "accepted": share, "same": same}


async def _drafted(directory: Path, prompts: Sequence[dict[str, Any]]) -> tuple[list[str], float, float]:
    """The answers, and how many tokens were drafted and accepted."""
    async with AsyncOmni(directory, speculation=DRAFTS) as omni:
        outs = await asyncio.gather(*(omni.generate(one, modalities=["text"]) for one in prompts))
        while True:  # workers report when they fall idle: until a report has a later request
            await omni.generate({"prompt_token_ids": [5], "sampling": {"thinker": {"max_tokens": 1}}})
            [values] = [
                one.values
                for worker in omni.orchestrator.stats.values()
                for one in worker.stages
                if one.stage == "thinker"
            ]
            begun = values.get("first_output_seconds")
            if isinstance(begun, Histogram) and sum(begun.counts) > len(prompts):
                break
        drafted, accepted = (values.get(f"spec_{name}_tokens_total", 0.0) for name in ("draft", "accepted"))
    return [out.text for out in outs], float(drafted), float(accepted)  # type: ignore[arg-type]


def of_seams(directory: Path, count: int) -> dict[str, Any]:
    """How much spectra change where pieces of sound meet, as a multiple of elsewhere: streamed; whole, by one call of
    the library's vocoder, at the same places; and if pieces of as many frames were decoded apart. And the furthest
    that a sample is from the library's, by each way to ask. Raises `ValueError` if a sound has another length."""
    # the library's talker cannot be given recordings
    asked = [one for one in evaluate.held_out(count, spoken=False) if one.style != evaluate.JSON][:count]
    model, processor = library_of(directory)
    changes: dict[str, list[float]] = {"streamed": [], "whole": [], "apart": []}
    furthest: dict[str, float] = {}
    prompts = [one.prompt | {"sampling": one.prompt["sampling"] | evaluate.SPEECH} for one in asked]
    aloud: dict[str, Any] = {"modalities": ["text", "audio"], "voice": "Chelsie"}
    pieces = [
        [delta.array for delta in deltas if isinstance(delta, AudioDelta)]
        for deltas in in_pieces(directory, prompts, **aloud)
    ]
    with Omni(directory) as omni:
        outs = omni.generate(prompts, **aloud)
    others = {"batched": outs, "killed": after_kills(directory, prompts, **aloud)}
    for number, (one, parts) in enumerate(zip(asked, pieces, strict=True)):
        codes = _spoken(model, processor, one)
        with torch.inference_mode():
            whole = model.code2wav(codes)[0, 0].numpy()
            ends = np.cumsum([len(part) for part in parts])[:-1]
            frames = [0, *((ends + FRAME // 2) // FRAME).tolist(), codes.shape[2]]
            apart = [model.code2wav(codes[..., start:end])[0, 0].numpy() for start, end in pairwise(frames)]
        streamed = np.concatenate(parts)
        sounds = {"streamed": streamed, **{name: made[number].audio.samples for name, made in others.items()}}
        for way, sound in sounds.items():
            furthest[way] = max(furthest.get(way, 0.0), float(np.abs(sound - whole).max()))
        for name, sound, borders in (
            ("streamed", streamed, ends),
            ("whole", whole, ends),
            ("apart", np.concatenate(apart), np.cumsum([len(part) for part in apart])[:-1]),
        ):
            if len(borders):
                changes[name].append(seam(sound, borders))
    medians = {name: round(float(np.median(found)), 3) for name, found in changes.items()}
    return {"seams": medians, "answers": len(asked), "furthest": furthest}


def seam(sound: np.ndarray, borders: np.ndarray) -> float:
    """The mean change of log spectra over a window at the borders, over that elsewhere; float [samples], int [n]."""
    spectrum = torch.stft(
        torch.from_numpy(sound.copy()), _WINDOW, _HOP, window=torch.hann_window(_WINDOW), return_complex=True
    )
    logs = (spectrum.abs() + 1e-3).log()
    change = (logs[:, 2:] - logs[:, :-2]).abs().mean(0)
    near = torch.zeros(len(change), dtype=torch.bool)
    for border in borders.tolist():
        middle = border // _HOP - 1
        near[max(middle - 1, 0) : middle + 2] = True
    return float(change[near].mean() / change[~near].mean())


def of_experts(directory: Path, count: int) -> dict[str, Any]:
    """Of each layer of thinker and talker: the largest share of tokens that one expert gets, times the number of
    experts."""
    model, processor = library_of(directory)
    routers = {name: one for name, one in model.named_modules() if name.endswith("mlp.gate")}
    taken = {name: torch.zeros(one.weight.shape[0]) for name, one in routers.items()}

    def note(name: str) -> Any:
        def hook(module: Any, args: Any, made: Any) -> None:
            indices = made[-1] if isinstance(made, tuple) else made.topk(2, -1).indices
            taken[name] += torch.bincount(indices.flatten(), minlength=len(taken[name]))

        return hook

    hooks = [one.register_forward_hook(note(name)) for name, one in routers.items()]
    try:
        for one in evaluate.held_out(count, spoken=False):
            if one.style != evaluate.JSON:
                _spoken(model, processor, one)
    finally:
        for hook in hooks:
            hook.remove()
    found = {name: round(float(len(one) * one.max() / one.sum()), 3) for name, one in taken.items()}
    return {
        "experts": {
            part: [value for name, value in found.items() if name.startswith(part)] for part in ("thinker", "talker")
        }
    }


def _spoken(model: Any, processor: Any, one: evaluate.Asked) -> torch.Tensor:
    """The library's codes of its spoken answer, [1, groups, frames], greedily."""
    _, codes = spoken_codes(
        model,
        **encoded(processor, one.prompt),
        speaker="Chelsie",
        thinker_do_sample=False,
        thinker_max_new_tokens=evaluate.GREEDY["max_tokens"],
        thinker_eos_token_id=model.config.im_end_token_id,
        talker_max_new_tokens=evaluate.SPEECH["talker"]["max_tokens"],
    )
    return codes


def write(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Figures, and what they were measured on, as `quality.json`."""
    found = machine()
    on = {"cpu": found.cpu, "cores": found.cores, "torch": torch.__version__, "commit": found.commit}
    written = {"machine": on | {"date": str(date.today())}, "rows": rows}
    (directory / "quality.json").write_text(json.dumps(written, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=100, help="questions of each kind, and as many spoken ones")
    parser.add_argument("--speech", type=int, default=40, help="spoken answers")
    options = parser.parse_args()
    directory, count = options.directory, options.count
    rows: list[dict[str, Any]] = []
    for found in (
        of_questions(directory, max(count, 100)),
        of_ways(directory, count // 2),
        of_weights(directory, count, options.speech),
        of_drafts(directory, count),
        map(of_experts, [directory], [count // 4]),
        map(of_seams, [directory], [options.speech]),
    ):
        for row in found:
            print(json.dumps(row), flush=True)
            rows.append(row)
    write(directory, rows)


if __name__ == "__main__":
    main()

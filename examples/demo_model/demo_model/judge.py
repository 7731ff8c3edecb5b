"""Count the held-out captions and edits that a checkpoint of `demo_model.draw` draws right, by plain checks of the
pixels and by what a model that sees tells of them: `python -m demo_model.judge DIR EYES`. Writes `DIR/quality.json`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from demo_model import ways
from demo_model.data.captions import Caption, Edit, drawing, is_held_out, random_caption, random_edit, shows, things_for
from demo_model.data.questions import JSON, STYLES
from demo_model.data.scenes import PLACES, SIDE, Thing, centre, picture
from demo_model.evaluate import GREEDY
from demo_model.pixels import STEPS, is_right
from demo_model.quality import write
from segue import Omni
from segue.messages.deltas import ImageDelta
from segue.messages.diffusion import TAYLORSEER
from segue.models.shared.diffusion.library import LIBRARIES

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as published": ({}, {}),
    "bfloat16": ({"dtype": "bfloat16"}, {}),
    "int8": ({"quantization": "int8"}, {}),
    "int4": ({"quantization": "int4"}, {}),
    "fp8": ({"quantization": "fp8"}, {}),
    TAYLORSEER: ({}, {"step_cache": TAYLORSEER}),
}
"""Arguments of `Omni`, and of each picture. The other step caches need blocks that do not join text and picture;
bfloat16 is some 50 times slower on a CPU that does not multiply in it."""


def held_out(count: int) -> Iterator[tuple[str, Caption | Edit]]:
    """`count` captions, then as many edits."""
    rng = random.Random("judged")
    makers: dict[str, Callable[[random.Random], Caption | Edit]] = {"captions": random_caption, "edits": random_edit}
    for sort, new in makers.items():
        found = 0
        while found < count:
            what = new(rng)
            if is_held_out(what):
                found += 1
                yield sort, what


def prompts(wanted: Sequence[Caption | Edit]) -> list[dict[str, Any]]:
    """What Segue takes of each; `seed` and picture by number."""
    size = {"height": SIDE, "width": SIDE, "num_inference_steps": STEPS}
    return [
        {"prompt": str(what), "seed": number, **size}
        | ({"image": _given(what, number)} if isinstance(what, Edit) else {})
        for number, what in enumerate(wanted)
    ]


def _given(edit: Edit, seed: int) -> Image.Image:
    return Image.fromarray(picture(drawing(edit.before, seed, edit.ground)))


def painted(wanted: Sequence[Caption | Edit]) -> list[np.ndarray]:
    """uint8 [SIDE, SIDE, 3] each: true pictures, of which both judges should say so."""
    rng = random.Random("painted")
    things = [what.after if isinstance(what, Edit) else things_for(what, rng) for what in wanted]
    return [
        picture(drawing(one, seed, what.ground)) for seed, (one, what) in enumerate(zip(things, wanted, strict=True))
    ]


def by_library(directory: Path, asked: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """uint8 [SIDE, SIDE, 3] each, drawn one by one by diffusers."""
    pipeline = LIBRARIES["diffusers"].Flux2KleinPipeline.from_pretrained(directory, dtype=torch.float32)  # type: ignore[attr-defined]
    pipeline.set_progress_bar_config(disable=True)
    made = []
    for one in asked:
        given = {key: value for key, value in one.items() if key != "seed"}
        drawn = pipeline(**given, generator=torch.Generator().manual_seed(one["seed"]))
        made.append(np.asarray(drawn.images[0]))
    return made


def in_pieces(directory: Path, asked: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """Streamed, with a preview each."""
    made = ways.in_pieces(directory, [one | {"partial_images": 1} for one in asked])
    return [
        delta.array for deltas in made for delta in deltas if isinstance(delta, ImageDelta) and delta.partial is None
    ]


def killed(directory: Path, asked: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    return [np.asarray(out.images[0]) for out in ways.after_kills(directory, asked)]


def by_segue(
    directory: Path, asked: Sequence[dict[str, Any]], settings: dict[str, Any], more: dict[str, Any]
) -> list[np.ndarray]:
    with Omni(directory, **settings) as omni:
        return [np.asarray(out.images[0]) for out in omni.generate([one | more for one in asked])]


WAYS: dict[str, Callable[[Path, Sequence[dict[str, Any]]], list[np.ndarray]]] = {
    "streamed": in_pieces,
    "killed": killed,
    **{name: partial(by_segue, settings=settings, more=more) for name, (settings, more) in SETTINGS.items()},
}


def looked_at(eyes: Omni, wanted: Sequence[Caption | Edit], drawn: Sequence[np.ndarray]) -> list[bool]:
    """Whether what a model describes in each picture is what there should be. It is not asked for backgrounds."""
    asks = []
    for pixels in drawn:
        image = {"type": "image", "image": Image.fromarray(pixels)}
        content = [image, {"type": "text", "text": "What do you see?"}]
        messages = [{"role": "system", "content": STYLES[JSON]}, {"role": "user", "content": content}]
        asks.append({"messages": messages, "sampling": {"thinker": GREEDY}})
    outs = eyes.generate(asks, modalities=["text"])
    return [shows(what, _described(out.text)) for what, out in zip(wanted, outs, strict=True)]


def _described(answer: str) -> list[Thing]:
    """The things that an answer in JSON describes; none where it is something else."""
    try:
        rows = json.loads(answer)["things"]
        return [
            Thing(
                *(str(row[name]) for name in ("size", "colour", "shape")),
                cell := PLACES.index(row["place"]),
                *centre(cell),
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError):
        return []


def shares(sorts: Sequence[str], right: Sequence[bool]) -> dict[str, float]:
    return {
        sort: round(float(np.mean([one for one, of in zip(right, sorts, strict=True) if of == sort])), 4)
        for sort in dict.fromkeys(sorts)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("eyes", type=Path, help="a checkpoint that sees, such as segue-shapes")
    parser.add_argument("--count", type=int, default=100, help="of captions, and of edits")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="to draw; without: all")
    parser.add_argument("--pictures", type=Path, help="where to write those of the library")
    options = parser.parse_args()
    sorts, wanted = zip(*held_out(options.count), strict=True)
    asked = prompts(wanted)
    rows: list[dict[str, Any]] = []
    with Omni(options.eyes) as eyes:
        exact = by_library(options.directory, asked)
        known = {"painted": painted(wanted), "library": exact}
        for name in (*known, *options.ways):
            drawn = known[name] if name in known else WAYS[name](options.directory, asked)
            right = [is_right(what, pixels) for what, pixels in zip(wanted, drawn, strict=True)]
            seen = looked_at(eyes, wanted, drawn)
            apart = [float(np.abs(one.astype(int) - other).mean()) for one, other in zip(drawn, exact, strict=True)]
            row = {"way": name, "asked": len(asked), "right": shares(sorts, right), "seen": shares(sorts, seen)}
            rows.append(row if name == "painted" else row | {"apart": round(float(np.mean(apart)), 3)})
            print(json.dumps(rows[-1]), flush=True)
            if options.pictures and name == "library":
                options.pictures.mkdir(parents=True, exist_ok=True)
                for number, (what, pixels, good) in enumerate(zip(wanted, drawn, right, strict=True)):
                    file = f"{number}-{'right' if good else 'wrong'}-{str(what).replace(' ', '_')}.png"
                    Image.fromarray(pixels).save(options.pictures / file)
    write(options.directory, rows)


if __name__ == "__main__":
    main()

"""What a person may ask a checkpoint first, as files beside it: `python -m demo_model.examples DIR`.

They are held out, and the first of each kind that comes: whether the model knows their answers chose none of them.
"""

from __future__ import annotations

import argparse
import json
import random
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from demo_model.data.answers import asked
from demo_model.data.captions import Caption, Group, drawing, is_held_out, random_caption, random_edit
from demo_model.data.questions import JSON, STYLES, Question
from demo_model.data.recordings import HEARD_RATE, sound
from demo_model.data.scenes import COLOURS, SIDE, Scene, clip, picture
from demo_model.pixels import STEPS
from segue.media.write_video import VideoWriter

FPS = 2.0
"""Frames of a clip in a second, as the model takes them."""
EXAMPLES = (
    ("Count", "picture", "count", "", False),
    ("Describe a picture", "picture", "describe", "", False),
    ("Describe it in JSON", "picture", "describe", JSON, False),
    ("Watch a clip", "clip", "moves", "", False),
    ("Ask aloud about a picture", "picture", "where", "", True),
    ("Ask aloud about a clip", "clip", "first", "", True),
    ("Say digits", "nothing", "digits", "", True),
    ("Ask what it cannot know", "nothing", "unknown", "", False),
)
"""Title; what is shown; what is asked for; the style of the answer; whether the question is spoken."""


DRAWN: dict[str, Callable[[Caption], bool]] = {
    "Draw things of a kind": lambda what: len(what.groups) == 1,
    "Draw one beside another": lambda what: what.relation is not None,
    "Draw on a background": lambda what: what.ground is not None,
}
"""Title; which captions."""
EDITED: dict[str, Callable[[list[str]], bool]] = {
    "Change a colour": lambda words: words[0] == "make" and words[-1] in COLOURS,
    "Take something away": lambda words: words[0] == "remove",
    "Add something": lambda words: words[0] == "add",
}
"""Title; which instructions."""


def examples(directory: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Write the media of each example into a directory and return what `examples.json` says of them."""
    made = []
    for number, (title, kind, asks, style, spoken) in enumerate(EXAMPLES):
        rng = random.Random(f"examples/{seed}/{number}")
        scene, question = _asked(rng, kind, asks, style)
        said: dict[str, Any] = {"type": "text", "text": question.text}
        if spoken:
            file = f"{number}-question.wav"
            _write_wav(directory / file, sound(question.text, rng))
            said = {"type": "input_audio", "input_audio": {"data": file, "format": "wav"}}
        content = [said] if scene is None else [_shown(scene, directory, number), said]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if style:
            messages.insert(0, {"role": "system", "content": STYLES[style]})
        made.append({"title": title, "messages": messages, "answer": question.answer})
    return made


def drawings(directory: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Likewise for a pipeline that draws. The answer to an edit is a caption of all that is to be seen then."""
    made: list[dict[str, Any]] = []
    settings = {"size": f"{SIDE}x{SIDE}", "steps": STEPS}
    rng = random.Random(f"drawings/{seed}")
    for title, chosen in DRAWN.items():
        caption = random_caption(rng)
        while not (chosen(caption) and is_held_out(caption)):
            caption = random_caption(rng)
        made.append({"title": title, "prompt": str(caption), **settings})
    for title, suits in EDITED.items():
        edit = random_edit(rng)
        while not (suits(edit.text.split()) and is_held_out(edit)):
            edit = random_edit(rng)
        file = f"{len(made)}-before.png"
        Image.fromarray(picture(drawing(edit.before, len(made), edit.ground))).save(directory / file)
        groups = tuple(Group(1, one.size, one.colour, one.shape, one.place) for one in edit.after)
        answer = str(Caption(groups, ground=edit.ground))
        made.append({"title": title, "prompt": edit.text, "image": file, **settings, "answer": answer})
    return made


def _asked(rng: random.Random, kind: str, asks: str, style: str) -> tuple[Scene | None, Question]:
    while True:
        scene, found, [question] = asked(kind, rng, 1)
        if found == style and question.kind == asks:
            return scene, question


def _shown(scene: Scene, directory: Path, number: int) -> dict[str, Any]:
    if not scene.moves:
        file = f"{number}-picture.png"
        Image.fromarray(picture(scene)).save(directory / file)
        return {"type": "image_url", "image_url": {"url": file}}
    file = f"{number}-clip.mp4"
    with VideoWriter(directory / file, fps=FPS) as video:
        video.add(clip(scene))
    return {"type": "video_url", "video_url": {"url": file}}


def _write_wav(path: Path, samples: np.ndarray) -> None:
    """Of float [samples] at `HEARD_RATE`."""
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(HEARD_RATE)
        out.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="the checkpoint; `examples` in it is written")
    checkpoint = parser.parse_args().directory
    directory = checkpoint / "examples"
    directory.mkdir(exist_ok=True)
    made = drawings(directory) if (checkpoint / "model_index.json").exists() else examples(directory)
    (directory / "examples.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()

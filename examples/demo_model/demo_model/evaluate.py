"""Ask questions that no training has seen, and count right answers: `python -m demo_model.evaluate DIRECTORY`."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from demo_model import hear, see
from demo_model.questions import STYLES, Question, is_right
from demo_model.scenes import clip, picture
from segue import Omni, SamplingParams


@dataclass(frozen=True)
class Asked:
    """A question as a prompt. `sort`: what counts together, such as "picture" or "spoken clip, json"."""

    sort: str
    question: Question
    prompt: dict[str, Any]


def held_out(count: int, *, seed: int = 0) -> Iterator[Asked]:
    """`count` questions of each kind, in writing and spoken."""
    rng = random.Random(f"held out/{seed}")
    for kind in ("picture", "clip", "nothing"):
        for number in range(2 * count):
            scene, style, [question] = see.asked(kind, rng, 1)
            said: dict[str, Any] = {"type": "text", "text": question.text}
            if number % 2:
                said = {"type": "audio", "audio": (hear.sound(question.text, rng), hear.HEARD_RATE)}
            content = [said]
            if scene is not None and scene.moves:
                content.insert(0, {"type": "video", "video": (clip(scene), 2.0)})
            elif scene is not None:
                content.insert(0, {"type": "image", "image": Image.fromarray(picture(scene))})
            messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
            if style:
                messages.insert(0, {"role": "system", "content": STYLES[style]})
            sort = f"{'spoken ' * (number % 2)}{kind}{', json' * (style == 'json')}"
            yield Asked(sort, question, {"messages": messages})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=200, help="questions of each kind, and as many spoken ones")
    options = parser.parse_args()
    asked = list(held_out(options.count))
    greedy = SamplingParams(temperature=0, max_tokens=128)
    with Omni(options.directory) as omni:
        outs = omni.generate([one.prompt for one in asked], modalities=["text"], sampling=greedy)
    right, all_of = Counter[str](), Counter[str]()
    for one, out in zip(asked, outs, strict=True):
        all_of[one.sort] += 1
        right[one.sort] += is_right(one.question, out.text)
    for sort, number in all_of.items():
        print(json.dumps({"questions": sort, "asked": number, "right": round(right[sort] / number, 4)}))


if __name__ == "__main__":
    main()

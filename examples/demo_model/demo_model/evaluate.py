"""Ask about pictures, clips and recordings that no training has seen; count right answers and understood words:
`python -m demo_model.evaluate DIR`.

The model's English is small: the words of most questions were in the training too."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from demo_model.data.answers import asked
from demo_model.data.questions import JSON, NUMBERS, STYLES, Question, is_right
from demo_model.data.recordings import HEARD_RATE, sound
from demo_model.data.sayings import SPOKEN_RATE, spoken
from demo_model.data.scenes import clip, picture
from demo_model.ways import WAYS
from segue import Omni
from segue.media.audio import resample

GREEDY = {"temperature": 0.0, "max_tokens": 160}
SPEECH: dict[str, dict[str, Any]] = {"talker": {"temperature": 0.0, "max_tokens": 300}}


@dataclass(frozen=True)
class Asked:
    """A question as a prompt. `sort`: what counts together, as "picture" or "spoken clip"; `style`: of the answer."""

    sort: str
    style: str
    question: Question
    prompt: dict[str, Any]


def held_out(count: int, *, spoken: bool = True, grammar: bool = False, seed: int = 0) -> Iterator[Asked]:
    """`count` questions of each kind in writing, and as many `spoken`. `grammar`: answers in JSON are kept to it."""
    rng = random.Random(f"held out/{seed}")
    for kind in ("picture", "clip", "nothing"):
        for number in range(0, 2 * count, 1 if spoken else 2):
            scene, style, [question] = asked(kind, rng, 1)
            said: dict[str, Any] = {"type": "text", "text": question.text}
            if number % 2:
                said = {"type": "audio", "audio": (sound(question.text, rng), HEARD_RATE)}
            content = [said]
            if scene is not None and scene.moves:
                content.insert(0, {"type": "video", "video": (clip(scene), 2.0)})
            elif scene is not None:
                content.insert(0, {"type": "image", "image": Image.fromarray(picture(scene))})
            messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
            if style:
                messages.insert(0, {"role": "system", "content": STYLES[style]})
            form = {"structured_outputs": {"json_object": True}} if grammar and style == JSON else {}
            prompt = {"messages": messages, "sampling": {"thinker": {**GREEDY, **form}}}
            yield Asked(f"{'spoken ' * (number % 2)}{kind}", style, question, prompt)


def alike(count: int) -> Iterator[Asked]:
    """`count` written questions for the number of two to four things of one colour and shape, without a style."""
    rng = random.Random("alike")
    found = 0
    while found < count:
        scene, _, [question] = asked("picture", rng, 1, "", harder=True)
        if scene is None or question.kind != "count_sort" or question.facts[0] not in NUMBERS[2:5]:
            continue
        found += 1
        content = [
            {"type": "image", "image": Image.fromarray(picture(scene))},
            {"type": "text", "text": question.text},
        ]
        prompt = {"messages": [{"role": "user", "content": content}], "sampling": {"thinker": GREEDY}}
        yield Asked("several alike", "", question, prompt)


def shares(asked: Sequence[Asked], texts: Sequence[str]) -> dict[str, float]:
    """The share of right answers to each sort of question, and of valid JSON."""
    return {row["questions"]: row["right"] for row in answers(asked, texts)}


def answers(asked: Sequence[Asked], texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per sort of question with the share of right answers, and one with that of valid JSON."""
    right, all_of = Counter[str](), Counter[str]()
    for one, text in zip(asked, texts, strict=True):
        found = {one.sort: is_right(one.question, text)}
        if one.style == JSON:
            found["valid JSON"] = _is_json(text)
        right.update(found)
        all_of.update(found.keys())
    for sort, number in all_of.items():
        yield {"questions": sort, "asked": number, "right": round(right[sort] / number, 4)}


def speech(omni: Omni, count: int) -> dict[str, Any]:
    """The share of words that a recogniser mistakes in spoken answers, and in espeak-ng's own sound of them."""
    outs = aloud(omni, count)
    said = [words_of(out.text) for out in outs]
    words = sum(map(len, said))
    sounds = {
        "error": [out.audio.samples for out in outs],
        "espeak": [spoken(out.text, "chelsie") / 32768 for out in outs],
    }
    shares = {name: round(misheard(said, heard) / words, 4) for name, heard in sounds.items()} if words else {}
    return {"spoken": len(outs), "words": words, **shares}


def misheard(said: Sequence[Sequence[str]], sounds: Sequence[np.ndarray]) -> int:
    """How many words a recogniser mistakes in sounds, float [samples] at the model's rate."""
    return sum(mistakes(words, recognised(sound, SPOKEN_RATE)) for words, sound in zip(said, sounds, strict=True))


def aloud(omni: Omni, count: int, seed: int = 0) -> list[Any]:
    """Answers to held-out questions, written and spoken, greedily both."""
    asked = [one.prompt for one in held_out(count, spoken=False, seed=seed) if one.style != JSON][:count]
    prompts = [one | {"sampling": one["sampling"] | SPEECH} for one in asked]
    return list(omni.generate(prompts, modalities=["text", "audio"], voice="Chelsie"))


def recognised(samples: np.ndarray, rate: int) -> list[str]:
    """The words that PocketSphinx hears in float [samples]."""
    import pocketsphinx

    if not len(samples):
        return []
    pieces = resample(samples.astype(np.float32), rate, HEARD_RATE)
    decoder = pocketsphinx.Decoder(samprate=HEARD_RATE, loglevel="FATAL")
    decoder.start_utt()
    decoder.process_raw((pieces.clip(-1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
    decoder.end_utt()
    return words_of(decoder.hyp().hypstr) if decoder.hyp() else []


def mistakes(said: Sequence[str], heard: Sequence[str]) -> int:
    """The fewest words to change, add or leave out."""
    row = list(range(len(heard) + 1))
    for number, word in enumerate(said, 1):
        before, row = row, [number]
        for index, other in enumerate(heard, 1):
            row.append(min(before[index] + 1, row[-1] + 1, before[index - 1] + (word != other)))
    return row[-1]


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=200, help="questions of each kind, and as many spoken ones")
    parser.add_argument("--speech", type=int, default=40, help="spoken answers; 0: none")
    parser.add_argument("--grammar", action="store_true", help="keep answers in JSON to its grammar")
    parser.add_argument("--way", choices=WAYS, default="batched", help="how answers are asked for")
    parser.add_argument("--seed", type=int, default=0, help="of the questions; 0: those of the card")
    options = parser.parse_args()
    asked = list(held_out(options.count, grammar=options.grammar, seed=options.seed))
    texts = WAYS[options.way](options.directory, [one.prompt for one in asked])
    for row in answers(asked, texts):
        print(json.dumps(row), flush=True)
    if options.speech:
        with Omni(options.directory) as omni:
            print(json.dumps(speech(omni, options.speech)))


if __name__ == "__main__":
    main()

"""Questions about scenes and clips, with answers in three styles, and the rule by which an answer counts as right."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from demo_model.data.scenes import COLOURS, DIRECTIONS, PLACES, RADII, SHAPES, Scene, Thing, draw_clip, draw_scene

JSON = "json"
"""The style that is not for speaking."""
STYLES = {"full": "Answer in full sentences.", "short": "Answer briefly.", JSON: "Answer in JSON."}
"""System prompts; without one the answer is a full sentence."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Laura",
    "Martin",
    "Nora",
    "Oscar",
)
UNKNOWN = "I do not know"
_FACTS = (*NUMBERS, *NAMES, *COLOURS, *SHAPES, *RADII, *sorted(PLACES, key=len, reverse=True), *DIRECTIONS)
_FACT = re.compile(rf"\b({'|'.join(dict.fromkeys((*_FACTS, 'yes', 'no', 'hello', 'not know')))})(?:s|es)?\b", re.I)


@dataclass(frozen=True)
class Question:
    """A question and its right answer. `kind`: what is asked for. `facts`: the words that an answer must have, in
    order, and no others of their sort.
    """

    kind: str
    text: str
    answer: str
    facts: tuple[str, ...]


@dataclass(frozen=True)
class _Answer:
    """One answer in all styles."""

    full: str
    short: str
    fields: dict[str, object]


def facts_of(answer: str) -> tuple[str, ...]:
    """The words of an answer that can be right or wrong, in order. Of JSON, those of its values."""
    if answer.lstrip().startswith("{"):
        try:
            answer = " , ".join(_leaves(json.loads(answer)))
        except ValueError:
            return ()
    return tuple(found.group(1).lower() for found in _FACT.finditer(answer))


def is_right(question: Question, answer: str) -> bool:
    """Whether an answer states the facts asked for and nothing else of their sort. JSON must be valid."""
    return bool(question.facts) and facts_of(answer) == question.facts


def about_picture(scene: Scene, rng: random.Random, style: str, count: int, *, harder: bool = False) -> list[Question]:
    """`count` random questions about a picture. `harder`: more of those for which all things must be looked at."""
    makers, weights = (_HARDER, _HARDER_WEIGHTS) if harder else (_OF_PICTURE, _WEIGHTS)
    return [_asked(rng.choices(makers, weights)[0], scene, rng, style) for _ in range(count)]


def about_clip(scene: Scene, rng: random.Random, style: str, count: int) -> list[Question]:
    """`count` random questions about a clip."""
    return [_asked(rng.choice(_OF_CLIP), scene, rng, style) for _ in range(count)]


def without_picture(rng: random.Random, style: str, count: int) -> list[Question]:
    """`count` random questions that need no picture: greetings, names, digits, and what cannot be known."""
    return [_asked(rng.choice(_OF_NOTHING), Scene((), 0), rng, style) for _ in range(count)]


Maker = Callable[[Scene, random.Random], tuple[str, _Answer] | None]
"""A question and its answer, or None where the scene does not allow the question."""


def _asked(maker: Maker, scene: Scene, rng: random.Random, style: str) -> Question:
    made = maker(scene, rng)
    while made is None:
        maker = rng.choice(_OF_CLIP if scene.moves else _OF_PICTURE)
        made = maker(scene, rng)
    text, answer = made
    said = json.dumps(answer.fields) if style == JSON else getattr(answer, style)
    return Question(maker.__name__.strip("_"), text, said, facts_of(said))


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield (
            {True: "yes", False: "no", None: "not know"}.get(value, "")
            if isinstance(value, bool | None)
            else _word(value)
        )


def _word(value: object) -> str:
    return NUMBERS[value] if isinstance(value, int) and 0 <= value < len(NUMBERS) else str(value)


def _pick(rng: random.Random, *texts: str) -> str:
    return rng.choice(texts)


def _plural(words: str, number: int) -> str:
    return words if number == 1 else words + "s"


def _name(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def _whole(thing: Thing) -> str:
    return f"{thing.size} {thing.colour} {thing.shape}"


def _a(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _at(place: str) -> str:
    return (
        f"in the {place}"
        if place == "middle"
        else f"at the {place}"
        if place in ("top", "bottom")
        else f"on the {place}"
    )


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sure(true: bool, of: str, key: str) -> _Answer:
    return _Answer(f"{'Yes' if true else 'No'}, {of}.", "Yes." if true else "No.", {key: true})


def _only(things: Sequence[Thing], rng: random.Random, key: Callable[[Thing], str]) -> Thing | None:
    """A random thing whose `key` no other has."""
    keys = [key(thing) for thing in things]
    alone = [thing for thing in things if keys.count(key(thing)) == 1]
    return rng.choice(alone) if alone else None


# about pictures


def _count(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    thing = rng.choice(scene.things)
    colour = thing.colour if rng.random() < 0.8 else rng.choice(list(COLOURS))
    words, same = rng.choice(
        [
            ("thing", lambda one: True),
            (thing.shape, lambda one: one.shape == thing.shape),
            (f"{colour} {thing.shape}", lambda one: (one.colour, one.shape) == (colour, thing.shape)),
            (f"{colour} thing", lambda one: one.colour == colour),
        ]
    )
    return _number_of(words, sum(map(same, scene.things)), rng)


def _count_sort(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    """Of one colour and shape, which another thing may have one of."""
    thing, other = rng.choice(scene.things), rng.choice(scene.things)
    words = f"{thing.colour} {thing.shape if rng.random() < 0.7 else other.shape}"
    return _number_of(words, [_name(one) for one in scene.things].count(words), rng)


def _number_of(words: str, number: int, rng: random.Random) -> tuple[str, _Answer]:
    text = _pick(rng, f"How many {words}s are there?", f"How many {words}s do you see?", f"Count the {words}s.")
    word = NUMBERS[number]
    full = f"There {'is' if number == 1 else 'are'} {word} {_plural(words, number)}."
    return text, _Answer(full, f"{word.capitalize()}.", {"count": number})


def _colour(scene: Scene, rng: random.Random) -> tuple[str, _Answer] | None:
    thing = _only(scene.things, rng, lambda one: one.shape)
    if thing is None:
        return None
    text = _pick(rng, f"What colour is the {thing.shape}?", f"Which colour has the {thing.shape}?")
    return text, _Answer(f"It is {thing.colour}.", f"{thing.colour.capitalize()}.", {"colour": thing.colour})


def _shape(scene: Scene, rng: random.Random) -> tuple[str, _Answer] | None:
    thing = _only(scene.things, rng, lambda one: one.colour)
    if thing is None:
        return None
    text = _pick(rng, f"What shape is the {thing.colour} thing?", f"Which shape has the {thing.colour} thing?")
    return text, _Answer(f"It is {_a(thing.shape)}.", f"{_a(thing.shape).capitalize()}.", {"shape": thing.shape})


def _where(scene: Scene, rng: random.Random) -> tuple[str, _Answer] | None:
    thing = _only(scene.things, rng, _name)
    if thing is None:
        return None
    text = _pick(rng, f"Where is the {_name(thing)}?", f"Where do you see the {_name(thing)}?")
    at = _at(thing.place)
    return text, _Answer(f"It is {at}.", f"{at.capitalize()}.", {"place": thing.place})


def _size(scene: Scene, rng: random.Random) -> tuple[str, _Answer] | None:
    thing = _only(scene.things, rng, _name)
    if thing is None:
        return None
    text = _pick(rng, f"Is the {_name(thing)} big or small?", f"What size is the {_name(thing)}?")
    return text, _Answer(f"It is {thing.size}.", f"{thing.size.capitalize()}.", {"size": thing.size})


def _what(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    cell = rng.choice(scene.things).cell if rng.random() < 0.8 else rng.randrange(len(PLACES))
    text = _pick(rng, f"What is {_at(PLACES[cell])}?", f"What do you see {_at(PLACES[cell])}?")
    for thing in scene.things:
        if thing.cell == cell:
            words = _a(_whole(thing))
            fields = {"size": thing.size, "colour": thing.colour, "shape": thing.shape}
            return text, _Answer(f"There is {words}.", f"{words.capitalize()}.", fields)
    return text, _Answer("No thing is there.", "No thing.", {"seen": False})


def _is_there(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    thing = rng.choice(scene.things)
    words = _name(thing) if rng.random() < 0.5 else f"{rng.choice(list(COLOURS))} {rng.choice(SHAPES)}"
    seen = any(_name(one) == words for one in scene.things)
    text = _pick(rng, f"Is there {_a(words)}?", f"Do you see {_a(words)}?")
    return text, _sure(seen, "there is" if seen else "there is not", "seen")


def _beside(scene: Scene, rng: random.Random) -> tuple[str, _Answer] | None:
    named = [thing for thing in scene.things if [_name(one) for one in scene.things].count(_name(thing)) == 1]
    pairs = [(one, other) for one in named for other in named if one.cell // 3 != other.cell // 3]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    asked = rng.choice(["above", "below"])
    true = (one.cell // 3 < other.cell // 3) == (asked == "above")
    return f"Is the {_name(one)} {asked} the {_name(other)}?", _sure(true, "it is" if true else "it is not", "true")


def _describe(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    text = _pick(rng, "What do you see?", "Describe the picture.", "What is in the picture?")
    places = _listed([f"{_a(_whole(thing))} {_at(thing.place)}" for thing in scene.things])
    fields = [{"size": one.size, "colour": one.colour, "shape": one.shape, "place": one.place} for one in scene.things]
    return text, _Answer(
        f"I see {places}.",
        f"{_listed([_a(_whole(thing)) for thing in scene.things]).capitalize()}.",
        {"things": fields},
    )


# about clips


def _moves(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    text = _pick(rng, "What moves?", "What is moving?", "What happens?")
    moves = [(_name(scene.things[index]), direction) for index, direction in scene.moves]
    first = f"The {moves[0][0]} moves {moves[0][1]}"
    full = first + (f", then the {moves[1][0]} moves {moves[1][1]}." if len(moves) > 1 else ".")
    short = f"{_listed([f'the {name} {direction}' for name, direction in moves]).capitalize()}."
    fields = [{"what": name, "direction": direction} for name, direction in moves]
    return text, _Answer(full, short, {"moves": fields})


def _direction(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    index, direction = rng.choice(scene.moves)
    name = _name(scene.things[index])
    text = _pick(rng, f"Where does the {name} move?", f"In which direction does the {name} go?")
    return text, _Answer(f"It moves {direction}.", f"{direction.capitalize()}.", {"direction": direction})


def _first(scene: Scene, rng: random.Random) -> tuple[str, _Answer] | None:
    if len(scene.moves) < 2:
        return None
    last = rng.random() < 0.5
    name = _name(scene.things[scene.moves[-1 if last else 0][0]])
    text = f"What moves {'last' if last else 'first'}?"
    return text, _Answer(f"The {name} does.", f"The {name}.", {"what": name})


def _does_it(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    index = rng.randrange(len(scene.things))
    true = index in [moved for moved, _ in scene.moves]
    return f"Does the {_name(scene.things[index])} move?", _sure(true, "it does" if true else "it does not", "moves")


# about nothing that is to be seen


def _hello(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    text = _pick(rng, "Hello!", "Good morning.", "Hi, how are you?")
    return text, _Answer("Hello! Show me a picture and ask me.", "Hello!", {"greeting": "hello"})


def _unknown(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    who = rng.choice(["painter", "teacher", "doctor", "neighbour", "captain", "baker", "singer", "pilot"])
    text = _pick(
        rng,
        f"What is the name of the {who}?",
        f"How old is the {who}?",
        f"Where does the {who} live?",
        f"Who knows the {who}?",
        f"What did the {who} eat?",
        f"When does the {who} sleep?",
    )
    return text, _Answer(f"{UNKNOWN} that.", f"{UNKNOWN}.", {"answer": None})


def _my_name(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    name = rng.choice(NAMES)
    text = _pick(rng, f"My name is {name}. What is my name?", f"I am {name}. Who am I?")
    return text, _Answer(f"Your name is {name}.", f"{name}.", {"name": name})


def _digits(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    digits = [rng.choice(NUMBERS) for _ in range(rng.randint(1, 4))]
    text = _pick(rng, f"Say after me: {' '.join(digits)}.", f"Which digits are these: {' '.join(digits)}?")
    return text, _Answer(
        f"You said {' '.join(digits)}.",
        f"{' '.join(digits).capitalize()}.",
        {"digits": [NUMBERS.index(one) for one in digits]},
    )


def _sum(scene: Scene, rng: random.Random) -> tuple[str, _Answer]:
    one, other = rng.randint(0, 4), rng.randint(0, 5)
    text = _pick(
        rng, f"What is {NUMBERS[one]} plus {NUMBERS[other]}?", f"How much is {NUMBERS[one]} and {NUMBERS[other]}?"
    )
    word = NUMBERS[one + other]
    return text, _Answer(f"It is {word}.", f"{word.capitalize()}.", {"sum": one + other})


_OF_PICTURE: list[Maker] = [_count, _colour, _shape, _where, _size, _what, _is_there, _beside, _describe, _unknown]
_WEIGHTS = [4, 2, 2, 2, 1, 3, 2, 2, 4, 1]
_HARDER: list[Maker] = [*_OF_PICTURE, _count_sort]
_HARDER_WEIGHTS = [8, 4, 2, 2, 1, 3, 3, 2, 3, 1, 9]
_OF_CLIP: list[Maker] = [_moves, _direction, _first, _does_it]
_OF_NOTHING: list[Maker] = [_hello, _unknown, _my_name, _digits, _sum]


def sentences(seed: int = 0, count: int = 4000) -> list[str]:
    """Questions and answers of all kinds, for the tokenizer."""
    rng = random.Random(seed)
    found = list(STYLES.values())
    while len(found) < count:
        style = rng.choice(list(STYLES))
        for question in (
            *about_picture(draw_scene(rng), rng, style, 2),
            *about_clip(draw_clip(rng), rng, style, 1),
            *without_picture(rng, style, 1),
        ):
            found += [question.text, question.answer]
    return found

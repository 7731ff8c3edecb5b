"""Tables of what `quality` or `judge` has measured: `python -m demo_model.tables DIR... --pages PAGE...` puts them into
Markdown pages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from segue.bench.figures import insert

SORTS = ("picture", "spoken picture", "clip", "spoken clip", "nothing", "spoken nothing", "valid JSON")


def tables(found: dict[str, Any]) -> str:
    """All tables of a checkpoint, each with a line on what it shows."""
    rows, machine = found["rows"], found["machine"]
    parts = drawings(rows) if "seen" in rows[0] else answers(rows)
    where = f"{machine['cores']} core{'s' * (machine['cores'] > 1)} of {machine['cpu']}, torch {machine['torch']}"
    return "\n\n".join([f"Measured on {where}, commit {machine['commit']}, {machine['date']}.", *parts])


def drawings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of `judge`."""
    return [
        f"**Drawings.** {rows[0]['asked']} held-out captions and edits: the share of pictures that are right by plain "
        "checks of their pixels (colour, shape, size, place, number, background); of how many segue-shapes describes "
        "all that there should be, each thing's colour, shape, size and place; and how far pixels, 0 to 255, are from "
        "the library's on average. Painted pictures are true ones. TaylorSeer is the only step cache that such blocks "
        "allow.",
        table(
            ["way", "captions", "edits", "captions, described", "edits, described", "from the library's"],
            (
                [row["way"], *map(percent, (*row["right"].values(), *row["seen"].values())), row.get("apart", "–")]
                for row in rows
            ),
        ),
    ]


def answers(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of `quality`."""
    whole = [row for row in rows if "grammar" in row]
    sorts = [*SORTS, "several alike"]
    parts = [
        f"**Questions.** {whole[0]['asked']} held-out questions, a hundred or more of each sort, greedy: the share of "
        "right answers. Pictures, clips and recordings are new; the words of most questions occurred in training. In"
        ' "several alike" two to four things of one colour and shape are counted. Recordings of the two rows differ a '
        "little, since espeak-ng's sound depends on what it said before.",
        table(
            ["answers in JSON", *sorts],
            (["by its grammar" if row["grammar"] else "free", *_right(row, sorts)] for row in whole),
        ),
    ]
    ways = [row for row in rows if "way" in row]
    [seams] = [row for row in rows if "seams" in row]
    furthest = max(seams["furthest"].values())
    parts += [
        f"**Ways to ask.** {ways[0]['asked']} held-out questions, greedy: the share of right answers, and of "
        "those that are the library's to the letter. Aloud, "
        f"{seams['answers']} answers, batched, streamed and killed, are as long as the library's; no sample is further "
        f"than {furthest:.0e} from its.",
        table(["way", *SORTS, "as the library"], ([row["way"], *_right(row), percent(row["same"])] for row in ways)),
    ]
    weights = [row for row in rows if "weights" in row]
    parts += [
        f"**Bits.** {weights[0]['asked']} held-out questions, greedy, and {weights[0]['speech']['spoken']} spoken "
        "answers: the share of words that an independent recogniser (PocketSphinx) mistakes; in espeak-ng's own sound "
        f"of the same sentences it mistakes {percent(weights[0]['speech'].get('espeak'))}.",
        table(
            ["weights", *SORTS, "as published", "word error"],
            (
                [row["weights"], *_right(row), percent(row["same"]), percent(row["speech"].get("error"))]
                for row in weights
            ),
        ),
    ]
    drafts = [row for row in rows if "drafts" in row]
    parts += [
        "**Drafts.** N-gram speculation, four tokens: the share of drafts that the model accepts, by the style that a "
        "system prompt asks for. Answers are the same to the letter: "
        f"{'yes' if all(row['same'] for row in drafts) else 'no'}.",
        table(
            ["style", "questions", "drafted tokens", "accepted"],
            ([row["drafts"], row["asked"], int(row["drafted"]), percent(row["accepted"])] for row in drafts),
        ),
    ]
    [experts] = [row for row in rows if "experts" in row]
    parts += [
        f"**Seams.** How much the spectrum of {seams['answers']} spoken answers changes where two pieces of sound meet,"
        " as a multiple of elsewhere; whole is one call of the library's vocoder.",
        table(["streamed", "whole, at the same places", "pieces decoded apart"], [list(seams["seams"].values())]),
        "**Experts.** The largest share of tokens that one expert gets, as a multiple of an even one, layer by layer: "
        + "; ".join(
            f"{part} {', '.join(f'{one:.2f}' for one in layers)}" for part, layers in experts["experts"].items()
        )
        + ".",
    ]
    return parts


def _right(row: dict[str, Any], sorts: Sequence[str] = SORTS) -> Iterator[str]:
    return (percent(row["right"].get(sort)) for sort in sorts)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%"


def table(head: Sequence[str], rows: Any) -> str:
    """In Markdown."""
    lines = [list(map(str, row)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(head), ["---"] * len(head), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--pages", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    body = "\n\n".join(tables(json.loads((one / "quality.json").read_text())) for one in options.directories)
    for page in options.pages:
        page.write_text(insert(page.read_text(), body))


if __name__ == "__main__":
    main()

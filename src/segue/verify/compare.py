"""Compare both sides' outputs: define "equal" for each kind of output, and make the rows of the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from segue.messages.reference import Followed, LibraryAnswer, Pixels
from segue.orchestrator.omni.outputs import RequestOutput
from segue.verify.segue_side import Served
from segue.verify.subject import Subject

Verdict = Literal["equal", "tie", "DIFFERENT", "FAILED", "skipped"]


class Tolerance(msgspec.Struct, frozen=True):
    """Tolerances of one dtype. If both sides compute the same in another order, they differ only by rounding."""

    logprob: float
    """Difference in natural log-probability of any token, and largest margin of another token that counts as a tie."""
    mean_logprob: float
    """The same difference as a mean over a reply's tokens: rounding has no direction, so the mean is far smaller."""
    ties: float
    """Share of a reply's tokens that may be ties; one always may."""
    audio: float
    """RMS of the difference divided by the RMS of the library's samples."""
    mean_level: float
    """Mean difference of pixels, in levels of 255."""
    max_level: float
    vector: float
    """Largest difference divided by the largest number."""


TOLERANCES = {
    "float32": Tolerance(1e-3, 2e-4, 0.1, 0.01, 0.1, 2, 1e-4),
    "float16": Tolerance(0.1, 0.02, 0.25, 0.05, 2, 64, 0.01),
    "bfloat16": Tolerance(0.5, 0.1, 0.25, 0.1, 4, 128, 0.05),
}
_SILENCE = 1e-5
"""Largest audio sample that becomes zero in a 16-bit file."""


class Row(msgspec.Struct, kw_only=True):
    """One line of the table."""

    stage: str
    kind: str
    question: str
    dtype: str
    served: str
    """`alone`, `together`, or `both` if the verdicts are the same; the figure is then that of the larger error."""
    verdict: Verdict
    figure: str
    error: float = 0.0
    """The figure as one number, in the unit of the tolerance."""
    tolerance: str = ""
    library_seconds: float = 0.0
    segue_seconds: float = 0.0
    detail: dict[str, Any] = {}
    """Data for a bug report."""


def compared(
    subject: Subject, dtype: str, served: Served, answers: dict[str, LibraryAnswer], error: str | None
) -> list[Row]:
    """Make the rows of a question. `answers`: how Segue was asked → the library's; `error`: why one is missing."""
    made = list(_rows(subject, dtype, served, answers, error))
    return _merged(made)


def _rows(
    subject: Subject, dtype: str, served: Served, answers: dict[str, LibraryAnswer], error: str | None
) -> Iterator[Row]:
    def row(verdict: Verdict, figure: str, **more: Any) -> Row:
        base: dict[str, Any] = {"stage": subject.graph.main, "kind": "", "served": "alone", **more}
        return Row(question=served.question.name, dtype=dtype, verdict=verdict, figure=figure, **base)

    if served.refused is not None:
        yield row("skipped", f"not accepted by this model: {served.refused}")
        return
    if served.error is not None:
        yield row("FAILED", f"Segue: {served.error}")
    if served.outputs and error is not None:
        yield row("FAILED", f"the library: {error}")
        return
    for how, output in served.outputs.items():
        answer = answers[how]
        if answer.refused is not None:
            yield row("skipped", answer.refused)
            return
        if answer.error is not None:
            yield row("FAILED", f"the library: {answer.error}", served=how)
            continue
        times = {"library_seconds": answer.seconds, "segue_seconds": served.seconds}
        for one in _judged(subject, TOLERANCES[dtype], output, answer):
            yield row(one.pop("verdict"), one.pop("figure"), served=how, **times, **one)


def _judged(subject: Subject, within: Tolerance, output: RequestOutput, answer: LibraryAnswer) -> Iterator[Any]:
    """Yield the fields of one row per output."""
    if answer.prompt_token_ids is not None:
        yield {"stage": "input", "kind": "prompt ids", **ids(output.prompt_token_ids, answer.prompt_token_ids)}
    for stage, kind in _unanswered(subject, output, answer):
        figure = f"the library gave no {kind} to compare"
        yield {"stage": stage, "kind": kind, "verdict": "FAILED", "figure": figure}
    for followed in answer.followed:
        given = output.token_ids.get(followed.stage, [])
        kind = "tokens" if subject.graph.stages[followed.stage].gives else "codes"
        own = [entry.chosen.logprob for entry in output.logprobs] if followed.stage == subject.graph.main else []
        yield {"stage": followed.stage, "kind": kind, **tokens(given, followed, own, within)}
    for kind in ("audio", "image", "video"):
        givers = [stage.name for stage in subject.graph.stages.values() if kind in stage.gives]
        shown = {"stage": givers[0] if givers else "", "kind": kind}
        if kind == "audio" and answer.samples is not None:
            mine = np.zeros(0, np.float32) if output.audio is None else output.audio.samples
            yield {**shown, **audio(mine, np.frombuffer(answer.samples, "<f4"), within)}
        elif kind in subject.graph.gives and answer.pixels:
            own_pixels = [np.asarray(image) for image in output.images] if kind == "image" else []
            own_pixels = own_pixels or [video.frames for video in output.videos]
            yield {**shown, **pixels(own_pixels, answer.pixels, within)}
    if answer.vector is not None:
        numbers = output.embedding if output.embedding is not None else output.classes
        mine = np.asarray([output.score] if numbers is None else numbers, np.float32)
        [kind] = subject.graph.gives
        yield {"kind": kind, **vector(mine, np.asarray(answer.vector, np.float32), within)}


def _unanswered(subject: Subject, output: RequestOutput, answer: LibraryAnswer) -> Iterator[tuple[str, str]]:
    """Yield (stage, kind) of outputs that Segue or the graph gives, but that the library's answer lacks."""
    followed = {one.stage for one in answer.followed}
    for stage in output.token_ids:
        if stage not in followed:
            yield stage, "tokens" if subject.graph.stages[stage].gives else "codes"
    has = {
        "text": bool(followed),
        "audio": answer.samples is not None,
        **dict.fromkeys(("image", "video"), bool(answer.pixels)),
    }
    for giver in subject.graph.stages.values():
        for kind in sorted(giver.gives):
            if not has.get(kind, answer.vector is not None) and giver.name not in output.token_ids:
                yield giver.name, kind


def _failed(figure: str) -> dict[str, Any]:
    """Return the row of a meaningless answer of the library, which verifies nothing."""
    return {"verdict": "FAILED", "figure": f"the library gave {figure}"}


def ids(mine: Sequence[int], theirs: Sequence[int]) -> dict[str, Any]:
    """Compare prompts as token ids: if they differ, so does everything after them."""
    if list(mine) == list(theirs):
        return {"verdict": "equal", "figure": f"{len(mine)} ids", "tolerance": "exact"}
    place = _first_difference(mine, theirs)
    figure = f"from index {place}: {len(mine)} ids, the library has {len(theirs)}"
    return {
        "verdict": "DIFFERENT",
        "figure": figure,
        "tolerance": "exact",
        "detail": {"segue": list(mine), "library": list(theirs)},
    }


def tokens(
    given: Sequence[int], followed: Followed, own_logprobs: Sequence[float], within: Tolerance
) -> dict[str, Any]:
    """Compare a greedy reply with the library's choices, given the reply's preceding tokens."""
    best, margins = followed.best, followed.margins
    apart = [place for place, token in enumerate(given) if place < len(best) and best[place] != token]
    theirs = followed.logprobs or []
    differences = [abs(a - b) for a, b in zip(own_logprobs, theirs, strict=False)]
    logprob = float(np.max(differences)) if differences else None  # NaN if one of them is
    mean = float(np.mean(differences)) if differences else 0.0
    worst = max((margins[place] for place in apart), default=0.0)
    said = f"; logprobs within {logprob:.2g}" if logprob is not None else ""
    made: dict[str, Any] = {
        "tolerance": f"{within.logprob:g} (logprob)",
        "error": max(worst, logprob or 0.0),
        "detail": {
            "segue": list(given),
            "library": best,
            "margins": margins,
            "segue_logprobs": list(own_logprobs),
            "library_logprobs": theirs,
        },
    }
    if len(best) != len(given):
        what = "goes on" if len(best) > len(given) else "ends"
        figure = f"the library {what} after {min(len(best), len(given))} tokens, Segue has {len(given)}"
    elif not given:
        return {**made, "verdict": "FAILED", "figure": "neither side gave a token"}
    elif unknown := [place for place, value in enumerate(margins) if math.isnan(value)]:
        return {**made, **_failed(f"scores that are no numbers, first at token {unknown[0]}")}
    elif not all(map(math.isfinite, theirs)):
        return {**made, **_failed("logprobs that are no numbers")}
    elif theirs and not len(own_logprobs) == len(theirs) == len(given):
        counts = f"{len(own_logprobs)} of Segue, {len(theirs)} of the library"
        return {**made, "verdict": "FAILED", "figure": f"{len(given)} tokens, but logprobs of fewer: {counts}"}
    elif worst > within.logprob:
        place = next(place for place in apart if margins[place] > within.logprob)
        figure = f"token {place} of {len(given)}: the library's is likelier by {margins[place]:.3g}"
    elif logprob is not None and not logprob <= within.logprob:
        figure = f"{len(given)} tokens, but their logprobs differ by {logprob:.3g}"
    elif not mean <= within.mean_logprob:
        figure = f"{len(given)} tokens, but their logprobs differ by {mean:.3g} on average"
    elif len(apart) > max(1.0, within.ties * len(given)):
        figure = f"{len(apart)} of {len(given)} tokens are ties, first at {apart[0]}; at most {within.ties:.0%} may be"
    elif apart:
        figure = f"{len(apart)} of {len(given)} tokens, first at {apart[0]}, margin {worst:.2g}{said}"
        return {"verdict": "tie", "figure": figure, **made}
    else:
        return {"verdict": "equal", "figure": f"{len(given)} token{'s' * (len(given) != 1)}{said}", **made}
    return {"verdict": "DIFFERENT", "figure": figure, **made}


def audio(mine: np.ndarray, theirs: np.ndarray, within: Tolerance) -> dict[str, Any]:
    """Compare samples made from the same codes and the same noise."""
    made = {"tolerance": f"{within.audio:g} (rms of the difference / rms)"}
    if not np.isfinite(theirs).all():
        return {**made, **_failed("samples that are no numbers")}
    if np.abs(theirs).max(initial=0.0) < _SILENCE:
        return {**made, **_failed("silence" if len(theirs) else "no sample")}
    if mine.shape != theirs.shape:
        figure = f"{len(mine)} samples, the library has {len(theirs)}"
        return {"verdict": "DIFFERENT", "figure": figure, **made}
    apart = mine.astype(np.float64) - theirs
    loudness = _rms(theirs)
    error = _rms(apart) / loudness
    figure = f"{error:.2g}, at most {np.abs(apart).max(initial=0.0):.2g} of {np.abs(theirs).max(initial=0.0):.2g}"
    detail = {"samples": len(theirs), "rms": loudness}
    return {"verdict": _within(error, within.audio), "figure": figure, "error": error, "detail": detail, **made}


def pixels(mine: Sequence[np.ndarray], theirs: Sequence[Pixels], within: Tolerance) -> dict[str, Any]:
    """Compare images or videos made from the same noise."""
    made = {"tolerance": f"mean {within.mean_level:g}, max {within.max_level:g} (of 255)"}
    arrays = [np.frombuffer(one.data, np.uint8).reshape(one.shape) for one in theirs]
    if not all(np.ptp(array.reshape(-1, array.shape[-1]), axis=0).any() for array in arrays):
        return {**made, **_failed("an image of one colour")}
    shapes = [one.shape for one in mine], [tuple(one.shape) for one in theirs]
    if shapes[0] != shapes[1]:
        return {"verdict": "DIFFERENT", "figure": f"{shapes[0]}, the library has {shapes[1]}", **made}
    apart = np.concatenate([np.abs(a.astype(int) - b).ravel() for a, b in zip(mine, arrays, strict=True)])
    mean, most = float(apart.mean()), int(apart.max())
    well = mean <= within.mean_level and most <= within.max_level
    deviation = float(np.concatenate([array.ravel() for array in arrays]).std())
    return {
        "verdict": "equal" if well else "DIFFERENT",
        "figure": f"mean {mean:.2g}, max {most}",
        "error": mean,
        "detail": {"deviation_of_the_librarys_levels": deviation, "shapes": shapes[1]},
        **made,
    }


def vector(mine: np.ndarray, theirs: np.ndarray, within: Tolerance) -> dict[str, Any]:
    """Compare an embedding, a score or the scores of classes."""
    made = {"tolerance": f"{within.vector:g} (of the largest number)"}
    if not theirs.size or not np.isfinite(theirs).all():
        return {**made, **_failed("no number" if not theirs.size else "numbers that are none")}
    if not theirs.any() and len(theirs) > 1:
        return {**made, **_failed("zeros alone")}
    if mine.shape != theirs.shape:
        figure = f"{len(mine)} numbers, the library has {len(theirs)}"
        return {"verdict": "DIFFERENT", "figure": figure, **made}
    largest = float(np.abs(theirs).max(initial=0.0))
    error = float(np.abs(mine - theirs).max(initial=0.0)) / (largest or 1.0)
    figure = f"{error:.2g} over {len(theirs)} number{'s' if len(theirs) > 1 else ''}"
    return {"verdict": _within(error, within.vector), "figure": figure, "error": error, **made}


def _within(error: float, most: float) -> Verdict:
    """Return "equal" if the error is at most `most`; NaN is different."""
    return "equal" if math.isfinite(error) and error <= most else "DIFFERENT"


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if len(values) else 0.0


def _first_difference(mine: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(mine), len(theirs)))


def _merged(rows: list[Row]) -> list[Row]:
    """Merge the rows of an output that has the same verdict alone and together."""
    kept: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.stage, row.kind, row.verdict)
        twin = kept.get(key)
        if twin is None:
            kept[key] = row
        else:
            worse = row if row.error > twin.error else twin
            kept[key] = msgspec.structs.replace(worse, served="both" if twin.served != row.served else row.served)
    return list(kept.values())

"""Choose the worker of a stage for a request: filter the workers, score the rest, pick the best. All of it is pure.

A filter leaves out workers that must not get the request. A deployment names the scores of a stage and their order
(`stages.NAME.routing`): the first score decides, the next one breaks its ties. Affinities (all scores but `load`)
choose among the workers whose load is at most `slack` above the lowest one: a request never joins a worker with more
than `slack` requests, or with more than a quarter of that in its queue, while another worker of the stage is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

QUEUED = 4
"""Weight of a request that waits, relative to one that runs, as in vLLM's load balancer."""


@dataclass(slots=True)
class Candidate:
    """A worker, as far as the choice for one request depends on it."""

    worker: str
    ready: bool = True
    waiting: int = 0
    """Requests in its queue."""
    running: int = 0
    """Requests that it works on."""
    reading_media: bool = False
    """An input worker that decodes media."""
    has_request: bool = False
    """It already runs other stages of the request."""
    has_last_try: bool = False
    """It has another request on its last try."""
    blocks: int = 0
    """Leading blocks of the request's prompt that it was sent before."""
    has_session: bool = False
    """It had the session's previous request, or the one that this one goes on from."""
    chosen: int = 0
    """Number of the choice that chose it last, if its stage is routed by prefix; else 0."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The request, as far as the filters depend on it."""

    input_stage: bool = False
    """The choice is of an input worker."""
    media: bool = False
    """The input stage has to decode media."""
    last_try: bool = False
    """Its next loss is its end."""


Filter = Callable[[Asked, Sequence[Candidate]], Sequence[Candidate]]


def ready(asked: Asked, workers: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep workers that are alive and loaded."""
    return [one for one in workers if one.ready]


def same_group(asked: Asked, workers: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the worker that already runs other stages of the request, if there is one: fused stages share a worker."""
    return [one for one in workers if one.has_request] or workers


def readers(asked: Asked, workers: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep input workers that decode nothing; none if a request with media would take the last one.

    Decoding media may take as long as the deployment's limits allow. So a worker decodes for one request at a time, and
    if there are several, one of them stays free for requests without media.
    """
    if not asked.input_stage or len(workers) == 1:
        return workers
    free = [one for one in workers if not one.reading_media]
    if asked.media:
        return free if len(free) > 1 else []
    return free or workers


def apart(asked: Asked, workers: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep workers without another request on its last try, if this one is on its last.

    If one request kills its workers, the others that were there each time then survive: a poison request fails alone.
    """
    if not asked.last_try or any(one.has_request for one in workers):
        return workers
    return [one for one in workers if not one.has_last_try]


FILTERS: tuple[Filter, ...] = (ready, same_group, readers, apart)
"""In this order; what one leaves is the input of the next."""


def load(worker: Candidate) -> int:
    """Return the worker's load: a request that waits counts `QUEUED` times as much as one that runs."""
    return QUEUED * worker.waiting + worker.running


SCORES: Mapping[str, Callable[[Candidate], int]] = {
    "load": load,
    "prefix": lambda worker: -worker.blocks,
    "session": lambda worker: -worker.has_session,
}
"""The scores that a deployment may name; the lowest is the best."""


def slack_of(max_batch: int) -> int:
    """Return by how much the load of a worker may exceed the lowest one for affinity's sake: a quarter of a batch."""
    return max_batch // 4


def pick(routing: Iterable[str], slack: int, workers: Sequence[Candidate]) -> Candidate | None:
    """Return the best worker by the named scores, then by load, then the one chosen longest ago, then the
    first; None if none is left."""
    if not workers:
        return None
    loads = [load(one) for one in workers]
    most = min(loads) + slack
    near = [one for one, found in zip(workers, loads, strict=True) if found <= most]
    for score in (*(SCORES[name] for name in dict.fromkeys((*routing, "load"))), _chosen):
        values = [score(one) for one in near]
        best = min(values)
        near = [one for one, value in zip(near, values, strict=True) if value == best]
    return near[0]


def _chosen(worker: Candidate) -> int:
    return worker.chosen


def choose(asked: Asked, routing: Iterable[str], slack: int, workers: Sequence[Candidate]) -> Candidate | None:
    """Return the worker that gets the request; None: the request waits for one."""
    for keep in FILTERS:
        workers = keep(asked, workers)
    return pick(routing, slack, workers)

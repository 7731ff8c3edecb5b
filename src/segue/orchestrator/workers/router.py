"""Choose a worker for each request: `Router` describes the workers, `segue.orchestrator.workers.routing` decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import nsmallest
from itertools import count
from operator import itemgetter

from segue.graph.deployment.deployment import Plan
from segue.graph.parts import only_reads, stage_of
from segue.messages.wire import Stats
from segue.orchestrator.requests.request_state import RequestState
from segue.orchestrator.workers.affinity import Sessions, prefix_of
from segue.orchestrator.workers.nodes.links import Links
from segue.orchestrator.workers.replicas import Replica, Replicas
from segue.orchestrator.workers.routing import QUEUED, Asked, Candidate, choose, slack_of

Group = tuple[str, ...]
_FEW = 8
"""So many workers are all described."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Why a request waits."""

    group: Group
    """It has no worker for the request."""
    cut: bool = False
    """It has one, but this one is on a node that cannot reach those of other stages."""


class Router:
    """Chooses workers for requests, and remembers what it sent them."""

    def __init__(
        self,
        plan: Plan,
        replicas: Replicas,
        requests: Mapping[str, RequestState],
        stats: Mapping[str, Stats],
    ) -> None:
        """`requests`: those that run, by id; `stats`: the latest of each worker, by its name."""
        self._plan = plan
        self._replicas = replicas
        self._requests = requests
        self._stats = stats
        self.links = Links()
        """The lost connections."""
        self._sessions = Sessions()
        self._choices = count(1)

    def place(self, state: RequestState) -> dict[Group, Replica] | Unplaced:
        """Return a worker for each group that a request waits for, such that they reach each other and the workers of
        its running stages."""
        groups = list(dict.fromkeys(self._replicas.group_of(stage_of(name)) for name in state.waiting))
        chosen: dict[Group, Replica] = {}
        for group in groups:
            replica = self._choose(state, group)
            if replica is None:
                return Unplaced(group)
            chosen[group] = replica
        if self.links.whole():
            return chosen
        return self._connected(state, groups, {}) or Unplaced(groups[0], cut=True)

    def _connected(
        self, state: RequestState, groups: Sequence[Group], chosen: dict[Group, Replica]
    ) -> dict[Group, Replica] | None:
        """Return `chosen` and workers for `groups`, of which none is cut off from another; None if there are none."""
        if not groups:
            return chosen
        near = list(self._near(state, groups[0], chosen))
        barred = {
            replica.worker
            for replica in self._replicas.of_group(groups[0])
            if any(self.links.cut(replica.node, other.node) for other in near)
        }
        while replica := self._choose(state, groups[0], barred):
            found = self._connected(state, groups[1:], {**chosen, groups[0]: replica})
            if found is not None:
                return found
            barred.add(replica.worker)
        return None

    def _near(self, state: RequestState, group: Group, chosen: Mapping[Group, Replica]) -> Iterator[Replica]:
        """Yield the workers with which a group's waiting stages will exchange chunks, as far as they are chosen."""
        for name in state.waiting:
            if self._replicas.group_of(stage_of(name)) != group:
                continue
            stage = state.stages[name]
            receiving = [
                down
                for down in stage.downstreams
                if down in state.waiting or not (state.stages[down].done or name in state.stages[down].inputs_done)
            ]
            for other in (*stage.upstreams, *receiving):
                if other in state.waiting:
                    replica = chosen.get(self._replicas.group_of(stage_of(other)))
                else:
                    replica = self._replicas.by_worker(state.stages[other].worker)
                if replica is not None:
                    yield replica

    def _choose(self, state: RequestState, group: Group, barred: Set[str] = frozenset()) -> Replica | None:
        """Return the worker of a group that gets a request, none of `barred`; None: the request waits."""
        workers = self._replicas.of_group(group)
        routing = self._plan.stages[group[0]].routing
        if state.after:
            routing = ("session", *routing)
        held = {stage.worker for visit, stage in state.stages.items() if stage_of(visit) in group} - barred
        chain = self._chain(state) if "prefix" in routing and len(workers) > 1 else []
        session = self._sessions.worker(_session(state, group)) if state.request.session else None
        asked = Asked(input_stage=only_reads(group), media=has_media(state), last_try=self._last_try(state, group))
        max_batch = self._max_batch(group)
        known = {*held, *barred, *state.after, *([session] if session is not None else [])}
        candidates = []
        for replica in self._shortlist(workers, asked, {name.rpartition("-")[0] for name in known}, chain, max_batch):
            name = replica.worker
            waiting, running = self._read(replica) if asked.input_stage else self._load(replica, max_batch)
            candidates.append(
                Candidate(
                    worker=name,
                    # stages of one worker stay together until it ends
                    ready=name not in barred and (replica.state == "ready" or (replica.alive and name in held)),
                    waiting=waiting,
                    running=running,
                    reading_media=asked.input_stage and any(replica.reading.values()),
                    has_request=name in held,
                    has_last_try=asked.last_try and self._has_last_try(replica, state),
                    blocks=replica.prefixes.held(chain) if chain else 0,
                    has_session=name == session or name in state.after,
                    chosen=replica.chosen,
                )
            )
        chosen = choose(asked, routing, slack_of(max_batch), candidates)
        return None if chosen is None else self._replicas.by_worker(chosen.worker)

    def _shortlist(
        self, workers: Sequence[Replica], asked: Asked, known: Set[str], chain: Sequence[bytes], max_batch: int
    ) -> list[Replica]:
        """Return the workers that may be chosen, in their order: of those that differ only in load and in when they
        were chosen, the best two are enough (`readers` asks for two). With hundreds of workers, describing each takes
        most of the orchestrator's time. `known`: slots that the request knows; `chain`: its prefix."""
        if len(workers) <= _FEW:
            return [*workers]
        apart: list[tuple[int, Replica]] = []
        alike: list[tuple[int, int, int]] = []
        for place, replica in enumerate(workers):
            if (
                asked.last_try
                or replica.slot in known
                or (chain and chain[0] in replica.prefixes)
                or (asked.input_stage and replica.reading)
            ):
                apart.append((place, replica))
            elif replica.state == "ready":
                waiting, running = (0, 0) if asked.input_stage else self._load(replica, max_batch)
                alike.append((QUEUED * waiting + running, replica.chosen, place))
        apart += [(place, workers[place]) for _, _, place in nsmallest(2, alike)]
        return [replica for _, replica in sorted(apart, key=itemgetter(0))]

    def given(self, state: RequestState, replica: Replica) -> None:
        """Record that a worker got a request."""
        routing = self._plan.stages[replica.group[0]].routing
        if "session" in routing and state.request.session:
            self._sessions.remember(_session(state, replica.group), replica.worker)
        if "prefix" in routing and len(self._replicas.of_group(replica.group)) > 1:
            replica.prefixes.remember(self._chain(state))
            replica.chosen = next(self._choices)  # new prompts then spread over the prefix caches

    @staticmethod
    def _read(replica: Replica) -> tuple[int, int]:
        """Return (requests with media, other requests) that an input worker processes."""
        media = sum(replica.reading.values())
        return media, len(replica.reading) - media

    def _load(self, replica: Replica, max_batch: int) -> tuple[int, int]:
        """Return (requests that wait in a worker, requests that it works on). It reports its queue now and then; what
        exceeds a batch waits in any case."""
        mine = len(replica.working)
        if not mine:
            return 0, 0
        stats = self._stats.get(replica.worker)
        reported = [stage.values.get("waiting", 0.0) for stage in stats.stages] if stats is not None else []
        queued = max((int(value) for value in reported if isinstance(value, float)), default=0)
        waiting = max(mine - max_batch, min(mine, queued))
        return waiting, mine - waiting

    def _max_batch(self, group: Group) -> int:
        return max(self._plan.stages[stage].max_batch for stage in group)

    @staticmethod
    def _chain(state: RequestState) -> list[bytes]:
        if state.prefix is None:
            state.prefix = prefix_of(state.request)
        return state.prefix

    def _has_last_try(self, replica: Replica, state: RequestState) -> bool:
        others = (self._requests[other] for other in replica.requests if other != state.id)
        return any(self._last_try(other, replica.group) for other in others)

    def _last_try(self, state: RequestState, group: Group) -> bool:
        return any(0 < state.losses[stage] == self._plan.limits.max_retries for stage in group)


def has_media(state: RequestState) -> bool:
    """Whether the input stage has to read more than text and ids."""
    request = state.request
    return bool(request.prompt_embeds or request.media_kinds() or request.embedded())


def _session(state: RequestState, group: Group) -> tuple[str, ...]:
    return (*group, state.request.tenant, state.request.session)

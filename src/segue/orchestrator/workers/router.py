"""Choose a worker for each request: `Router` describes the workers, `segue.orchestrator.workers.routing` decides."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from segue.graph.deployment.deployment import Plan
from segue.graph.parts import only_reads, stage_of
from segue.messages.wire import Stats
from segue.orchestrator.request_state import RequestState
from segue.orchestrator.workers.affinity import Sessions, prefix_of
from segue.orchestrator.workers.replicas import Replica, Replicas
from segue.orchestrator.workers.routing import Asked, Candidate, choose, slack_of


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
        self._sessions = Sessions()
        self._choices = count(1)

    def choose(self, state: RequestState, group: tuple[str, ...]) -> Replica | None:
        """Return the worker of a group that gets a request; None: the request waits."""
        workers = self._replicas.of_group(group)
        routing = self._plan.stages[group[0]].routing
        held = {stage.worker for visit, stage in state.stages.items() if stage_of(visit) in group}
        chain = self._chain(state) if "prefix" in routing and len(workers) > 1 else []
        session = self._sessions.worker(_session(state, group)) if state.request.session else None
        candidates = []
        for replica in workers:
            waiting, running = self._load(replica)
            candidates.append(
                Candidate(
                    worker=replica.worker,
                    # stages of one worker stay together until it ends
                    ready=replica.state == "ready" or (replica.alive and replica.worker in held),
                    waiting=waiting,
                    running=running,
                    reading_media=any(replica.reading.values()),
                    has_request=replica.worker in held,
                    has_last_try=self._has_last_try(replica, state),
                    blocks=replica.prefixes.held(chain),
                    has_session=replica.worker == session,
                    chosen=replica.chosen,
                )
            )
        asked = Asked(input_stage=only_reads(group), media=has_media(state), last_try=self._last_try(state, group))
        chosen = choose(asked, routing, slack_of(self._max_batch(group)), candidates)
        return None if chosen is None else self._replicas.by_worker(chosen.worker)

    def given(self, state: RequestState, replica: Replica) -> None:
        """Record that a worker got a request."""
        routing = self._plan.stages[replica.group[0]].routing
        if "session" in routing and state.request.session:
            self._sessions.remember(_session(state, replica.group), replica.worker)
        if "prefix" in routing and len(self._replicas.of_group(replica.group)) > 1:
            replica.prefixes.remember(self._chain(state))
            replica.chosen = next(self._choices)  # new prompts then spread over the prefix caches

    def _load(self, replica: Replica) -> tuple[int, int]:
        """Return (requests that wait in a worker, requests that it works on). It reports its queue now and then; what
        exceeds a batch waits in any case."""
        if only_reads(replica.group):
            media = sum(replica.reading.values())
            return media, len(replica.reading) - media
        mine = len(replica.working)
        stats = self._stats.get(replica.worker)
        reported = [stage.values.get("waiting", 0.0) for stage in stats.stages] if stats is not None else []
        queued = max((int(value) for value in reported if isinstance(value, float)), default=0)
        waiting = max(mine - self._max_batch(replica.group), min(mine, queued))
        return waiting, mine - waiting

    def _max_batch(self, group: tuple[str, ...]) -> int:
        return max(self._plan.stages[stage].max_batch for stage in group)

    @staticmethod
    def _chain(state: RequestState) -> list[bytes]:
        if state.prefix is None:
            state.prefix = prefix_of(state.request)
        return state.prefix

    def _has_last_try(self, replica: Replica, state: RequestState) -> bool:
        others = (self._requests[other] for other in replica.requests if other != state.id)
        return any(self._last_try(other, replica.group) for other in others)

    def _last_try(self, state: RequestState, group: tuple[str, ...]) -> bool:
        return any(0 < state.losses[stage] == self._plan.limits.max_retries for stage in group)


def has_media(state: RequestState) -> bool:
    """Whether the input stage has to read more than text and ids."""
    request = state.request
    return bool(request.prompt_embeds or request.media_kinds() or request.embedded())


def _session(state: RequestState, group: tuple[str, ...]) -> tuple[str, ...]:
    return (*group, state.request.tenant, state.request.session)

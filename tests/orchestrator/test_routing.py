"""Which worker gets a request: properties of the choice, and of what is remembered for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from segue.graph.deployment.deployment import Hardware, Plan
from segue.graph.deployment.loader import load_plan
from segue.graph.deployment.stage_plan import ROUTINGS
from segue.graph.stage_graph import INPUT, StageGraph
from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.messages.stats import WorkerStats
from segue.messages.wire import Stats
from segue.orchestrator.requests.client_queue import ClientQueue
from segue.orchestrator.requests.request_state import RequestState, StageState
from segue.orchestrator.workers.affinity import BLOCK_BYTES, BLOCK_IDS, PrefixMemory, Sessions, prefix_of
from segue.orchestrator.workers.replicas import Replica, Replicas
from segue.orchestrator.workers.router import Router, Unplaced
from segue.orchestrator.workers.routing import QUEUED, SCORES, Asked, Candidate, choose, load, slack_of

candidates = st.builds(
    Candidate,
    worker=st.uuids().map(str),
    ready=st.booleans(),
    waiting=st.integers(0, 20),
    running=st.integers(0, 20),
    reading_media=st.booleans(),
    has_request=st.just(False),
    has_last_try=st.booleans(),
    blocks=st.integers(0, 5),
    has_session=st.booleans(),
    chosen=st.integers(0, 9),
)
routings = st.permutations(ROUTINGS).flatmap(lambda names: st.integers(1, len(names)).map(lambda count: names[:count]))
workers = st.lists(candidates, max_size=6)
requests = st.builds(Asked, input_stage=st.booleans(), media=st.booleans(), last_try=st.booleans())


def test_a_deployment_can_name_every_score() -> None:
    assert set(SCORES) == set(ROUTINGS)


@given(requests, routings, st.integers(0, 32), workers)
def test_a_choice_is_alive_and_leaves_nobody_idle_beyond_the_bound(
    asked: Asked, routing: list[str], slack: int, workers: list[Candidate]
) -> None:
    chosen = choose(asked, routing, slack, workers)
    fit = [one for one in workers if one.ready and not (asked.last_try and one.has_last_try)]
    if asked.input_stage:
        fit = [one for one in fit if not one.reading_media]
    if chosen is None:
        assert not fit or asked.input_stage
        return
    assert chosen.ready
    assert not (asked.last_try and chosen.has_last_try)
    if any(load(one) == 0 for one in fit):
        assert load(chosen) <= slack
        assert chosen.waiting <= slack / QUEUED


@given(routings, st.integers(0, 32), st.lists(candidates.map(lambda one: replace(one, ready=True)), min_size=1))
def test_affinity_is_preferred_within_the_slack_and_only_there(
    routing: list[str], slack: int, workers: list[Candidate]
) -> None:
    chosen = choose(Asked(), routing, slack, workers)
    assert chosen is not None
    lowest = min(map(load, workers))
    near = [one for one in workers if load(one) <= lowest + slack]
    assert chosen in near
    first = routing[0]
    if first == "load":
        assert load(chosen) == lowest
    elif first == "prefix":
        assert chosen.blocks == max(one.blocks for one in near)
    else:
        assert chosen.has_session == any(one.has_session for one in near)


def test_a_worker_that_runs_other_stages_of_the_request_is_kept() -> None:
    mine = Candidate("mine", has_request=True, waiting=50)
    assert choose(Asked(), ["load"], 0, [Candidate("idle"), mine]) is mine
    dead = replace(mine, ready=False)
    assert choose(Asked(), ["load"], 0, [idle := Candidate("idle"), dead]) is idle


def test_one_input_worker_stays_free_for_requests_without_media() -> None:
    reads, text = Asked(input_stage=True, media=True), Asked(input_stage=True)
    free, other, busy = Candidate("free"), Candidate("other"), Candidate("busy", reading_media=True)
    assert choose(reads, ["load"], 0, [free, busy]) is None
    assert choose(reads, ["load"], 0, [busy, free, other]) is free
    assert choose(reads, ["load"], 0, [busy]) is busy
    assert choose(text, ["load"], 0, [busy, replace(free, running=9)]) == replace(free, running=9)
    assert choose(text, ["load"], 0, [busy, replace(busy, worker="2", running=1)]) is busy


# ── the router ─────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_of(routing: list[str], replicas: int, max_batch: int, inputs: int = 1) -> Plan:
    graph = StageGraph("one")
    graph.stage("llm", "autoregressive", takes={"text"}, gives={"text"})
    stage = {"replicas": replicas, "routing": routing, "max_batch": max_batch}
    return load_plan(graph, {"stages": {"llm": stage, INPUT: {"replicas": inputs}}}, hardware=Hardware(2, 1 << 34))


@dataclass
class Routed:
    """A router of one stage, whose requests and workers the test begins and ends."""

    plan: Plan
    requests: dict[str, RequestState] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas = Replicas(self.plan.groups, self.plan.stages)
        for replica in self.replicas.all:
            replica.incarnation, replica.state = 1, "ready"
        self.router = Router(self.plan, self.replicas, self.requests, self.stats)

    @property
    def workers(self) -> list[Replica]:
        return self.replicas.of_group(("llm",))

    @staticmethod
    def state(request: Request) -> RequestState:
        state = RequestState(request, {}, "llm", ClientQueue(1 << 20))
        state.stages = {"llm": StageState((INPUT,), ())}
        state.waiting = {"llm"}
        return state

    def begin(self, request: Request) -> Replica | None:
        return self.place(self.state(request))

    def place(self, state: RequestState) -> Replica | None:
        placed = self.router.place(state)
        replica = None if isinstance(placed, Unplaced) else placed["llm",]
        if replica is not None:
            self.requests[state.id] = state
            state.stages["llm"].worker = replica.worker
            replica.requests.add(state.id)
            replica.working.add(state.id)
            self.router.given(state, replica)
        return replica

    def end(self, request_id: str) -> None:
        del self.requests[request_id]
        for replica in self.workers:
            replica.requests.discard(request_id)
            replica.working.discard(request_id)


@given(routings, st.integers(2, 4), st.integers(1, 24), st.data())
def test_no_run_of_requests_and_deaths_breaks_the_bound(
    routing: list[str], replicas: int, max_batch: int, data: st.DataObject
) -> None:
    routed = Routed(plan_of(list(routing), replicas, max_batch))
    slack = slack_of(max_batch)
    for number in range(data.draw(st.integers(1, 40))):
        if routed.requests and data.draw(st.integers(0, 3)) == 0:
            routed.end(data.draw(st.sampled_from(sorted(routed.requests))))
        if data.draw(st.integers(0, 9)) == 0:
            replica = data.draw(st.sampled_from(routed.workers))
            for request_id in list(replica.requests):
                routed.end(request_id)
            replica.clear()
            replica.state = "restarting" if replica.state == "ready" else "ready"
            replica.incarnation += 1
        before = {one.worker: len(one.working) for one in routed.workers if one.state == "ready"}
        text = data.draw(st.sampled_from("ab")) * (BLOCK_BYTES * data.draw(st.integers(0, 2)))
        session = data.draw(st.sampled_from(["", "x", "y"]))
        chosen = routed.begin(Request(request_id=str(number), prompt=text, session=session))
        if not before:
            assert chosen is None
            continue
        assert chosen is not None
        assert chosen.state == "ready"
        others = [count for worker, count in before.items() if worker != chosen.worker]
        if routing[0] == "load":
            assert before[chosen.worker] <= min(others, default=max_batch * 99)
        if 0 in others:
            assert before[chosen.worker] <= slack


class Thorough(Router):
    """Describes all workers."""

    def _shortlist(self, workers: Sequence[Replica], *_: object) -> list[Replica]:
        return [*workers]


@given(routings, st.integers(1, 24), st.data())
def test_describing_fewer_workers_changes_no_choice(routing: list[str], max_batch: int, data: st.DataObject) -> None:
    routed = Routed(plan_of(list(routing), 10, max_batch))
    thorough = Thorough(routed.plan, routed.replicas, routed.requests, routed.stats)
    thorough._sessions = routed.router._sessions
    for number in range(data.draw(st.integers(1, 30))):
        if routed.requests and data.draw(st.integers(0, 2)) == 0:
            routed.end(data.draw(st.sampled_from(sorted(routed.requests))))
        worker = data.draw(st.sampled_from(routed.workers))
        worker.state = data.draw(st.sampled_from(["ready", "ready", "restarting"]))
        queued = data.draw(st.integers(0, 3))
        routed.stats[worker.worker] = Stats(worker.worker, [WorkerStats("llm", 1, {"waiting": float(queued)})])
        text = data.draw(st.sampled_from("ab")) * (BLOCK_BYTES * data.draw(st.integers(0, 2)))
        state = routed.state(Request(request_id=str(number), prompt=text, session=data.draw(st.sampled_from("xy"))))
        state.losses["llm"] = data.draw(st.sampled_from([0, 0, routed.plan.limits.max_retries]))
        wanted = thorough.place(state)
        assert routed.place(state) == (None if isinstance(wanted, Unplaced) else wanted["llm",])


@given(st.lists(st.sampled_from(["", "text", "media"]), min_size=9, max_size=12), st.booleans())
def test_fewer_input_workers_are_described_with_the_same_choice(reading: list[str], media: bool) -> None:
    plan = plan_of(["load"], 1, 4, inputs=len(reading))
    replicas = Replicas(plan.groups, plan.stages)
    for replica in replicas.all:
        replica.incarnation, replica.state = 1, "ready"
    for replica, what in zip(replicas.of_group((INPUT,)), reading, strict=True):
        replica.reading = {"other": what == "media"} if what else {}
    state = RequestState(chat("x", image=b"y" if media else None), {}, "llm", ClientQueue(1 << 20))
    state.stages, state.waiting = {INPUT: StageState((), ("llm",))}, {INPUT}
    assert Router(plan, replicas, {}, {}).place(state) == Thorough(plan, replicas, {}, {}).place(state)


def routed_by(*routing: str, replicas: int = 2, max_batch: int = 64) -> Callable[..., str]:
    routed = Routed(plan_of(list(routing), replicas, max_batch))

    def begin(number: int, **what: str) -> str:
        chosen = routed.begin(Request(request_id=str(number), **what))
        assert chosen is not None
        return chosen.worker

    return begin


def test_a_prompt_goes_where_its_prefix_went() -> None:
    begin = routed_by("prefix")
    one, other = begin(1, prompt="a" * 1000), begin(2, prompt="b" * 1000)
    assert one != other
    assert begin(3, prompt="b" * 1000 + "and more") == other
    assert begin(4, prompt="b" * 600 + "c" * 600) == other
    assert begin(5, prompt="a" * 1000) == one


def test_equally_loaded_workers_are_told_apart_by_the_prefix_by_default() -> None:
    routed = Routed(plan_of(["load", "prefix"], 2, 64))
    assert load_plan(routed.plan.graph, hardware=Hardware(2, 1 << 34)).stages["llm"].routing == ("load", "prefix")
    first = routed.begin(Request(request_id="1", prompt="a" * 1000))
    assert first is not None
    routed.end("1")
    assert routed.begin(Request(request_id="2", prompt="a" * 1000)) is first
    assert routed.begin(Request(request_id="3", prompt="a" * 1000)) is not first


def test_a_session_stays_until_its_worker_is_overloaded() -> None:
    begin = routed_by("session", max_batch=16)  # slack: 4
    home = begin(0, prompt="", session="mine")
    assert [begin(number, prompt="", session="mine") for number in range(1, 5)] == [home] * 4
    assert begin(5, prompt="", session="mine") != home


def test_a_session_of_a_dead_worker_goes_elsewhere() -> None:
    routed = Routed(plan_of(["session"], 2, 64))
    home = routed.begin(Request(request_id="1", prompt="", session="mine"))
    assert home is not None
    home.clear()
    home.state = "restarting"
    found = routed.begin(Request(request_id="2", prompt="", session="mine"))
    assert found is not None
    assert found is not home


def test_a_reported_queue_counts() -> None:
    routed = Routed(plan_of(["load"], 2, 64))
    one, other = routed.workers
    for number in range(3):
        routed.begin(Request(request_id=str(number), prompt=""))
    assert (len(one.working), len(other.working)) == (2, 1)
    routed.stats[other.worker] = Stats(other.worker, [WorkerStats("llm", 1, {"waiting": 5.0})])
    assert routed.begin(Request(request_id="4", prompt="")) is one


# ── what is remembered ─────────────────────────────────────────────────────────────────────────────────────────────


def chat(*texts: str, image: bytes | None = None, **more: str) -> Request:
    media = [] if image is None else [MediaPart("image", image)]
    messages = [Message("user", [*media, TextPart(text)]) for text in texts]
    return Request(request_id="r", messages=messages, **more)


@given(st.lists(st.text(max_size=600), min_size=1, max_size=4), st.text(max_size=600))
def test_a_longer_conversation_begins_with_the_blocks_of_the_shorter(texts: list[str], more: str) -> None:
    short, long = prefix_of(chat(*texts)), prefix_of(chat(*texts, more))
    assert long[: len(short)] == short
    size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    assert size // BLOCK_BYTES <= len(short)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=400), st.lists(st.integers(0, 2**64 - 1), max_size=100))
def test_ids_are_hashed_in_blocks(ids: list[int], more: list[int]) -> None:
    short = prefix_of(Request(request_id="r", prompt_token_ids=ids))
    assert len(short) == len(ids) // BLOCK_IDS
    assert prefix_of(Request(request_id="r", prompt_token_ids=ids + more))[: len(short)] == short


def test_blocks_are_told_apart_by_all_that_precedes_them() -> None:
    text, image = "x" * 2000, bytes(range(256)) * 1000
    kinds = [
        chat(text),
        chat("y" + text),
        chat(text, image=image),
        chat(text, image=image[1:]),
        chat(text, cache_salt="mine"),
        chat(text, adapter="poet"),
    ]
    chains = [prefix_of(kind) for kind in kinds]
    assert all(chains)
    assert len({chain[0] for chain in chains}) == len(chains)


@given(st.lists(st.lists(st.binary(min_size=1, max_size=1), max_size=6, unique=True), max_size=20), st.integers(1, 8))
def test_memory_is_bounded_and_keeps_what_was_sent_last(chains: list[list[bytes]], most: int) -> None:
    memory = PrefixMemory(most)
    for chain in chains:
        memory.remember(chain)
        assert len(memory) <= most
        assert memory.held(chain) == min(len(chain), most)
    sessions = Sessions(most)
    for number in range(20):
        sessions.remember(number, "worker")
        assert len(sessions) <= most
        assert sessions.worker(number) == "worker"

"""The messages about a request that go to the workers of its stages, made from its state."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from segue.graph.parts import stage_of, visit_name
from segue.messages.request import Appended
from segue.messages.wire import Append, Begin, Close, Moved, Peer, Resend, Return, Throttle, ToWorker
from segue.orchestrator.requests.request_state import RequestState

Addressed = tuple[str, ToWorker]
"""(address of the worker, message)"""


def begins(state: RequestState, begin: set[str]) -> Iterator[Addressed]:
    """Yield what starts the stages `begin` and informs their neighbours. Downstream stages get their `Begin` first, so
    that chunks seldom overtake it."""
    stripped = msgspec.structs.replace(
        state.request, messages=[], received=[], earlier=[], prompt=None, prompt_token_ids=None, prompt_embeds=None
    )
    for name, stage_state in reversed(state.stages.items()):
        if name not in begin:
            continue
        stage = state.walk[stage_of(name)]
        downstreams, served = _downstreams(state, name, begin)
        message = Begin(
            request=state.request if name == state.input else stripped,
            stage=name,
            attempt=stage_state.attempt,
            upstreams=[_peer(state, state.node(up)) for up in state.course.begun[name]],
            downstreams=downstreams,
            to_client=sorted(stage.to_client),
            encoded=sorted(stage.encoded),
            resume=state.resume(name),
            turns=state.turns.get(name, []),
            holds=name == state.held,
            served=served,
            facts=bool(stage.on),
        )
        yield stage_state.address, message
        if name == state.held:
            for number in range(1, state.course.last + 1):
                yield returned(state, number, begin)
            if state.course.closed:
                yield closed(state)
        for piece in state.appended if name == state.input else ():
            yield appended(state, piece)
        if state.queue.behind and (stage.to_client or stage.encoded):
            yield throttled(state, name)
        for down in dict.fromkeys(stage_state.downstreams):
            if down not in begin and not state.stages[down].done and state.stages[down].address:
                yield state.stages[down].address, Moved(state.id, _peer(state, name), down)
    for name in begin:
        for up in dict.fromkeys(state.stages[name].upstreams):
            if up not in begin:
                yield resent(state, up, name)


def returned(state: RequestState, number: int, begin: set[str]) -> Addressed:
    """Tell the stage that holds about another visit of it. `begin`: stages that start with it."""
    assert state.held is not None
    visit, here = visit_name(state.held, number), state.stages[state.held]
    upstreams = [_peer(state, state.node(up)) for up in state.course.begun[visit]]
    downstreams, _ = _downstreams(state, visit, begin)
    return here.address, Return(state.id, state.held, here.attempt, upstreams, downstreams)


def closed(state: RequestState) -> Addressed:
    """Tell the stage that holds that it is not visited again."""
    assert state.held is not None
    here = state.stages[state.held]
    return here.address, Close(state.id, state.held, here.attempt)


def appended(state: RequestState, piece: Appended | None) -> Addressed:
    """Give the input stage a piece that the client appended; None: the input is closed."""
    here = state.stages[state.input]
    return here.address, Append(state.id, state.input, here.attempt, piece)


def throttled(state: RequestState, stage: str) -> Addressed:
    """Tell a stage whether the client is behind."""
    here = state.stages[stage]
    return here.address, Throttle(state.id, stage, here.attempt, state.queue.behind)


def resent(state: RequestState, source: str, target: str) -> Addressed:
    """Have an upstream stage send again what it kept for one that restarts."""
    return state.stages[source].address, Resend(state.id, source, _peer(state, target))


def _downstreams(state: RequestState, visit: str, begin: set[str]) -> tuple[list[Peer], list[str]]:
    """Return the receivers of a visit's output, and the names of those that want nothing of it. A receiver
    that is undecided, or has no worker yet, is a `Peer` with an empty worker. `begin`: stages that start with it."""
    peers: list[Peer] = []
    served: list[str] = []
    for target in state.course.targets(visit):
        down = state.node(target)
        if not state.course.decided(visit, target):
            peers.append(Peer(down, "", "", 0))
        elif visit not in state.course.begun.get(target, ()):
            served.append(down)
        elif down in state.waiting or (down in begin and not state.stages[down].worker):
            peers.append(Peer(down, "", "", 0))
        elif state.stages[down].done and down not in begin:
            served.append(down)
        else:
            peers.append(_peer(state, down))
    return peers, served


def _peer(state: RequestState, stage: str) -> Peer:
    stage_state = state.stages[stage]
    return Peer(stage, stage_state.worker, stage_state.address, stage_state.attempt)

"""The streams that leave a worker: put, send, count what is not consumed yet, keep what may be asked for again.

A flow is one edge of one request. Its chunks wait in `pending` while the edge's byte budget is used up or the connector
has no room; the stage's engine is told to pause such a request. One chunk is always let through where the downstream
has nothing of this flow left to consume: it may be the very chunk it waits for (no deadlock, whatever the budget).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from segue.connectors.base import Connector, Payload
from segue.messages.wire import Chunk, Peer
from segue.worker.retained import Key, RetainedStore


@dataclass(slots=True)
class Channel:
    """How an edge of the deployment carries its chunks."""

    connector: Connector
    inline: Connector | None
    """Carries payloads of any size inside the message: the way out where the pool is full and the downstream has
    nothing of this flow left to consume. What fills the pool may be waiting for this very chunk."""
    budget: int
    """Bytes in flight on this edge, over all requests."""
    retain: bool
    """Keep payloads for a restart of the downstream; not where both stages live and die in one process."""
    in_flight: int = 0


@dataclass(slots=True)
class _Flow:
    request_id: str
    source: Peer
    target: Peer
    channel: Channel
    pending: deque[tuple[Payload | None, bool]] = field(default_factory=deque)
    unconsumed: deque[tuple[int, int]] = field(default_factory=deque)
    """(seq, bytes) of what was sent and not yet consumed."""
    next_seq: int = 0

    @property
    def key(self) -> Key:
        return (self.request_id, self.source.stage, self.target.stage)


Send = Callable[[str, Chunk], None]
"""(address, chunk)"""


class Outbox:
    """All flows of one worker, and the payloads retained for them."""

    def __init__(self, channels: dict[tuple[str, str], Channel], retained: RetainedStore, send: Send) -> None:
        self._channels = channels
        self.retained = retained
        self._send = send
        self._flows: dict[Key, _Flow] = {}
        self._stuck: set[Key] = set()
        """Flows with something pending."""
        self._targets: dict[str, list[str]] = {}
        for source, target in channels:
            self._targets.setdefault(source, []).append(target)

    def open(self, request_id: str, source: Peer, target: Peer) -> None:
        """A stage begins a request: where its chunks go. A new attempt of the source starts its streams anew."""
        key = (request_id, source.stage, target.stage)
        self._close(key)
        self._flows[key] = _Flow(request_id, source, target, self._channels[source.stage, target.stage])

    def push(self, request_id: str, source: str, target: str, payload: Payload | None, *, final: bool) -> None:
        """One chunk for the downstream, kept until it has finished with it."""
        flow = self._flows.get((request_id, source, target))
        if flow is None:
            return  # dropped meanwhile
        flow.pending.append((payload, final))
        self._pump(flow)

    def resend(self, request_id: str, source: str, target: Peer) -> bool:
        """The downstream starts anew: everything from the first chunk. False: not everything was kept."""
        flow = self._flows.get((request_id, source, target.stage))
        if flow is None:
            return False
        chunks = self.retained.replay(flow.key)
        if chunks is None:
            return False
        not_sent = flow.pending
        self._forget_in_flight(flow)
        flow.target, flow.next_seq = target, 0
        flow.pending = deque([*chunks, *not_sent])
        self.retained.drop(flow.key)  # sending keeps them again
        self._pump(flow)
        return True

    def consumed(self, request_id: str, source: str, target: Peer, seq: int, *, finished: bool) -> None:
        """The downstream has used chunks up to `seq`, or has finished the request."""
        flow = self._flows.get((request_id, source, target.stage))
        if flow is None or flow.target.worker != target.worker or flow.target.attempt != target.attempt:
            return  # an answer from an attempt that is over
        while flow.unconsumed and (finished or flow.unconsumed[0][0] <= seq):
            flow.channel.in_flight -= flow.unconsumed.popleft()[1]
        if finished:
            flow.pending.clear()
            self._close(flow.key)

    def pump(self) -> None:
        """Send what waits and may go now."""
        for key in list(self._stuck):
            self._pump(self._flows[key])

    def blocked(self, request_id: str, source: str) -> bool:
        """True while some chunk of this stage's request cannot leave."""
        return any((request_id, source, target) in self._stuck for target in self._targets.get(source, ()))

    def waiting(self) -> bool:
        return bool(self._stuck)

    def drop(self, request_id: str) -> None:
        """The request is over."""
        for key in [key for key in self._flows if key[0] == request_id]:
            self._close(key)
        self.retained.drop_request(request_id)

    def edges(self) -> dict[tuple[str, str], dict[str, float]]:
        """Gauges of every edge that leaves this worker."""
        held: dict[tuple[str, str], dict[str, float]] = {
            edge: {"in_flight_bytes": float(channel.in_flight), "flows": 0.0, "pending_chunks": 0.0}
            for edge, channel in self._channels.items()
        }
        for (_, source, target), flow in self._flows.items():
            held[source, target]["flows"] += 1
            held[source, target]["pending_chunks"] += len(flow.pending)
        return held

    def close(self) -> None:
        """Forget everything."""
        self._flows.clear()
        self._stuck.clear()
        self.retained.close()

    def _pump(self, flow: _Flow) -> None:
        self._send_pending(flow)
        if flow.pending:
            self._stuck.add(flow.key)
        else:
            self._stuck.discard(flow.key)

    def _send_pending(self, flow: _Flow) -> None:
        """In order, as far as the edge's budget and the connector's room go."""
        channel = flow.channel
        while flow.pending:
            if flow.unconsumed and channel.in_flight >= channel.budget:
                return
            payload, final = flow.pending[0]
            meta, nbytes = None, 0
            if payload is not None:
                ok, nbytes, meta = channel.connector.put(flow.source.stage, flow.target.stage, flow.request_id, payload)
                if not ok and not flow.unconsumed and channel.inline is not None:
                    ok, nbytes, meta = channel.inline.put(
                        flow.source.stage, flow.target.stage, flow.request_id, payload
                    )
                if not ok:
                    return
            flow.pending.popleft()
            if channel.retain:
                self.retained.append(flow.key, payload, nbytes, final=final)
            flow.unconsumed.append((flow.next_seq, nbytes))
            channel.in_flight += nbytes
            chunk = Chunk(
                request_id=flow.request_id,
                source=flow.source,
                target=flow.target.stage,
                seq=flow.next_seq,
                final=final,
                meta=meta,
                nbytes=nbytes,
                sent=time.monotonic(),
            )
            flow.next_seq += 1
            self._send(flow.target.address, chunk)

    def _forget_in_flight(self, flow: _Flow) -> None:
        flow.channel.in_flight -= sum(nbytes for _, nbytes in flow.unconsumed)
        flow.unconsumed.clear()

    def _close(self, key: Key) -> None:
        self._stuck.discard(key)
        flow = self._flows.pop(key, None)
        if flow is not None:
            self._forget_in_flight(flow)
            self.retained.drop(key)

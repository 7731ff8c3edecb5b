"""Send the streams that leave a worker, count unconsumed bytes, and keep payloads that may have to be resent.

A flow is one edge of one request. Its chunks wait in `pending` while the edge's byte budget is used up or the connector
has no space; the stage's engine then pauses the request. The first is held back until `Channel.start` chunks wait, or
the stream has ended. A flow whose target is not known yet (`Peer.worker` is empty) keeps its chunks like retained ones,
until they are to be resent to the target, or not wanted. One chunk is always sent if the downstream stage has nothing
left of this flow: it may wait for this very chunk (no deadlock with any budget).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from segue.connectors import payload as codec
from segue.connectors.base import Connector, Payload
from segue.graph.parts import stage_of
from segue.messages.wire import Chunk, Peer
from segue.worker.edges.retained import Key, RetainedStore

CHUNK_BYTES = 1024
"""What a chunk costs in addition to its payload, in objects at either end; a chunk may be one row of codes."""


@dataclass(slots=True)
class Channel:
    """The connectors and byte budget of one edge."""

    connector: Connector
    inline: Connector | None
    """Carries payloads of any size inside the message: used if the pool is full and the downstream stage has nothing
    left of this flow, because the payloads that fill the pool may wait for this very chunk."""
    budget: int
    """Bytes in flight on this edge, over all requests."""
    retain: bool
    """Keep payloads for a restart of the downstream stage; not if both stages are in one process."""
    overhead: int = 0
    """Bytes that count for each chunk, in addition to its payload."""
    start: int = 1
    """Chunks of a request that must be there before any is sent; the end of its stream counts as enough."""
    in_flight: int = 0


@dataclass(slots=True)
class _Flow:
    request_id: str
    source: Peer
    target: Peer
    channel: Channel
    pending: deque[tuple[Payload | None, bool]] = field(default_factory=deque)
    unconsumed: deque[tuple[int, int]] = field(default_factory=deque)
    """(seq, bytes) of chunks that are sent and not yet consumed."""
    next_seq: int = 0
    started: bool = False
    """Chunks no longer wait for others."""

    @property
    def key(self) -> Key:
        return (self.request_id, self.source.stage, self.target.stage)

    @property
    def waits(self) -> bool:
        """Whether its target is not known yet."""
        return not self.target.worker


Send = Callable[[str, Chunk], None]
"""Sends a chunk to an address."""


class Outbox:
    """All flows of one worker, and the payloads retained for them."""

    def __init__(self, channels: dict[tuple[str, str], Channel], retained: RetainedStore, send: Send) -> None:
        self._channels = channels
        self.retained = retained
        self._send = send
        self._flows: dict[Key, _Flow] = {}
        self._stuck: set[Key] = set()
        """Flows with pending chunks."""

    def open(self, request_id: str, source: Peer, target: Peer) -> None:
        """Open the flow of a request over an edge. A new attempt of the source restarts the flow."""
        key = (request_id, source.stage, target.stage)
        self._close(key)
        channel = self._channels[stage_of(source.stage), stage_of(target.stage)]
        self._flows[key] = _Flow(request_id, source, target, channel)

    def push(self, request_id: str, source: str, target: str, payload: Payload | None, *, final: bool) -> None:
        """Send one chunk downstream, and keep it until the downstream stage has finished."""
        flow = self._flows.get((request_id, source, target))
        if flow is None:
            return  # the request was dropped meanwhile
        if flow.waits:
            size = 0 if payload is None else codec.measure(payload).size
            self.retained.append(flow.key, payload, size, final=final)
            return
        flow.pending.append((payload, final))
        self._pump(flow)

    def resend(self, request_id: str, source: str, target: Peer) -> bool:
        """Resend everything to a restarted downstream stage, from the first chunk. False: not everything was kept."""
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
        self.retained.drop(flow.key)  # sending stores them again
        self._pump(flow)
        return True

    def forgo(self, request_id: str, source: str, target: str) -> None:
        """Free what waits for a target that the request does not visit."""
        self._close((request_id, source, target))

    def abandon(self, request_id: str, source: str, attempt: int) -> None:
        """Free what was made by the attempts of a stage up to this one: it goes on in another worker."""
        for key, flow in list(self._flows.items()):
            if key[:2] == (request_id, source) and flow.source.attempt <= attempt:
                self._close(key)

    def consumed(self, request_id: str, source: str, target: Peer, seq: int, *, finished: bool) -> None:
        """Handle the report that the downstream stage has used chunks up to `seq`, or has finished the request."""
        flow = self._flows.get((request_id, source, target.stage))
        if flow is None or flow.target.worker != target.worker or flow.target.attempt != target.attempt:
            return  # from a past attempt
        while flow.unconsumed and (finished or flow.unconsumed[0][0] <= seq):
            flow.channel.in_flight -= flow.unconsumed.popleft()[1]
        if finished:
            flow.pending.clear()
            self._close(flow.key)

    def pump(self) -> None:
        """Send the pending chunks that may be sent now."""
        for key in list(self._stuck):
            self._pump(self._flows[key])

    def blocked(self, request_id: str, source: str) -> bool:
        """Whether some chunk of this stage's request cannot be sent."""
        return any(key[:2] == (request_id, source) for key in self._stuck)

    def waiting(self) -> bool:
        return bool(self._stuck)

    def drop(self, request_id: str) -> None:
        """Free everything of a request that is over."""
        for key in [key for key in self._flows if key[0] == request_id]:
            self._close(key)
        self.retained.drop_request(request_id)

    def edges(self) -> dict[tuple[str, str], dict[str, float]]:
        """Return the gauges of every edge that leaves this worker."""
        held: dict[tuple[str, str], dict[str, float]] = {
            edge: {"in_flight_bytes": float(channel.in_flight), "flows": 0.0, "pending_chunks": 0.0}
            for edge, channel in self._channels.items()
        }
        for (_, source, target), flow in self._flows.items():
            edge = held[stage_of(source), stage_of(target)]
            edge["flows"] += 1
            edge["pending_chunks"] += len(flow.pending)
        return held

    def close(self) -> None:
        """Free everything."""
        self._flows.clear()
        self._stuck.clear()
        self.retained.close()

    def _pump(self, flow: _Flow) -> None:
        """Send pending chunks in order, as far as the edge's budget and the connector's space allow."""
        channel = flow.channel
        if not flow.started:
            if len(flow.pending) < channel.start and not (flow.pending and flow.pending[-1][1]):
                return
            flow.started = True
        while flow.pending and not (flow.unconsumed and channel.in_flight >= channel.budget):
            payload, final = flow.pending[0]
            meta, nbytes = None, 0
            if payload is not None:
                edge = (stage_of(flow.source.stage), stage_of(flow.target.stage))
                ok, nbytes, meta = channel.connector.put(*edge, flow.request_id, payload)
                if not ok and not flow.unconsumed and channel.inline is not None:
                    ok, nbytes, meta = channel.inline.put(*edge, flow.request_id, payload)
                if not ok:
                    break
            flow.pending.popleft()
            cost = nbytes + channel.overhead
            if channel.retain:
                self.retained.append(flow.key, payload, cost, final=final)
            flow.unconsumed.append((flow.next_seq, cost))
            channel.in_flight += cost
            chunk = Chunk(
                request_id=flow.request_id,
                source=flow.source,
                target=flow.target.stage,
                target_attempt=flow.target.attempt,
                seq=flow.next_seq,
                final=final,
                meta=meta,
                nbytes=nbytes,
                sent=time.monotonic(),
            )
            flow.next_seq += 1
            self._send(flow.target.address, chunk)
        if flow.pending:
            self._stuck.add(flow.key)
        else:
            self._stuck.discard(flow.key)

    def _forget_in_flight(self, flow: _Flow) -> None:
        flow.channel.in_flight -= sum(nbytes for _, nbytes in flow.unconsumed)
        flow.unconsumed.clear()

    def _close(self, key: Key) -> None:
        self._stuck.discard(key)
        flow = self._flows.pop(key, None)
        if flow is not None:
            self._forget_in_flight(flow)
            self.retained.drop(key)

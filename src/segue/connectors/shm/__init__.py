"""Payloads through shared memory: `connector` has the calls of the contract, `pool` the producer's memory, `receiver`
the consumer's side. A pool consists of memfds (`segment`), which a socket passes to receivers (`handover`); `metadata`
says where a payload is.

Doors: `connector`, `metadata`, `segment`.
"""

"""Payloads over plain TCP sockets: `connector` has the calls of the contract, `producer` keeps payloads and sends them,
`consumer` fetches them, and `wire` has their messages, the first of which prove that both sides know the key.

Optional reading: a connector between hosts.

Doors: `connector`.
"""

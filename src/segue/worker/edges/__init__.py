"""What moves between workers: `peers` has the sockets of the inboxes, `outbox` sends the streams of chunks, `retained`
keeps payloads that may have to be sent again, and `arrivals` waits for those that come over a network.

Doors: every module.
"""

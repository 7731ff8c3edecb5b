"""Connectors move a payload from the worker that makes it to the worker that needs it: references within a process
(`inproc`), shared memory between processes (`shm`), device memory that both can open (`device`), between hosts sockets
(`tcp`), Mooncake (`mooncake`) or NIXL (`nixl`). `base` has the contract; one test suite checks it for every connector.

Doors: `base`, `create`, `device`, `payload`, `shm`.
"""

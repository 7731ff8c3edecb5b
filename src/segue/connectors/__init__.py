"""Connectors move a payload from the worker that makes it to the worker that needs it: references within a process
(`inproc`), shared memory between processes (`shm`), device memory that both can open (`device`, `cuda`), and sockets
between hosts (`tcp`), or Mooncake (`mooncake`). `base` has the contract; one test suite checks it for every connector.

Doors: `base`, `create`, `cuda`, `device`, `payload`, `segment`, `shm`.
"""

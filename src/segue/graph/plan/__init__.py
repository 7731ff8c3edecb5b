"""Place stages: which share a worker (`groups`), on which devices (`placement`), with which share of their memory
(`memory_shares`), and which connector serves each edge (`wiring`).

Optional reading: makes the `Plan` of a deployment and a host: each stage's workers, devices and connectors.

Doors: `groups`, `memory_shares`, `placement`, `wiring`.
"""

"""Place stages: which share a worker (`groups`), on which devices (`placement`), with which share of their memory
(`memory_shares`), and which connector serves each edge (`wiring`).

Doors: `groups`, `memory_shares`, `placement`, `wiring`.
"""

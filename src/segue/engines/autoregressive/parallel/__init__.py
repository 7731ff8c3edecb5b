"""Tensor parallelism of a language model: the engine runs on the leader (`ranks`), and the other ranks follow its
orders (`follower`).

Doors: `ranks`, `follower`.
"""

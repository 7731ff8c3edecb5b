"""Segue against a plain PyTorch loop over the same networks: what a model's author has before he has a server.
`comparison` measures a `Workload`; `mimo_audio` and `bagel` are workloads, each with its loop in a module of its own.

Doors: `comparison`, `mimo_audio`, `bagel`.
"""

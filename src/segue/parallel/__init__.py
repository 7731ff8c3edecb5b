"""Cooperation of the processes of one replica: process groups, tensor parallelism by the models' own plans, and
`ranks`, which keeps their engines in step.

Doors: every module.
"""

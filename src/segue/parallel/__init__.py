"""Cooperation of the processes of one replica: process groups, and tensor parallelism by the models' own plans.

Doors: every module.
"""

"""Contexts: what a request has read, lent to another engine of the worker that attends to it (`engine`); `contract` is
the interface to the stage models of both.

Doors: `contract`, `engine`.
"""

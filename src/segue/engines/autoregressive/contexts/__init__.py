"""Contexts: what a request has read, lent to another engine of the worker that attends to it (`engine`); `contract` is
the interface to the stage models of both.

Optional reading: only a stage that lends its blocks to a denoiser has a `ContextEngine`.

Doors: `contract`, `engine`.
"""

"""Metrics, request times and structured logging. Every package may use it; it imports only `messages`.

Doors: every module.
"""

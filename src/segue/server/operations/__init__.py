"""Endpoints for operators: health, metrics, moves of workers, and the OpenAPI document with the types of all answers.

Doors: `health`, `moves`, `openapi`.
"""

"""Endpoints for operators: health and metrics, and the OpenAPI document with the types of all answers.

Doors: `health`, `openapi`.
"""

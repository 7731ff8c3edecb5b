"""Types of all answers: `GET /openapi.json` publishes their schemas, and tests check every answer against them. `chat`
has those of chat completions and completions, and their parts, which others use; `responses` and `anthropic` those of
these APIs; `texts`, `media` and `server` the rest.

Doors: every module.
"""

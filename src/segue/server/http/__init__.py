"""HTTP code that every endpoint uses: bodies within limits, errors in OpenAI's form, events, connections, checks of
`Host` and `Origin`.

Doors: every module.
"""

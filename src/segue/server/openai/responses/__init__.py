"""`/v1/responses` over chat completions: items in (`items`, `request`) and out (`writer`), responses stored (`store`)
or made in the background (`background`, `journal`).

Doors: `endpoint`, `request`.
"""

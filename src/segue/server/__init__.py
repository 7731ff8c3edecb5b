"""The HTTP API over a `Service`. It knows no model by name.

`app` builds the application, `serve` runs it. `openai`, `anthropic`, `vllm` and `operations` hold a family of endpoints
each, `page` the web page, `http` the protocol code that all endpoints use, `generation` the code that all generating
endpoints share, and `tenants` the API keys and their limits.

Doors: `serve`, `settings`, `tenants`.
"""

"""Tenants by API key: their limits and shares, and the service as each tenant sees it.

Doors: `keys_file`, `service`, `tenants`.
"""

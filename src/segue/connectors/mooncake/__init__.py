"""Payloads over Mooncake (`pip install 'segue[mooncake]'`): `store` keeps them in its store, `engine` in the memory of
the producer. `client` is the store's client, `library` loads the package.

Optional reading: connectors between hosts.

Doors: `engine`, `store`.
"""

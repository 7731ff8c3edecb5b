"""Workers on several hosts: `node_placement` is the server's side, `agent` that of a host that has joined, and `links`
says which nodes reach each other. `ray_agents` has Ray start the agents, by `ray_driver`.

Optional reading: `NodePlacement` starts workers as `LocalPlacement` does, on other hosts.

Doors: `agent`, `links`, `node_placement`, `ray_agents`.
"""

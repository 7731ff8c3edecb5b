"""Read what a deployment says of the Ray cluster that starts its nodes.

Optional reading: makes part of a `Deployment` from a file.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from segue.graph.deployment.deployment import RayNode, RayPlan
from segue.graph.deployment.section import Section, as_mapping, wrong
from segue.messages.errors import ConfigError, nearest

RAY_NODE_KEYS = ("num_cpus", "num_gpus", "accelerator_type", "resources", "model")


def ray_plan(section: Section, nodes: Collection[str]) -> RayPlan:
    """`nodes`: those of the deployment. Raises `ConfigError`."""
    if not nodes:
        raise ConfigError(
            "placement is ray, but no stage has a node; say which run where, by `node`", field="placement"
        )
    address = _text(section, "address") or "auto"
    written = section.mapping("nodes")
    for name in written:
        if name not in nodes:
            raise ConfigError(
                f"{section.at('nodes')} has {name!r}, which is the node of no stage{nearest(name, nodes)}",
                field=section.at("nodes"),
            )
    return RayPlan(address, {name: _node(f"{section.at('nodes')}.{name}", written.get(name)) for name in nodes})


def _node(path: str, values: object) -> RayNode:
    section = Section(path, values, RAY_NODE_KEYS)
    at, own = section.find("resources")
    resources = as_mapping(at, own)
    amounts = {f"{at}.{name}": amount for name, amount in resources.items()}
    amounts |= {section.at(key): section.values[key] for key in ("num_cpus", "num_gpus") if key in section.values}
    for where, amount in amounts.items():
        if type(amount) not in (int, float) or amount < 0 or not math.isfinite(amount):
            raise wrong(where, amount, "a number of at least 0")
    cpus, gpus = section.values.get("num_cpus", 1), section.values.get("num_gpus", 0)
    kind = _text(section, "accelerator_type")
    if not (cpus or gpus or kind or any(resources.values())):
        raise ConfigError(f"{path} reserves nothing; give it num_cpus, num_gpus or resources", field=path)
    return RayNode(cpus, gpus, kind, resources, _text(section, "model"))


def _text(section: Section, key: str) -> str | None:
    path, value = section.find(key)
    if value is not None and not isinstance(value, str):
        raise wrong(path, value, "text")
    return value

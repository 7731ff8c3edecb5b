"""Let a Ray cluster run the agents of nodes, which `segue join` runs elsewhere.

Ray is kept out of this process: a process that uses it is ended by Ray when the cluster's head is gone. So a process of
its own (`ray_driver`) reserves a host for each node and keeps an actor there; if it ends, another one is started. The
actors end with it, the workers with the actors, and their requests go on as if the nodes had been lost. A node that
only serves workers which come and go by the load is reserved while it has some.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Set
from dataclasses import asdict
from typing import Any

from segue.graph.deployment.deployment import RayPlan
from segue.messages.errors import ConfigError
from segue.messages.join import Listen

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 5.0
"""Between the end of a driver and the start of the next one."""
_END_SECONDS = 20.0
"""For a driver to give back what it has reserved."""


class RayAgents:
    """The agents of a plan's nodes in a Ray cluster."""

    def __init__(self, plan: RayPlan, listen: Listen, needed: Set[str]) -> None:
        """`needed`: the nodes that are there all the time. Raises `ConfigError` if Ray is not installed, or it is not
        said how to authenticate."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("placement is ray, but Ray is not installed: pip install 'segue[ray]'", field="placement")
        mode = os.environ.get("RAY_AUTH_MODE", "token")
        if mode == "token" and not os.environ.keys() & {"RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"}:
            raise ConfigError(
                "placement is ray: set RAY_AUTH_TOKEN_PATH to a file with the cluster's token, here and on every host "
                "of the cluster, with RAY_AUTH_MODE=token; or RAY_AUTH_MODE=disabled, if only friends reach its ports",
                field="placement",
            )
        self._environment = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_USAGE_STATS_ENABLED": "0"}
        self._order: dict[str, Any] = {"plan": asdict(plan), "listen": [listen.host, listen.port, listen.token]}
        self._always = sorted(needed & plan.nodes.keys())
        self.needed = frozenset(needed)
        """The nodes that are needed now."""
        self._driver: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        log.warning("Ray's processes listen on every interface: let nobody else reach the hosts of the cluster")
        self._task = asyncio.create_task(self._run())

    def need(self, nodes: Set[str]) -> None:
        """Have these nodes, and none that only came by the load and is not among them."""
        if nodes == self.needed:
            return
        self.needed = frozenset(nodes)
        if self._driver is not None and self._driver.stdin is not None:
            self._driver.stdin.write(self._wanted())

    def _wanted(self) -> bytes:
        """The line that says which nodes are needed beyond those that are there all the time."""
        more = self.needed & self._order["plan"]["nodes"].keys() - set(self._always)
        return f"{json.dumps(sorted(more))}\n".encode()

    async def close(self) -> None:
        """End the agents, and give their hosts back to the cluster."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            log.info("asking Ray for hosts: %s", ", ".join(self._always))
            driver = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "segue.orchestrator.workers.nodes.ray_driver"),
                stdin=asyncio.subprocess.PIPE,
                env=self._environment,
            )
            try:
                assert driver.stdin is not None
                order = json.dumps({**self._order, "always": self._always})
                driver.stdin.write(f"{order}\n".encode() + self._wanted())
                self._driver = driver
                code = await driver.wait()
            finally:
                self._driver = None
                await _end(driver)
            log.error("what keeps nodes in the Ray cluster ended (%d); starting it again", code)
            await asyncio.sleep(_AGAIN_SECONDS)


async def _end(driver: asyncio.subprocess.Process) -> None:
    """Let a driver end by itself, which it does when its input ends; kill it if it does not."""
    if driver.returncode is not None:
        return
    assert driver.stdin is not None
    driver.stdin.close()
    try:
        await asyncio.wait_for(driver.wait(), _END_SECONDS)
    except TimeoutError:
        driver.kill()
        await driver.wait()

"""`segue join`: make this machine a node of a running server."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket

from segue.cli.parser import Parser
from segue.messages.errors import ConfigError
from segue.messages.join import PORT, Listen

TOKEN = "SEGUE_JOIN_TOKEN"


def add_join(commands: argparse._SubParsersAction[Parser]) -> None:
    join = commands.add_parser("join", help="make this machine a node of a running server")
    join.add_argument("server", metavar="HOST[:PORT]", help=f"what the server listens on; default port: {PORT}")
    add_token(join)
    join.add_argument(
        "--name", default=_host_name(), help="the node's name in the deployment; default: this machine's (%(default)s)"
    )
    join.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="[SERVER_DIR=]DIR",
        help="where this machine has the checkpoint; default: the same directory as on the server",
    )
    join.add_argument(
        "--address",
        metavar="ADDRESS",
        help="this machine's address for the other nodes; default: that of the interface that leads to the server",
    )
    join.set_defaults(run=run)


def add_token(parser: Parser) -> None:
    parser.add_argument(
        "--token",
        help=f"the secret that the nodes share, which other users of this machine can see in the list of processes; "
        f"default: the environment's {TOKEN}",
    )


def token_of(arguments: argparse.Namespace) -> str | None:
    """Return the token of the command line or the environment. Raises `ConfigError` if it is too short."""
    token: str | None = arguments.token or os.environ.get(TOKEN)
    if token is not None and len(token) < 16:
        raise ConfigError(f"the token has {len(token)} characters; it must have at least 16", field="token")
    return token


def host_and_port(text: str) -> tuple[str, int]:
    """Parse HOST[:PORT]."""
    host, colon, port = text.partition(":")
    if not host or (colon and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise ConfigError(f"{text!r} is not HOST or HOST:PORT, such as 192.168.1.20:{PORT}", field="listen")
    return host, int(port) if colon else PORT


def listen_of(arguments: argparse.Namespace) -> Listen | None:
    """Return where `segue serve` waits for nodes; None without --listen."""
    if arguments.listen is None:
        return None
    host, port = host_and_port(arguments.listen)
    if host in ("0.0.0.0", "*"):
        raise ConfigError(
            f"--listen is {arguments.listen!r}; name the address of one interface, which the nodes can reach",
            field="listen",
        )
    token = token_of(arguments)
    if token is None:
        raise ConfigError(
            f"--listen needs a token, which the nodes are given too: --token, or {TOKEN} in the environment; e.g. of "
            "`openssl rand -hex 32`",
            field="token",
        )
    return Listen(host, port, token)


def run(arguments: argparse.Namespace) -> int:
    """Be a node until a signal stops it."""
    from segue.observe.logging import configure_logging

    configure_logging("info", as_json=False)
    token = token_of(arguments)
    if token is None:
        raise ConfigError(f"the server's token is needed: --token, or {TOKEN} in the environment", field="token")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,63}", arguments.name):
        raise ConfigError(f"--name is {arguments.name!r}; a name has letters, digits, - and _", field="name")
    models = {}
    for given in arguments.model:
        theirs, equals, ours = given.rpartition("=")
        if not os.path.isdir(ours):
            raise ConfigError(f"--model: {ours!r} is not a directory", field="model")
        models[theirs if equals else ""] = os.path.abspath(ours)
    host, port = host_and_port(arguments.server)
    return asyncio.run(_run(host, port, token, arguments.name, arguments.address, models))


async def _run(host: str, port: int, token: str, name: str, address: str | None, models: dict[str, str]) -> int:
    from segue.orchestrator.workers.nodes.agent import Agent

    agent = asyncio.ensure_future(Agent(host, port, token, name, address=address, models=models).run())
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        agent.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await agent
    except asyncio.CancelledError:
        if not stopped:
            raise
    return 0


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0]) or "node"

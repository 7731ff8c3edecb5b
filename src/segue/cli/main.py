"""The commands `segue serve | join | generate | graph | verify | tiny | bench`."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from segue.cli import generate as generate_command
from segue.cli.join import add_join, add_token, listen_of
from segue.cli.model import add_model, model_settings
from segue.cli.parser import Parser, count
from segue.messages.errors import ConfigError, SegueError, nearest
from segue.messages.join import PORT
from segue.models.shared.dialects.dialect import CALL_FORMATS
from segue.verify.arguments import add_arguments as add_verify

if TYPE_CHECKING:
    from segue.server.settings import ServerSettings
    from segue.server.tenants.tenants import Tenant


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk, or a standard output, that accepts no more data."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. A `SegueError` prints one line on stderr, without a traceback, and
    gives status 2; an output that accepts no more data does so with status 1, as the command was not at fault."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(given)
        finally:
            if sys.stdout is not None:  # None if it was closed from the start
                sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _nothing_more_is_said()
        return 141
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        print(f"segue: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        _nothing_more_is_said()
        return 1


def _run(given: list[str]) -> int:
    try:
        if given[:1] == ["bench"]:
            return _bench(given[1:])  # has a parser of its own, its --help included
        arguments = parser().parse_args(given)
        status: int = arguments.run(arguments)
        return status
    except SegueError as error:
        print(f"segue: error: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _nothing_more_is_said() -> None:
    """Discard the rest of the output, so that flushing it at exit raises no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Version(argparse.Action):
    """Prints the version, looked up only on request: there is none if the source is not installed."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"segue {version('segue')}")
        except PackageNotFoundError as error:
            raise ConfigError("the version is unknown: the package is not installed") from error
        parser.exit()


def parser() -> Parser:
    """All commands and their arguments."""
    top = Parser(prog="segue", description="Any-to-any models, served as graphs of stages.")
    top.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    _add_serve(commands)
    add_join(commands)

    generate = commands.add_parser("generate", help="run one request and write its output")
    add_model(generate)
    generate_command.add_arguments(generate)
    generate.set_defaults(run=generate_command.run)

    graph = commands.add_parser("graph", help="print the stage graph of a model as it would be deployed")
    add_model(graph)
    graph.add_argument("--mermaid", action="store_true", help="as a Mermaid flowchart")
    graph.set_defaults(run=_graph)

    tiny = commands.add_parser("tiny", help="make a small checkpoint with random weights in a family's true format")
    tiny.add_argument("family", help="name of a preset; an unknown name lists all presets")
    tiny.add_argument("directory", type=Path, help="output directory: new, empty, or filled by this command before")
    tiny.add_argument("--size", default="tiny", help="one of the preset's sizes; default: %(default)s")
    tiny.add_argument("--seed", type=int, default=0, help="seed of the weights; default: %(default)s")
    tiny.set_defaults(run=_tiny)

    verify = commands.add_parser("verify", help="compare a checkpoint's answers with the library's own")
    add_verify(verify)
    verify.set_defaults(run=_verify)

    commands.add_parser("bench", help="measure against the reference library", add_help=False)
    return top


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    add_model(serve)
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all addresses; default: %(default)s"
    )
    serve.add_argument("--port", type=int, default=8000, help="0: any free port; default: %(default)s")
    serve.add_argument(
        "--listen",
        metavar="ADDRESS[:PORT]",
        help="wait for other machines (`segue join`) on this address of this machine, where they also exchange "
        f"payloads; default port: {PORT}",
    )
    add_token(serve)
    serve.add_argument(
        "--api-key",
        type=_key,
        help="require this bearer token, which other users of this machine can see in the list of processes; default: "
        "the environment's SEGUE_API_KEY, else none",
    )
    serve.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="require a bearer token of this file: one key, or those of several tenants with their limits",
    )
    serve.add_argument(
        "--allow-origin",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="accept requests of web pages from this origin, e.g. https://app.example.org (*: any); may be repeated",
    )
    serve.add_argument(
        "--allowed-host",
        type=_host,
        action="append",
        default=[],
        metavar="NAME",
        help="also answer to this host name, e.g. ai.example.org or *.example.org (*: any); may be given repeatedly",
    )
    serve.add_argument(
        "--tool-parser", choices=list(CALL_FORMATS), help="format of the model's tool calls; default: its template's"
    )
    serve.add_argument(
        "--media-root", type=Path, metavar="DIR", help="allow file paths below this directory as media URLs"
    )
    serve.add_argument(
        "--media-host",
        action="append",
        default=[],
        metavar="HOST",
        help="allow media from this http(s) host; may be given repeatedly",
    )
    serve.add_argument(
        "--lora", type=_named_path, action="append", metavar="NAME=DIR", help="a LoRA adapter; may be given repeatedly"
    )
    serve.add_argument(
        "--allow-runtime-lora", action="store_true", help="let clients load LoRA adapters from this machine's files"
    )
    serve.add_argument(
        "--allow-moves", action="store_true", help="let operators move workers from one stage to another"
    )
    serve.add_argument(
        "--allow-voice-cloning", action="store_true", help="let clients request speech in the voice of a recording"
    )
    serve.add_argument(
        "--max-body-bytes", type=_size, default="384MiB", help="size of one HTTP request; default: %(default)s"
    )
    serve.add_argument(
        "--max-bodies-bytes",
        type=_size,
        default="2GiB",
        help="size of all unanswered requests together; default: %(default)s",
    )
    serve.add_argument("--max-connections", type=count, default=4096, help="open at once; default: %(default)s")
    serve.add_argument(
        "--upload-seconds",
        type=_seconds,
        default=600.0,
        help="how long a client may take to send a request; default: %(default)g",
    )
    serve.add_argument(
        "--stall-seconds",
        type=_seconds,
        default=60.0,
        help="a streaming client that reads nothing, or sends no more of its text, for this long is disconnected; "
        "default: %(default)g",
    )
    serve.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        help="how long running requests may go on after a signal to stop; default: %(default)g",
    )
    serve.add_argument(
        "--max-responses",
        type=count,
        default=1024,
        help="responses (/v1/responses) kept in memory; default: %(default)s",
    )
    serve.add_argument(
        "--max-response-bytes",
        type=_size,
        default="256MiB",
        help="size of all kept responses and conversations; default: %(default)s",
    )
    serve.add_argument(
        "--video-dir",
        type=Path,
        metavar="DIR",
        help="keep video jobs here, across restarts; default: the user's state directory",
    )
    serve.add_argument("--max-videos", type=count, default=256, help="video jobs to keep; default: %(default)s")
    serve.add_argument(
        "--max-video-bytes", type=_size, default="16GiB", help="size of all video jobs on disk; default: %(default)s"
    )
    serve.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="least severe level to log on stderr; default: %(default)s",
    )
    serve.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="format of log lines; json: one object per line; default: %(default)s",
    )
    serve.set_defaults(run=_serve)


def _size(text: str) -> int:
    from segue.graph.deployment.section import size_of

    size = int(text) if text.isdecimal() else size_of(text)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0, such as 1048576, '64MiB' or '1GB'")
    return size


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,]+", text):  # no browser sends such an origin
        raise argparse.ArgumentTypeError(f"{text!r} is not an origin, such as https://app.example.org, without a path")
    return text


def _host(text: str) -> str:
    if text != "*" and not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a host name, such as ai.example.org or *.example.org, without a port; addresses need none"
        )
    return text


def _key(text: str) -> str:
    from segue.server.tenants.keys_file import KEY

    key = text.strip()
    if not key:  # e.g. from an unset variable: the server would be open to everyone
        raise argparse.ArgumentTypeError("the key is empty")
    if not KEY.fullmatch(key):
        raise argparse.ArgumentTypeError("the key must be of visible ASCII characters")
    return key


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _named_path(text: str) -> tuple[str, Path]:
    """Parse NAME=DIR."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR, a name and the directory of a LoRA adapter")
    return name, Path(path)


def _serve(arguments: argparse.Namespace) -> int:
    import asyncio

    from segue.media.sources import MediaPolicy
    from segue.observe.logging import configure_logging
    from segue.server.settings import ServerSettings

    if arguments.media_root is not None and not arguments.media_root.is_dir():
        raise ConfigError(f"--media-root {str(arguments.media_root)!r} is not a directory", field="media_root")
    configure_logging(arguments.log_level, as_json=arguments.log_format == "json")
    api_key, tenants = _keys(arguments)
    settings = ServerSettings(
        host=arguments.host,
        port=arguments.port,
        api_key=api_key,
        tenants=tenants,
        allow_origins=frozenset(arguments.allow_origin),
        allowed_hosts=frozenset(arguments.allowed_host),
        tool_parser=arguments.tool_parser,
        allow_voice_cloning=arguments.allow_voice_cloning,
        allow_runtime_lora=arguments.allow_runtime_lora,
        allow_moves=arguments.allow_moves,
        media=MediaPolicy(media_root=arguments.media_root, http_hosts=frozenset(arguments.media_host)),
        max_responses=arguments.max_responses,
        max_response_bytes=arguments.max_response_bytes,
        video_dir=arguments.video_dir,
        max_videos=arguments.max_videos,
        max_video_bytes=arguments.max_video_bytes,
        max_body_bytes=arguments.max_body_bytes,
        max_bodies_bytes=arguments.max_bodies_bytes,
        max_connections=arguments.max_connections,
        upload_seconds=arguments.upload_seconds,
        stall_seconds=arguments.stall_seconds,
        drain_seconds=arguments.drain_seconds,
    )
    return asyncio.run(_serve_until_stopped(arguments, settings))


def _keys(arguments: argparse.Namespace) -> tuple[str | None, tuple[Tenant, ...]]:
    """Return (one key for everyone, or None; tenants with keys of their own). The command line overrides the
    environment."""
    from segue.server.tenants.keys_file import read_keys

    if arguments.api_keys is not None:
        if arguments.api_key is not None:
            raise ConfigError("--api-key and --api-keys are both given; give one of them", field="api_keys")
        return None, read_keys(arguments.api_keys)
    if arguments.api_key is None and "SEGUE_API_KEY" in os.environ:
        try:
            return _key(os.environ["SEGUE_API_KEY"]), ()
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"SEGUE_API_KEY: {error}; set it to a key, or not at all", field="api_key") from None
    return arguments.api_key, ()


async def _serve_until_stopped(arguments: argparse.Namespace, settings: ServerSettings) -> int:
    """Serve `/health` at once, and requests when every stage is ready; stop the stages when the server has drained."""
    import asyncio

    from segue.graph.machine.account import account
    from segue.orchestrator.omni.async_omni import AsyncOmni
    from segue.orchestrator.omni.progress import StartBars
    from segue.server.serve import http_server, listen

    adapters = dict(arguments.lora or ())
    log = logging.getLogger("segue.server")
    bars = StartBars(log=log, drawn=arguments.log_format == "text")
    omni = AsyncOmni(
        **model_settings(arguments),
        lora=adapters if adapters or settings.allow_runtime_lora else None,
        on_progress=bars.show,
        listen=listen_of(arguments),
    )
    fair = any(stage.scheduling == "fair" for stage in omni.plan.stages.values())
    if not fair and any(tenant.share != 1 for tenant in settings.tenants):
        log.warning("tenants have shares, but no stage has `scheduling: fair`")
    sock = listen(settings.host, settings.port)
    for line in account(omni.plan):
        log.info("%s", line)
    server = http_server(omni, settings, omni.finish)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    starting = asyncio.create_task(omni.start())
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            bars.close()
            host, port = sock.getsockname()[:2]
            print(f"segue: {omni.card.name} is served at http://{host}:{port}", flush=True)
        else:
            starting.cancel()
        await serving
    finally:
        bars.close()
        server.should_exit = True
        await asyncio.gather(serving, starting, return_exceptions=True)
        await omni.stop(drain=not server.force_exit)
        sock.close()
    return 1 if server.force_exit else 0  # forced: requests were cut off


def _graph(arguments: argparse.Namespace) -> int:
    from segue.graph.deployment.loader import load_plan, stage_overrides
    from segue.graph.machine.account import cautions
    from segue.graph.machine.further import further_workers
    from segue.graph.parts import full_name
    from segue.graph.render import as_mermaid, as_text
    from segue.models.model_graph import read_models
    from segue.models.shared.checkpoint.stored import stored_bytes
    from segue.orchestrator.serving import check_models

    models = read_models(arguments.model)
    for one in models.members.values():
        one.family.dialect(one.directory, one.config)  # raises for an invalid chat template
    overrides = stage_overrides(
        arguments.dtype,
        deterministic=arguments.deterministic,
        speculation=arguments.speculation,
        tensor_parallel=arguments.tensor_parallel,
        quantization=arguments.quantization,
        kv_dtype=arguments.kv_dtype,
        scheduling=arguments.scheduling,
    )
    skip = arguments.skip_tokenizer_init
    plan = load_plan(models.graph, arguments.config, overrides=overrides, skip_tokenizer_init=skip)
    check_models(models, plan)
    for caution in cautions(plan):
        print(f"segue: warning: {caution}", file=sys.stderr)
    if arguments.mermaid:
        print(as_mermaid(models.graph))
        return 0
    stored = {
        full_name(member, stage): size
        for member, one in models.members.items()
        for stage, size in stored_bytes(one.directory, one.graph).items()
    }
    print(f"{as_text(plan)}\n{further_workers(plan, stored)}", end="")
    return 0


def _tiny(arguments: argparse.Namespace) -> int:
    from segue.models.registry import tiny_preset
    from segue.models.shared.tiny.made import filled

    preset = tiny_preset(arguments.family)
    if arguments.size not in preset.sizes:
        raise ConfigError(f"{arguments.family} has no size {arguments.size!r}{nearest(arguments.size, preset.sizes)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # see segue.worker.process.life
    try:
        with filled(arguments.directory) as directory:
            preset.make(directory, arguments.size, arguments.seed)
    except OSError as error:
        raise ConfigError(f"the checkpoint cannot be written to {str(arguments.directory)!r}: {error}") from error
    print(f"{arguments.family} ({arguments.size}) is in {arguments.directory}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from segue.verify.command import run

    return run(arguments)


def _bench(rest: list[str]) -> int:
    from segue.bench.main import main as bench

    return bench(rest)

"""`segue serve | generate | graph | tiny | bench`."""

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

from segue import cli_generate
from segue.cli_model import add_model, model_settings
from segue.cli_parser import Parser, count
from segue.messages.errors import ConfigError, SegueError, nearest
from segue.models.dialects.dialect import CALL_FORMATS

if TYPE_CHECKING:
    from segue.server.settings import ServerSettings


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What is said of a disk, or a standard output, that takes no more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Errors of ours are one line on stderr, without a traceback, and status 2; so is
    an output that takes nothing more, with status 1: nothing was wrong with the command."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(given)
        finally:
            if sys.stdout is not None:  # it is None where it was closed from the start
                sys.stdout.flush()
    except BrokenPipeError:  # who read what is printed has had enough, as `head` does
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
    """Let what is left of the output, which nobody takes, make no noise at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Version(argparse.Action):
    """Looked up when it is asked for: there is none where the source was not installed."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"segue {version('segue')}")
        except PackageNotFoundError as error:
            raise ConfigError("the version is not known: the package is not installed") from error
        parser.exit()


def parser() -> Parser:
    """All commands and their arguments."""
    top = Parser(prog="segue", description="Any-to-any models, served as graphs of stages.")
    top.add_argument("--version", action=_Version, nargs=0, help="print it")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    _add_serve(commands)

    generate = commands.add_parser("generate", help="run one request and write what comes out")
    add_model(generate)
    cli_generate.add_arguments(generate)
    generate.set_defaults(run=cli_generate.run)

    graph = commands.add_parser("graph", help="print the stage graph of a model as it would be deployed")
    add_model(graph)
    graph.add_argument("--mermaid", action="store_true", help="as a Mermaid flowchart")
    graph.set_defaults(run=_graph)

    tiny = commands.add_parser("tiny", help="make a small checkpoint with random weights in a family's true format")
    tiny.add_argument("family", help="name of a preset, e.g. qwen3; an unknown one is answered with all of them")
    tiny.add_argument("directory", type=Path, help="where the files go; made where it is not there")
    tiny.add_argument("--size", default="tiny", help="of those that the preset has; default: %(default)s")
    tiny.add_argument("--seed", type=int, default=0, help="of the weights; default: %(default)s")
    tiny.set_defaults(run=_tiny)

    commands.add_parser("bench", help="measure against the reference library", add_help=False)
    return top


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    add_model(serve)
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this machine's; default: %(default)s"
    )
    serve.add_argument("--port", type=int, default=8000, help="0: any free one; default: %(default)s")
    serve.add_argument("--api-key", type=_key, help="require this bearer token; default: none is asked for")
    serve.add_argument(
        "--allow-origin",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages from there ask this server, e.g. https://app.example.org (*: any); may be given repeatedly",
    )
    serve.add_argument(
        "--tool-parser", choices=list(CALL_FORMATS), help="how the model writes tool calls; default: as its template"
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
        "--allow-runtime-lora", action="store_true", help="let clients have LoRA adapters loaded from this machine"
    )
    serve.add_argument(
        "--max-body-bytes", type=_size, default="384MiB", help="of one HTTP request; default: %(default)s"
    )
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
        help="a streaming client that takes nothing for so long is taken for gone; default: %(default)g",
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
        help="responses (/v1/responses) that are kept, in memory; default: %(default)s",
    )
    serve.add_argument(
        "--max-response-bytes",
        type=_size,
        default="256MiB",
        help="of all of them and their conversations; default: %(default)s",
    )
    serve.add_argument(
        "--video-dir",
        type=Path,
        metavar="DIR",
        help="keep jobs of video here, over restarts; default: the user's state directory",
    )
    serve.add_argument(
        "--max-videos", type=count, default=256, help="jobs of video that are kept; default: %(default)s"
    )
    serve.add_argument(
        "--max-video-bytes", type=_size, default="16GiB", help="of all of them on disk; default: %(default)s"
    )
    serve.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="what is worth a line on stderr; default: %(default)s",
    )
    serve.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="of these lines; json: an object each; default: %(default)s",
    )
    serve.set_defaults(run=_serve)


def _size(text: str) -> int:
    from segue.graph.section import size_of

    size = int(text) if text.isdecimal() else size_of(text)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no size above 0, such as 1048576, '64MiB' or '1GB'")
    return size


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,]+", text):  # no browser would name it so
        raise argparse.ArgumentTypeError(f"{text!r} is no origin: that is like https://app.example.org, without a path")
    return text


def _key(text: str) -> str:
    if not text:  # of a variable that is not set, say: the server would be open to whoever tries
        raise argparse.ArgumentTypeError("the key is empty")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _named_path(text: str) -> tuple[str, Path]:
    """NAME=DIR."""
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
    settings = ServerSettings(
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key,
        allow_origins=frozenset(arguments.allow_origin),
        tool_parser=arguments.tool_parser,
        allow_runtime_lora=arguments.allow_runtime_lora,
        media=MediaPolicy(media_root=arguments.media_root, http_hosts=frozenset(arguments.media_host)),
        max_responses=arguments.max_responses,
        max_response_bytes=arguments.max_response_bytes,
        video_dir=arguments.video_dir,
        max_videos=arguments.max_videos,
        max_video_bytes=arguments.max_video_bytes,
        max_body_bytes=arguments.max_body_bytes,
        upload_seconds=arguments.upload_seconds,
        stall_seconds=arguments.stall_seconds,
        drain_seconds=arguments.drain_seconds,
    )
    return asyncio.run(_serve_until_told(arguments, settings))


async def _serve_until_told(arguments: argparse.Namespace, settings: ServerSettings) -> int:
    """Answer `/health` at once, requests when every stage is ready; stop the stages when the server has drained."""
    import asyncio

    from segue.orchestrator.omni import AsyncOmni
    from segue.orchestrator.start_bars import StartBars
    from segue.server.serve import http_server, listen

    adapters = dict(arguments.lora or ())
    bars = StartBars(log=logging.getLogger("segue.server"), drawn=arguments.log_format == "text")
    omni = AsyncOmni(
        **model_settings(arguments),
        lora=adapters if adapters or settings.allow_runtime_lora else None,
        on_progress=bars.show,
    )
    sock = listen(settings.host, settings.port)
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
    from segue.graph.loader import load_plan, stage_overrides
    from segue.graph.render import as_mermaid, as_text
    from segue.models.checkpoint_values import check_files
    from segue.models.located import located
    from segue.models.registry import family_of, read_config

    model_dir, _ = located(arguments.model)
    config = read_config(model_dir)
    family = family_of(config, model_dir)
    graph = family.graph(config)
    check_files(model_dir, config, graph)
    family.dialect(model_dir, config)  # refuses a chat template that is none
    overrides = stage_overrides(
        arguments.dtype,
        deterministic=arguments.deterministic,
        speculation=arguments.speculation,
        tensor_parallel=arguments.tensor_parallel,
        quantization=arguments.quantization,
        kv_dtype=arguments.kv_dtype,
        scheduling=arguments.scheduling,
    )
    plan = load_plan(graph, arguments.config, overrides=overrides)
    print(as_mermaid(graph) if arguments.mermaid else as_text(plan))
    return 0


def _tiny(arguments: argparse.Namespace) -> int:
    from segue.models.registry import tiny_preset

    preset = tiny_preset(arguments.family)
    if arguments.size not in preset.sizes:
        raise ConfigError(f"{arguments.family} has no size {arguments.size!r}{nearest(arguments.size, preset.sizes)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # see segue.worker.life
    try:
        preset.make(arguments.directory, arguments.size, arguments.seed)
    except OSError as error:
        raise ConfigError(f"the checkpoint cannot be written to {str(arguments.directory)!r}: {error}") from error
    print(f"{arguments.family} ({arguments.size}) is in {arguments.directory}")
    return 0


def _bench(rest: list[str]) -> int:
    from segue.bench.main import main as bench

    return bench(rest)


if __name__ == "__main__":
    sys.exit(main())

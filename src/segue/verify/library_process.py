"""`python -m segue.verify.library_process SOCKET_FD OPTIONS`: run the library's calls in a separate process."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from segue.bench.harness.process import Channel, Work, serve
from segue.messages.reference import LibraryAnswer, Question


class Options(msgspec.Struct, kw_only=True):
    """How to load the library's model; the process gets it as JSON in `argv`."""

    module: str
    """The family's `reference_module`."""
    model_dir: str
    device: str
    dtype: str
    threads: int


class Quiet(msgspec.Struct, tag=True):
    """An empty message type: this process receives only questions."""


class Loaded(msgspec.Struct, tag=True):
    """The library has loaded the checkpoint, or failed with `error`."""

    versions: dict[str, str]
    error: str | None = None


def main(argv: list[str]) -> int:
    return serve(argv, Options, Quiet, Question, _run)


def _run(channel: Channel[Quiet, Question], options: Options) -> None:
    warnings.simplefilter("ignore")  # the library's advice to its users does not concern this command
    try:
        reference = _load(options)
    except Exception as error:  # any exception of the library is reported
        channel.send(Loaded(_versions(), said(error)))
        return
    channel.send(Loaded(_versions()))
    while isinstance(message := channel.take(), Work):
        channel.send(_answer(reference, message.request))


def _load(options: Options) -> Any:
    import torch

    from segue.kernels.torchvision_shim import ensure_torchvision
    from segue.models.shared.reference import Library
    from segue.parallel.wire import dtype_of

    ensure_torchvision()
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = False  # as in Segue's workers
    module = import_module(options.module)
    for name in ("transformers", "diffusers"):  # they set their log levels on import
        if name in sys.modules:
            verbosity = import_module(f"{name}.utils.logging")
            verbosity.set_verbosity(logging.CRITICAL)
            verbosity.disable_progress_bar()
    return module.load(Library(Path(options.model_dir), options.device, dtype_of(options.dtype)))


def _answer(reference: Any, question: Question) -> LibraryAnswer:
    from segue.models.shared.reference import NotTaken

    began = time.monotonic()
    try:
        answer: LibraryAnswer = reference.answer(question)
    except NotTaken as error:
        return LibraryAnswer(index=question.index, refused=str(error))
    except Exception as error:  # as above
        return LibraryAnswer(index=question.index, error=said(error))
    answer.seconds = time.monotonic() - began
    return answer


def said(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}"


def _versions() -> dict[str, str]:
    return {
        name: str(sys.modules[name].__version__)
        for name in ("torch", "transformers", "diffusers")
        if name in sys.modules
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What tests of several rooms share: the toy family, found as an outside package would be; the tiny checkpoint, real
files, and transformers' answers. Torch is imported by the fixtures that need it alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from segue.graph.machine.hardware import detect_hardware
from segue.models.speech.pocket_tts.graph import has_model

if TYPE_CHECKING:
    from segue.models.omni.qwen2_5_omni.reference import Reference

if not Path("/dev/nvidiactl").exists():
    # read when Triton is imported, by whomever: without a GPU its kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Each client of httpx, openai's too, reads all of certifi's certificates otherwise (20 ms); none here speaks TLS.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
if "PYTEST_XDIST_WORKER" in os.environ:
    # read when torch is imported, here and in what tests start: the cores are shared out among processes of pytest,
    # and threads are many where a test asks for `two_threads`
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no failure, and examples are the same in every run: what a change breaks is what its author sees.
# `pytest --hypothesis-profile search` tries others each time.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", PATIENT)
settings.register_profile("segue", PATIENT, derandomize=True)
settings.load_profile("segue")

pytest_plugins = ["selection"]
collect_ignore_glob = [] if has_model(version("transformers")) else ["*pocket_tts*"]
MEMORY_OF_TESTS = 4 << 30
"""Bytes for each of several processes of pytest and what it starts."""
TOYS = str(Path(__file__).parent / "toys")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process per core, if there is memory for its models and servers; none beside this one where there are GPUs,
    whose memory tests take whole."""
    machine = detect_hardware()
    return 0 if machine.gpus else max(1, min(machine.cpus, machine.memory_bytes // MEMORY_OF_TESTS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before fixtures of any scope: what a test draws without a generator does not hang on the tests before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Of torch and of the compiled kernels, on any machine: how work is divided among threads is tested, too."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def toy_path() -> None:
    """Make `segue_toy` an installed package, here and in the workers that tests start."""
    if TOYS not in sys.path:
        sys.path.insert(0, TOYS)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TOYS, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="session")
def toy_dir(toy_path: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the toy family."""
    from segue_toy.family import make

    return make(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real inputs: photo.jpg, speech.wav, video.mp4."""
    return Path(__file__).parents[1] / "assets"


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-Omni checkpoint, seed 0. Read it, never write to it."""
    from segue.models.omni.qwen2_5_omni.tiny import presets as tiny

    directory = tmp_path_factory.mktemp("qwen2.5-omni-tiny")
    tiny.make(directory)
    return directory


@pytest.fixture(scope="session")
def reference(tiny_dir: Path) -> Reference:
    """transformers on `tiny_dir`."""
    import torch

    from segue.models.omni.qwen2_5_omni.reference import load
    from segue.models.shared.reference import Library

    return load(Library(tiny_dir, "cpu", torch.float32))


@pytest.fixture(scope="session")
def qwen_image_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen-Image checkpoint, seed 0. Read it, never write to it."""
    from segue.models.images.qwen_image import tiny

    directory = tmp_path_factory.mktemp("qwen-image")
    tiny.make(directory)
    return directory

"""What is checked of every family that makes images: those of the library's pipeline, however they are run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from segue.engines.contract import StageRequest
from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.kernels.graphs.replay import launched_one_by_one
from segue.messages.diffusion import DiffusionParams
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser
from segue.models.shared.diffusion.denoiser.given import Given
from segue.models.shared.diffusion.text_encoder import TextEncoder
from segue.models.shared.diffusion.tiny import Part, write_index
from segue.models.shared.encoder_cache import EncoderCache
from segue.models.shared.tiny.files import write_json


@contextmanager
def one_weight_more(layer: nn.Module) -> Iterator[None]:
    """Within it, the first weight of a layer is larger by one."""

    def linear(module: nn.Module, given: tuple[torch.Tensor, ...], made: torch.Tensor) -> torch.Tensor:
        """Of a linear layer, whose weights may be packed: what that one adds to the output."""
        return made + functional.pad(given[0][..., :1], (0, made.shape[-1] - 1))

    if isinstance(layer, nn.Conv2d | nn.Conv3d | nn.Embedding):
        with torch.no_grad():
            before = layer.weight.clone()
            layer.weight[0, 0] += 1.0
            yield
            layer.weight.copy_(before)
    else:
        hook = layer.register_forward_hook(linear)
        yield
        hook.remove()


class ImageParity:
    """Base of a family's tests; says nothing of its own."""

    make: ClassVar[Callable[[Path], None]]
    pipeline: ClassVar[str]
    cases: ClassVar[Sequence[Mapping[str, Any]]]
    """Of other sizes, steps and guidance; the first has a second row, and one makes two images."""
    changes: ClassVar[Mapping[str, Any]]
    """By argument of the first case: another value, which must show."""
    weights: ClassVar[Sequence[tuple[str, str]]]
    """(stage, dotted name of a layer in its adapter): one weight of it must show."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Of the input stage."""
    theirs_only: ClassVar[Mapping[str, Any]] = {}
    """What the library's pipeline is told besides."""

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        made = tmp_path_factory.mktemp("pipeline")
        cls.make(made)
        return made

    @pytest.fixture(scope="class")
    @classmethod
    def chain(cls, directory: Path) -> Chain:
        return Chain(directory, options={"input": cls.options})

    @pytest.fixture(scope="class")
    @classmethod
    def theirs(cls, directory: Path) -> list[list[torch.Tensor]]:
        """By case."""
        pipeline = pipeline_of(directory, cls.pipeline)
        return [expected(pipeline, {**case, **cls.theirs_only}) for case in cls.cases]

    def test_alone(self, chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
        for case, images in zip(self.cases, theirs, strict=True):
            [made] = chain.run(case)
            assert apart(made, images) < WITHIN
            for index, pixels in enumerate(images):
                levels = abs(made.shown[index].astype(int) - (pixels.numpy() * 255).round().astype(int))
                assert levels.max() <= 1

    def test_in_a_batch(self, chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
        made = chain.run(*self.cases)
        assert max(apart(one, images) for one, images in zip(made, theirs, strict=True)) < WITHIN
        assert max(chain.batches) > 2, "some share a call"

    def test_joined_late(self, chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
        made = chain.run(*self.cases, late={index: index for index in range(1, len(self.cases))})
        assert max(apart(one, images) for one, images in zip(made, theirs, strict=True)) < WITHIN
        assert max(chain.batches) > 2, "some share a call"

    def test_images_are_not_grey_and_not_alike(self, theirs: list[list[torch.Tensor]]) -> None:
        for images in theirs:
            assert all(0.1 < float(one.std()) < 0.45 for one in images)
            for one, other in pairwise(images):
                assert float((one - other).abs().mean()) > 0.05
        assert any(len(images) == 2 for images in theirs)

    def test_parity_fails_when_the_request_is_another(self, chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
        for name, value in {"seed": 77, **self.changes}.items():
            [made] = chain.run({**self.cases[0], name: value})
            assert apart(made, theirs[0]) > 5 * WITHIN, name

    def test_parity_fails_when_one_weight_is_another(self, chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
        for stage, name in self.weights:
            root, _, path = name.partition(".")
            adapter = chain.adapters[stage]
            networks = adapter.networks() if isinstance(adapter, Denoiser) else []
            # a recording knows nothing of hooks
            with launched_one_by_one(networks), one_weight_more(getattr(adapter, root).get_submodule(path)):
                self._forget(chain)
                [made] = chain.run(self.cases[0])
            self._forget(chain)
            assert apart(made, theirs[0]) > WITHIN, name
        [made] = chain.run(self.cases[0])
        assert apart(made, theirs[0]) < WITHIN

    def test_trials_of_the_engine(self, chain: Chain) -> None:
        """The smallest two are computed; all have positions."""
        denoiser = chain.adapters["denoiser"]
        trials = list(denoiser.trials())
        assert len(trials) >= 2
        with torch.inference_mode():
            for sample in trials[:2]:
                for rows in ([Row(sample, 0)], [Row(sample, 0)] * 2):
                    with denoiser.during(rows):
                        assert [one.shape for one in denoiser.predict(rows)] == [sample.latents.shape] * len(rows)

    def test_the_same_seed_makes_the_same_files(self, directory: Path, tmp_path: Path) -> None:
        type(self).make(tmp_path / "again")
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                assert path.read_bytes() == (tmp_path / "again" / path.relative_to(directory)).read_bytes(), path

    def _forget(self, chain: Chain) -> None:
        """What encoders have kept."""
        for adapter in chain.adapters.values():
            if isinstance(adapter, TextEncoder):
                adapter.cache = EncoderCache(adapter.cache.capacity)


def published(model: str, part: str) -> dict[str, Any]:
    """The config of a part of a published checkpoint."""
    [file] = (Path(__file__).parent / "published" / model / part).iterdir()
    return json.loads(file.read_text())


def full_size(directory: Path, pipeline: str, parts: Mapping[str, Part], configs: Mapping[str, Any]) -> None:
    """A checkpoint of these configs without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    write_index(directory, pipeline, parts)
    for name, config in configs.items():
        (directory / name).mkdir()
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        write_json(directory / name, file, config)


def on_meta(directory: Path, stage: str) -> DenoiserContext:
    """To load a stage of it with nothing in its tensors."""
    return DenoiserContext(directory, stage, torch.device("meta"), torch.bfloat16, load_format="dummy")


def parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


class OnDevice(TorchFunctionMode):
    """Within it, nothing but a network makes tensors on the host: to copy one to a GPU in every step would wait."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._inside = 0
        network.register_forward_pre_hook(lambda *_: self._entered(1))
        network.register_forward_hook(lambda *_: self._entered(-1))

    def _entered(self, by: int) -> None:
        self._inside += by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), "numbers of the host are copied"
            assert not isinstance(out, torch.Tensor) or out.device.type == "meta", f"{func} gives a tensor of the host"
        return out


def called_on_meta(denoiser: Any, params: DiffusionParams, conditions: list[Any]) -> tuple[Sample, torch.Tensor]:
    """A made-up sample, and what the network says to it: shapes only."""
    request = StageRequest(
        request_id="0",
        stage="denoiser",
        request=Request(request_id="0", prompt=""),
        sampling=FALLBACK,
        seed=0,
        upstreams=frozenset(),
        downstreams=frozenset(),
        to_client=frozenset(),
    )
    sample = next(denoiser._samples(Given(request, params=params), conditions))
    rows = [Row(sample, branch) for branch in range(len(conditions))]
    with torch.inference_mode(), OnDevice(denoiser.network):
        predictions = list(denoiser.predict(rows))
    assert len(predictions) == len(rows)
    return sample, predictions[0]

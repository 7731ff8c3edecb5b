"""Drafters of every kind, as fixtures: those with a network are trained on the texts that the target writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from ar_adapter import HIDDEN, VOCAB, TinyAdapter, generate, tiny_model
from ar_speculation import PROMPTS, TOKENS
from spec_heads import renamed, train_chain, train_parallel

from head_files import eagle_config, layer_shapes, random_tensors, write
from segue.engines.autoregressive.speculation.drafter import Drafter
from segue.engines.autoregressive.speculation.heads import ChainDrafter, HeadsDrafter
from segue.engines.autoregressive.speculation.model import ModelDrafter
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.models.shared.decoder.speculators.eagle import Eagle
from segue.models.shared.decoder.speculators.medusa import Medusa
from segue.models.shared.decoder.speculators.mtp import MultiToken, layouts
from selection import daily


@pytest.fixture(scope="module")
def adapter():
    return TinyAdapter(tiny_model("qwen2", seed=7))


@pytest.fixture(scope="module")
def answers(adapter):
    return [generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def texts(answers):
    return [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]


def chain(adapter, head, blocks: int = 64) -> ChainDrafter:
    return ChainDrafter(head, blocks, 8, adapter.device, adapter.vocab_size)


def medusa_tensors(heads: int = 3) -> dict[str, torch.Tensor]:
    shapes = {}
    for head in range(heads):
        shapes |= {
            f"{head}.0.linear.weight": [HIDDEN, HIDDEN],
            f"{head}.0.linear.bias": [HIDDEN],
            f"{head}.1.weight": [VOCAB, HIDDEN],
        }
    return random_tensors(shapes)


@pytest.fixture(scope="module")
def medusa(adapter, texts, tmp_path_factory):
    """The authors' layout, in the file they publish."""
    path = tmp_path_factory.mktemp("medusa")
    tensors = medusa_tensors()
    torch.save(tensors, path / "medusa_lm_head.pt")
    heads = Medusa(path, adapter, torch.float32)
    parts = [part for head in heads._heads for part in (*head.blocks[0], head.out)]
    weights = dict(zip(tensors, parts, strict=True))
    train_parallel(heads, weights, adapter, texts)
    torch.save(weights, path / "medusa_lm_head.pt")
    trained = Medusa(path, adapter, torch.float32)
    assert (trained.count, trained.weight_bytes) == (3, sum(tensor.nbytes for tensor in tensors.values()))
    return lambda: HeadsDrafter(trained)


def eagle1_tensors() -> dict[str, torch.Tensor]:
    shapes = layer_shapes("layers.0.", HIDDEN, norm=False)
    shapes |= {"fc.weight": [HIDDEN, 2 * HIDDEN], "fc.bias": [HIDDEN]}
    return random_tensors(shapes)


@pytest.fixture(scope="module")
def eagle1(adapter, texts, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("eagle1"), eagle1_tensors(), eagle_config(HIDDEN, VOCAB))
    head = Eagle(path, adapter, torch.float32)
    train_chain(head, head._network, adapter, texts)
    write(path, renamed(head._network, lambda name: name))
    trained = Eagle(path, adapter, torch.float32)
    return lambda: chain(adapter, trained)


DRAFT_VOCAB = 90


def eagle3_tensors() -> dict[str, torch.Tensor]:
    """`d2t`: ids from 7 on have an offset, the others none; `t2d`, which only training needs."""
    shapes = layer_shapes("midlayer.", HIDDEN, wide=2)
    shapes |= {
        "midlayer.hidden_norm.weight": [HIDDEN],
        "fc.weight": [HIDDEN, 3 * HIDDEN],
        "norm.weight": [HIDDEN],
        "lm_head.weight": [DRAFT_VOCAB, HIDDEN],
    }
    shift = torch.where(torch.arange(DRAFT_VOCAB) < 7, 0, VOCAB - DRAFT_VOCAB)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[torch.arange(DRAFT_VOCAB) + shift] = True
    return {**random_tensors(shapes), "d2t": shift, "t2d": known}


@pytest.fixture(scope="module")
def eagle3(adapter, texts, tmp_path_factory):
    tensors = eagle3_tensors()
    config = eagle_config(HIDDEN, VOCAB, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    path = write(tmp_path_factory.mktemp("eagle3"), tensors, {**config, "draft_vocab_size": DRAFT_VOCAB})
    head = Eagle(path, adapter, torch.float32)
    train_chain(head, head._network, adapter, texts)
    trained = renamed(head._network, lambda name: name.replace("layers.0.", "midlayer."))
    write(path, {**trained, "d2t": tensors["d2t"], "t2d": tensors["t2d"]})
    again = Eagle(path, adapter, torch.float32)
    return lambda: chain(adapter, again)


def mtp_tensors(adapter: TinyAdapter, which: int) -> tuple[dict[str, torch.Tensor], Callable[[str], str]]:
    """A module in one of the published layouts, and names in our network → names in it."""
    way = layouts(len(adapter.model.model.layers))[which]
    ours = {"embed_norm": way.embed_norm, "hidden_norm": way.hidden_norm, "join": way.join, "norm": way.norm}
    if way.head is not None:
        ours["head"] = way.head

    def name(key: str) -> str:
        module, _, rest = key.partition(".")
        return f"{way.prefix}{way.layer}{rest}" if module == "layer" else f"{way.prefix}{ours[module]}.{rest}"

    shapes: dict[str, list[int]] = {f"{key}.weight": [HIDDEN] for key in ("embed_norm", "hidden_norm", "norm")}
    shapes["join.weight"] = [HIDDEN, 2 * HIDDEN]
    if way.head is not None:
        shapes["head.weight"] = [VOCAB, HIDDEN]
    for key, tensor in adapter.model.model.layers[0].state_dict().items():
        shapes[f"layer.{key}"] = list(tensor.shape)
    return {name(key): tensor for key, tensor in random_tensors(shapes).items()}, name


@pytest.fixture(scope="module")
def mtp(adapter, texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("mtp")
    tensors, name = mtp_tensors(adapter, 0)
    write(path, tensors)
    head = MultiToken(path, adapter, torch.float32)
    train_chain(head, head._network, adapter, texts)
    write(path, renamed(head._network, name))
    trained = MultiToken(path, adapter, torch.float32)
    return lambda: chain(adapter, trained)


@pytest.fixture(scope="module")
def draft(adapter):
    """The target with a little noise on its weights."""
    other = copy.deepcopy(adapter.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    small = TinyAdapter(other)
    return lambda: ModelDrafter(small, VOCAB, 64, 8, 2048)


@pytest.fixture(scope="module")
def ngram():
    return lambda: NgramDrafter(1, 3)


@dataclass
class Kind:
    make: Callable[[], Drafter]
    accepted: float
    """At least this part of the drafts is accepted on the texts it was trained for."""


KINDS = {"ngram": 0.02, "draft": 0.35, "medusa": 0.35, "eagle1": 0.35, "eagle3": 0.35, "mtp": 0.35}


@pytest.fixture(scope="module", params=daily(KINDS, KINDS.keys() - {"eagle1"}))
def kind(request):
    return Kind(request.getfixturevalue(request.param), KINDS[request.param])

"""The networks have the parameters of the published modules, by name and shape, without exception."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import nn

from segue.models.speech.mimo_audio.codec import Decoder, Encoder
from segue.models.speech.mimo_audio.config import Codec, config_of
from segue.models.speech.mimo_audio.graph import graph
from segue.models.speech.mimo_audio.loading import decoder_name, encoder_name, language_name
from segue.models.speech.mimo_audio.networks import LanguageNet

PUBLISHED = Path(__file__).parents[2] / "published"
UNREAD = (
    r"^encoder\.quantizer\.vq\.layers\.(8|9|1\d)\.",  # the language model has 8 channels
    r"\._codebook\.(inited|cluster_size|embed_avg)$",  # for training
    r"^decoder\.vocoder\.head\.istft\.window$",  # computed
)


def published(model: str) -> dict[str, tuple[int, ...]]:
    """Name → shape. A range in the file stands for all numbers in it."""
    shapes = {}
    for name, shape in json.loads((PUBLISHED / model / "tensors.json").read_text()).items():
        numbers = re.search(r"\.(\d+)-(\d+)\.", name)
        for number in range(int(numbers[1]), int(numbers[2]) + 1) if numbers else [0]:
            shapes[re.sub(r"\.\d+-\d+\.", f".{number}.", name)] = tuple(shape)
    return shapes


def own(net: nn.Module, named: Callable[[str], str]) -> dict[str, tuple[int, ...]]:
    return {named(name): tuple(tensor.shape) for name, tensor in net.state_dict().items()}


def test_the_language_model() -> None:
    config = json.loads((PUBLISHED / "MiMo-Audio-7B-Instruct" / "config.json").read_text())
    with torch.device("meta"):
        net = LanguageNet(config_of(config, "config.json"))
    shapes = own(net, language_name)
    assert shapes == published("MiMo-Audio-7B-Instruct")
    assert 7.9e9 < sum(torch.Size(shape).numel() for shape in shapes.values()) < 8.1e9
    assert graph(config).name == "mimo_audio"


def test_the_audio_tokenizer() -> None:
    codec = msgspec.convert(json.loads((PUBLISHED / "MiMo-Audio-Tokenizer" / "config.json").read_text()), Codec)
    with torch.device("meta"):
        encoder, decoder = Encoder(codec, 8), Decoder(codec, 8)
    theirs = published("MiMo-Audio-Tokenizer")
    read = {name: shape for name, shape in theirs.items() if not any(re.search(one, name) for one in UNREAD)}
    assert own(encoder, encoder_name) | own(decoder, decoder_name) == read
    assert codec.hop == 960

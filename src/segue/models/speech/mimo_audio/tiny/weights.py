"""Draw random weights under which every branch of the networks carries signal of order one.

Each matrix has entries of std gain / sqrt(fan in), so that outputs are as large as inputs; the gains were chosen by
measurement (the tests of the family state the targets).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from segue.models.speech.mimo_audio.codec import Decoder, Encoder
from segue.models.speech.mimo_audio.config import Codec, config_of
from segue.models.speech.mimo_audio.loading import decoder_name, encoder_name, language_name
from segue.models.speech.mimo_audio.networks import LanguageNet
from segue.models.speech.mimo_audio.tiny.config import IDS

# (pattern of the published name, gain); the first match counts, 1.0 without a match
_GAINS = (
    # sharp attention over the whole context: otherwise the next token depends only on the last one, and decoding loops
    (r"^model\.layers\.\d+\.self_attn\.[qk]_proj\.weight$", 2.2),
    (r"^model\.layers\.\d+\.self_attn\.o_proj\.weight$", 6.0),
    (r"^(input_)?local_transformer\.layers\.\d+\.self_attn\.[qk]_proj\.weight$", 2.0),
    (r"^(input_)?local_transformer\.layers\.\d+\.self_attn\.o_proj\.weight$", 3.0),
    (r"^local_transformer_lm_heads\.", 2.0),
    (r"^lm_head\.", 3.0),
    (r"^(en|de)coder\..*\.[qk]_proj\.weight$", 1.5),
)
_BIAS_STD = 0.05
_FIRST = 12
"""Added to the seed of the language model: with seed 0, all replies of the tests then end, and all have speech."""
_SPEAKS = 14.0
"""How easily a patch of codes is next: a head row k times as large as the others wins more steps the larger k is."""
_ENDS = 1.8
"""The same of the end tokens."""
_SHRINKS = 0.85
"""A codebook's vectors, compared with those of the one before."""
_LOUD = 0.1
"""Rms of the samples of random codes."""


def make_language_model(config: dict[str, Any], speakable: list[int], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of the language model, float32, the same for the same arguments. `speakable`: the ids of text that
    replies have."""
    read = config_of(config, "config.json")
    with torch.device("meta"):
        net = LanguageNet(read)
    weights = _drawn({language_name(name): tensor.shape for name, tensor in net.state_dict().items()}, seed + _FIRST)
    for channel, empty in enumerate(read.empty_codes):
        weights[f"speech_embeddings.{channel}.weight"] /= math.sqrt(read.audio_channels)  # a frame is their sum
        weights[f"speech_embeddings.{channel}.weight"][empty] = 0.0
    rows = torch.zeros(read.vocab_size, 1)
    rows[speakable] = 1.0
    rows[IDS["<|empty|>"]] = _SPEAKS
    for end in ("<|im_end|>", "<|eostm|>"):
        rows[IDS[end]] = _ENDS
    weights["lm_head.weight"] *= rows
    return weights


def make_codec(config: dict[str, Any], language: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of the audio tokenizer, float32. `language`: the config of the language model."""
    codec = msgspec.convert(config, Codec)
    channels = config_of(language, "config.json").audio_channels
    with torch.device("meta"):
        encoder = Encoder(codec, codec.num_quantizers)
    decoder = Decoder(codec, channels).eval()
    shapes = {encoder_name(name): tensor.shape for name, tensor in encoder.state_dict().items()}
    shapes |= {decoder_name(name): tensor.shape for name, tensor in decoder.state_dict().items()}
    weights = _drawn(shapes, seed)
    # how loud a recording is says less than its shape: otherwise few codes are ever drawn
    weights["encoder.conv1.weight"] -= weights["encoder.conv1.weight"].mean(dim=(1, 2), keepdim=True)
    for book in range(codec.num_quantizers):
        name = f"encoder.quantizer.vq.layers.{book}._codebook"
        weights[f"{name}.embed"] *= _SHRINKS**book  # each quantises what the one before left
        weights[f"{name}.embed_avg"] = weights[f"{name}.embed"].clone()  # this and the next two: only for training
        weights[f"{name}.cluster_size"] = torch.ones(codec.codes_of(book))
        weights[f"{name}.inited"] = torch.ones(1)
    weights["decoder.vocoder.head.istft.window"] = torch.hann_window(codec.nfft).clone()
    decoder.load_state_dict({name: weights[decoder_name(name)] for name in decoder.state_dict()})
    generator = torch.Generator().manual_seed(seed)
    codes = [torch.randint(0, codec.codes_of(book), (1, 50), generator=generator) for book in range(channels)]
    with torch.no_grad():
        rms = float(decoder(torch.stack(codes, dim=-1)).square().mean().sqrt())
    weights["decoder.vocoder.head.out.bias"][: codec.nfft // 2 + 1] += math.log(_LOUD / rms)  # logs of magnitudes
    return weights


def _drawn(shapes: Mapping[str, torch.Size], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: _scaled(name, torch.randn(shapes[name], generator=generator)) for name in sorted(shapes)}


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("bias"):
        return _BIAS_STD * noise
    if re.search(r"(^speech_embeddings\.\d+\.weight|embed_tokens\.weight|_codebook\.embed)$", name):
        return noise
    if noise.ndim < 2:
        return 1.0 + 0.1 * noise  # norms
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(_fan_in(name, noise)) * noise


def _fan_in(name: str, noise: torch.Tensor) -> int:
    # transposed: [in, out, kernel], one or two taps per frame
    return noise.shape[0] if re.search(r"^decoder\.dconv[12]\.conv", name) else noise[0].numel()

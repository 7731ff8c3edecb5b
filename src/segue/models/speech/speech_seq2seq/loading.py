"""Load the parts of an encoder-decoder of transformers for their stages, and find the decoder's cross-attention
modules: those that are called with `key_value_states`."""

from __future__ import annotations

import copy

import torch
from torch import nn

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import LoadContext
from segue.kernels.attention.encoder_attention import NAME as ACROSS
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.pretrained import load_config, load_model
from segue.models.shared.decoder.interface import cannot_be_served
from segue.models.shared.library import AutoModelForSpeechSeq2Seq, PreTrainedConfig, PreTrainedModel


def encoder_of(ctx: LoadContext) -> tuple[PreTrainedModel, tuple[int, int]]:
    """Load the encoder alone; also returns the shape of a window: (bins, frames)."""
    config = load_config(ctx)
    shape = (config.num_mel_bins, 2 * config.max_source_positions)
    config.decoder_layers = 0
    encoder: PreTrainedModel = load_model(ctx, config, AutoModelForSpeechSeq2Seq).get_encoder()
    return encoder, shape


def without_encoder(ctx: AutoregressiveContext) -> PreTrainedModel:
    """Load the model without the layers of its encoder, its cross-attention modules separated."""
    if ctx.group is not None:
        raise ConfigError(
            "a model that transcribes audio cannot be run tensor parallel: only the first rank has the "
            "encoder states; leave tensor_parallel out",
            field="tensor_parallel",
        )
    config = load_config(ctx)
    config.encoder_layers = 0
    return load_model(ctx, config, AutoModelForSpeechSeq2Seq)


@torch.inference_mode()
def separate_cross_attention(model: PreTrainedModel, encoder_states: torch.Tensor) -> int:
    """Set a separate attention function on the decoder's modules that attend to `encoder_states` [1, n, H]; returns
    how many there are. Raises `ConfigError` unless every layer has one."""
    found: list[nn.Module] = []

    def see(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if kwargs.get("key_value_states") is not None:
            found.append(module)

    decoder = model.get_decoder()
    hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in decoder.modules()]
    try:
        decoder(
            input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device),
            encoder_hidden_states=encoder_states,
            use_cache=False,
        )
    finally:
        for hook in hooks:
            hook.remove()
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if [module.layer_idx for module in found] != list(range(layers)):
        raise cannot_be_served(type(model).__name__, "not every layer of its decoder attends to the encoder states")
    for module in found:
        own = copy.deepcopy(module.config)
        assert isinstance(own, PreTrainedConfig)
        own._attn_implementation = ACROSS
        module.config = own
    return len(found)

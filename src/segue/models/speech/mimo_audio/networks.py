"""The networks of the language model.

H hidden size, G frames of a patch, K codes of a frame, E width of the patch encoder, L of the local decoder; n patches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segue.models.speech.mimo_audio.config import Config
from segue.models.speech.mimo_audio.library import Qwen2Config, Qwen2ForCausalLM, Qwen2Model


class LanguageNet(nn.Module):
    """A decoder over patches (embedding and head of text included), the encoder of a patch, and the decoder that draws
    the codes of one (`local_decoder`)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.decoder = Qwen2ForCausalLM(_decoder_config(config))
        self.speech_embeddings = nn.ModuleList(nn.Embedding(count, config.encoder_dim) for count in config.code_counts)
        self.input_local_transformer = _local(config, config.encoder_dim, config.input_local_layers)
        self.speech_group_downcast = nn.Linear(config.encoder_dim * config.group_size, config.hidden_size, bias=False)
        self.hidden_states_downcast = nn.Linear(config.hidden_size, config.local_dim, bias=False)
        self.local_transformer = _local(config, config.local_dim, config.local_layers, config.local_ffn_dim)
        self.local_transformer_lm_heads = nn.ModuleList(
            nn.Linear(config.local_dim, count, bias=False) for count in config.code_counts
        )
        same = config.encoder_dim == config.local_dim
        self.speech_embeddings_to_local = (
            nn.Identity() if same else nn.Linear(config.encoder_dim, config.local_dim, bias=False)
        )
        self._empty = config.empty_codes
        self._both_ways = bool(config.input_full_attention)
        self.input_local_transformer.set_attn_implementation("sdpa")
        self.local_transformer.set_attn_implementation("sdpa")

    def encode(self, codes_nGK: Tensor) -> Tensor:
        """[n, G, K] codes of patches → [n, H]: the input of the decoder."""
        n, frames, _ = codes_nGK.shape
        rows = 0
        for channel, (embedding, empty) in enumerate(zip(self.speech_embeddings, self._empty, strict=True)):
            codes = codes_nGK[:, :, channel]
            rows = rows + embedding(codes).masked_fill((codes == empty)[..., None], 0.0)
        mask = torch.ones(1, 1, frames, frames, dtype=torch.bool, device=codes_nGK.device)
        out = self.input_local_transformer(
            inputs_embeds=rows,
            position_ids=torch.arange(frames, device=codes_nGK.device)[None],
            attention_mask={"full_attention": mask if self._both_ways else mask.tril()},
            use_cache=False,
        ).last_hidden_state
        patches: Tensor = self.speech_group_downcast(out.reshape(n, -1))
        return patches


def _local(config: Config, width: int, layers: int, feed_forward: int | None = None) -> Qwen2Model:
    """A decoder over the frames of one patch. Its rotary base is the language model's."""
    net = Qwen2Model(
        _decoder_config(
            config,
            hidden_size=width,
            intermediate_size=feed_forward or 4 * width,
            num_hidden_layers=layers,
            num_attention_heads=config.local_attn_heads,
            num_key_value_heads=config.local_attn_heads,
            head_dim=width // config.local_attn_heads,
        )
    )
    del net.embed_tokens  # each channel has its own
    return net


def _decoder_config(config: Config, **other: int) -> Qwen2Config:
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    } | other
    return Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        **sizes,
    )

"""Draw the codes of a patch: a small decoder reads the language model's final hidden state, then the sum of the codes
that it has drawn in each step. Channel k lags `delay_pattern[k]` steps behind, so G + the largest delay steps give G
frames of K codes: a step draws the channels whose frame it is, independently of each other.

n patches, H width of the language model, L of this decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from segue.engines.autoregressive.contract import Draws
from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError, nearest
from segue.models.shared.speech.talker import NEVER
from segue.models.speech.mimo_audio.config import Config
from segue.models.speech.mimo_audio.library import DynamicCache
from segue.models.speech.mimo_audio.networks import LanguageNet


@dataclass(frozen=True, slots=True)
class CodeSampling:
    """How codes are drawn, whatever the request says of its text: the most likely ones are a monotone."""

    temperature: float = 0.9
    """0: the most likely code."""
    top_k: int = 0
    top_p: float = 0.95


def code_sampling(ctx: LoadContext) -> CodeSampling:
    """The stage's options `audio_temperature`, `audio_top_k` and `audio_top_p`; the published values by default. Raises
    `ConfigError`."""
    names = ("audio_temperature", "audio_top_k", "audio_top_p")
    for name in ctx.options:
        if name not in names:
            raise ConfigError(f"the stage has no option {name!r}{nearest(name, names)}", field=name)
    default = CodeSampling()
    temperature = ctx.options.get("audio_temperature", default.temperature)
    top_k, top_p = ctx.options.get("audio_top_k", default.top_k), ctx.options.get("audio_top_p", default.top_p)
    for name, value, fits, right in (
        ("audio_temperature", temperature, isinstance(temperature, int | float) and temperature >= 0, "at least 0"),
        ("audio_top_k", top_k, isinstance(top_k, int) and top_k >= 0, "an integer of at least 0 (0: all codes)"),
        ("audio_top_p", top_p, isinstance(top_p, int | float) and 0 < top_p <= 1, "above 0 and at most 1"),
    ):
        if not fits or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be {right}", field=name)
    return CodeSampling(float(temperature), top_k, float(top_p))


class PatchDecoder:
    """Runs the local decoder, for many patches at once."""

    def __init__(self, net: LanguageNet, config: Config, sampling: CodeSampling) -> None:
        self._net, self._sampling = net, sampling
        self._decoder = net.local_transformer
        self._group, self._channels = config.group_size, config.audio_channels
        self._delays = config.delays
        self._masks = dict.fromkeys(self._decoder.config.layer_types)  # None: causal
        never = torch.ones(self._channels, max(config.code_counts), dtype=torch.bool)
        for channel, (count, empty) in enumerate(zip(config.code_counts, config.empty_codes, strict=True)):
            never[channel, :count] = False
            never[channel, empty] = True
        self._never = never.to(net.hidden_states_downcast.weight.device)
        """[K, codes]: the empty codes, and those that a channel does not have."""

    def __call__(self, hidden: Tensor, draws: Draws) -> Tensor:
        """[n, H] final hidden states → [n, G · K] long, frame by frame. Whether the request is greedy is ignored."""
        net, sampling = self._net, self._sampling
        own = Draws(draws.numbers, torch.full_like(draws.greedy, sampling.temperature == 0), draws.filters)
        cache = DynamicCache(config=self._decoder.config)
        rows = net.hidden_states_downcast(hidden)[:, None]
        frames: list[list[Tensor]] = [[] for _ in range(self._group)]
        for step in range(self._group + max(self._delays)):
            out = self._decoder(
                inputs_embeds=rows,
                position_ids=torch.full((1, 1), step, device=hidden.device),
                attention_mask=self._masks,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
            due = [channel for channel, delay in enumerate(self._delays) if 0 <= step - delay < self._group]
            codes = own.codes(
                [1 + (step - self._delays[channel]) * self._channels + channel for channel in due],
                self._logits(out, due),
                temperature=sampling.temperature or 1.0,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            ).unbind(1)
            rows = torch.zeros_like(rows)
            for channel, code in zip(due, codes, strict=True):
                frames[step - self._delays[channel]].append(code)
                rows = rows + net.speech_embeddings_to_local(net.speech_embeddings[channel](code))[:, None]
        draws.finite = own.finite
        return torch.stack([code for frame in frames for code in self._in_order(frame)], dim=1)

    def _logits(self, out: Tensor, channels: list[int]) -> Tensor:
        """[n, L] → [n, channels, codes of the widest channel] float32."""
        widest = self._never.shape[1]
        logits = [self._net.local_transformer_lm_heads[channel](out).float() for channel in channels]
        wide = torch.stack([pad(one, (0, widest - one.shape[1])) for one in logits], dim=1)
        return wide.masked_fill(torch.stack([self._never[channel] for channel in channels]), NEVER)

    def _in_order(self, codes: list[Tensor]) -> list[Tensor]:
        """The codes of a frame as they were drawn → by channel."""
        drawn = sorted(range(self._channels), key=lambda channel: (self._delays[channel], channel))
        return [codes[drawn.index(channel)] for channel in range(self._channels)]
